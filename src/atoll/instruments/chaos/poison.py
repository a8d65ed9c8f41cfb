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
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from atoll.codec import BLOCK
from atoll.errors import PayloadError
from atoll.learner import F32, U8, HeldContribution, Snapshot, Vault

VARIANTS = ("nan", "huge", "flip", "flip8", "long", "noise")
HUGE = 1000.0
"""How much too large: a hundred times what the norm guard lets pass."""
LONG = 8.0
"""How much too large a liar may be whom the norm guard does not notice: its factor is 10."""
NAN_BYTES = (4, 2)
"""Widths of a float32, or of two bfloat16s, and of one of them: what payloads begin with."""
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
        payload = _not_finite(vault, sending, payload)
        sending.payload = payload
    return payload


def _not_finite(vault: Vault, sending: HeldContribution, payload: U8) -> U8:
    """A payload that its codec takes for one and finds NaN in: the first value or scale is NaN. How wide that is, only
    the codec knows; so each width is tried until it says so."""
    fragment = sending.header.fragment
    codec, n = vault.codec(sending.header.codec, fragment), vault.layout.fragments[fragment].size
    for width in NAN_BYTES:
        bad = payload.copy()
        bad[:width] = 0xFF
        with suppress(PayloadError):
            if not codec.inspect(bad, n, np.array([0, -(-n // BLOCK)]))[0]:
                return bad
    return payload  # of a codec that has no bytes for NaN


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
