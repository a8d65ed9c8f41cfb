"""Finds learners that read the same data: their losses are equal to the last digit, step for step.

That happens when a script seeds its data by a rank that is 0 everywhere. Learners begin with the same parameters, so
that the same batches give the same losses until the first merges are adopted at different steps. The cost is two looks
into dictionaries per report.
"""

from __future__ import annotations

import math

EQUAL_IN_A_ROW = 3
"""Different losses in a row that must be equal. One may be: a model whose head starts at zero has the loss ln(classes)
on any data. Three cannot be chance: a loss has 24 bits."""
SEEN_MAX = 4096
"""Losses remembered: the first seconds of hundreds of learners, which is when twins are alike."""


class Twins:
    """Told of every report; names a pair once in a run."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, float], str] = {}
        """By step and loss, who first reported it."""
        self._rows: dict[tuple[str, str], tuple[int, float]] = {}
        """Of two learners: how many losses in a row were equal, and the last of them."""
        self._twin_of: dict[str, tuple[str, str]] = {}
        self._step_of: dict[str, int] = {}
        self._told = False

    def report(self, learner: str, step: int, loss: float) -> tuple[str, str] | None:
        """Returns the pair when it is found."""
        if self._told or not math.isfinite(loss) or loss == 0.0 or self._step_of.get(learner) == step:
            return None
        self._step_of[learner] = step
        other = self._seen.setdefault((step, loss), learner)
        if other == learner:
            self._differs(learner, step)
            self._forget()
            return None
        pair = (learner, other) if learner < other else (other, learner)
        count, last = self._rows.get(pair, (0, math.nan))
        count += loss != last
        self._rows[pair] = (count, loss)
        self._twin_of[learner] = self._twin_of[other] = pair
        self._told = count >= EQUAL_IN_A_ROW
        return pair if self._told else None

    def _differs(self, learner: str, step: int) -> None:
        """Nobody has reported this loss for this step: if the one that was alike is past it, they are no twins."""
        pair = self._twin_of.get(learner)
        if pair is not None and min(self._step_of.get(name, -1) for name in pair) >= step:
            self._rows.pop(pair, None)

    def _forget(self) -> None:
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]
        if len(self._step_of) > SEEN_MAX:  # far more learners than there are twins to be found among
            self._step_of.clear()
            self._twin_of.clear()
            self._rows.clear()
