from __future__ import annotations

from collections import defaultdict, deque

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Committed, Restored

PERIODS = 10
"""Versions of a fragment over which the model must move: it is merged about once a period."""
SHARE_MIN = 0.5


class ModelMoves(Checker):
    """I14. A merge may take a smaller step while somebody's progress is on its way, which counts when it comes. But one
    that does not deliver must not hold the model back.

    In steps of training: over any ten versions of a fragment the model has moved by `sum of share * mean steps` of the
    merges. Had every contribution been merged with all the others at once, it would have moved as far as the learners
    in these versions did, which is the mean of the steps that each of them brought. At least half of that is asked, as
    far as the run's own schedule asks for whole steps."""

    invariant = "I14"
    statement = "while a quorum answers, the applied step is at least half of what its contributions alone would give"

    def __init__(self, step_factor_min: float = 1.0) -> None:
        super().__init__()
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
        moved, brought = _moved(merged), _brought(merged)
        if moved < self._share_min * brought:
            self.complain(
                f"fragment {fact.fragment}: versions {fact.version - PERIODS + 1} to {fact.version} moved the model by "
                f"{moved:.3g} steps, and its learners brought {brought:.3g}"
            )
            merged.clear()

    def on_restored(self, fact: Restored) -> None:
        self._merged.clear()


def _moved(merged: deque[Committed]) -> float:
    return sum(fact.share * sum(w * s for w, s in zip(fact.weights, fact.steps, strict=True)) for fact in merged)


def _brought(merged: deque[Committed]) -> float:
    """The mean of the steps that each learner brought, by its weight."""
    steps: defaultdict[str, int] = defaultdict(int)
    weights: defaultdict[str, float] = defaultdict(float)
    for fact in merged:
        for (learner, _, _), count, weight in zip(fact.contributions, fact.steps, fact.weights, strict=True):
            steps[learner] += count
            weights[learner] += weight
    return sum(weights[learner] * steps[learner] for learner in steps) / sum(weights.values())
