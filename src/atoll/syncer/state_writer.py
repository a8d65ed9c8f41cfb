"""The keeper has the syncer's disk: the tape, the commits, what leavers handed over, and the recording. When what is
written, and what waits for it, is decided by `core.durability_gate`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.core import (
    ContributionId,
    ContributionRecord,
    DurabilityGate,
    HandedOver,
    Merge,
    StoreOutcome,
    VersionToStore,
)
from atoll.observe import Writer, events
from atoll.store import Handover, RunStore
from atoll.syncer.recording import Recorder

WRITERS = 2
"""Commits that are written at a time: one waits for the disk while the other is copied."""

Arrays = Mapping[str, NDArray[np.float32]]


class StateWriter:
    """One per syncer; everything but the writes themselves runs on the event loop."""

    def __init__(
        self, store: RunStore | None, level: str, interval_s: float, writer: Writer, *, record: bool = False
    ) -> None:
        self.gate = DurabilityGate(level if store is not None else "none", int(interval_s * 1e9))
        self._store = store
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(WRITERS, thread_name_prefix="atoll-store")
        recording = store.recording() if record and store is not None else None
        self.recorder = Recorder(recording, self._threads, writer)
        self._handed: set[ContributionId] = set()
        self._handover = Handover(store.path / "handover") if store is not None else Handover(Path())

    @property
    def level(self) -> str:
        return self.gate.level

    @property
    def degraded(self) -> str:
        """Why commits are not durable at the moment."""
        return self.gate.degraded

    def close(self) -> None:
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

    async def look_around(self) -> None:
        """Raises FencedSyncerError if a newer syncer has taken over."""
        with contextlib.suppress(OSError):  # the next write will say more
            await self._loop.run_in_executor(self._threads, self.check_epoch)

    # ------------------------------------------------------------ facts and commits

    def append(self, rows: Mapping[str, Any]) -> None:
        """Put facts on the tape."""
        if self._store is not None:
            self._store.remember(rows)

    def note(self, merge: Merge, checksum: int) -> None:
        """Put a decision on the tape, for people and for replay: what was merged, into which version, how weighted."""
        if self._store is not None and not self.gate.fenced:
            ids = [[item.learner, item.generation, item.seq] for item in merge.contributions]
            record = {"merge": merge.fragment, "version": merge.version, "round": merge.round, "checksum": checksum}
            self._store.note({**record, "contributions": ids, "weights": list(merge.weights)})

    async def sync(self) -> str:
        """Make what was appended durable; returns the error if that failed. Raises FencedSyncerError if a newer syncer
        has taken over."""
        assert self._store is not None
        try:
            await self._loop.run_in_executor(self._threads, self._store.sync)
        except OSError as error:
            return cause(error)
        return ""

    async def store(self, item: VersionToStore, arrays: Arrays) -> StoreOutcome:
        """Make one version durable. The caller has the fragment's turn. Raises FencedSyncerError if a newer syncer has
        taken over, and then nothing may be published."""
        assert self._store is not None
        fragment_record = {**item.fragment_record, **self.recorder.mark(item.fragment, item.version)}
        try:
            stats = await self._loop.run_in_executor(
                self._threads, self._store.commit, item.fragment, item.version, arrays, fragment_record
            )
        except OSError as error:
            return StoreOutcome(cause(error))
        return StoreOutcome("", stats.write_ns + stats.sync_ns, stats.bytes)

    # ------------------------------------------------------------ what leaving learners handed over

    async def keep_handed(self, items: Sequence[tuple[ContributionRecord, NDArray[np.uint8]]], processed: int) -> None:
        """Put contributions of a learner that leaves on disk. If that fails they are only in memory, as at the other
        levels; the ledger tells if that costs anything."""
        if self._store is None:
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
                item = ContributionRecord(**{**fields, "id": ContributionId(**about["id"])})
                processed = int(about["processed"])
            except (TypeError, KeyError, ValueError, OverflowError) as error:
                problems.append(f"{name}: not a contribution ({error})")
                continue
            handed.append(HandedOver(item, processed))
            payloads[item.id] = payload
        self._handed |= payloads.keys()
        return handed, payloads, problems


REMEDIES = {
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room on the disk, or raise the quota",
    errno.EMFILE: "the disk is fine, but this process has no descriptor left: raise `ulimit -n` for it, and look who "
    "holds connections to its port",
    errno.ENFILE: "the disk is fine, but this machine has no descriptor left: look which process holds them",
    errno.EROFS: "the disk takes no writes: look at the system's log, and mount it again",
}


def cause(error: OSError) -> str:
    """What went wrong, and what to do."""
    return f"{error}; {REMEDIES.get(error.errno or 0, 'look at the disk, and at the log of the system')}"


def handed_name(identity: ContributionId) -> str:
    """A file name for any learner id."""
    digest = xxhash.xxh3_64_hexdigest(identity.learner.encode())
    return f"{identity.fragment:04d}-{digest}-{identity.generation}-{identity.seq}"
