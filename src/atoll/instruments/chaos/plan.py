"""The plans that have a name: what goes wrong and when, as data. Nothing here touches a process.

The demo's moments are shares of the run's tokens, so that it hits the same part of a run on a fast and on a slow
machine. A storm's are seconds: it is drawn for a run of a given length.
"""

from __future__ import annotations

import math
import random

from atoll.core import one_of
from atoll.errors import ConfigError
from atoll.instruments.chaos.draw import FAULTS_MAX, FAULTS_PER_MINUTE, draw_faults, learner_names, storm_down_max
from atoll.instruments.chaos.fault import Fault
from atoll.instruments.chaos.kinds import DIRECTIONS, GUEST_PREFIX, KINDS, SYNCER, Kind
from atoll.instruments.chaos.planfile import StormPlan, dump_plan, load_plan

__all__ = [
    "CHAOS_PLANS",
    "DIRECTIONS",
    "FAULTS_MAX",
    "FAULTS_PER_MINUTE",
    "GUEST_PREFIX",
    "KINDS",
    "SYNCER",
    "Fault",
    "Kind",
    "StormPlan",
    "chaos_plan",
    "draw_faults",
    "dump_plan",
    "learner_names",
    "load_plan",
    "storm_down_max",
    "storm_plan",
]

CHAOS_PLANS = ("none", "demo", "storm")
CHAOS_LEARNERS_MIN = 2
"""With one learner nobody would be left to go on while it is down."""
DEMO_KILL_AT = 0.30
DEMO_SLOW_AT = 0.45
DEMO_SLOW_UNTIL = 0.75
DEMO_SLOW_FACTOR = 4.0
"""The slowdown of issue 2 and of the paper's heterogeneous-hardware figure."""
DEMO_SYNCER_KILL_AT = 0.65
"""Late enough that the first two faults show by themselves, early enough that much is merged after it."""
STORM_MINUTES = 10.0
"""Length of a storm when nobody says otherwise."""
STORM_MINUTES_MAX = 7 * 24 * 60.0


def chaos_plan(name: str, learners: int, *, seed: int = 0, minutes: float = STORM_MINUTES) -> tuple[Fault, ...]:
    """The faults of the named plan for a run of `learners` learners, in order of their beginning.

    `seed` and `minutes` are for storm, which is drawn for a run of that length.
    """
    one_of("chaos", name, CHAOS_PLANS)
    if name == "none":
        return ()
    if learners < CHAOS_LEARNERS_MIN:
        raise ConfigError(
            f"chaos {name} kills one learner while the others go on, so it needs at least {CHAOS_LEARNERS_MIN} "
            f"learners; this run has {learners}: use --learners {CHAOS_LEARNERS_MIN} or more, or --chaos none"
        )
    return storm_plan(seed=seed, learners=learners, minutes=minutes) if name == "storm" else _demo_plan(learners)


def storm_plan(*, seed: int, learners: int, minutes: float, faults: int | None = None) -> tuple[Fault, ...]:
    """Faults of all kinds over a run of that many minutes, the same for the same arguments on every machine.

    At most half of the learners are down at one moment. In a run too short for `faults` of them there are fewer.
    """
    if not (math.isfinite(minutes) and 0.0 < minutes <= STORM_MINUTES_MAX):
        raise ConfigError(f"a storm lasts more than 0 and at most {STORM_MINUTES_MAX:g} minutes; not {minutes!r}")
    count = max(1, round(minutes * FAULTS_PER_MINUTE)) if faults is None else faults
    return draw_faults(
        random.Random(seed),
        learners=learner_names(learners),
        seconds=minutes * 60.0,
        count=count,
        down_max=storm_down_max(learners),
    )


def _demo_plan(learners: int) -> tuple[Fault, ...]:
    # The last but one is killed (learner-2 of four): neither end of the list, so that a view shows neighbours going on.
    # Learner-0 is spared where possible because it evaluates the published model during the run.
    killed = max(1, learners - 2)
    slowed = 1 if killed != 1 else learners - 1 if learners > 2 else 0
    return (
        Fault(
            kind="kill",
            target=f"learner-{killed}",
            at_progress=DEMO_KILL_AT,
            detail="SIGKILL; the supervisor restarts it",
        ),
        Fault(
            kind="slow",
            target=f"learner-{slowed}",
            at_progress=DEMO_SLOW_AT,
            until_progress=DEMO_SLOW_UNTIL,
            amount=DEMO_SLOW_FACTOR,
            detail=f"every step takes {DEMO_SLOW_FACTOR:g}x as long",
        ),
        Fault(
            kind="kill",
            target=SYNCER,
            at_progress=DEMO_SYNCER_KILL_AT,
            detail="SIGKILL; the supervisor restarts it, and it goes on from its last commit",
        ),
    )
