from __future__ import annotations

from atoll.instruments.check.facts import Adopted, Committed, WentBack
from atoll.instruments.check.lineage import FollowsLines


class VersionChain(FollowsLines):
    """I1. A syncer makes the next version from the one before; a learner only ever moves forward, to versions that were
    really made, bit for bit."""

    invariant = "I1"
    statement = "every version has exactly one predecessor, and versions never go back on any learner"

    def __init__(self) -> None:
        super().__init__()
        self._adopted: dict[tuple[str, str, int], int] = {}

    def on_committed(self, fact: Committed) -> None:
        head = self.lineages[fact.fragment].head
        before = -1 if head is None or fact.version == 0 else head.number
        if fact.version != before + 1:
            self.complain(f"fragment {fact.fragment}: version {fact.version} was made after version {before}")
        super().on_committed(fact)

    def moved(self, fragment: int, version: int, checksum: int, wrong: str) -> bool:
        known = super().moved(fragment, version, checksum, wrong)
        if not known:
            self.complain(f"fragment {fragment}: {wrong.format(version)}")
        return known

    def on_adopted(self, fact: Adopted) -> None:
        key = (fact.learner, fact.instance, fact.fragment)
        before = self._adopted.get(key, -1)
        if fact.version < before:
            self.complain(f"{fact.learner} went from version {before} of fragment {fact.fragment} to {fact.version}")
        self._adopted[key] = fact.version
        known = self.lineages[fact.fragment].known
        if fact.checksum and (fact.version, fact.checksum) not in known:
            self.complain(
                f"{fact.learner} holds bits of version {fact.version} of fragment {fact.fragment} that were never made"
            )

    def on_wentback(self, fact: WentBack) -> None:
        self._adopted.pop((fact.learner, fact.instance, fact.fragment), None)
