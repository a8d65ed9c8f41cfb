from __future__ import annotations

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Sizes


class Bounded(Checker):
    """I10."""

    invariant = "I10"
    statement = "memory, queues and disk do not grow with the number of steps or faults"

    def on_sizes(self, fact: Sizes) -> None:
        if fact.count > fact.most:
            self.complain(f"{fact.count} {fact.what}, at most {fact.most} are allowed")
