from __future__ import annotations

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Refused


class Loud(Checker):
    """I13."""

    invariant = "I13"
    statement = "every refusal and skip is counted and named"

    def on_refused(self, fact: Refused) -> None:
        if not fact.code:
            self.complain(f"something of {fact.learner} was refused without a reason")
        elif not fact.told:
            self.complain(f"something of {fact.learner} was refused ({fact.code}) and no event says so")
