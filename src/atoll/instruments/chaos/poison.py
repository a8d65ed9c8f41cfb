"""A learner that goes bad on purpose: the fault `poison` of a chaos plan.

While a file exists that names a variant, the contributions of this process are not what it has trained:

    nan    the bytes that are sent hold a NaN, past the learner's own check: the syncer must find it
    huge   1000 times too large
    flip   of the opposite sign, with a norm like any other

The learner itself keeps training as if nothing were wrong. `chaos.inside` installs it in the learners of a storm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from atoll.learner import F32, U8, HeldContribution, Snapshot, Vault

VARIANTS = ("nan", "huge", "flip")
HUGE = 1000.0
"""How much too large: a hundred times what the norm guard lets pass."""
VARIANT_BYTES_MAX = 16


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A snapshot whose progress since the base was multiplied."""

    snapshot: Snapshot
    origin: F32
    factor: float

    def values(self) -> F32:
        scaled: F32 = self.origin + np.float32(self.factor) * (self.snapshot.values() - self.origin)
        return scaled


def encode_poisoned(vault: Vault, sending: HeldContribution, variant: str) -> U8:
    """As `Vault.encode`, of what the variant makes of the contribution. The progress that the learner itself reckons
    with stays true."""
    factor = {"huge": HUGE, "flip": -1.0}.get(variant, 1.0)
    bad = replace(sending, snapshot=_Scaled(sending.snapshot, sending.origin, factor))
    payload = vault.encode(bad)
    sending.residual = bad.residual
    if variant == "nan":
        payload = payload.copy()
        payload[:4] = 0xFF  # a float32 of NaN: the first value (fp32), two of them (bf16), or the first scale
    sending.payload = payload
    return payload


class Poison:
    """Encodes contributions, badly while the file says so."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def encode(self, vault: Vault, sending: HeldContribution) -> U8:
        variant = self._variant()
        return encode_poisoned(vault, sending, variant) if variant else vault.encode(sending)

    def _variant(self) -> str:
        try:
            with self._path.open() as file:
                text = file.read(VARIANT_BYTES_MAX).strip()
        except OSError:
            return ""
        return text if text in VARIANTS else ""
