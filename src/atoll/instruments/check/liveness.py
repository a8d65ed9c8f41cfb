from __future__ import annotations

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Calm, Ended, Progressed


class Liveness(Checker):
    """I5. Once nothing is wrong any more, every fragment is committed again and every learner's work is merged again,
    within the bound, without anybody doing anything."""

    invariant = "I5"
    statement = "with enough healthy learners the next commit comes within a bound, and nobody is left out"

    def __init__(self) -> None:
        super().__init__()
        self._calm: Calm | None = None
        self.fragments: set[int] = set()
        self.learners: set[str] = set()

    def on_calm(self, fact: Calm) -> None:
        self._calm = fact
        self.fragments, self.learners = set(), set()

    def on_progressed(self, fact: Progressed) -> None:
        if self._calm is not None and fact.at_ns <= self._calm.until_ns:
            self.fragments.add(fact.fragment)
            self.learners.add(fact.learner)

    def on_ended(self, fact: Ended) -> None:
        calm = self._calm
        if calm is None or fact.at_ns < calm.until_ns:
            return
        waited_s = (calm.until_ns - calm.at_ns) / 1e9
        stuck = [fragment for fragment in range(calm.fragments) if fragment not in self.fragments]
        if stuck:
            self.complain(f"fragments {stuck} were not committed in the {waited_s:g} s after the last fault")
        unheard = [learner for learner in calm.learners if learner not in self.learners]
        if unheard:
            self.complain(f"nothing of {', '.join(unheard)} was merged in the {waited_s:g} s after the last fault")
        self._calm = None
