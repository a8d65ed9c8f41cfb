from __future__ import annotations

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Committed


class Finite(Checker):
    """I7."""

    invariant = "I7"
    statement = "no committed tensor holds NaN or Inf"

    def on_committed(self, fact: Committed) -> None:
        if not fact.finite:
            self.complain(f"version {fact.version} of fragment {fact.fragment} holds NaN or Inf")
