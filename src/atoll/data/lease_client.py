"""The learner's side of the leases: what to tell the syncer and when, and what its answers change.

    syncer --leases--> held chunks --take--> read, cut --hand--> the loop --stepped--> finished --report--> syncer

One report is in flight at a time: the next one says everything anyway. A lock guards all of it; it is never held while
the learner is called, so the learner may call in from any of its threads with locks of its own.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from atoll.core import HAND_MAX, DataLeases, DataReport, Lease, check_stream_name
from atoll.data.cutting import Part, Ticket
from atoll.data.held_chunks import HeldChunks
from atoll.data.seam import LearnerLike

AHEAD_S = 300.0
"""Training time that the leases in hand should last for: five minutes without any link."""
HOLD_MIN = 2
"""Chunks in hand at least: one being read, and the next."""
UNREAD_MIN = 1
"""Of those, not being read at least: a batch may need many chunks to be filled."""
SHARE = 8
"""Of a stream that ends, nobody holds more than one part in this many of what was never issued, so that a learner which
comes first does not leave the others without data. Towards the end all go down to the minimum and hand back the
rest."""
REPORT_EVERY_S = 1.0
"""Reports that are not urgent wait for each other this long."""
ASK_AGAIN_S = 0.2
"""The least time between two reports of a learner that has nothing to do but ask."""
REPORT_LOST_S = 30.0
"""A report that was not answered for this long is sent again even though the link looks fine."""
PACE_CHUNKS = 16
"""Chunks over which the pace is measured."""

_serials = itertools.count(1)
"""One count for all lease clients of this process, so that a later one of the same stream is newer to the syncer."""


@dataclass(slots=True)
class SampleCounts:
    """Since this process began; `samples` includes the repeated ones."""

    chunks: int = 0
    samples: int = 0
    repeated: int = 0


class LeaseClient:
    """The leases of one stream. Implements `seam.DataSource`."""

    def __init__(
        self,
        learner: LearnerLike,
        *,
        stream: str,
        chunks: int,
        ahead_s: float = AHEAD_S,
        hold_min: int = HOLD_MIN,
        lookahead: int = 0,
        trust: bool = False,
        open_ended: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`chunks` 0: no end. `lookahead`: batches that the loop takes before it has processed the one before. `trust`:
        a chunk that was given out whole is done when the learner leaves, whether its step was seen or not.
        `open_ended`: the first chunk without a sample is the end of the data."""
        check_stream_name(stream)
        self.stream = stream
        self.chunks = chunks
        self.counts = SampleCounts()
        self.clock = clock
        self.answers = 0
        """Answers of the syncer so far."""
        self.exhausted = False
        """The newest answer said that nothing is left to lease."""
        self.leased = 0
        """Leases received so far."""
        self._learner = learner
        self._ahead_s = ahead_s
        self._hold_min = max(HOLD_MIN, hold_min)
        self._trust = trust
        self._open_ended = open_ended
        self._changed = threading.Condition()
        self._lookahead = lookahead
        self._held_chunks = HeldChunks(lookahead)
        self._finished: dict[int, None] = {}
        self._returned: dict[int, int] = {}
        self._told = DataReport(stream, 0, chunks, 0)
        self._told_s = -math.inf
        self._unanswered = False
        self._fruitless = False
        """The newest answer granted nothing, so there is no hurry to ask again."""
        self._closed = False
        """Left, fenced, or the run is over."""
        self._resting = False
        """The loop has ended: nothing is asked for, and what comes all the same goes back."""
        self._highest = -1
        """The highest chunk number ever leased to us: how far the run is."""
        self._limit: float = math.inf
        """The first chunk known to be empty, of a stream whose length nobody told."""
        self._times_s: deque[float] = deque(maxlen=PACE_CHUNKS + 1)
        learner.attach_data(self)
        self.nudge()

    # ------------------------------------------------------------ the learner calls (seam.DataSource)

    def report(self) -> DataReport:
        with self._changed:
            want, done, holding = self._want(), tuple(self._finished), tuple(self._held_chunks.held)
            returned = tuple(Lease(chunk, start) for chunk, start in self._returned.items())
            self._told = DataReport(self.stream, next(_serials), self.chunks, want, done, holding, returned)
            self._told_s, self._unanswered = self.clock(), True
            return self._told

    def leases(self, message: DataLeases) -> None:
        with self._changed:
            if message.serial != self._told.serial:
                return  # a newer report is on its way, and its answer will say all of this again
            self._unanswered = False
            self._fruitless = not message.granted
            self.answers += 1
            self.exhausted = message.exhausted
            for chunk in self._told.done:
                self._finished.pop(chunk, None)
            for lease in self._told.returned:
                self._returned.pop(lease.chunk, None)
            for chunk in message.revoked:
                self._held_chunks.remove(chunk)
            for lease in message.granted:
                self._take_in(lease)
            share = max(self._share(), len(self._held_chunks.held) - self._held_chunks.waiting + UNREAD_MIN)
            if len(self._held_chunks.held) > share + share // 4:
                self._give_back(self._held_chunks.surplus(share))
            self._changed.notify_all()
        self.nudge()

    def _take_in(self, lease: Lease) -> None:
        if lease.chunk in self._held_chunks.held or lease.chunk in self._finished or lease.chunk in self._returned:
            return
        self.leased += 1
        self._highest = max(self._highest, lease.chunk)
        if self._closed or self._resting:
            self._give_back([lease])
        elif lease.chunk >= self._limit:
            self._finished[lease.chunk] = None
            self.exhausted = True  # fresh numbers are only given when the pool is empty
        else:
            self._held_chunks.add(lease)

    def stepped(self) -> None:
        with self._changed:
            self._finish(self._held_chunks.finish_step())
        self.nudge()

    def leaving(self) -> None:
        with self._changed:
            self._closed = True
            finished, rest = self._held_chunks.clear(trust=self._trust)
            self._finish(finished)
            self._give_back(rest)
            self._changed.notify_all()

    def dropped(self) -> None:
        with self._changed:
            self._closed = True
            self._held_chunks.clear()
            self._changed.notify_all()

    # ------------------------------------------------------------ the loader calls

    @property
    def over(self) -> bool:
        """There is no more data for this process, whatever the stream still has."""
        return self._learner.done or self._closed

    def outlook(self) -> str:
        """ready: a lease waits to be read; exhausted: nothing is left to lease; new: none ever came; dry: they ran
        out."""
        with self._changed:
            if self._held_chunks.waiting:
                return "ready"
            return "exhausted" if self.exhausted else "dry" if self.leased else "new"

    def take(self) -> Ticket | None:
        """The next chunk to read, None if there is none just now."""
        with self._changed:
            if not self._times_s:
                self._times_s.append(self.clock())
            return self._held_chunks.take()

    def unwanted(self, key: int) -> bool:
        with self._changed:
            return self._held_chunks.unwanted(key)

    def repeat_one(self) -> bool:
        with self._changed:
            return not self._closed and self._held_chunks.repeat_one()

    def rewind(self) -> None:
        """A loop begins."""
        with self._changed:
            self._resting = False
            self._held_chunks.lookahead = self._lookahead
            self._held_chunks.rewind()
        self.nudge()

    def hand(self, parts: Sequence[Part]) -> bool:
        """The loop is being given a batch. False if all of it was revoked: do not give it."""
        with self._changed:
            self._notice_end(parts)
            wanted = self._held_chunks.hand(parts)
            if wanted:
                self.counts.samples += sum(part.size for part in parts)
                self.counts.repeated += sum(part.size for part in parts if part.key < 0)
        if not wanted:
            self.close(parts)
        return wanted

    def close(self, parts: Sequence[Part]) -> None:
        """These chunks end, and no batch goes with it."""
        with self._changed:
            self._notice_end(parts)
            self._finish(self._held_chunks.close(parts))

    def read(self, part: Part) -> None:
        """A loop that reads for itself has got this far."""
        with self._changed:
            self._held_chunks.read(part)

    def finish(self) -> None:
        """The loop has been given everything: nothing is taken ahead any more, in batches or in leases."""
        with self._changed:
            self._resting = True
            self._held_chunks.lookahead = 0
            self._held_chunks.make_due()
            self._give_back(self._held_chunks.surplus(0))
        self.nudge()

    def _notice_end(self, parts: Sequence[Part]) -> None:
        """A chunk turned out to be empty: the stream ends before it, and all from here on are done."""
        chunk = self._held_chunks.end_of_data(parts) if self._open_ended else None
        if chunk is not None:
            self._limit = min(chunk, self._limit)
            self._finished |= dict.fromkeys(self._held_chunks.beyond(self._limit))
            self.exhausted = True

    def wait(self, timeout_s: float) -> None:
        """Until something arrives, at most this long."""
        with self._changed:
            self._changed.wait(timeout_s)

    # ------------------------------------------------------------ when to tell the syncer, and how much to hold

    def nudge(self, *, now: bool = False) -> None:
        """Have a report sent if there is something to say and it is time."""
        with self._changed:
            news = bool(self._finished or self._returned) or self._want() > 0
            due = self.clock() - self._told_s >= self._pause_s(now)
        if news and due:
            self._learner.poke_data(self)

    def _pause_s(self, now: bool) -> float:
        """The least time between the last report and the next."""
        if self._unanswered:
            return REPORT_LOST_S
        if self._returned or self._resting:
            return 0.0  # others may be waiting for it
        short = not self.exhausted and self._held_chunks.waiting < HOLD_MIN
        if short and not self._fruitless:
            return 0.0
        return ASK_AGAIN_S if short or now else REPORT_EVERY_S

    def _finish(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self._finished[chunk] = None
            self.counts.chunks += 1
            self._times_s.append(self.clock())

    def _give_back(self, leases: Sequence[Lease]) -> None:
        self._returned |= {lease.chunk: lease.start for lease in leases}

    @property
    def chunk_s(self) -> float:
        """Seconds that a chunk takes here; 0 until one is done."""
        times_s = self._times_s
        return (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else 0.0

    def _want(self) -> int:
        """How many more leases to ask for."""
        if self._closed or self._resting:
            return 0
        by_pace = math.ceil(self._ahead_s / self.chunk_s) if self.chunk_s > 0 else self._hold_min
        target = max(self._hold_min, min(by_pace, self._share(), HAND_MAX))
        held, unread = len(self._held_chunks.held), self._held_chunks.waiting
        lack = max(target - held, UNREAD_MIN - unread)
        if not unread and held > target:  # a batch needs more chunks than the target: as many again
            lack = min(held, self._share())
        return max(0, min(lack, HAND_MAX - held - len(self._finished) - len(self._returned)))

    def _share(self) -> int:
        """How many leases are ours at most, for the sake of the others."""
        if self.exhausted:
            return self._hold_min
        return max(self._hold_min, (self.chunks - 1 - self._highest) // SHARE) if self.chunks else HAND_MAX

    # ------------------------------------------------------------ what people ask

    def state(self) -> dict[str, Any]:
        """JSON: every chunk of which something was processed, with its first sample that was not; and the counts."""
        with self._changed:
            in_hand = [[chunk, held.processed] for chunk, held in self._held_chunks.held.items() if held.processed]
            return {"stream": self.stream, "chunks": self.chunks, "in_hand": in_hand, "counts": asdict(self.counts)}
