"""Finds learners that read the same data, which happens when a script seeds it by a rank that is 0 everywhere.

Those that begin together have the same parameters, so that the same batches give losses that are equal to the last
digit until the first merges are adopted (`Twins`). One that begins later has other parameters, and the run's first
batches: what is easy for the one is easy for the other, so that their losses rise and fall together (`Echoes`). The
cost is a few looks into dictionaries per report.
"""

from __future__ import annotations

import itertools
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


STEPS_HEARD = 64
"""Of each learner's own first steps."""
PAIRS_MIN = 40
"""A report overtakes another one at times, and some losses are missing."""
ALIKE = 0.7
"""Correlation of the ranks of changes from one loss to the next. The same batches gave 0.9 where parameters were 44
steps apart. Of learners with nothing in common it is noise of 0.13, so that 0.7 is no chance among thousands."""
TURNS_MIN, TURNS_MAX = 0.35, 0.9
"""Of changes, how many are of another sign than the one before: two in three where losses are noise. Far fewer: smooth
curves, which are alike whatever was read. All of them: two kinds of batches in turns."""
HEARD_MAX = 256
"""Learners whose first losses are kept."""


class Echoes:
    """Told of every report, by the learner's own count of steps; names a pair once in a run."""

    def __init__(self) -> None:
        self._losses: dict[str, dict[int, float]] = {}
        self._heard: set[str] = set()
        """Learners whose first losses are complete."""
        self._told = False

    def report(self, learner: str, own_step: int, loss: float) -> tuple[str, str] | None:
        """Returns the pair when it is found."""
        if self._told or learner in self._heard or not math.isfinite(loss) or own_step < 1:
            return None
        losses = self._losses.setdefault(learner, {})
        if own_step <= STEPS_HEARD:
            losses.setdefault(own_step, loss)
        if own_step < STEPS_HEARD:
            return None
        self._heard.add(learner)
        changes = _changes(losses)
        for other in self._heard - {learner}:
            if _alike(changes, _changes(self._losses[other])):
                self._told = True
                return (learner, other) if learner < other else (other, learner)
        if len(self._losses) > HEARD_MAX:
            self._told = True  # a run of so many is not started by hand
            self._losses.clear()
        return None


def _changes(losses: dict[int, float]) -> dict[int, float]:
    return {step: loss - losses[step - 1] for step, loss in losses.items() if step - 1 in losses}


def _alike(one: dict[int, float], other: dict[int, float]) -> bool:
    both = sorted(one.keys() & other.keys())
    if len(both) < PAIRS_MIN:
        return False
    a, b = [one[step] for step in both], [other[step] for step in both]
    turns = sum(x * y < 0 for x, y in itertools.pairwise(a)) / (len(a) - 1)
    return TURNS_MIN <= turns <= TURNS_MAX and _correlation(a, b) >= ALIKE


def _correlation(a: list[float], b: list[float]) -> float:
    """Of ranks: one big change must not decide."""
    a, b = _ranks(a), _ranks(b)
    middle = (len(a) - 1) / 2
    return sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True)) / sum((x - middle) ** 2 for x in a)


def _ranks(values: list[float]) -> list[float]:
    ranks = [0.0] * len(values)
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        ranks[index] = float(rank)
    return ranks
