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


class ContentBudget:
    """Bytes that fetches keep in memory. A content that goes out several times is there once, and may have left its
    owner meanwhile: what nobody fetches any more is nobody's."""

    def __init__(self, per_learner_max: int, in_all_max: int) -> None:
        self._bytes = Budget("bytes of fetches", per_learner_max, in_all_max)
        self._held: Counter[tuple[str, int]] = Counter()

    @contextmanager
    def held(self, learner: str, content: memoryview) -> Iterator[None]:
        which = (learner, id(content.obj))
        if not self._held[which]:
            self._bytes.take(learner, content.nbytes)
        self._held[which] += 1
        try:
            yield
        finally:
            self._held[which] -= 1
            if not self._held[which]:
                del self._held[which]
                self._bytes.give_back(learner, content.nbytes)
