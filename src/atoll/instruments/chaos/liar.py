"""A learner process that lies on purpose: the fault `lie` of a chaos plan.

While a file exists that names lies (`chaos.lies`) with their amounts, what this process sends is not what it should. It
trains, answers and adopts as any other. `chaos.inside` installs it in the learners of a storm.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from atoll.core import InlinePush, PushKind
from atoll.instruments.chaos.lies import TOLD_BY_PROCESSES, VALUES, falsified, renumbered
from atoll.instruments.chaos.poison import encode_scaled
from atoll.learner import U8, HeldContribution, Vault

FILE_BYTES_MAX = 4096
"""Every lie there is, with its amount."""


class Liar:
    """Falsifies messages and contributions as the file says. `encode` makes those that are not lied about."""

    def __init__(self, path: Path, encode: Callable[[Vault, HeldContribution], U8]) -> None:
        self._path = path
        self._encode = encode

    def encode(self, vault: Vault, sending: HeldContribution) -> U8:
        factors = [VALUES[name] for name in self._lies() if name in VALUES]
        if not factors:
            return self._encode(vault, sending)
        payload = encode_scaled(vault, sending, factors[0])
        sending.residual = None  # what a lie left out is owed to nobody
        return payload

    def falsify(self, message: object) -> Sequence[object]:
        lies = self._lies()
        told = falsified(message, lies)
        if told is None:
            return ()
        if "numbers" in lies and isinstance(told, InlinePush) and told.header.kind is PushKind.CONTRIBUTION:
            return (told, *(InlinePush(header, told.payload) for header in renumbered(told.header)))
        return (told,)

    def _lies(self) -> Mapping[str, float]:
        try:
            with self._path.open() as file:
                found = json.loads(file.read(FILE_BYTES_MAX))
        except (OSError, ValueError):
            return {}
        return {name: float(amount) for name, amount in found.items() if name in TOLD_BY_PROCESSES}
