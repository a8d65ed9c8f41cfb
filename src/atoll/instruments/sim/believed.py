"""What the syncer may believe of a liar, at most: the models behind I15.

They are made from what is true of the simulated learners, and not from what the syncer worked out. Of the product they
take what a contribution weighs by itself, and what is taken off for age and length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.core import ContributionRecord, SyncConfig, contribution_weight, scales_steps

if TYPE_CHECKING:
    from atoll.instruments.sim.world import World

PACE_BELIEVED, BURST_BELIEVED = 16, 8
"""How far a liar's steps count: so many times the others' pace, and so many periods at once, for each of its processes
and when the syncer restarts (`core.plausible`)."""
SIZE_SLACK, SIZE_GROWTH, SIZE_PERIODS = 2.0, 2.0, 2
"""What a claimed size is worth at once, how much faster it may count after so many periods of claims (`core.sizes`)."""
SPEND_SLACK, SPEND_GROWTH, SPEND_PERIODS = 2.0, 2.0, 8
"""The same of what contributions show for the budget (`core.spending`)."""
PERIODS_WEIGHED = 2
"""The most that any contribution weighs, in periods (`core.policy`)."""
SHOWS = frozenset({"tokens", "steps", "numbers"})
"""Lies by which contributions claim more than went into them: what is merged confirms them."""
JUDGES_MIN = 3
"""Learners of which one alone is not the usual one."""


def steps_believed(world: World) -> int:
    """How many steps of a learner the clock may go by: PACE_BELIEVED times as many as the fastest takes, and some."""
    burst = _processes(world) * BURST_BELIEVED * world.scenario.config.sync_every
    return int(PACE_BELIEVED * _steps_usual(world)) + burst


def tokens_believed(world: World) -> float:
    """How many tokens of the liar may count for the budget: one share, whatever it reports, and two if it says that it
    is faster, since others may be away and it one of two. If its contributions claim more, two shares, and twice as
    much after every window of that; at most PACE_BELIEVED shares where its size is declared. Infinite where claims
    count, and where the liar is half of the run."""
    scenario, config = world.scenario, world.scenario.config
    told = {fault.variant for fault in scenario.faults if fault.kind == "lie"}
    if config.sizes == "claimed" or len(scenario.learners) < JUDGES_MIN or "crowd" in told:
        return math.inf
    steps, size = _steps_usual(world), max(spec.tokens for spec in world.specs.values())
    windows = int(steps / (SPEND_PERIODS * config.sync_every))
    rate = SPEND_SLACK * SPEND_GROWTH ** min(windows, 60) if told & SHOWS else SPEND_SLACK if "pace" in told else 1.0
    if scenario.keys:
        rate = min(rate, PACE_BELIEVED)
    burst = _processes(world) * BURST_BELIEVED * config.sync_every
    return (steps * rate + burst * max(SIZE_SLACK, rate)) * size


def _steps_usual(world: World) -> float:
    fastest_ns = min(spec.step_ns * (1 - spec.jitter / 2) for spec in world.specs.values())
    return world.now_ns / fastest_ns


def _processes(world: World) -> int:
    return 1 + sum(not world.is_honest(host.name) for host in world.hosts)


@dataclass(frozen=True, slots=True)
class MergeWithLies:
    """The contributions of one merge, with their ages, and what is left of their weights for age and length."""

    config: SyncConfig
    items: Sequence[ContributionRecord]
    ages: Sequence[int]
    discounts: Sequence[float]
    honest: Sequence[bool]

    def weight(self, weights: Sequence[float]) -> float:
        """What the liar weighs. Where a step may be smaller than a whole one, what was taken from others was not given
        to it: then it is a share of what all would weigh."""
        taken = self.discounts if scales_steps(self.config) else [1.0] * len(weights)
        whole = sum(weight / left for weight, left in zip(weights, taken, strict=True))
        return sum(weight for weight, honest in zip(weights, self.honest, strict=True) if not honest) / whole

    def weight_max(self, size_max: int, lies_merged: int) -> float:
        """The most that it may weigh beside the honest ones: as the largest of all learners (`size_max`), twice, and
        twice again for every so many contributions with which it has shown more; 1.0 where claims count."""
        config = self.config
        if config.sizes == "claimed" or not any(self.honest) or all(self.honest):
            return 1.0
        size = SIZE_SLACK * SIZE_GROWTH ** (lies_merged // (SIZE_PERIODS * config.fragments)) * size_max
        steps = PERIODS_WEIGHED * config.sync_every
        most = contribution_weight(config, steps, int(steps * size), 0) * self.honest.count(False)
        capped = config.share_max if config.share_max < 1.0 else 0.0  # what is taken from one is given to the others
        return max(capped, most / (most + self._others()))

    def _others(self) -> float:
        taken = [1.0] * len(self.items) if scales_steps(self.config) else self.discounts
        return sum(
            contribution_weight(self.config, item.steps, item.tokens, age) * left
            for item, age, left, honest in zip(self.items, self.ages, taken, self.honest, strict=True)
            if honest
        )
