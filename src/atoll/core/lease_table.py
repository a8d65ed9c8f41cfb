"""The chunks of one data stream, and what happens to each: the table at the top of `leases`, as code. Pure.

Only what is in a hand or in the pool is written down. `changed` names the rows (keys below the stream's own, "" for
that one itself) that differ from what was last put on the tape.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from atoll.core.messages import CHUNKS_MAX, Lease

HAND_MAX = CHUNKS_MAX
"""Chunks in one learner's hand, per stream: what one report can name."""
AHEAD_MAX = 10 * CHUNKS_MAX
"""Numbers above `next` that are remembered as issued. They appear only after rows were lost: what ten learners with
full hands know."""
REISSUED_KEPT = 1000
"""Re-issued chunk numbers remembered by name, newest last; the counter counts all of them."""
FORMER_MAX = 4
"""Learners remembered that had a chunk and were lost with it: it is seldom issued more than twice."""
NUMBER_MAX = 2**62
"""Chunk numbers, sample positions, serials: what a signed 64-bit field carries with room to add."""
AGAIN = "/again"
HAND = "/hand/"


@dataclass(slots=True)
class Hand:
    """What one generation of one learner has leased."""

    generation: int
    serial: int = 0
    """Of the newest report."""
    leases: dict[int, int] = field(default_factory=dict)
    """Chunk to the sample at which its lease starts, oldest first."""
    told: frozenset[int] = frozenset()
    """The done chunks of the newest report: named again, they are the same news and not a second time."""

    def row(self) -> dict[str, Any]:
        leases = [[chunk, start] for chunk, start in self.leases.items()]
        return {"generation": self.generation, "serial": self.serial, "leases": leases, "done": sorted(self.told)}


@dataclass(slots=True)
class Pooled:
    """A chunk that was issued, is not finished and is in nobody's hand."""

    start: int
    lost: bool
    """True if its last holder was lost with it, so that samples may repeat; False if it was handed back."""


