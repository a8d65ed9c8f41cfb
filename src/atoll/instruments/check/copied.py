from __future__ import annotations

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Committed, Copied, Told


class CopyFirst(Checker):
    """I17. Where commits are sent to a standby, nobody hears of a version before the standby's disk has that very
    version."""

    invariant = "I17"
    statement = "what a syncer with a standby of its own has published is on the standby's disk"

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[tuple[int, int], int] = {}

    def on_committed(self, fact: Committed) -> None:
        if fact.version == 0:
            self._copies = {key: checksum for key, checksum in self._copies.items() if key[0] != fact.fragment}

    def on_copied(self, fact: Copied) -> None:
        self._copies[fact.fragment, fact.version] = fact.checksum

    def on_told(self, fact: Told) -> None:
        if fact.copied and fact.promised and self._copies.get((fact.fragment, fact.version)) != fact.checksum:
            self.complain(
                f"fragment {fact.fragment}: version {fact.version} was published, and the standby does not have it"
            )
