"""Where data meets the learner: two short protocols. `atoll.Learner` is behind one, a fake in the tests."""

from __future__ import annotations

from typing import Protocol

from atoll.core import DataLeases, DataReport
from atoll.observe import Writer


class DataSource(Protocol):
    """One stream of data, as the learner sees it. Every method takes the source's own lock and returns soon."""

    @property
    def stream(self) -> str: ...

    def report(self) -> DataReport:
        """What to tell the syncer now. Called on every (re)connect and after a poke, from any thread."""

    def leases(self, message: DataLeases) -> None:
        """The syncer's answer, on the link's thread."""

    def stepped(self) -> None:
        """Training thread, at each `learner.step`: everything handed to the loop so far is processed."""

    def leaving(self) -> None:
        """The learner leaves: hand back what is unfinished. One more `report` is sent before Leave."""

    def dropped(self) -> None:
        """This process was fenced, or the run is over: there will be no more leases."""


class LearnerLike(Protocol):
    """What data needs of a learner."""

    events: Writer

    @property
    def learner_id(self) -> str: ...

    @property
    def done(self) -> bool:
        """The run is over. May raise what ended this learner's session for good, such as FencedError: a loader that
        waits for leases asks here, and would wait in vain."""

    def attach_data(self, source: DataSource) -> None:
        """From now on the learner carries this source's reports and answers."""

    def poke_data(self, source: DataSource) -> None:
        """Send `source.report()` soon. Never waits; several pokes before the report is sent are one. Called without
        any lock of the source's held."""
