"""The chunks that a learner holds, and how far each is. Pure; the lease client around it has the lock and the clock.

    waiting --take--> being read --hand--> in the loop --finish_step (a step is over)--> finished

Positions are sample numbers within a chunk: `processed` <= `handed`. Only `processed` counts when something is handed
back, so a sample in a prefetch queue, or in a batch whose step did not happen, is never taken for trained.

Every reading of a chunk has a key of its own. What still comes of a reading that is over (the chunk was revoked, or the
loop started anew) has a key that nobody knows any more, and is not mixed up with a later reading of the same chunk.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atoll.core import Lease
from atoll.data.cutting import Part, Ticket

RECENT_KEPT = 64
"""Chunks read to their end that may be gone over again when the leases run out."""


@dataclass(slots=True)
class HeldChunk:
    """One leased chunk."""

    handed: int
    """The first sample that the loop has not been given."""
    processed: int
    """The first sample whose step is not over."""
    whole: bool = False
    """The loop has been given the last sample."""
    key: int = 0
    """Of the reading; 0: waiting."""


class _Mark(NamedTuple):
    """A batch covers this chunk up to here."""

    chunk: int
    upto: int
    last: bool


class HeldChunks:
    def __init__(self, lookahead: int = 0) -> None:
        self.held: dict[int, HeldChunk] = {}
        self.lookahead = lookahead
        """Batches that the loop takes before it has processed the one before."""
        self._keys = itertools.count(1)
        self._reading: dict[int, int] = {}
        """Key to chunk."""
        self._waiting: OrderedDict[int, None] = OrderedDict()
        """Held and not being read."""
        self._batches: deque[list[_Mark]] = deque()
        """The last `lookahead` batches that were handed out."""
        self._due: dict[int, _Mark] = {}
        """What the next step will have processed, by chunk."""
        self._recent: deque[int] = deque(maxlen=RECENT_KEPT)
        self._again: deque[int] = deque()

    # ------------------------------------------------------------ leases come and go

    def add(self, lease: Lease) -> None:
        self.held[lease.chunk] = HeldChunk(lease.start, lease.start)
        self._waiting[lease.chunk] = None
        self._again.clear()

    def remove(self, chunk: int) -> None:
        held = self.held.pop(chunk, None)
        if held is not None:
            self._reading.pop(held.key, None)
            self._waiting.pop(chunk, None)

    def surplus(self, share: int) -> list[Lease]:
        """Take out unread chunks, the newest first, until no more than `share` are held."""
        spare: list[Lease] = []
        for chunk in list(reversed(self._waiting)):
            held = self.held[chunk]
            if len(self.held) > share and held.handed == held.processed:
                spare.append(Lease(chunk, held.processed))
                self.remove(chunk)
        return spare

    def beyond(self, limit: float) -> list[int]:
        """Take out all chunks from this number on."""
        chunks = [chunk for chunk in self.held if chunk >= limit]
        for chunk in chunks:
            self.remove(chunk)
        return chunks

    def clear(self, *, trust: bool = False) -> tuple[list[int], list[Lease]]:
        """Give all up: what is finished, and what is not, from its first unprocessed sample. With `trust`, a chunk that
        was given out whole is finished although its last step is not over."""
        finished = [chunk for chunk, held in self.held.items() if held.whole and trust]
        rest = [Lease(chunk, held.processed) for chunk, held in self.held.items() if not (held.whole and trust)]
        for box in (self.held, self._reading, self._waiting, self._batches, self._due, self._again):
            box.clear()
        return finished, rest

    # ------------------------------------------------------------ reading

    @property
    def waiting(self) -> int:
        """Leases that nobody reads yet."""
        return len(self._waiting)

    def take(self) -> Ticket | None:
        """The next chunk to read; one to go over again only if there is no other."""
        if self._waiting:
            chunk, _ = self._waiting.popitem(last=False)
            held = self.held[chunk]
            held.key = next(self._keys)
            self._reading[held.key] = chunk
            return Ticket(held.key, chunk, held.handed)
        if self._again:
            return Ticket(-next(self._keys), self._again.popleft(), 0)
        return None

    def unwanted(self, key: int) -> bool:
        """Whether what is left of this reading is not wanted: the chunk was revoked or, going over an old one again,
        there is something new."""
        return key not in self._reading if key > 0 else self.waiting > 0

    def repeat_one(self) -> bool:
        """Put one chunk up to be gone over again. False if none was read yet."""
        if not self._recent:
            return False
        self._recent.rotate(-1)
        self._again.append(self._recent[-1])
        return True

    def rewind(self) -> None:
        """What was read and not handed out is to be read again, before anything else."""
        unread = [chunk for chunk, held in self.held.items() if not held.whole and held.key]
        for chunk in unread:
            self._reading.pop(self.held[chunk].key, None)
            self.held[chunk].key = 0
        self._waiting = OrderedDict.fromkeys([*unread, *self._waiting])
        self._again.clear()

    # ------------------------------------------------------------ the loop

    def hand(self, parts: Sequence[Part]) -> bool:
        """The loop is being given a batch. False if all of it was revoked: do not give it."""
        if not any(part.size and (part.key in self._reading or part.key < 0) for part in parts):
            return False
        self._batches.append([self._mark(part, part.upto > 0) for part in parts if part.key in self._reading])
        self.make_due()
        return True

    def read(self, part: Part) -> None:
        """A loop that reads for itself has got this far; the next step covers it."""
        if part.key in self._reading:
            mark = self._mark(part, True)
            self._due[mark.chunk] = mark

    def _mark(self, part: Part, some: bool) -> _Mark:
        """`some`: the chunk is not empty, so that there is something in it to go over again."""
        chunk = self._reading[part.key]
        held = self.held[chunk]
        held.handed, held.whole = max(held.handed, part.upto), part.last
        if part.last and some:
            self._recent.append(chunk)
        return _Mark(chunk, part.upto, part.last)

    def make_due(self) -> None:
        while len(self._batches) > self.lookahead:
            self._due |= {mark.chunk: mark for mark in self._batches.popleft()}

    def finish_step(self) -> list[int]:
        """The steps of everything handed out, but for the last `lookahead` batches, are over. Returns what that
        finished."""
        finished = []
        for chunk, mark in self._due.items():
            held = self.held.get(chunk)
            if held is not None:
                held.processed = max(held.processed, mark.upto)
                if mark.last:
                    finished.append(chunk)
                    self.remove(chunk)
        self._due.clear()
        return finished

    def end_of_data(self, parts: Iterable[Part]) -> int | None:
        """The number of a chunk that turned out to have no sample at all."""
        return next((self._reading[p.key] for p in parts if p.last and not p.upto and p.key in self._reading), None)

    def close(self, parts: Iterable[Part]) -> list[int]:
        """Chunks that end without a batch: they were empty, or their last samples are given up (drop_last). Returns
        those that are finished; one that has samples in the loop waits for their step."""
        finished = []
        for part in parts:
            if not part.last or part.key not in self._reading:
                continue
            chunk = self._reading[part.key]
            held = self.held[chunk]
            if held.processed < held.handed:
                self._due[chunk] = self._mark(part, part.upto > 0)
            else:
                finished.append(chunk)
                self.remove(chunk)
        return finished
