from __future__ import annotations

from collections import defaultdict

from atoll.check.checker import Checker
from atoll.check.facts import Adopted, Committed, Healed, Restored, WentBack
from atoll.check.lineage import Lineage


class VersionChain(Checker):
    """I1. A syncer makes the next version from the one before; a learner only ever moves forward, to versions that were
    really made, bit for bit."""

    invariant = "I1"
    statement = "every version has exactly one predecessor, and versions never go back on any learner"

    def __init__(self) -> None:
        super().__init__()
        self._lineages: defaultdict[int, Lineage] = defaultdict(Lineage)
        self._adopted: dict[tuple[str, str, int], int] = {}

    def on_committed(self, fact: Committed) -> None:
        lineage = self._lineages[fact.fragment]
        head = lineage.head
        before = -1 if head is None or fact.version == 0 else head.number
        if fact.version != before + 1:
            self.complain(f"fragment {fact.fragment}: version {fact.version} was made after version {before}")
        if fact.version == 0:
            lineage.head = None
        lineage.follow(fact)

    def on_restored(self, fact: Restored) -> None:
        for fragment, (version, checksum) in fact.fragments.items():
            if not self._lineages[fragment].move(version, checksum):
                self.complain(f"fragment {fragment}: version {version} came from disk and was never made")

    def on_healed(self, fact: Healed) -> None:
        if not self._lineages[fact.fragment].move(fact.version, fact.checksum):
            self.complain(f"fragment {fact.fragment}: a learner brought back version {fact.version}, never made so")

    def on_adopted(self, fact: Adopted) -> None:
        key = (fact.learner, fact.instance, fact.fragment)
        before = self._adopted.get(key, -1)
        if fact.version < before:
            self.complain(f"{fact.learner} went from version {before} of fragment {fact.fragment} to {fact.version}")
        self._adopted[key] = fact.version
        known = self._lineages[fact.fragment].known
        if fact.checksum and (fact.version, fact.checksum) not in known:
            self.complain(
                f"{fact.learner} holds bits of version {fact.version} of fragment {fact.fragment} that were never made"
            )

    def on_wentback(self, fact: WentBack) -> None:
        self._adopted.pop((fact.learner, fact.instance, fact.fragment), None)
