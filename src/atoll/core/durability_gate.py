"""The durability gate: what may be said, and what must be written, when. A pure machine; its host has the disk.

    level      a commit is on disk            messages wait for the tape
    commit     before it is published         yes
    interval   every so many seconds          no
    none       never                          no

Facts come first: whatever follows from a fact leaves only when the fact is on disk, in the order in which it was said.
When a write fails (disk full, I/O error), training is worth more than durability: the gate is degraded, lets everything
pass, and counts what the disk has missed (`dirty`) until all of it was written; then `level` holds again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import StrEnum

from atoll.core.config import SECOND_NS, one_of

LEVELS = ("commit", "interval", "none")
RETRY_NS = 5 * SECOND_NS
"""Pause between two attempts to write after a failure: long enough not to hammer a dying disk, short against the
minutes that it takes somebody to make room."""
LOOK_NS = SECOND_NS
"""How often somebody looks for what is not on disk yet and need not be at once."""


class Chore(StrEnum):
    """What is to be done for the disk when nothing else asks for it."""

    CATCH_UP = "catch up"
    """Write every dirty fragment and the facts."""
    SYNC = "sync"
    """Facts were put on the tape that nobody waits for: they are on disk within a second or two."""
    LOOK = "look"
    """A syncer with nothing to write must notice as well that a newer one has taken over."""


class DurabilityGate:
    """Counts what was appended and what is synced, so that a message waits for the facts that it follows from."""

    def __init__(self, level: str, interval_ns: int = 0) -> None:
        self.level = one_of("durability", level, LEVELS)
        self.degraded = ""
        """Why commits are not durable at the moment."""
        self.fenced = False
        """A newer syncer has taken over: nothing is written or said any more."""
        self.dirty: set[int] = set()
        """Fragments whose newest version is not on disk."""
        self._interval_ns = interval_ns
        self._written_ns = -1
        self._loose = False
        self._trying = False
        """Degraded, but a write has worked again."""
        self._appended = 0
        self._syncing = False
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    # ------------------------------------------------------------ facts, and what waits for them

    def remembered(self, *, first: bool) -> bool:
        """Facts were put on the tape. True if it must be synced now, because what comes next waits for them."""
        self._loose = True
        if not first or self.level != "commit" or self.degraded:
            return False
        self._appended += 1
        begins, self._syncing = not self._syncing, True
        return begins

    @property
    def open(self) -> bool:
        """Nothing that is said now waits for anything."""
        return not (self._syncing or self._waiting or self.fenced)

    def after_tape(self, action: Callable[[], None]) -> None:
        """Do it now, or once everything that was remembered before is on disk. Order is kept."""
        if self.fenced:
            return
        if self.open:
            action()
        else:
            self._waiting.append((self._appended, action))

    @property
    def appended(self) -> int:
        """How many facts that something waits for the tape has been given: a sync that begins now covers so many."""
        return self._appended

    def synced(self, upto: int, error: str = "") -> bool:
        """A sync is over. True if another is to follow for facts that have come meanwhile. With an `error` the gate is
        degraded already, and nothing waits any more."""
        upto = self._appended if error else upto
        self._syncing = upto < self._appended
        while self._waiting and self._waiting[0][0] <= upto:
            self._waiting.popleft()[1]()
        return self._syncing

    # ------------------------------------------------------------ commits

    @property
    def writes_commits(self) -> bool:
        """True if a version is to be on disk before it is published; else it is put off."""
        return self.level == "commit" and (not self.degraded or self._trying)

    def put_off(self, fragments: Iterable[int]) -> None:
        """The newest versions of these fragments are to be written later."""
        self.dirty.update(fragments)

    def written(self, fragment: int, *, again: bool = False) -> None:
        """The newest version of a fragment is on disk. After a failure commits are written at once again as soon as one
        that was put off (`again`) has been: else new ones would come up as fast as old ones are written."""
        self.dirty.discard(fragment)
        self._trying = self._trying or again

    def failed(self, reason: str, fragment: int | None = None) -> bool:
        """A write did not work. True if that is news."""
        if fragment is not None:
            self.dirty.add(fragment)
            self._trying = False
        news, self.degraded = not self.degraded, reason
        return news

    def mended(self) -> str:
        """Everything was written. Returns why it was not before, if that is over now."""
        if not self.degraded or (self.level != "interval" and self.dirty):
            return ""
        reason, self.degraded, self._trying = self.degraded, "", False
        return reason

    def fence(self) -> None:
        self.fenced = True
        self._waiting.clear()

    # ------------------------------------------------------------ looking after the disk

    @property
    def pause_ns(self) -> int:
        """Until the next chore."""
        return RETRY_NS if self.degraded else LOOK_NS

    def chore(self, now_ns: int) -> Chore:
        """What to do now; the caller does it."""
        if self.degraded or self._due(now_ns):
            self._loose = False
            return Chore.CATCH_UP
        if self._loose:
            self._loose = False
            return Chore.SYNC
        return Chore.LOOK

    def _due(self, now_ns: int) -> bool:
        """At level `interval` fragments are written now and then; at `commit`, what was put off before the start."""
        if self.level == "commit":
            return bool(self.dirty)
        self._written_ns = now_ns if self._written_ns < 0 else self._written_ns
        if self.level != "interval" or now_ns - self._written_ns < self._interval_ns:
            return False
        self._written_ns = now_ns
        return bool(self.dirty)
