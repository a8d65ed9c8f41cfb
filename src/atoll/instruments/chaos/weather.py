"""What one learner's link to the syncer is like at a moment, composed of the faults that are active on it.

Faults overlap: delays add up, of several limits the least counts, flips add up, and any one that blocks or stalls does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.errors import ConfigError
from atoll.instruments.chaos.fault import Fault

WINDOW_BYTES = 4 << 20
"""What the proxy holds of one direction of a connection: at 300 ms one way that still lets 14 MB/s pass, about what
TCP's own window allows on Linux (tcp_rmem, 6 MiB)."""
WINDOW_BYTES_MIN = 64 << 10
"""A limited link holds little, as a router does: its sender must feel the limit."""
LIMIT_QUEUE_S = 0.1
"""Seconds of traffic that wait in front of a limited link, on top of those that its delay keeps in flight."""
LIMIT_PIECE_S = 0.05
LIMIT_PIECE_BYTES_MIN = 1024
"""Connections share a limited link in pieces of 50 ms, at least 1 KiB: as a router shares it by packets."""
LINK_FAULTS = ("partition", "delay", "limit", "stall", "corrupt")
"""The lasting faults that are weather. A cut is an instant: see ChaosProxy.cut."""


@dataclass(frozen=True, slots=True)
class Way:
    """One direction of a link."""

    delay_s: float = 0.0
    """How much later everything arrives; the order is kept."""
    bits_per_s: float = 0.0
    """What all connections of the learner together may carry; 0: unlimited."""
    blocked: bool = False
    """A partition: nothing is read or passed on, connections hang, new ones too."""
    stalled: bool = False
    """Bytes are read and kept, up to a window, and flow on afterwards; new connections are made."""
    flips_per_mb: float = 0.0
    """Flipped bits per 1,000,000 bytes on average; the first bytes that pass always get one."""

    def __post_init__(self) -> None:
        for name in ("delay_s", "bits_per_s", "flips_per_mb"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ConfigError(f"{name} of a link must be 0 or more; not {value!r}")

    @property
    def window_bytes(self) -> int:
        """Bytes that may wait inside the proxy."""
        if not self.bits_per_s:
            return WINDOW_BYTES
        held = self.bits_per_s / 8.0 * (self.delay_s + LIMIT_QUEUE_S)
        return int(min(max(held, WINDOW_BYTES_MIN), WINDOW_BYTES))

    @property
    def piece_bytes(self) -> int:
        """Bytes that are passed on at once."""
        if not self.bits_per_s:
            return WINDOW_BYTES
        return int(min(max(self.bits_per_s / 8.0 * LIMIT_PIECE_S, LIMIT_PIECE_BYTES_MIN), WINDOW_BYTES))


@dataclass(frozen=True, slots=True)
class Weather:
    """Both directions of a link: `up` from learner to syncer, `down` back. Without arguments: a perfect link."""

    up: Way = field(default=Way())
    down: Way = field(default=Way())

    @classmethod
    def of(cls, faults: Iterable[Fault]) -> Weather:
        """What these faults, all active on one learner, make of its link. Kinds that are not weather are ignored."""
        active = [fault for fault in faults if fault.kind in LINK_FAULTS]
        return cls(
            up=_way([fault for fault in active if fault.direction in ("both", "up")]),
            down=_way([fault for fault in active if fault.direction in ("both", "down")]),
        )


PERFECT = Weather()
"""A link without faults."""


def _way(faults: list[Fault]) -> Way:
    def amounts(kind: str) -> list[float]:
        return [fault.amount for fault in faults if fault.kind == kind]

    kinds = [fault.kind for fault in faults]
    return Way(
        delay_s=sum(amounts("delay")) / 1000.0,
        bits_per_s=min(amounts("limit"), default=0.0) * 1000.0,
        blocked="partition" in kinds,
        stalled="stall" in kinds,
        flips_per_mb=sum(amounts("corrupt")),
    )
