"""The chunks that a learner holds, and how far each is. Pure; the desk around it has the lock and the clock.

    waiting --take--> being read --hand--> in the loop --settle (a step is over)--> finished

Positions are sample numbers within a chunk: `processed` <= `handed`. Only `processed` counts when something is handed
back, so a sample in a prefetch queue, or in a batch whose step did not happen, is never taken for trained.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.core.messages import Lease
from atoll.data.cutting import Part, Ticket

RECENT_KEPT = 64
"""Chunks read to their end that may be gone over again when the leases run out."""


@dataclass(slots=True)
class Held:
    """One leased chunk."""

    handed: int
    """The first sample that the loop has not been given."""
    processed: int
    """The first sample whose step is not over."""
    whole: bool = False
    """The loop has been given the last sample."""


class Shelf:
    def __init__(self, lookahead: int = 0) -> None:
        self.held: dict[int, Held] = {}
        self.lookahead = lookahead
        """Batches that the loop takes before it has processed the one before."""
        self._waiting: OrderedDict[int, None] = OrderedDict()
        """Held and not being read."""
        self._batches: deque[Sequence[Part]] = deque()
        """The last `lookahead` batches that were handed out."""
        self._due: dict[int, Part] = {}
        """What the next step will have processed, by chunk."""
        self._recent: deque[int] = deque(maxlen=RECENT_KEPT)
        self._again: deque[int] = deque()

    # ------------------------------------------------------------ leases come and go

    def add(self, lease: Lease) -> None:
        self.held[lease.chunk] = Held(lease.start, lease.start)
        self._waiting[lease.chunk] = None
        self._again.clear()

    def revoke(self, chunk: int) -> None:
        self.held.pop(chunk, None)
        self._waiting.pop(chunk, None)

    def surplus(self, share: int) -> list[Lease]:
        """Take out unread chunks, the newest first, until no more than `share` are held."""
        spare: list[Lease] = []
        for chunk in list(reversed(self._waiting)):
            held = self.held[chunk]
            if len(self.held) > share and held.handed == held.processed:
                spare.append(Lease(chunk, held.processed))
                self.revoke(chunk)
        return spare

    def beyond(self, limit: float) -> list[int]:
        """Take out all chunks from this number on."""
        chunks = [chunk for chunk in self.held if chunk >= limit]
        for chunk in chunks:
            self.revoke(chunk)
        return chunks

    def clear(self, *, trust: bool = False) -> tuple[list[int], list[Lease]]:
        """Empty the shelf: what is finished, and what is not, from its first unprocessed sample. With `trust`, a chunk
        that was given out whole is finished although its last step is not over."""
        finished = [chunk for chunk, held in self.held.items() if held.whole and trust]
        rest = [Lease(chunk, held.processed) for chunk, held in self.held.items() if not (held.whole and trust)]
        for box in (self.held, self._waiting, self._batches, self._due, self._again):
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
            return Ticket(chunk, chunk, self.held[chunk].handed)
        if self._again:
            chunk = self._again.popleft()
            return Ticket(-1 - chunk, chunk, 0)
        return None

    def unwanted(self, key: int) -> bool:
        """Whether what is left of this ticket's chunk is not wanted: it was revoked or, going over an old one again,
        there is something new."""
        return key not in self.held if key >= 0 else self.waiting > 0

    def repeat_one(self) -> bool:
        """Put one chunk up to be gone over again. False if none was read yet."""
        if not self._recent:
            return False
        self._recent.rotate(-1)
        self._again.append(self._recent[-1])
        return True

    def rewind(self) -> None:
        """What was read and not handed out is to be read again, before anything else."""
        unread = [chunk for chunk, held in self.held.items() if not held.whole and chunk not in self._waiting]
        self._waiting = OrderedDict.fromkeys([*unread, *self._waiting])
        self._again.clear()

    # ------------------------------------------------------------ the loop

    def hand(self, parts: Sequence[Part]) -> bool:
        """The loop is being given a batch. False if all of it was revoked: do not give it."""
        if not any(part.size and (part.key in self.held or part.key < 0) for part in parts):
            return False
        for part in parts:
            self._mark(part, some=part.upto > 0)
        self._batches.append(parts)
        self.make_due()
        return True

    def read(self, part: Part) -> None:
        """A loop that reads for itself has got this far; the next step covers it."""
        if part.key in self.held:
            self._mark(part, some=True)
            self._due[part.key] = part

    def _mark(self, part: Part, *, some: bool) -> None:
        """`some`: the chunk is not empty, so that there is something in it to go over again."""
        held = self.held.get(part.key)
        if held is not None:
            held.handed, held.whole = max(held.handed, part.upto), part.last
            if part.last and some:
                self._recent.append(part.key)

    def make_due(self) -> None:
        while len(self._batches) > self.lookahead:
            for part in self._batches.popleft():
                if part.key in self.held:
                    self._due[part.key] = part

    def settle(self) -> list[int]:
        """The steps of everything handed out, but for the last `lookahead` batches, are over. Returns what that
        finished."""
        finished = []
        for chunk, part in self._due.items():
            held = self.held.get(chunk)
            if held is not None:
                held.processed = max(held.processed, part.upto)
                if part.last:
                    finished.append(chunk)
                    del self.held[chunk]
        self._due.clear()
        return finished

    def end_of_data(self, parts: Iterable[Part]) -> int | None:
        """The number of a chunk that turned out to have no sample at all."""
        return next((part.key for part in parts if part.last and part.upto == 0 and part.key in self.held), None)

    def close(self, parts: Iterable[Part]) -> list[int]:
        """Chunks that end without a batch: they were empty, or their last samples are given up (drop_last). Returns
        those that are finished; one that has samples in the loop waits for their step."""
        finished = []
        for part in parts:
            held = self.held.get(part.key)
            if held is None or not part.last:
                continue
            in_loop = held.processed < held.handed
            self._mark(part, some=part.upto > 0)
            if in_loop:
                self._due[part.key] = part
            else:
                finished.append(part.key)
                del self.held[part.key]
        return finished
