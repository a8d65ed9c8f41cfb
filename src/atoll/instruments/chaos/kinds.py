"""The kinds of faults, as one table. Plans, the simulator and the executor on real processes all read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from atoll.instruments.chaos.lies import TOLD_BY_PROCESSES

SYNCER = "syncer"
"""The target of a fault that hits the syncer; every other target is the id of a learner."""
DIRECTIONS = ("both", "up", "down")
"""Of a learner's link: up is learner to syncer, down is syncer to learner."""
STANDBY = "standby"
"""The target of a fault that hits the syncer which stands by, whichever of the two that is."""
GUEST_PREFIX = "guest-"
"""Learners that a plan adds are called guest-0, guest-1, ..., so that nobody takes them for the run's own."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kind of fault may hit and which of a fault's fields it uses."""

    doc: str
    """One sentence for people: what happens."""
    targets: tuple[str, ...]
    """What it may hit: learner, syncer, or guest (a learner that does not exist yet)."""
    lasting: bool = True
    """Whether it has an end. The others are instants."""
    lasts_s: tuple[float, float] | None = None
    """Seconds that a drawn fault lasts, shortest and longest; None for an instant."""
    amount: tuple[float, float] | None = None
    """Range from which a drawn plan takes the amount; None when the kind has none."""
    amount_unit: str = ""
    """What the amount counts."""
    amount_allowed: tuple[float, float] = (0.0, 0.0)
    """Least and greatest amount that a plan may hold."""
    directional: bool = False
    """Whether it can hit one direction of the link alone."""
    drawn: bool = True
    """Whether a plan that names no kinds may draw it."""
    variants: tuple[str, ...] = ()
    """Its forms, of which a fault names one."""
    variants_drawn: int | None = None
    """Drawn plans have the first so many of them; None: all. Plans that were drawn before a form came stay the same."""
    down: bool = False
    """Whether a learner that it hits cannot take part: drawn plans limit how many are down at one moment."""
    of_ranks: bool = False
    """Whether it can hit one process of a learner that has several."""
    parts: tuple[str, ...] = ()
    """What else it may hit in a run that has them: shard, relay, standby. Plans name these; none are drawn."""


# Where the durations come from: a learner that says nothing for 15 s is away (SyncConfig.lease_ns), so freezes and
# partitions of 2 to 40 s fall on both sides of that; what only disturbs lasts long enough to cover several rounds.
_KINDS = {
    "kill": Kind(
        doc="SIGKILL; the supervisor restarts the process",
        targets=("learner", "syncer"),
        lasting=False,
        down=True,
        of_ranks=True,
        parts=("shard", "relay", "standby"),
    ),
    "freeze": Kind(
        doc="SIGSTOP until the end, then SIGCONT",
        targets=("learner", "syncer"),
        lasts_s=(2.0, 30.0),
        down=True,
        of_ranks=True,
        parts=("shard", "relay", "standby"),
    ),
    "slow": Kind(
        doc="every step takes that many times as long",
        targets=("learner",),
        lasts_s=(10.0, 60.0),
        amount=(2.0, 10.0),
        amount_unit="times as long",
        amount_allowed=(1.01, 1000.0),
    ),
    "away": Kind(
        doc="the learner is asked to leave, and joins again as a new process at the end",
        targets=("learner",),
        lasts_s=(5.0, 30.0),
        down=True,
    ),
    "join": Kind(
        doc="an extra learner joins, and is asked to leave at the end",
        targets=("guest",),
        lasts_s=(15.0, 60.0),
    ),
    "partition": Kind(
        doc="nothing passes in that direction; connections hang, new ones too",
        targets=("learner",),
        lasts_s=(2.0, 40.0),
        directional=True,
        down=True,
        parts=("shard", "relay"),
    ),
    "delay": Kind(
        doc="everything arrives that much later in that direction",
        targets=("learner",),
        lasts_s=(5.0, 60.0),
        amount=(20.0, 300.0),  # RELIABILITY row 4: 20 to 300 ms, a neighbouring region to the far side of the earth
        amount_unit="ms one way",
        amount_allowed=(0.01, 60_000.0),
        directional=True,
        parts=("shard", "relay"),
    ),
    "limit": Kind(
        doc="the link carries no more than that in that direction",
        targets=("learner",),
        lasts_s=(5.0, 60.0),
        amount=(500.0, 20_000.0),  # a poor mobile link to a plain home connection
        amount_unit="kbit/s",
        amount_allowed=(1.0, 1e9),
        directional=True,
        parts=("shard", "relay"),
    ),
    "stall": Kind(
        doc="bytes are kept back in both directions and flow on afterwards",
        targets=("learner",),
        lasts_s=(0.5, 5.0),
        parts=("shard", "relay"),
    ),
    "cut": Kind(
        doc="all connections of the learner are reset, in the middle of a message",
        targets=("learner",),
        lasting=False,
        parts=("shard", "relay"),
    ),
    "corrupt": Kind(
        doc="bits of the stream are flipped in that direction",
        targets=("learner",),
        lasts_s=(2.0, 20.0),
        amount=(0.1, 10.0),  # one bad bit per 10 MB up to ten per MB: each kills a connection, some several a second
        amount_unit="flipped bits per MB",
        amount_allowed=(1e-6, 1e6),
        directional=True,
        parts=("shard", "relay"),
    ),
    "disk_full": Kind(
        doc="every write of the syncer's state fails with ENOSPC",
        targets=("syncer",),
        lasts_s=(3.0, 30.0),
        parts=("shard",),
    ),
    "poison": Kind(
        doc="the learner's contributions hold NaN, are 8 or 1000 times too large, have the opposite sign, or are noise",
        targets=("learner",),
        lasts_s=(5.0, 30.0),
        variants=("nan", "huge", "flip", "flip8", "long", "noise"),
        variants_drawn=3,
    ),
    "lie": Kind(
        doc="what the learner claims is not so",
        targets=("learner",),
        lasts_s=(10.0, 60.0),
        amount=(3.0, 1000.0),
        amount_unit="as bold",
        amount_allowed=(0.0, 2.0**60),
        drawn=False,  # what one learner that lies may cost is another question than what survives a storm
        variants=TOLD_BY_PROCESSES,
    ),
}


def role_of(target: str) -> str:
    """What a fault hits: syncer, standby, shard, relay, or learner."""
    name, _, number = target.rpartition("-")
    if target in (SYNCER, STANDBY):
        return target
    return name if name in ("shard", "relay") and number.isascii() and number.isdigit() else "learner"


KINDS: Mapping[str, Kind] = MappingProxyType(_KINDS)
"""Every kind by its name. The order is fixed: drawn plans depend on it."""
DRAWN_KINDS = tuple(name for name, kind in _KINDS.items() if kind.drawn)
"""What a plan is drawn from, where it names no kinds."""
