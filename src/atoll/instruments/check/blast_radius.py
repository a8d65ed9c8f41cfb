from __future__ import annotations

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Lived

EPSILON = 0.02
"""Share of its steps that others' faults may cost a learner (RELIABILITY I6)."""
STEPS_SPARED = 2
"""Steps under way at the beginning and at the end of the time that is looked at."""


class BlastRadius(Checker):
    """I6. A learner that is up steps at its own pace, whatever happens to the others, the links and the syncer."""

    invariant = "I6"
    statement = "losing one of M costs at most 1/M of the steps"

    def on_lived(self, fact: Lived) -> None:
        if fact.waits or fact.step_ns <= 0:
            return
        possible = fact.able_ns // fact.step_ns
        if fact.steps < possible * (1 - EPSILON) - STEPS_SPARED:
            self.complain(
                f"{fact.learner} took {fact.steps} steps in {fact.able_ns / 1e9:.1f} s that had room for {possible}"
            )
