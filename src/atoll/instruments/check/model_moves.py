from __future__ import annotations

from collections import defaultdict, deque

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Committed, Restored

PERIODS = 10
"""Versions of a fragment over which the model must move: it is merged about once a period."""
SHARE_MIN = 0.5
LONG_PERIODS = 2
"""What a contribution counts for here, in periods. By the protocol's own rule a longer one, from before an outage or
over a thin link, weighs less by as much as it is longer: its whole way is not what the model was asked to go."""


class ModelMoves(Checker):
    """I14. A merge may take a smaller step while somebody's progress is on its way, which counts when it comes. But one
    that does not deliver must not hold the model back.

    In steps of training: over any ten versions of a fragment the model has moved by `sum of share * mean steps` of the
    merges. Had every contribution been merged with all the others at once, it would have moved as far as the learners
    in these versions did, which is the mean of the steps that each of them brought. At least half of that is asked, as
    far as the run's own schedule asks for whole steps. Of a contribution of more than two periods two count, on both
    sides. A merge of n learners may take `n * share_max` of a step, by the operator's word, and is measured by that
    (draw 3, seeds 1027, 1172, 1408: one learner after the other, alone, with half a step each)."""

    invariant = "I14"
    statement = "while a quorum answers, the applied step is at least half of what its contributions alone would give"

    def __init__(self, step_factor_min: float = 1.0, *, sync_every: int, share_max: float = 1.0) -> None:
        super().__init__()
        self._share_max = share_max
        self._steps_max = LONG_PERIODS * sync_every
        self._share_min = SHARE_MIN * step_factor_min
        self._merged: defaultdict[int, deque[Committed]] = defaultdict(lambda: deque(maxlen=PERIODS))

    def on_committed(self, fact: Committed) -> None:
        merged = self._merged[fact.fragment]
        if not fact.weights:  # the seed, or a version of which nothing more is known
            merged.clear()
            return
        merged.append(fact)
        if len(merged) < PERIODS:
            return
        moved, brought = _moved(merged, self._steps_max, self._share_max), _brought(merged, self._steps_max)
        if moved < self._share_min * brought:
            self.complain(
                f"fragment {fact.fragment}: versions {fact.version - PERIODS + 1} to {fact.version} moved the model by "
                f"{moved:.3g} steps, and its learners brought {brought:.3g}"
            )
            merged.clear()

    def on_restored(self, fact: Restored) -> None:
        self._merged.clear()


def _moved(merged: deque[Committed], steps_max: int, share_max: float) -> float:
    moved = 0.0
    for fact in merged:
        steps = (min(count, steps_max) for count in fact.steps_true or fact.steps)
        mean = sum(weight * count for weight, count in zip(fact.weights, steps, strict=True))
        allowed = min(1.0, share_max * len({learner for learner, _, _ in fact.contributions}))
        moved += fact.share / allowed * mean
    return moved


def _brought(merged: deque[Committed], steps_max: int) -> float:
    """The mean of the steps that each learner brought, by its weight. With age_discount 0 an old contribution weighs
    nothing, by the operator's word (draw 2, seed 371: 243 steps, a version late)."""
    steps: defaultdict[str, int] = defaultdict(int)
    weights: defaultdict[str, float] = defaultdict(float)
    for fact in merged:
        true = fact.steps_true or fact.steps
        for (learner, _, _), count, weight in zip(fact.contributions, true, fact.weights, strict=True):
            steps[learner] += min(count, steps_max) if weight > 0.0 else 0
            weights[learner] += weight
    return sum(weights[learner] * steps[learner] for learner in steps) / sum(weights.values())
