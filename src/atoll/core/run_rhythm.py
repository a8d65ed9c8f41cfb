"""How often a run merges, where it follows the network: what rounds and fetches need, and a period for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.core.config import SyncConfig

FULL = 1.0
"""Of a period: rounds that need more do not fit."""
ROOMY = 0.7
FITS = 1.0
"""Of a period: what rounds should need of a longer one. What is not used is lost: rounds that wait for nobody would
follow each other as fast as links let them, and one that is a little too short slips."""
OVERLAP_MAX = 8
SPARSE_PERIODS = 3
"""Where most links are thin, values are left out of contributions once the period is so many times `sync_every`: up to
there it costs less loss (docs/results/sparse.md)."""


@dataclass(frozen=True, slots=True)
class RunMeasured:
    """What a decision about the whole run goes by."""

    step_ns: float
    round_ns: float | None
    """From a launch to the publication; None: too few are known since the last decision."""
    fragments: int
    adopt_ns: float = 0.0
    """From a publication to its adoption by the learner in the middle, without the wait for the end of a step."""

    def wrong(self) -> str:
        """What in it cannot be; empty: nothing."""
        for name, value in (("a step", self.step_ns), ("a round", self.round_ns)):
            if value is not None and (not math.isfinite(value) or value <= 0.0):
                return f"{name} took {value:g} ns"
        return "" if math.isfinite(self.adopt_ns) and self.adopt_ns >= 0.0 else f"a fetch took {self.adopt_ns:g} ns"

    def needs_ns(self, period: int, overlap: int) -> float:
        """What all rounds of one period take, and all fetches of what comes of them; the longer of the two."""
        rounds = (self.round_ns or 0.0) * self.fragments / in_flight(self.fragments, period, overlap)
        return max(rounds, self.adopt_ns * self.fragments)


def in_flight(fragments: int, period: int, overlap: int) -> int:
    """Rounds that may run at once (`SyncConfig.rounds_in_flight_max`)."""
    return max(1, -(-fragments // period), -(-overlap * fragments // period))


def longer_period(now: int, needs_ns: float, step_ns: float, most: int) -> int:
    """The first period above this one into which so much fits; `most` if there is none."""
    return max(now, min(most, max(now + 1, math.ceil(needs_ns / (FITS * step_ns)))))


def shorter_period(now: int, run: RunMeasured, config: SyncConfig, overlap: int) -> int:
    """The shortest one, from the settings' on, in which there is room for what is measured."""
    fitting = (
        period
        for period in range(config.sync_every, now)
        if run.needs_ns(period, overlap) < ROOMY * period * run.step_ns
    )
    return next(fitting, now)
