"""Writes a snapshot of the whole run every so often, in the background: one fragment is copied and written at a time,
so it costs the memory of one fragment, and merges wait only for a copy."""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor

from atoll.core import Refusal
from atoll.errors import RefusedError
from atoll.observe import Writer, events
from atoll.store import LABELS_PER_EPOCH, SnapshotTarget
from atoll.syncer.claim import ClaimKeeper
from atoll.syncer.shell import SyncerShell

ANSWER_S = 5.0
"""Whoever asks for a snapshot waits so long for its end: half of what a caller waits for an answer."""
ONLY_WHEN_ASKED = math.inf
"""As the time between two snapshots: none by itself, and none at the end."""
Outcome = events.SnapshotWritten | events.SnapshotFailed


class Snapshotter:
    def __init__(
        self,
        shell: SyncerShell,
        target: SnapshotTarget,
        every_s: float,
        writer: Writer,
        claim: ClaimKeeper | None = None,
    ) -> None:
        self._shell = shell
        self._claim = claim
        self._target = target
        self._every_s = every_s
        self._writer = writer
        self._label = 0
        self._turn = asyncio.Lock()
        """One at a time."""
        self._asked: asyncio.Task[Outcome | None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="atoll-snapshot")
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Write a last snapshot, with everything in it, and end."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._asked is not None:
            await asyncio.gather(self._asked, return_exceptions=True)
        if self._every_s != ONLY_WHEN_ASKED:
            await self._write_if_ours()
        self._thread.shutdown(wait=True)

    def cancel(self) -> None:
        """End at once, without a last snapshot."""
        self._task.cancel()
        if self._asked is not None:
            self._asked.cancel()

    async def now(self) -> str:
        """One beside those that come by themselves. Who asks while one that was asked for is written gets that one."""
        if self._shell.state is None:
            raise RefusedError(Refusal.NOT_READY, "the run has no parameters yet; ask again when a learner has joined")
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().create_task(self._write_if_ours())
        await asyncio.wait({self._asked}, timeout=ANSWER_S)
        if not self._asked.done():
            return f"a snapshot is being written to {self._target.url}; `atoll logs` says when it is there"
        outcome = self._asked.result()
        if isinstance(outcome, events.SnapshotWritten):
            return f"snapshot {outcome.label} is written to {outcome.url} ({outcome.bytes / 1e6:.1f} MB)"
        raise RefusedError(Refusal.NOT_READY, outcome.reason if outcome else "another syncer has the run; ask that one")

    async def _run(self) -> None:
        while self._every_s != ONLY_WHEN_ASKED:
            await asyncio.sleep(self._every_s)
            await self._write_if_ours()

    async def _write_if_ours(self) -> Outcome | None:
        async with self._turn:
            if self._shell.state is None or self._shell.fenced:
                return None
            if self._claim is None or await self._claim.still_ours():
                return await self._write()
            return None

    async def _write(self) -> Outcome:
        """A failure is told and costs nothing but this snapshot; the next is tried at its time."""
        started_ns = time.monotonic_ns()
        try:
            versions, size, label = await self._write_all()
        except Exception as error:  # a remote file system raises whatever its library does
            text = f"snapshot to {self._target.url} failed: {type(error).__name__}: {error}; training goes on"
            failed = events.SnapshotFailed(self._target.url, text)
            self._writer.emit(failed)
            return failed
        took_ns = time.monotonic_ns() - started_ns
        written = events.SnapshotWritten(self._target.url, label, size, took_ns, versions)
        self._writer.emit(written)
        return written

    async def _write_all(self) -> tuple[list[int], int, int]:
        loop = asyncio.get_running_loop()
        shell, machine = self._shell, self._shell.machine
        # A run that comes back from learners has its epoch from them, after this syncer has started.
        self._label = max(self._label, machine.epoch * LABELS_PER_EPOCH) + 1
        draft = await loop.run_in_executor(self._thread, self._target.begin, self._label)
        # Still the newest after the places were looked at: so the label that was chosen is of this epoch.
        await loop.run_in_executor(self._thread, shell.keeper.check_epoch)
        try:
            versions = []
            for fragment in range(machine.config.fragments):
                version, arrays, fragment_record = await shell.copy_fragment(fragment)
                await loop.run_in_executor(self._thread, draft.put_fragment, fragment, version, arrays, fragment_record)
                versions.append(version)
            about = {
                "run": machine.run,
                "epoch": machine.epoch,
                "versions": versions,
                "config": machine.config.to_dict(),
                "created_s": int(time.time()),
            }
            await loop.run_in_executor(self._thread, shell.keeper.check_epoch)
            # The facts are taken last: they must be at least as new as every record.
            stats = await loop.run_in_executor(self._thread, draft.finish, machine.rows(), about)
        except BaseException:
            await asyncio.shield(loop.run_in_executor(self._thread, draft.abandon))
            raise
        return versions, stats.bytes, draft.label
