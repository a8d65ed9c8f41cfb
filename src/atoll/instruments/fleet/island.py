"""One learner's chips: they fail, the island stalls and shrinks, slices come back and it grows.

Failures are drawn for the island, never for a chip: live chips times the rate of one. Everything between two stalls is
known when the island starts to run, so the cost grows with failures, not with chips or seconds.

    run_at(t) -> Run          when it will fail, and from when on it may grow
    fail(t), grow(t) -> Stall      until when it stands, whether its state is lost

Whoever drives it (the data-parallel baselines, or a learner around the real machines) takes steps in between, and calls
`fail` exactly at the run's `fail_s`, or `grow` at a step boundary from `grow_s` on.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from atoll.instruments.fleet.mechanics import Mechanics

FAILURES_IN_A_STALL_MAX = 100_000
"""An island that fails faster than it can resize never runs again; the simulation then ends instead of looping."""


class Run(NamedTuple):
    fail_s: float
    grow_s: float
    share: float
    """Live slices over all: tokens per step are in proportion."""


class Stall(NamedTuple):
    until_s: float
    state_lost: bool
    """The last slice is gone: the learner starts anew on spare chips, from published state."""


@dataclass(slots=True)
class IslandCounts:
    """What happened so far. `hazard` is the integral of the failure rate: failures - hazard has mean zero, exactly."""

    failures: int = 0
    hazard: float = 0.0
    shrinks: int = 0
    grows: int = 0
    restarts: int = 0


class Island:
    """Chips of one learner. `elastic` False: they only ever restart, all together, on spares."""

    def __init__(self, chips: float, slices: int, mechanics: Mechanics, *, mtbi_s: float, rng: Random) -> None:
        self._mechanics = mechanics
        self._rng = rng
        self._slices = slices
        self._slice_rate = chips / slices / mtbi_s
        self.live = slices
        self.counts = IslandCounts()
        self._returns_s: list[float] = []
        self._began_s = 0.0
        self.elastic = True

    def run_at(self, now_s: float) -> Run:
        """The island runs from now on. Slices that came back during a stall are in."""
        returns = self._returns_s
        while returns and returns[0] <= now_s:
            heapq.heappop(returns)
            self.live += 1
        self._began_s = now_s
        grow_s = returns[0] + self._mechanics.hold_off_s if returns else math.inf
        return Run(now_s + self._next_failure_s(), grow_s, self.live / self._slices)

    def fail(self, now_s: float) -> Stall:
        """A chip of a running island failed now."""
        self._ran_until(now_s)
        return self._failed(now_s) if self.elastic else self._restart(now_s)

    def grow(self, now_s: float) -> Stall:
        """Take the slices in that have returned; a failure meanwhile makes it an unplanned resize."""
        self._ran_until(now_s)
        until_s = now_s + self._mechanics.grow_s
        failed_s = now_s + self._next_failure_s()
        self.counts.hazard += self._rate * (min(failed_s, until_s) - now_s)
        if failed_s < until_s:
            return self._failed(failed_s)
        self.counts.grows += 1
        return Stall(until_s, False)

    # ------------------------------------------------------------ inside

    @property
    def _rate(self) -> float:
        return self._slice_rate * self.live

    def _next_failure_s(self) -> float:
        return self._rng.expovariate(self._rate)

    def _ran_until(self, now_s: float) -> None:
        self.counts.hazard += self._rate * (now_s - self._began_s)

    def _lose_slice(self, now_s: float) -> None:
        self.counts.failures += 1
        self.live -= 1
        mean_s = self._mechanics.return_s
        back_s = now_s + (self._rng.expovariate(1.0 / mean_s) if mean_s > 0.0 else 0.0)
        heapq.heappush(self._returns_s, back_s)

    def _failed(self, now_s: float) -> Stall:
        """Detection, then the resize; a failure during the resize begins it again."""
        self._lose_slice(now_s)
        noticed_s = now_s + self._mechanics.detect_s
        until_s = noticed_s + self._mechanics.shrink_s
        for _ in range(FAILURES_IN_A_STALL_MAX):
            if not self.live:
                return self._restart_empty(noticed_s)
            failed_s = now_s + self._next_failure_s()
            self.counts.hazard += self._rate * (min(failed_s, until_s) - now_s)
            if failed_s >= until_s:
                self.counts.shrinks += 1
                return Stall(until_s, False)
            now_s = failed_s
            self._lose_slice(now_s)
            if now_s > noticed_s:
                until_s = now_s + self._mechanics.shrink_s
        return Stall(math.inf, True)

    def _restart_empty(self, noticed_s: float) -> Stall:
        """No slice is left: the whole learner starts on spares, as one without elasticity does. What failed goes to
        the pool that the spares came from."""
        self.live = self._slices
        self._returns_s.clear()
        return Stall(self._restarted_s(noticed_s), True)

    def _restart(self, now_s: float) -> Stall:
        """Without elasticity: every failure stops everything, and the last step's state is read back."""
        self.counts.failures += 1
        until_s = now_s + self._mechanics.detect_s
        failed_s = now_s + self._next_failure_s()
        self.counts.hazard += self._rate * (min(failed_s, until_s) - now_s)
        self.counts.failures += failed_s < until_s
        return Stall(self._restarted_s(until_s), False)

    def _restarted_s(self, now_s: float) -> float:
        """When a restart that begins now is through: one that a failure cuts short begins again, drawn anew."""
        mechanics = self._mechanics
        for _ in range(FAILURES_IN_A_STALL_MAX):
            until_s = now_s + self._rng.weibullvariate(mechanics.restart_scale_s, mechanics.restart_shape)
            failed_s = now_s + self._next_failure_s()
            self.counts.hazard += self._rate * (min(failed_s, until_s) - now_s)
            if failed_s >= until_s:
                self.counts.restarts += 1
                return until_s
            self.counts.failures += 1
            now_s = failed_s
        return math.inf
