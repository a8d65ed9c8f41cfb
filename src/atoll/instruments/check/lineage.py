"""Which versions exist, which one each followed, and which line of them is the run's.

Normally a line: 0, 1, 2, ... A syncer that lost versions with its disk goes back to an older one and another version of
the same number may follow it; a learner that still holds a lost version may bring it back. So a version is named by its
number and checksum, and the run's line is found by following predecessors from its head.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Committed, Healed, Identity, Restored


@dataclass(frozen=True, slots=True)
class Version:
    number: int
    checksum: int
    before: Version | None
    contributions: tuple[Identity, ...]
    tokens_each: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.tokens_each)


class Lineage:
    """The versions of one fragment."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], Version] = {}
        self.head: Version | None = None

    def follow(self, fact: Committed) -> Version:
        """A version was made from the head."""
        version = Version(fact.version, fact.checksum, self.head, fact.contributions, fact.tokens)
        self.known[fact.version, fact.checksum] = version
        self.head = version
        return version

    def move(self, number: int, checksum: int) -> bool:
        """The run's line ends at this version now; False if it was never made."""
        found = self.known.get((number, checksum))
        if found is not None:
            self.head = found
        return found is not None

    def accept(self, number: int, checksum: int) -> None:
        """The line goes on from a version that nobody made, as if it had followed the head."""
        self.head = Version(number, checksum, self.head, (), ())
        self.known[number, checksum] = self.head

    def line(self) -> list[Version]:
        """From the head back to the first."""
        versions = []
        version = self.head
        while version is not None:
            versions.append(version)
            version = version.before
        return versions


class FollowsLines(Checker):
    """A checker that needs to know the run's line of versions of every fragment."""

    def __init__(self) -> None:
        super().__init__()
        self.lineages: defaultdict[int, Lineage] = defaultdict(Lineage)

    def on_committed(self, fact: Committed) -> None:
        if fact.version == 0:
            self.lineages[fact.fragment].head = None
        self.lineages[fact.fragment].follow(fact)

    def on_restored(self, fact: Restored) -> None:
        for fragment, (version, checksum) in fact.fragments.items():
            self.moved(fragment, version, checksum, "version {} came from disk and was never made")

    def on_healed(self, fact: Healed) -> None:
        if fact.undecidable:
            self.lineages[fact.fragment].accept(fact.version, fact.checksum)
        self.moved(fact.fragment, fact.version, fact.checksum, "a learner brought back version {}, never made so")

    def moved(self, fragment: int, version: int, checksum: int, wrong: str) -> bool:
        """The run's line ends there now; False if that version was never made, and `wrong` says so."""
        return self.lineages[fragment].move(version, checksum)
