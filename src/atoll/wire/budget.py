"""How much of something one learner, and all of them together, may have at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.core import Refusal
from atoll.errors import RefusedError


class Budget:
    """What would be beyond it is refused as busy, and the learner comes back. Whoever has nothing may have one thing of
    any size: what a single one may have is decided elsewhere."""

    def __init__(self, what: str, per_learner_max: int, in_all_max: int) -> None:
        self._what = what
        self._per_learner_max, self._in_all_max = per_learner_max, in_all_max
        self._held: Counter[str] = Counter()

    def take(self, learner: str, amount: int = 1) -> None:
        held, in_all = self._held[learner], self._held.total()
        if held and held + amount > self._per_learner_max:
            detail = f"learner {learner} has too many {self._what} under way; wait for one to end"
            raise RefusedError(Refusal.BUSY, detail)
        if in_all and in_all + amount > self._in_all_max:
            raise RefusedError(Refusal.BUSY, f"the syncer has too many {self._what} under way; ask again soon")
        self._held[learner] += amount

    def give_back(self, learner: str, amount: int = 1) -> None:
        self._held[learner] -= amount
        if not self._held[learner]:
            del self._held[learner]

    @contextmanager
    def held(self, learner: str, amount: int = 1) -> Iterator[None]:
        self.take(learner, amount)
        try:
            yield
        finally:
            self.give_back(learner, amount)
