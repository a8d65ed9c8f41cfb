"""The two kinds of run that a cell may be, each advanced window by window.

`DataParallel` is one island without a syncer: nothing happens between two stalls, so a window costs its failures alone.
`Islands` is M learners around the real machines.
"""

from __future__ import annotations

import math
from random import Random

from atoll.core import SyncConfig
from atoll.instruments.fleet.estimate import SYNC_EVERY
from atoll.instruments.fleet.island import Island
from atoll.instruments.fleet.mechanics import PACE_MIN, Mechanics, slices_of
from atoll.instruments.fleet.parts import FailingParts, Parts
from atoll.instruments.fleet.windows import Windows
from atoll.instruments.fleet.world import FleetWorld

FRAGMENTS = 4
"""P of simulated runs: enough for rounds of different fragments to overlap with failures, few enough to be quick.
Goodput does not depend on it, because nobody waits."""


def decoupled_config(learners: int) -> SyncConfig:
    """The paper's: the first contribution closes a round, with a grace window, hidden behind two steps."""
    return SyncConfig(sync_every=SYNC_EVERY, fragments=FRAGMENTS, overlap=2, quorum="1", learners_expected=learners)


def synchronous_config(learners: int, fragments: int = 1) -> SyncConfig:
    """DiLoCo: everybody stands at the boundary until everybody's contribution is merged."""
    return SyncConfig(
        sync_every=SYNC_EVERY,
        fragments=fragments,
        overlap=0,
        quorum="all",
        grace_cap_steps=0.0,
        learners_expected=learners,
    )


class DataParallel:
    """One island that holds all chips."""

    events = 0
    parts_failed = 0
    """It has no syncer."""

    def __init__(self, chips: int, mechanics: Mechanics, *, elastic: bool, mtbi_s: float, seed: str) -> None:
        slices = slices_of(chips, 1, mechanics)
        self._island = Island(chips, slices, mechanics, mtbi_s=mtbi_s, rng=Random(seed))
        self._island.elastic = elastic
        self._step_s = mechanics.step_s
        self.now_s = 0.0

    @property
    def failures(self) -> int:
        return self._island.counts.failures

    @property
    def able_s(self) -> float:
        return self.now_s

    def window(self, seconds: float, windows: Windows | None) -> None:
        """Run for at least so long, in whole cycles of running and stalling."""
        began_s, useful_s, up_s = self.now_s, 0.0, 0.0
        counts = self._island.counts
        luck = counts.failures - counts.hazard
        while self.now_s < began_s + seconds:
            useful, up = self._cycle()
            useful_s, up_s = useful_s + useful, up_s + up
            self.events += 1
        wall_s = self.now_s - began_s
        if windows is not None:
            luck = counts.failures - counts.hazard - luck
            windows.add(allocated_s=wall_s, useful_s=useful_s, up_s=up_s, wall_s=wall_s, luck=luck)

    def _cycle(self) -> tuple[float, float]:
        """From the end of one stall to the end of the next: useful seconds, seconds of running."""
        began_s = self.now_s
        run = self._island.run_at(began_s)
        steps = math.floor((run.fail_s - began_s) / self._step_s)
        end_s = run.fail_s
        if run.grow_s <= began_s + steps * self._step_s:
            steps = math.ceil((run.grow_s - began_s) / self._step_s)
            end_s = began_s + steps * self._step_s
            stall = self._island.grow(end_s)
        else:
            stall = self._island.fail(end_s)
        self.now_s = stall.until_s
        return steps * self._step_s * run.share, end_s - began_s


class Islands:
    """M learners, each with its share of the chips, around the real SyncerMachine."""

    def __init__(self, chips: int, learners: int, mechanics: Mechanics, *, mtbi_s: float, world: FleetWorld) -> None:
        self.world = world
        self.parts: Parts | None = None
        """What of the fabric fails."""
        self._allocated = learners
        self._chips = chips / learners
        self._slices = slices_of(chips, learners, mechanics)
        self._mechanics = mechanics
        self._mtbi_s = mtbi_s
        self._before = (0.0, 0.0, 0.0)

    def populate(self, seed: str) -> None:
        for number in range(self._allocated):
            rng = Random(f"{seed}/{number}")
            pace = max(PACE_MIN, rng.gauss(1.0, self._mechanics.speed_spread))
            island = Island(self._chips, self._slices, self._mechanics, mtbi_s=self._mtbi_s, rng=rng)
            self.world.add(island, step_s=self._mechanics.step_s * pace)
        if self.parts is not None:
            self.world.parts = FailingParts(self.world, self.parts, seed)

    @property
    def able_s(self) -> float:
        """Seconds so far in which a learner could exchange a fragment, of both the mean."""
        return self.world.parts.able_s if self.world.parts is not None else self.now_s

    @property
    def parts_failed(self) -> int:
        return self.world.parts.failures if self.world.parts is not None else 0

    @property
    def now_s(self) -> float:
        return self.world.clock.now_ns / 1e9

    @property
    def events(self) -> int:
        return self.world.events

    @property
    def failures(self) -> int:
        return sum(host.island.counts.failures for host in self.world.hosts)

    def window(self, seconds: float, windows: Windows | None) -> None:
        self.world.run(seconds)
        hosts = self.world.hosts
        counts = [host.island.counts for host in hosts]
        luck = sum(c.failures - c.hazard for c in counts)
        now = (sum(host.useful_s for host in hosts), self.world.up_s, luck)
        useful_s, up_s, fresh = (a - b for a, b in zip(now, self._before, strict=True))
        self._before = now
        if windows is not None:
            allocated_s = seconds * self._allocated
            windows.add(allocated_s=allocated_s, useful_s=useful_s, up_s=up_s, wall_s=seconds, luck=fresh)
