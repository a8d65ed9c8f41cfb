from __future__ import annotations

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Moved, Opened, Owned


class OneOwner(Checker):
    """I18. While one coordinator leads, a fragment is written by one shard: the one to which the tape gives it. Another
    takes it over by a move, or in the place of one that is lost."""

    invariant = "I18"
    statement = "a fragment has one owner"

    def __init__(self) -> None:
        super().__init__()
        self._epoch = 0
        self._owners: dict[int, str] = {}

    def on_opened(self, fact: Opened) -> None:
        self._epoch = max(self._epoch, fact.epoch)
        self._owners.clear()

    def on_moved(self, fact: Moved) -> None:
        self._owners[fact.fragment] = fact.shard

    def on_owned(self, fact: Owned) -> None:
        if fact.epoch < self._epoch:
            self.complain(f"{fact.shard} wrote fragment {fact.fragment} for epoch {fact.epoch}, after {self._epoch}")
        owner = self._owners.setdefault(fact.fragment, fact.shard)
        if owner != fact.shard:
            self.complain(f"fragment {fact.fragment} is {owner}'s, and {fact.shard} wrote it")
