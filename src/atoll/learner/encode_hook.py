"""How a contribution becomes bytes. A storm puts something else in between (`instruments.chaos`); nobody else does."""

from __future__ import annotations

from collections.abc import Callable

from atoll.learner.vault import U8, HeldContribution, Vault

EncodeContribution = Callable[[Vault, HeldContribution], U8]

_encode: EncodeContribution = Vault.encode


def encode_contribution(vault: Vault, sending: HeldContribution) -> U8:
    """As `Vault.encode`, unless something else was installed in this process."""
    return _encode(vault, sending)


def install_encode(encode: EncodeContribution = Vault.encode) -> None:
    """Encode the contributions of this process like this from now on; without an argument as usual again."""
    global _encode
    _encode = encode
