from __future__ import annotations

from collections import defaultdict

from atoll.check.checker import Checker
from atoll.check.facts import Committed, Healed, Identity, Restored
from atoll.check.lineage import Lineage


class AtMostOnce(Checker):
    """I2. In the run's line of versions a contribution is merged once or not at all. One that was merged into a version
    which was lost with a disk may be merged again; if that version comes back, only one of the two lines counts."""

    invariant = "I2"
    statement = "a contribution enters at most one merge"

    def __init__(self) -> None:
        super().__init__()
        self._lineages: defaultdict[int, Lineage] = defaultdict(Lineage)
        self._merged: defaultdict[int, dict[Identity, int]] = defaultdict(dict)

    def on_committed(self, fact: Committed) -> None:
        lineage, merged = self._lineages[fact.fragment], self._merged[fact.fragment]
        if fact.version == 0:
            lineage.head = None
            merged.clear()
        lineage.follow(fact)
        for identity in fact.contributions:
            if identity in merged:
                learner, generation, seq = identity
                self.complain(
                    f"fragment {fact.fragment}: contribution {seq} of {learner} (generation {generation}) is in "
                    f"version {merged[identity]} and again in {fact.version}"
                )
            merged[identity] = fact.version

    def on_restored(self, fact: Restored) -> None:
        for fragment, (version, checksum) in fact.fragments.items():
            self._move(fragment, version, checksum)

    def on_healed(self, fact: Healed) -> None:
        self._move(fact.fragment, fact.version, fact.checksum)

    def _move(self, fragment: int, version: int, checksum: int) -> None:
        lineage = self._lineages[fragment]
        head = lineage.head
        if head is not None and (head.number, head.checksum) == (version, checksum):
            return
        lineage.move(version, checksum)
        self._merged[fragment] = {identity: v.number for v in lineage.line() for identity in v.contributions}
