"""The keeper makes the run durable: it writes commits and facts to the store, holds back what must not be said before
they are on disk, and copes with a disk that fails.

    level      a commit is on disk            messages wait for the tape
    commit     before it is published         yes
    interval   every so many seconds          no
    none       never                          no

When a write fails (disk full, I/O error), training is worth more than durability: the keeper says so loudly, lets
everything pass, and tries again every few seconds until all that it missed is on disk; then `level` holds again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.core.config import one_of
from atoll.core.effects import Merge
from atoll.core.rounds import Contribution, ContributionId, HandedOver
from atoll.errors import FencedSyncerError
from atoll.observe import Writer, events
from atoll.store import CommitStats, Handover, RunStore
from atoll.syncer.recording import Recorder

LEVELS = ("commit", "interval", "none")
RETRY_S = 5.0
"""Pause between two attempts to write after a failure: long enough not to hammer a dying disk, short against the
minutes that it takes somebody to make room."""
LOOK_S = 1.0
"""How often the keeper looks for what is not on disk yet and need not be at once."""
WRITERS = 2
"""Commits that are written at a time: one waits for the disk while the other is copied."""

Arrays = Mapping[str, NDArray[np.float32]]


class Keeper:
    """One per syncer; everything but the writes themselves runs on the event loop."""

    def __init__(
        self, store: RunStore | None, level: str, interval_s: float, writer: Writer, *, record: bool = False
    ) -> None:
        self.level = one_of("durability", level if store is not None else "none", LEVELS)
        self.degraded = ""
        """Why commits are not durable at the moment."""
        self.fenced: FencedSyncerError | None = None
        self.store_fragment: Callable[[int], Awaitable[None]] = _nothing
        """Set by the shell: write one fragment as it stands."""
        self.failed: Callable[[BaseException | None], None] = lambda error: None
        """Set by the shell: told of an error that is not the disk's."""
        self._store = store
        self._interval_s = interval_s
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(WRITERS, thread_name_prefix="atoll-store")
        recording = store.recording() if record and store is not None else None
        self.recorder = Recorder(recording, self._threads, writer)
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        self._appended = 0
        self._loose = False
        """Facts were put on the tape that nobody waits for."""
        self._handed: set[ContributionId] = set()
        self._handover = Handover(store.path / "handover") if store is not None else Handover(Path())
        self._dirty: set[int] = set()
        self._trying = False
        """Degraded, but a write has worked again."""
        self._written_s = self._loop.time()
        self._syncing: asyncio.Task[None] | None = None
        self._background: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to write in the background what is not written at once."""
        if self._store is not None:
            self._background = self._loop.create_task(self._look_after())
            self._background.add_done_callback(self._check_task)

    async def close(self) -> None:
        """Write what is left, in order."""
        if self._background is not None:
            self._background.cancel()
            await asyncio.gather(self._background, return_exceptions=True)
        if self._syncing is not None:
            await self._syncing
        if self._store is not None and self.fenced is None:
            await self._catch_up()
        self._threads.shutdown(wait=True)
        self.recorder.close()
        if self._store is not None:
            self._store.close()

    def check_epoch(self) -> None:
        """Worker threads: raise FencedSyncerError if a newer syncer has taken over."""
        if self._store is not None:
            self._store.check_epoch()

    def while_newest(self, act: Callable[[], None]) -> None:
        """Do it while no other syncer can take over; raise FencedSyncerError if one has."""
        if self._store is None:
            act()
        else:
            self._store.while_newest(act)

    # ------------------------------------------------------------ facts, and what waits for them

    def remember(self, rows: Mapping[str, Any], first: bool) -> None:
        """Put facts on the tape; with `first`, `say` waits until they are on disk."""
        if self._store is None or self.fenced is not None:
            return
        self._store.remember(rows)
        self._loose = True
        if first and self.level == "commit" and not self.degraded:
            self._appended += 1
            if self._syncing is None:
                self._syncing = self._loop.create_task(self._sync())
                self._syncing.add_done_callback(self._check_task)

    def note(self, merge: Merge, checksum: int) -> None:
        """Put a decision on the tape, for people and for replay: what was merged, into which version, how weighted."""
        if self._store is not None and self.fenced is None:
            ids = [[item.learner, item.generation, item.seq] for item in merge.contributions]
            record = {"merge": merge.fragment, "version": merge.version, "round": merge.round, "checksum": checksum}
            self._store.note({**record, "contributions": ids, "weights": list(merge.weights)})

    def say(self, send: Callable[[], None]) -> None:
        """Send now, or once everything that was remembered before is on disk. Order is kept."""
        if self.fenced is not None:
            return
        if self._syncing is None and not self._held:
            send()
        else:
            self._held.append((self._appended, send))

    async def _sync(self) -> None:
        assert self._store is not None
        synced = -1
        while synced < self._appended and self.fenced is None:
            upto = self._appended
            try:
                await self._loop.run_in_executor(self._threads, self._sync_here)
            except OSError as error:
                self._degrade(f"the tape cannot be written ({error})")
                upto = self._appended
            except FencedSyncerError as error:
                self.fence(error)
                break
            synced = upto
            self._let_go(synced)
        self._syncing = None
        self._let_go(self._appended)

    def _sync_here(self) -> None:
        assert self._store is not None
        self._store.sync()

    def _let_go(self, upto: int) -> None:
        while self._held and self._held[0][0] <= upto:
            send = self._held.popleft()[1]
            if self.fenced is None:
                send()

    # ------------------------------------------------------------ commits

    async def commit(
        self,
        fragment: int,
        version: int,
        arrays: Arrays,
        column: Mapping[str, Any],
        *,
        now: bool = False,
        seed: bool = False,
    ) -> CommitStats | None:
        """Make one version durable as the level says (a seed at every level). The caller holds the fragment's lock.
        Returns None if nothing was written; raises FencedSyncerError if a newer syncer has taken over, and then nothing
        may be published. With `now` an OSError is the caller's."""
        if self._store is None:
            return None
        if not now and not seed and (self.level != "commit" or (self.degraded and not self._trying)):
            self._dirty.add(fragment)
            return None
        column = {**column, **self.recorder.mark(fragment, version)}
        if self._syncing is not None:
            # Facts first: a column must not know that somebody has left, say, before the tape does. Only those that
            # were remembered before it was made: under a steady stream of facts the tape is never at rest.
            told = self._loop.create_future()
            self.say(lambda: told.set_result(None))
            await asyncio.wait({told, self._syncing}, return_when=asyncio.FIRST_COMPLETED)
        try:
            stats = await self._loop.run_in_executor(
                self._threads, self._store.commit, fragment, version, arrays, column
            )
        except OSError as error:
            self._dirty.add(fragment)
            self._trying = False
            if now:
                raise
            self._degrade(f"version {version} of fragment {fragment} cannot be written ({error})")
            return None
        except FencedSyncerError as error:
            self.fence(error)
            raise
        self._dirty.discard(fragment)
        return stats

    # ------------------------------------------------------------ what leaving learners handed over

    async def keep_handed(self, items: Sequence[tuple[Contribution, NDArray[np.uint8]]], processed: int) -> None:
        """Put contributions of a learner that leaves on disk. If that fails they are only in memory, as at the other
        levels; the ledger tells if that costs anything."""
        if self._store is None or not items or self.fenced is not None:
            return
        for item, payload in items:
            self._handed.add(item.id)
            about = {**asdict(item), "processed": processed}
            try:
                await self._loop.run_in_executor(
                    self._threads, self._handover.put, handed_name(item.id), about, payload
                )
            except OSError as error:
                text = f"what {item.id.learner!r} handed over could not be put on disk ({error}); it waits in memory"
                self._writer.emit(events.Warned("syncer", text))
                return
            self._handed.add(item.id)  # it may have been merged, and dropped here, while it was being written

    def drop_handed(self, identity: ContributionId) -> None:
        """It was merged or dropped. Done in the background: the commit says that it is merged, too."""
        if identity in self._handed:
            self._handed.discard(identity)
            self._loop.run_in_executor(self._threads, self._handover.drop, handed_name(identity))

    def load_handed(self) -> tuple[list[HandedOver], dict[ContributionId, NDArray[np.uint8]], list[str]]:
        """What an earlier syncer had put on disk for learners that left."""
        found, problems = self._handover.load() if self._store is not None else ({}, [])
        handed, payloads = [], {}
        for name, (about, payload) in found.items():
            try:
                fields = {name: value for name, value in about.items() if name != "processed"}
                item = Contribution(**{**fields, "id": ContributionId(**about["id"])})
                processed = int(about["processed"])
            except (TypeError, KeyError, ValueError, OverflowError) as error:
                problems.append(f"{name}: not a contribution ({error})")
                continue
            handed.append(HandedOver(item, processed))
            payloads[item.id] = payload
        self._handed |= payloads.keys()
        return handed, payloads, problems

    def take_in(self, rows: Mapping[str, Any], fragments: Sequence[int]) -> None:
        """What came from a snapshot is not in this state folder: put it there, facts first, in the background."""
        if self._store is not None:
            if rows:
                self._store.remember(rows)
                self._loose = True
            self._dirty |= set(fragments)

    async def _look_after(self) -> None:
        """Write what is dirty: after a failure, and every so often."""
        while self.fenced is None:
            await asyncio.sleep(RETRY_S if self.degraded else LOOK_S)
            if self.degraded or self._due():
                await self._catch_up()
            elif self._loose:
                await self._sync_loose()
            else:
                await self._look_around()

    async def _sync_loose(self) -> None:
        """Facts that nobody waits for are on disk within a second or two."""
        self._loose = False
        try:
            await self._loop.run_in_executor(self._threads, self._sync_here)
        except OSError as error:
            self._degrade(f"the tape cannot be written ({error})")
        except FencedSyncerError as error:
            self.fence(error)

    async def _look_around(self) -> None:
        """A syncer with nothing to write must notice as well that a newer one has taken over."""
        try:
            await self._loop.run_in_executor(self._threads, self.check_epoch)
        except OSError:
            pass  # the next write will say more
        except FencedSyncerError as error:
            self.fence(error)

    def _due(self) -> bool:
        """True if fragments are to be written: at level `interval`, now and then; at `commit`, what `take_in` left."""
        if self.level == "commit":
            return bool(self._dirty)
        if self.level != "interval" or self._loop.time() - self._written_s < self._interval_s:
            return False
        self._written_s = self._loop.time()
        return bool(self._dirty)

    async def _catch_up(self) -> None:
        """Write everything that is not on disk. After a failure, commits are written at once again as soon as one write
        has worked: else new ones would come up as fast as old ones are written."""
        self._loose = False
        try:
            if self._dirty:
                # Facts first: a column must not know of a member that no row knows.
                await self._loop.run_in_executor(self._threads, self._sync_here)
            for _ in range(2):
                for fragment in sorted(self._dirty):
                    await self.store_fragment(fragment)
                    self._trying = True
            await self._loop.run_in_executor(self._threads, self._sync_here)
        except OSError as error:
            self._degrade(str(error))
        except FencedSyncerError as error:
            self.fence(error)
        else:
            self._mend()

    # ------------------------------------------------------------ how things stand

    def _degrade(self, reason: str) -> None:
        if not self.degraded:
            text = f"{reason}; training goes on, commits are not durable until this is mended (make room on the disk)"
            self._writer.emit(events.DurabilityChanged("degraded", self.level, text))
            print(f"atoll syncer: {text}", flush=True)
        self.degraded = reason

    def _mend(self) -> None:
        if self.degraded and (self.level == "interval" or not self._dirty):
            self._trying = False
            text = f"everything is on disk again (it was not because {self.degraded})"
            self.degraded = ""
            self._writer.emit(events.DurabilityChanged(self.level, self.level, text))
            print(f"atoll syncer: {text}", flush=True)

    def _check_task(self, task: asyncio.Task[None]) -> None:
        """Whatever ends a task of the keeper's must not end in silence."""
        if not task.cancelled() and task.exception() is not None:
            self.failed(task.exception())

    def fence(self, error: FencedSyncerError) -> None:
        """A newer syncer has taken over: nothing is written or said any more."""
        self.fenced = error
        self._held.clear()


def handed_name(identity: ContributionId) -> str:
    """A file name for any learner id."""
    digest = xxhash.xxh3_64_hexdigest(identity.learner.encode())
    return f"{identity.fragment:04d}-{digest}-{identity.generation}-{identity.seq}"


async def _nothing(fragment: int) -> None:
    return None
