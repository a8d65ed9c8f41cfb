from __future__ import annotations

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Arrived, Committed, Dropped, Moved, NotMoved, Owned

At = tuple[int, int]
"""Version and checksum."""


class WholeMoves(Checker):
    """I20. A fragment goes to another shard with the newest version that was written of it, and whoever has it deletes
    nothing of it. A move that does not go through leaves it where it was."""

    invariant = "I20"
    statement = "a move loses nothing, and one that fails changes nothing"

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[int, str] = {}
        """As the coordinator's tape has them."""
        self._newest: dict[int, At] = {}
        self._held: dict[tuple[int, str], At] = {}
        """What each shard has put on its disk."""

    def on_committed(self, fact: Committed) -> None:
        if fact.version == 0:
            self._newest.pop(fact.fragment, None)

    def on_owned(self, fact: Owned) -> None:
        self._newest[fact.fragment] = self._held[fact.fragment, fact.shard] = (fact.version, fact.checksum)

    def on_arrived(self, fact: Arrived) -> None:
        self._held[fact.fragment, fact.shard] = (fact.version, fact.checksum)

    def on_moved(self, fact: Moved) -> None:
        fragment = fact.fragment
        before, self._owners[fragment] = self._owners.get(fragment), fact.shard
        newest, here = self._newest.get(fragment), self._held.get((fragment, fact.shard))
        if not fact.whole or before in (None, fact.shard) or newest is None:
            return
        if here is None or here[0] < newest[0] or (here[0] == newest[0] and here != newest):
            self.complain(
                f"fragment {fragment} went from {before} to {fact.shard}, which has {here} of it, and not {newest}"
            )

    def on_dropped(self, fact: Dropped) -> None:
        self._held.pop((fact.fragment, fact.shard), None)
        if self._owners.get(fact.fragment) == fact.shard:
            self.complain(f"{fact.shard} has deleted fragment {fact.fragment}, which is its own")

    def on_notmoved(self, fact: NotMoved) -> None:
        if fact.shard != fact.before or not fact.there:
            self.complain(
                f"a move of fragment {fact.fragment} failed; {fact.before} had it before, now it is {fact.shard}'s, "
                f"{'which has it' if fact.there else 'which does not have it'}"
            )