@dataclass(slots=True)
class StreamTable:
    """One stream. Every method is a plain state change."""

    chunks: int
    """In total; 0: no end."""
    next: int = 0
    """The first number that was never issued, `ahead` apart."""
    hands: dict[str, Hand] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)
    """The hands, by chunk."""
    pool: OrderedDict[int, Pooled] = field(default_factory=OrderedDict)
    ahead: set[int] = field(default_factory=set)
    """Issued numbers above `next`."""
    again: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Re-issued chunks and how often."""
    former: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Who had a chunk before and was lost with it: such a one may still say what became of it."""
    lost_rows: bool = False
    """An earlier syncer may have issued numbers that this book does not know."""
    reissued: int = 0
    repeated: int = 0
    changed: set[str] = field(default_factory=set)

    @property
    def issued(self) -> int:
        return self.next + len(self.ahead)

    @property
    def exhausted(self) -> bool:
        return 0 < self.chunks <= self.issued and not self.pool

    def knows(self, chunk: int) -> bool:
        """Whether the number was ever issued."""
        return chunk < self.next or chunk in self.ahead

    def _learn(self, chunk: int) -> bool:
        """Take note of a number that a syncer issued before this one lost its rows. False if there was no such syncer,
        or no room."""
        if self.knows(chunk) or not self.lost_rows or len(self.ahead) >= AHEAD_MAX:
            return False
        self.ahead.add(chunk)
        self.changed.add("")
        return True

    # ------------------------------------------------------------ what a report says of one chunk

    def had(self, learner: str, chunk: int) -> bool:
        """Whether the chunk is or was in this learner's hand, or may have been as far as is known."""
        return self.owner.get(chunk) == learner or learner in self.former.get(chunk, ()) or not self.knows(chunk)

    def done(self, learner: str, chunk: int) -> None:
        if not self.had(learner, chunk):
            return
        holder = self.owner.pop(chunk, None)
        if holder is not None:
            del self.hands[holder].leases[chunk]
            self.changed.add(HAND + holder)
            if holder != learner:
                self._count_repeated()
            self._forget_former(chunk)
        elif self.pool.pop(chunk, None) is not None:
            self._forget_former(chunk)
            self.changed.add("")
        elif self.knows(chunk):
            if chunk in self.again and chunk not in self.hands[learner].told:
                self._count_repeated()  # it was issued again, and that holder has finished it as well
        else:
            self._learn(chunk)

    def returned(self, learner: str, lease: Lease) -> None:
        holder = self.owner.get(lease.chunk)
        pooled = self.pool.get(lease.chunk)
        if not self.had(learner, lease.chunk):
            return
        if holder == learner:
            start = self.hands[learner].leases.pop(lease.chunk)
            del self.owner[lease.chunk]
            self.changed.add(HAND + learner)
            self.pool[lease.chunk] = Pooled(max(start, lease.start), lost=False)
        elif pooled is not None:
            pooled.start, pooled.lost = max(pooled.start, lease.start), False
        elif holder is None and self._learn(lease.chunk):
            self.pool[lease.chunk] = Pooled(lease.start, lost=False)
        else:
            return
        self.changed.add("")

    def holds(self, learner: str, chunk: int) -> bool:
        """Whether the chunk is this learner's, now that it says so."""
        hand = self.hands[learner]
        if chunk in hand.leases:
            return True
        if len(hand.leases) >= HAND_MAX or not self.had(learner, chunk):
            return False
        pooled = self.pool.pop(chunk, None)
        if pooled is None and not self._learn(chunk):
            return False
        self._give(learner, Lease(chunk, pooled.start if pooled is not None else 0))
        return True

    # ------------------------------------------------------------ hands

    def grant(self, learner: str, count: int) -> list[Lease]:
        """Up to `count` new leases for this learner: the pool first, then fresh numbers."""
        granted: list[Lease] = []
        while len(granted) < count and not self.exhausted:
            if self.pool:
                chunk, pooled = self.pool.popitem(last=False)
                granted.append(Lease(chunk, pooled.start))
                if pooled.lost:
                    self._count_reissued(chunk)
            elif self.next in self.ahead:
                self.ahead.discard(self.next)
                self.next += 1
            else:
                granted.append(Lease(self.next))
                self.next += 1
        for lease in granted:
            self._give(learner, lease)
        return granted

    def _give(self, learner: str, lease: Lease) -> None:
        self.hands[learner].leases[lease.chunk] = lease.start
        self.owner[lease.chunk] = learner
        self.changed |= {"", HAND + learner}

    def open_hand(self, learner: str, generation: int) -> Hand:
        """An empty hand for this generation; what an older one held goes into the pool."""
        self.drop_hand(learner)
        self.changed.add(HAND + learner)
        hand = self.hands[learner] = Hand(generation)
        return hand

    def drop_hand(self, learner: str) -> int:
        """Nobody knows what became of this learner's chunks: into the pool with them. Returns how many."""
        hand = self.hands.pop(learner, None)
        if hand is None:
            return 0
        for chunk, start in hand.leases.items():
            del self.owner[chunk]
            self.pool[chunk] = Pooled(start, lost=True)
            others = tuple(name for name in self.former.get(chunk, ()) if name != learner)
            self.former[chunk] = (*others, learner)[-FORMER_MAX:]
        self.changed |= {"", HAND + learner}
        return len(hand.leases)

    def _forget_former(self, chunk: int) -> None:
        """It is done; who else has finished it is of interest while it is among those that were issued again."""
        if chunk not in self.again:
            self.former.pop(chunk, None)

    def _count_reissued(self, chunk: int) -> None:
        self.reissued += 1
        self.again[chunk] = self.again.pop(chunk, 0) + 1
        if len(self.again) > REISSUED_KEPT:
            oldest, _ = self.again.popitem(last=False)
            if oldest not in self.owner and oldest not in self.pool:
                self.former.pop(oldest, None)
        self.changed |= {"", AGAIN}

    def _count_repeated(self) -> None:
        self.repeated += 1
        self.changed.add("")

    # ------------------------------------------------------------ figures and rows

    def status(self) -> dict[str, int]:
        in_hand, pool = len(self.owner), len(self.pool)
        return {
            "chunks": self.chunks,
            "issued": self.issued,
            "done": self.issued - in_hand - pool,
            "in_hand": in_hand,
            "pool": pool,
            "reissued": self.reissued,
            "repeated": self.repeated,
        }

    def row(self, key: str) -> Any | None:
        """The value of one row, None if there is none."""
        if key == AGAIN:
            return [[chunk, times] for chunk, times in self.again.items()]
        if key.startswith(HAND):
            hand = self.hands.get(key.removeprefix(HAND))
            return hand.row() if hand is not None else None
        former = {"former": [[chunk, *names] for chunk, names in self.former.items()]} if self.former else {}
        return former | {
            "chunks": self.chunks,
            "next": self.next,
            "pool": [[chunk, pooled.start, int(pooled.lost)] for chunk, pooled in self.pool.items()],
            "ahead": sorted(self.ahead),
            "reissued": self.reissued,
            "repeated": self.repeated,
        }

    def load_row(self, key: str, row: Any) -> None:
        """Take in one of the rows below the stream's own. Unknown ones are passed over; nonsense is a ValueError,
        KeyError or TypeError."""
        if key == AGAIN:
            for chunk, times in row[-REISSUED_KEPT:]:
                demand(whole([chunk, times]), "numbers")
                self.again[chunk] = times
        elif key.startswith(HAND):
            self._load_hand(key.removeprefix(HAND), row)

    def _load_hand(self, learner: str, row: Any) -> None:
        hand = Hand(row["generation"], row.get("serial", 0), told=frozenset(row.get("done", ())))
        demand(whole([hand.generation, hand.serial, *hand.told]), "numbers")
        demand(len(row["leases"]) <= HAND_MAX, "too many leases")
        self.hands[learner] = hand
        for chunk, start, *_ in row["leases"]:
            demand(whole([chunk, start]) and self.knows(chunk), f"chunk {chunk} was not issued")
            demand(chunk not in self.owner and chunk not in self.pool, f"chunk {chunk} is in two places")
            hand.leases[chunk] = start
            self.owner[chunk] = learner


def load_table(row: Any, *, lost_rows: bool) -> StreamTable:
    """A stream from its own row."""
    table = StreamTable(row["chunks"], row["next"], reissued=row["reissued"], repeated=row["repeated"])
    table.ahead, table.lost_rows = set(row.get("ahead", ())), lost_rows
    for chunk, *names in row.get("former", ()):
        demand(whole([chunk]) and all(type(name) is str for name in names), "former holders")
        table.former[chunk] = tuple(names[-FORMER_MAX:])
    demand(whole([table.chunks, table.next, table.reissued, table.repeated, *table.ahead]), "numbers")
    demand(len(table.ahead) <= AHEAD_MAX and all(chunk >= table.next for chunk in table.ahead), "ahead")
    for chunk, start, lost, *_ in row["pool"]:
        demand(whole([chunk, start]) and table.knows(chunk) and chunk not in table.pool, f"chunk {chunk} in the pool")
        table.pool[chunk] = Pooled(start, bool(lost))
    return table


def whole(values: Iterable[Any], highest: int = NUMBER_MAX) -> bool:
    """True if all are integers from 0 to `highest`; JSON and callers may bring anything."""
    return all(type(value) is int and 0 <= value <= highest for value in values)


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)
