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
    FragmentRecord,
    HandedOver,
    Layout,
    Merge,
    StoreOutcome,
    SyncConfig,
    VersionToStore,
)
from atoll.errors import FencedSyncerError
from atoll.observe import Writer, events
from atoll.store import CommitStats, Handover, RecordPosition, RunStore
from atoll.syncer.logged_since import LoggedSince
from atoll.syncer.recording import Recorder, described
from atoll.syncer.replicate import Replicator
from atoll.syncer.state import InspectedPayload, ModelState

WRITERS = 2
"""Commits that are written at a time: one waits for the disk while the other is copied."""

Arrays = Mapping[str, NDArray[np.float32]]


class StateWriter:
    """One per syncer; everything but the writes themselves runs on the event loop."""

    def __init__(
        self, store: RunStore | None, level: str, interval_s: float, writer: Writer, *, record: bool = False
    ) -> None:
        self.gate = DurabilityGate(level if store is not None else "none", int(interval_s * 1e9))
        self.replica: Replicator | None = None
        """A standby whose disk must have everything, too."""
        self._store = store
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(WRITERS, thread_name_prefix="atoll-store")
        recording = store.recording() if record and store is not None else None
        self.recorder = Recorder(recording, self._threads, writer)
        self._behind: dict[int, LoggedSince] = {}
        """By fragment that has a slot of this process: what follows it in the log."""
        self._pending: dict[int, tuple[Merge, list[RecordPosition]]] = {}
        """By fragment: a merge whose payloads are in the log and which is not committed yet."""
        self._handed: set[ContributionId] = set()
        self._handover = store.handover() if store is not None else Handover(Path())

    @property
    def level(self) -> str:
        return self.gate.level

    @property
    def degraded(self) -> str:
        """Why commits are not durable at the moment."""
        return self.gate.degraded or (self.replica.degraded if self.replica is not None else "")

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
        if self.replica is not None:
            await self.replica.confirm()

    # ------------------------------------------------------------ facts and commits

    def append(self, rows: Mapping[str, Any]) -> None:
        """Put facts on the tape."""
        if self._store is not None:
            self._store.remember(rows)
        if self.replica is not None:
            self.replica.append(rows)

    def rows(self) -> dict[str, Any]:
        """Every fact as it stands."""
        return self._store.rows() if self._store is not None else {}

    def note(self, merge: Merge, checksum: int) -> None:
        """Put a decision on the tape, for people and for replay: what was merged, into which version, how weighted."""
        if self._store is not None and not self.gate.fenced:
            ids = [[item.learner, item.generation, item.seq] for item in merge.contributions]
            record = {"merge": merge.fragment, "version": merge.version, "round": merge.round, "checksum": checksum}
            other = {"codec_down": merge.codec_down} if merge.codec_down else {}
            self._store.note({**record, "contributions": ids, "weights": list(merge.weights), **other})

    async def sync(self) -> str:
        """Make what was appended durable; returns the error if that failed. Raises FencedSyncerError if a newer syncer
        has taken over."""
        if self.replica is None:
            return await self._sync_here()
        return (await asyncio.gather(self._sync_here(), self.replica.flush()))[0]

    async def _sync_here(self) -> str:
        assert self._store is not None
        try:
            await self._loop.run_in_executor(self._threads, self._store.sync)
        except OSError as error:
            return cause(error)
        return ""

    def begin(self, run: str, config: SyncConfig, layout: Layout) -> None:
        """The run is known: from here on what is written can be understood."""
        self.recorder.begin(run, config, layout)
        if self._store is not None:
            self._store.describe_log(described(run, config, layout))

    async def log_payloads(self, merge: Merge, held: Sequence[InspectedPayload] | None) -> None:
        """Put what a merge is made from on disk while it is computed, if its version is to be committed that way.
        None: it cannot be made again from what is here."""
        self._pending.pop(merge.fragment, None)
        if held is None:
            return
        size = sum(item.payload.nbytes for item in held)
        behind = self._behind.get(merge.fragment)
        if self._store is None or behind is None or not behind.takes(merge.version, size):
            return
        payloads = [(item.codec.name, item.payload) for item in held]
        with contextlib.suppress(OSError):  # then it goes into a slot
            self._pending[merge.fragment] = (
                merge,
                await self._loop.run_in_executor(
                    self._threads, self._store.log_payloads, merge.fragment, merge.version, payloads
                ),
            )

    async def store(self, item: VersionToStore, arrays: Arrays) -> StoreOutcome:
        """Make one version durable, here and on the standby. The caller has the fragment's turn. Raises
        FencedSyncerError if a newer syncer has taken over, and then nothing may be published."""
        if self.replica is None:
            return await self._store_here(item, arrays)
        return (await asyncio.gather(self._store_here(item, arrays), self.replica.commit(item, arrays)))[0]

    async def _store_here(self, item: VersionToStore, arrays: Arrays) -> StoreOutcome:
        """As what it was made from, where that is less than what it is, else in a slot."""
        assert self._store is not None
        fragment_record = {**item.fragment_record, **self.recorder.mark(item.fragment, item.version)}
        try:
            stats = await self._commit_to_log(item, fragment_record)
            if stats is None:
                stats = await self._loop.run_in_executor(
                    self._threads, self._store.commit, item.fragment, item.version, arrays, fragment_record
                )
                self._in_slot(item, arrays)
        except OSError as error:
            return StoreOutcome(cause(error))
        return StoreOutcome("", stats.write_ns + stats.sync_ns, stats.bytes)

    async def _commit_to_log(self, item: VersionToStore, fragment_record: FragmentRecord) -> CommitStats | None:
        """None if it is to go into a slot. A log that cannot be written is no reason to lose the commit."""
        merge, places = self._pending.pop(item.fragment, (None, []))
        behind = self._behind.get(item.fragment)
        if self._store is None or merge is None or behind is None or merge.version != item.version:
            return None
        if behind.version != item.version - 1:
            return None
        logged = {**fragment_record, "codec_down": merge.codec_down} if merge.codec_down else fragment_record
        try:
            stats: CommitStats = await self._loop.run_in_executor(
                self._threads,
                self._store.log_commit,
                item.fragment,
                item.version,
                logged,
                merge.weights,
                places,
            )
        except OSError:
            return None
        behind.logged(item.version, stats.bytes, fragment_record)
        return stats

    def _in_slot(self, item: VersionToStore, arrays: Arrays) -> None:
        """From here on the log may follow, at level commit. With --record the payloads are on disk once already."""
        if self.level == "commit" and not self.recorder.on:
            size = sum(array.nbytes for array in arrays.values())
            self._behind[item.fragment] = LoggedSince(item.version, size)

    async def forget_fragment(self, fragment: int) -> None:
        """Another shard has this fragment: nothing of it stays on this disk. Raises OSError if that cannot be done."""
        self._behind.pop(fragment, None)
        self._pending.pop(fragment, None)
        for identity in [one for one in self._handed if one.fragment == fragment]:
            self.drop_handed(identity)
        if self._store is not None:
            await self._loop.run_in_executor(self._threads, self._store.drop, fragment)

    def fill_slots(self, state: ModelState) -> None:
        """Worker threads, at the end: put what only the log has into slots, so that nobody needs to merge again to read
        it. What cannot be written stays in the log."""
        for fragment, behind in self._behind.items():
            arrays = state.fragments[fragment] if fragment < len(state.fragments) else None
            if self._store is None or not behind.count or arrays is None or arrays.version != behind.version:
                continue
            with contextlib.suppress(OSError, FencedSyncerError):
                self._store.commit(fragment, behind.version, state.durable(fragment), behind.fragment_record)

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
            if self.replica is not None:
                await self.replica.keep_handed(handed_name(item.id), about, payload)
            self._handed.add(item.id)  # it may have been merged, and dropped here, while it was being written

    async def handed_abouts(self, fragment: int) -> dict[ContributionId, dict[str, Any]]:
        """What is on disk of leavers' contributions to a fragment, but for the bytes."""
        found = await self._loop.run_in_executor(self._threads, self.handed_over)
        names = {handed_name(one): one for one in self._handed if one.fragment == fragment}
        return {names[name]: about for name, (about, _) in found.items() if name in names}

    async def take_handed(self, identity: ContributionId, about: Mapping[str, Any], payload: NDArray[np.uint8]) -> None:
        """Put on disk what another shard had there. Raises OSError if that fails."""
        if self._store is not None:
            await self._loop.run_in_executor(self._threads, self._handover.put, handed_name(identity), about, payload)
            self._handed.add(identity)

    def drop_handed(self, identity: ContributionId) -> None:
        """It was merged or dropped. Done in the background: the commit says that it is merged, too."""
        if identity in self._handed:
            self._handed.discard(identity)
            self._loop.run_in_executor(self._threads, self._handover.drop, handed_name(identity))
            if self.replica is not None:
                self.replica.drop_handed(handed_name(identity))

    def handed_over(self) -> dict[str, tuple[dict[str, Any], NDArray[np.uint8]]]:
        """Worker threads: what is on disk of learners that left."""
        return self._handover.load()[0] if self._store is not None else {}

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
