from __future__ import annotations

from atoll.instruments.check.facts import Committed, Opened, Told
from atoll.instruments.check.lineage import FollowsLines


class FencedSaysNothing(FollowsLines):
    """I16. Once a newer syncer has opened the run, an older one may still tell what both of them know; it tells nobody
    of a version that is not in the newer one's line."""

    invariant = "I16"
    statement = "a syncer that was overtaken publishes nothing of its own"

    def __init__(self) -> None:
        super().__init__()
        self._epoch = 0

    def on_committed(self, fact: Committed) -> None:
        if fact.epoch >= self._epoch:
            super().on_committed(fact)

    def on_opened(self, fact: Opened) -> None:
        self._epoch = max(self._epoch, fact.epoch)

    def on_told(self, fact: Told) -> None:
        if not fact.promised or fact.epoch >= self._epoch or fact.version < 0:
            return
        line = {(version.number, version.checksum) for version in self.lineages[fact.fragment].line()}
        if (fact.version, fact.checksum) not in line:
            self.complain(
                f"epoch {fact.epoch} published version {fact.version} of fragment {fact.fragment}, which epoch "
                f"{self._epoch} does not have"
            )
