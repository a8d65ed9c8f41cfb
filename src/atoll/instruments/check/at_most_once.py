from __future__ import annotations

from collections import defaultdict

from atoll.instruments.check.facts import Committed, Identity
from atoll.instruments.check.lineage import FollowsLines


class AtMostOnce(FollowsLines):
    """I2. In the run's line of versions a contribution is merged once or not at all. One that was merged into a version
    which was lost with a disk may be merged again; if that version comes back, only one of the two lines counts."""

    invariant = "I2"
    statement = "a contribution enters at most one merge"

    def __init__(self) -> None:
        super().__init__()
        self._merged: defaultdict[int, dict[Identity, int]] = defaultdict(dict)

    def on_committed(self, fact: Committed) -> None:
        super().on_committed(fact)
        merged = self._merged[fact.fragment]
        if fact.version == 0:
            merged.clear()
        for identity in fact.contributions:
            if identity in merged:
                learner, generation, seq = identity
                self.complain(
                    f"fragment {fact.fragment}: contribution {seq} of {learner} (generation {generation}) is in "
                    f"version {merged[identity]} and again in {fact.version}"
                )
            merged[identity] = fact.version

    def moved(self, fragment: int, version: int, checksum: int, wrong: str) -> bool:
        lineage = self.lineages[fragment]
        head = lineage.head
        if head is not None and (head.number, head.checksum) == (version, checksum):
            return True
        known = super().moved(fragment, version, checksum, wrong)
        self._merged[fragment] = {identity: v.number for v in lineage.line() for identity in v.contributions}
        return known
