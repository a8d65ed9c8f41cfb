from __future__ import annotations

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Committed, Durable, Restored, Told


class CommitFirst(Checker):
    """I4. Nobody hears of a version before it is on disk, while the disk works; so a syncer that comes back finds
    everything that anybody was ever told."""

    invariant = "I4"
    statement = "nothing that a learner ever received can be lost by a crash of the syncer"

    def __init__(self) -> None:
        super().__init__()
        self._durable: dict[int, int] = {}
        self._told: dict[int, int] = {}

    def on_committed(self, fact: Committed) -> None:
        if fact.version == 0:
            self._durable.pop(fact.fragment, None)
            self._told.pop(fact.fragment, None)

    def on_durable(self, fact: Durable) -> None:
        self._durable[fact.fragment] = fact.version

    def on_told(self, fact: Told) -> None:
        if not fact.promised:
            return
        durable = self._durable.get(fact.fragment, -1)
        if fact.version > durable:
            self.complain(
                f"fragment {fact.fragment}: version {fact.version} was published, the disk has version {durable}"
            )
        self._told[fact.fragment] = max(fact.version, self._told.get(fact.fragment, -1))

    def on_restored(self, fact: Restored) -> None:
        for fragment, (version, _) in fact.fragments.items():
            told = self._told.get(fragment, -1)
            if fact.exact and version < told:
                self.complain(f"fragment {fragment}: version {told} was published, the syncer came back with {version}")
            self._durable[fragment] = version
            self._told[fragment] = min(told, version)
