"""The codecs that a run with `adaptive` may ask for, from the most bits to the fewest.

Bits are asked of the codecs themselves, so a registered one stands where it belongs. By itself a run begins at its
`codec_up` and goes down from there only: more bits than somebody chose are sent only where a ladder is stated.
"""

from __future__ import annotations

from functools import cache

from atoll.core.config import CODECS, SyncConfig

DENSE = ("fp32", "bf16", "int8", "int4", "int2")
"""Codecs that send every value, in payloads whose size tells which it was."""
USUAL = (*DENSE, "topk:10%", "topk:3%")
DENSE_BITS_MIN = 2.0
"""What has fewer bits per parameter leaves values out, and costs loss that a period of up to three times as many steps
does not (docs/results/sparse.md)."""
SAMPLE = 1 << 20
"""Values by which bits are told: scales and counts of blocks are in it, and no edge matters."""

Rung = tuple[str, float]
"""A codec, and its bits per parameter."""


def ladder_of(config: SyncConfig) -> tuple[Rung, ...]:
    """The codecs that a learner of this run may be asked for."""
    if config.adaptive not in ("on", "network"):
        return ((config.codec_up, 1.0),)
    return _ladder(config.codec_up, config.codec_ladder)


def ladder_down(config: SyncConfig) -> tuple[Rung, ...]:
    """The codecs that updates of this run may have. They are for everybody, so none of them leaves values out."""
    first: Rung = (config.codec_down, bits(config.codec_down) or 1.0)
    if config.adaptive not in ("on", "network") or config.codec_down not in DENSE:
        return (first,)
    return first, *((name, share) for name in DENSE if (share := bits(name) or 0.0) < first[1])


def last_dense(ladder: tuple[Rung, ...]) -> int:
    """The rung below which values are left out; the first one, if all do."""
    return max((place for place, (_, share) in enumerate(ladder) if share >= DENSE_BITS_MIN), default=0)


@cache
def _ladder(codec_up: str, stated: str) -> tuple[Rung, ...]:
    most = bits(codec_up)
    if most is None:
        return ((codec_up, 1.0),)
    known = {name: bits(name) for name in (stated.split(",") if stated else (codec_up, *USUAL))}
    rungs = [(n, b) for n, b in known.items() if b is not None and (stated or n == codec_up or b < most)]
    return tuple(sorted(rungs, key=lambda rung: -rung[1]))


@cache
def bits(codec: str) -> float | None:
    """Per parameter; None of a codec that goes by the shapes of tensors (`shaped`): it has no place on a ladder."""
    made = CODECS.get(codec)
    return None if hasattr(made, "shaped") else 8.0 * float(made.size_max(SAMPLE)) / SAMPLE
