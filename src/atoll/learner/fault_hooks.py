"""What a learner sends: how a contribution becomes bytes, and each message before it goes out. A storm puts something
else in between (`instruments.chaos`); nobody else does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from atoll.learner.arithmetic import U8
from atoll.learner.vault import HeldContribution, Vault

T = TypeVar("T")
EncodeContribution = Callable[[Vault, HeldContribution], U8]
Falsify = Callable[[object], Sequence[object]]
"""From a message (or the header of a push) to what is sent instead."""

_encode: EncodeContribution = Vault.encode
_falsify: Falsify | None = None


def encode_contribution(vault: Vault, sending: HeldContribution) -> U8:
    """As `Vault.encode`, unless something else was installed in this process."""
    return _encode(vault, sending)


def outgoing(message: T) -> Sequence[T]:
    """The message itself, unless something else was installed in this process."""
    return (message,) if _falsify is None else _falsify(message)  # type: ignore[return-value]


def install_encode(encode: EncodeContribution = Vault.encode) -> None:
    """Encode the contributions of this process like this from now on; without an argument as usual again."""
    global _encode
    _encode = encode


def install_falsify(falsify: Falsify | None = None) -> None:
    """Send what this makes of each message from now on; without an argument the messages themselves again."""
    global _falsify
    _falsify = falsify
