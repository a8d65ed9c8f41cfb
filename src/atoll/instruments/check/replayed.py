from __future__ import annotations

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Replayed


class ReplayIsExact(Checker):
    """I9."""

    invariant = "I9"
    statement = "replaying the tape gives the same bits"

    def on_replayed(self, fact: Replayed) -> None:
        if fact.expected != fact.found:
            self.complain(
                f"fragment {fact.fragment}, version {fact.version}: the tape gives {fact.found:016x}, the run had "
                f"{fact.expected:016x}"
            )
