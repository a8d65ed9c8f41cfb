"""What goes wrong and when, as data: nothing here touches a process.

Moments are shares of the run's tokens, not seconds, so that the same plan hits the same part of a run on a fast and on
a slow machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.config import one_of
from atoll.errors import ConfigError

CHAOS_PLANS = ("none", "demo")
DEMO_LEARNERS_MIN = 2
"""With one learner nobody would be left to go on while it is down."""
DEMO_KILL_AT = 0.30
DEMO_SLOW_AT = 0.45
DEMO_SLOW_UNTIL = 0.75
DEMO_SLOW_FACTOR = 4.0
"""The slowdown of issue 2 and of the paper's heterogeneous-hardware figure."""
DEMO_SYNCER_KILL_AT = 0.65
"""Late enough that the first two faults show by themselves, early enough that much is merged after it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `kill` is an instant, `slow` lasts from `at_progress` to `until_progress`."""

    name: str
    """kill (SIGKILL, the supervisor restarts the process) or slow (each step takes `factor` times as long)."""
    target: str
    """Id of the learner that it hits, or syncer (only kill)."""
    at_progress: float
    """Share of the run's tokens at which it begins, 0 to 1."""
    until_progress: float = 0.0
    """Share of the run's tokens at which it ends; 0 for an instant."""
    factor: float = 1.0
    """How many times as long a step takes (slow only)."""
    detail: str = ""
    """What a reader of the report should know about it."""

    def __post_init__(self) -> None:
        one_of("fault", self.name, ("kill", "slow"))
        if not 0.0 <= self.at_progress <= 1.0:
            raise ConfigError(f"fault {self.name} must begin between 0 and 1 of the run; not {self.at_progress!r}")
        if self.name == "slow" and self.target == "syncer":
            raise ConfigError("the syncer takes no steps that could be slow; choose a learner, or the fault kill")
        if self.name == "slow" and not (self.at_progress < self.until_progress and self.factor > 1.0):
            raise ConfigError(
                f"fault slow on {self.target} needs until_progress above at_progress and a factor above 1"
            )


def chaos_plan(name: str, learners: int) -> tuple[Fault, ...]:
    """The faults of the named plan for a run of `learners` learners, in order of their beginning."""
    one_of("chaos", name, CHAOS_PLANS)
    if name == "none":
        return ()
    if learners < DEMO_LEARNERS_MIN:
        raise ConfigError(
            f"chaos demo kills one learner while the others go on, so it needs at least {DEMO_LEARNERS_MIN} learners; "
            f"this run has {learners}: use --learners {DEMO_LEARNERS_MIN} or more, or --chaos none"
        )
    # The last but one is killed (learner-2 of four): neither end of the list, so that a view shows neighbours going on.
    # Learner-0 is spared where possible because it evaluates the published model during the run.
    killed = max(1, learners - 2)
    slowed = 1 if killed != 1 else learners - 1 if learners > 2 else 0
    of_learners = (
        Fault(
            name="kill",
            target=f"learner-{killed}",
            at_progress=DEMO_KILL_AT,
            detail="SIGKILL; the supervisor restarts it",
        ),
        Fault(
            name="slow",
            target=f"learner-{slowed}",
            at_progress=DEMO_SLOW_AT,
            until_progress=DEMO_SLOW_UNTIL,
            factor=DEMO_SLOW_FACTOR,
            detail=f"every step takes {DEMO_SLOW_FACTOR:g}x as long",
        ),
    )
    detail = "SIGKILL; the supervisor restarts it, and it goes on from its last commit"
    return (*of_learners, Fault("kill", "syncer", DEMO_SYNCER_KILL_AT, detail=detail))
