"""The codecs that a run with `adaptive` may ask for, from the most bits to the fewest.

Bits are asked of the codecs themselves, so a registered one stands where it belongs. By itself a run begins at its
`codec_up` and goes down from there only: more bits than somebody chose are sent only where a ladder is stated.
"""

from __future__ import annotations

from functools import cache

from atoll.core.config import CODECS, SyncConfig

USUAL = ("fp32", "bf16", "int8", "int4", "int2", "topk:10%", "topk:3%")
SAMPLE = 1 << 20
"""Values by which bits are told: scales and counts of blocks are in it, and no edge matters."""

Rung = tuple[str, float]
"""A codec, and its bits per parameter."""


def ladder_of(config: SyncConfig) -> tuple[Rung, ...]:
    """The codecs that a learner of this run may be asked for."""
    if config.adaptive not in ("on", "network"):
        return ((config.codec_up, 1.0),)
    return _ladder(config.codec_up, config.codec_ladder)


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
