"""Which versions exist, which one each followed, and which line of them is the run's.

Normally a line: 0, 1, 2, ... A syncer that lost versions with its disk goes back to an older one and another version of
the same number may follow it; a learner that still holds a lost version may bring it back. So a version is named by its
number and checksum, and the run's line is found by following predecessors from its head.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.check.facts import Committed, Identity


@dataclass(frozen=True, slots=True)
class Version:
    number: int
    checksum: int
    before: Version | None
    contributions: tuple[Identity, ...]
    tokens: int


class Lineage:
    """The versions of one fragment."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], Version] = {}
        self.head: Version | None = None

    def follow(self, fact: Committed) -> Version:
        """A version was made from the head."""
        version = Version(fact.version, fact.checksum, self.head, fact.contributions, sum(fact.tokens))
        self.known[fact.version, fact.checksum] = version
        self.head = version
        return version

    def move(self, number: int, checksum: int) -> bool:
        """The run's line ends at this version now; False if it was never made."""
        found = self.known.get((number, checksum))
        if found is not None:
            self.head = found
        return found is not None

    def line(self) -> list[Version]:
        """From the head back to the first."""
        versions = []
        version = self.head
        while version is not None:
            versions.append(version)
            version = version.before
        return versions
