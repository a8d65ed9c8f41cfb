from __future__ import annotations

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Durable, Opened, Told


class SingleWriter(Checker):
    """I11. Once a newer syncer has opened the run, an older one puts nothing on its disk and tells nobody of a version
    that the newer one does not know."""

    invariant = "I11"
    statement = "only the newest syncer can commit"

    def __init__(self) -> None:
        super().__init__()
        self._epoch = 0
        self._durable: dict[int, int] = {}

    def on_opened(self, fact: Opened) -> None:
        if fact.epoch <= self._epoch:
            self.complain(f"epoch {fact.epoch} was opened after epoch {self._epoch}")
        self._epoch = max(self._epoch, fact.epoch)

    def on_durable(self, fact: Durable) -> None:
        if fact.epoch < self._epoch:
            self.complain(
                f"epoch {fact.epoch} wrote version {fact.version} of fragment {fact.fragment} after epoch "
                f"{self._epoch} had opened the run"
            )
        else:
            self._durable[fact.fragment] = fact.version

    def on_told(self, fact: Told) -> None:
        if fact.promised and fact.epoch < self._epoch and fact.version > self._durable.get(fact.fragment, -1):
            self.complain(f"fenced epoch {fact.epoch} published version {fact.version} of fragment {fact.fragment}")
