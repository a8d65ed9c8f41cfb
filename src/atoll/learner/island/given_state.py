"""The inner state that a learner of several ranks gives a joiner: each rank keeps its part until it has been asked for.

All ranks copy their parts at the same boundary. The rank that speaks has them brought to it a piece at a time, as the
joiner takes them: nobody holds the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from atoll.errors import AtollError, PayloadError
from atoll.learner.island.link import SPEAKER, RankLink

U8 = NDArray[np.uint8]
Give = Callable[[], Callable[[], U8]]
"""Copies the state, on the training thread; what it gives packs the copy, on another (`InnerState.give`)."""


class GivenState:
    def __init__(self, link: RankLink) -> None:
        self._link = link
        self.give: Give | None = None
        self._copied: Callable[[], U8] | None = None
        self._packed: U8 | None = None
        self._ends: list[int] = []
        """Where the part of each rank ends in the whole."""

    def copy(self) -> None:
        """Training thread. Whatever is wrong with the state must not cost this learner its run."""
        self._packed, self._copied = None, None
        try:
            self._copied = self.give() if self.give is not None else None
        except (AtollError, RuntimeError, MemoryError):
            return

    def pack(self) -> None:
        copied, self._copied = self._copied, None
        if copied is None:
            raise PayloadError("this rank has no inner state that it could give")
        self._packed = copied()

    def sizes(self) -> list[int]:
        """All ranks together."""
        sizes = np.zeros(self._link.size, np.int64)
        sizes[self._link.rank] = self._packed.nbytes if self._packed is not None else 0
        self._link.add_up(sizes)
        self._ends = np.cumsum(sizes).tolist()
        return [int(size) for size in sizes]

    def piece(self, start: int, stop: int) -> U8 | None:
        """The bytes of all parts from `start` to `stop`, at the speaker; None where they are gone. All together."""
        own = self._packed  # the training thread may be asked for the next copy at any time
        missing = np.array([own is None], np.int64)
        self._link.add_up(missing)
        if missing[0] or own is None:
            return None
        spans = [self._inside(rank, start, stop) for rank in range(self._link.size)]
        if self._link.rank != SPEAKER:
            low, high = spans[self._link.rank]
            self._link.exchange({SPEAKER: own[low:high]} if high > low else {}, {})
            return None
        parts = [np.empty(high - low, np.uint8) if rank else own[low:high] for rank, (low, high) in enumerate(spans)]
        self._link.exchange({}, {rank: part for rank, part in enumerate(parts) if rank and part.size})
        return np.concatenate(parts)

    def _inside(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        """The same range within the part of a rank."""
        first, last = (self._ends[rank - 1] if rank else 0), self._ends[rank]
        low, high = max(start, first), min(stop, last)
        return (low - first, high - first) if low < high else (0, 0)

    def forget(self) -> None:
        self._packed = None
