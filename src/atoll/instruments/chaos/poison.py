"""A learner that goes bad on purpose: the fault `poison` of a chaos plan.

While a file exists that names a variant, the contributions of this process are not what it has trained:

    nan    the bytes that are sent hold a NaN, past the learner's own check: the syncer must find it
    huge   1000 times too large
    flip   of the opposite sign, with a norm like any other
    flip8  the same, 8 times too large: just within what the norm guard lets pass
    long   8 times too large, of the right sign
    noise  a random direction, with a norm like any other

The learner itself keeps training as if nothing were wrong. `chaos.inside` installs it in the learners of a storm.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from atoll.learner import F32, U8, HeldContribution, Snapshot, Vault

VARIANTS = ("nan", "huge", "flip", "flip8", "long", "noise")
HUGE = 1000.0
"""How much too large: a hundred times what the norm guard lets pass."""
LONG = 8.0
"""How much too large a liar may be whom the norm guard does not notice: its factor is 10."""
FACTORS = {"huge": HUGE, "flip": -1.0, "flip8": -LONG, "long": LONG}
VARIANT_BYTES_MAX = 16


@dataclass(frozen=True, slots=True)
class _ScaledSnapshot:
    """A snapshot whose progress since the base was multiplied."""

    snapshot: Snapshot
    origin: F32
    factor: float

    def values(self) -> F32:
        scaled: F32 = self.origin + np.float32(self.factor) * (self.snapshot.values() - self.origin)
        return scaled


@dataclass(frozen=True, slots=True)
class _Noise:
    """A snapshot whose progress since the base was replaced by as much in a random direction, where it has moved."""

    snapshot: Snapshot
    origin: F32
    seed: int

    def values(self) -> F32:
        moved = self.snapshot.values() - self.origin
        noise = np.random.default_rng(self.seed).standard_normal(moved.size, np.float32) * (moved != 0)
        length = float(np.linalg.norm(noise))
        other: F32 = self.origin + noise * np.float32(np.linalg.norm(moved) / length if length else 0.0)
        return other


def encode_poisoned(vault: Vault, sending: HeldContribution, variant: str) -> U8:
    """As `Vault.encode`, of what the variant makes of the contribution. The progress that the learner itself reckons
    with stays true."""
    if variant == "noise":
        header = sending.header
        seed = zlib.crc32(f"{header.learner}/{header.generation}/{header.fragment}/{header.seq}".encode())
        payload = _encode(vault, sending, _Noise(sending.snapshot, sending.origin, seed))
    else:
        payload = encode_scaled(vault, sending, FACTORS.get(variant, 1.0))
    if variant == "nan":
        payload = payload.copy()
        # A float32 of NaN: the first value (fp32), two of them (bf16), or the first scale, which has 2 bytes in topk.
        payload[: 2 if sending.header.codec.startswith("topk") else 4] = 0xFF
        sending.payload = payload
    return payload


def encode_scaled(vault: Vault, sending: HeldContribution, factor: float) -> U8:
    """As `Vault.encode`, of that many times the contribution."""
    return _encode(vault, sending, _ScaledSnapshot(sending.snapshot, sending.origin, factor))


def _encode(vault: Vault, sending: HeldContribution, snapshot: Snapshot) -> U8:
    bad = replace(sending, snapshot=snapshot)
    payload = vault.encode(bad)
    sending.residual, sending.payload = bad.residual, payload
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
