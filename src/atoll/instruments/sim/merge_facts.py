"""What the checkers are told of a merge, whoever does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.core import ContributionRecord as Merged
from atoll.core import SyncerMachine, age_limit, contribution_weight, scales_steps
from atoll.core import effects as fx
from atoll.instruments.check import facts
from atoll.instruments.sim.believed import MergeWithLies
from atoll.instruments.sim.payloads import Made

if TYPE_CHECKING:
    from atoll.instruments.sim.world import World


class MergeFacts:
    """A syncer: it has a machine, whose merge is under way."""

    world: World
    machine: SyncerMachine
    epoch: int

    def _fact_of(self, merge: fx.Merge, made: Made) -> facts.Committed:
        items = self.machine.merging(merge.fragment)
        oldest = max(merge.version - 1 - item.base_version for item in items)
        carried = age_limit(self.machine.config, aside=True)
        self.world.observe(facts.Sizes("versions is the age of a merged contribution", oldest, carried))
        weights = tuple(weight / sum(merge.weights) for weight in merge.weights)
        lies = self._with_lies(merge, items)
        self.world.lies_merged += lies.honest.count(False)
        return facts.Committed(
            self.epoch,
            merge.fragment,
            merge.version,
            made.checksum,
            tuple((i.learner, i.generation, i.seq) for i in merge.contributions),
            tuple(item.tokens for item in items),
            tuple(item.norm for item in items),
            tuple(item.steps for item in items),
            made.theta_finite,
            weights,
            self._share(merge, items),
            made.gradient_norm,
            tuple(self.world.steps_true.get(item.id, item.steps) for item in items),
            lies.weight(merge.weights),
            lies.weight_max(max(spec.tokens for spec in self.world.specs.values()), self.world.lies_merged),
        )

    def _with_lies(self, merge: fx.Merge, items: list[Merged]) -> MergeWithLies:
        found = self.machine.merging_discounts(merge.fragment)
        honest = [self.world.is_honest(item.id.learner) for item in items]
        ages, left = [age for age, _ in found], [discount for _, discount in found]
        return MergeWithLies(self.machine.config, items, ages, left, honest)

    def _share(self, merge: fx.Merge, items: list[Merged]) -> float:
        """How much of a merged step is taken, of what its contributions by themselves would give."""
        config = self.machine.config
        if not scales_steps(config):
            return 1.0
        found = self.machine.merging_discounts(merge.fragment)
        pairs = list(zip(items, found, strict=True))
        alone = [contribution_weight(config, item.steps, item.tokens, age) for item, (age, _) in pairs]
        left = sum(weight * discount for weight, (_, discount) in zip(alone, found, strict=True))
        return sum(merge.weights) / (left / sum(alone) if any(alone) else 1.0)
