"""A learner that reads the run's data: a chunk each step, leased, finished and reported.

It stands for `atoll.data`, in scenarios in which somebody lies about chunks.
"""

from __future__ import annotations

from atoll.core import DataLeases, DataReport

STREAM = "corpus"
AHEAD = 2
"""Chunks in hand: one to read, one to come."""


class DataReader:
    def __init__(self) -> None:
        self._holding: list[int] = []
        self._done: dict[int, int] = {}
        """Finished chunks whose report was not answered yet, and the first report that named each."""
        self._serial = 0

    def step(self) -> tuple[int | None, DataReport]:
        """A step is over: the chunk that it finished, if there was one, and what to report."""
        self._serial += 1
        finished = self._holding.pop(0) if self._holding else None
        if finished is not None:
            self._done[finished] = self._serial
        want = AHEAD - len(self._holding)
        return finished, DataReport(STREAM, self._serial, 0, want, tuple(self._done), tuple(self._holding))

    def answered(self, message: DataLeases) -> None:
        """What it grants may be finished already, if an earlier answer granted it, too."""
        self._done = {chunk: serial for chunk, serial in self._done.items() if serial > message.serial}
        self._holding = [chunk for chunk in self._holding if chunk not in message.revoked]
        known = {*self._holding, *self._done}
        self._holding += [lease.chunk for lease in message.granted if lease.chunk not in known]
