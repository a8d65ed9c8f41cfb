"""Writes a snapshot of the whole run every so often, in the background: one fragment is copied and written at a time,
so it costs the memory of one fragment, and merges wait only for a copy."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from atoll.observe import Writer, events
from atoll.store import LABELS_PER_EPOCH, SnapshotTarget
from atoll.syncer.claim import ClaimKeeper
from atoll.syncer.shell import SyncerShell


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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="atoll-snapshot")
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Write a last snapshot, with everything in it, and end."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._write_if_ours()
        self._thread.shutdown(wait=True)

    def cancel(self) -> None:
        """End at once, without a last snapshot."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self._write_if_ours()

    async def _write_if_ours(self) -> None:
        if self._shell.state is None or self._shell.fenced:
            return
        if self._claim is None or await self._claim.still_ours():
            await self._write()

    async def _write(self) -> None:
        """A failure is told and costs nothing but this snapshot; the next is tried at its time."""
        started_ns = time.monotonic_ns()
        try:
            versions, size, label = await self._write_all()
        except Exception as error:  # a remote file system raises whatever its library does
            text = f"snapshot to {self._target.url} failed: {type(error).__name__}: {error}; training goes on"
            self._writer.emit(events.SnapshotFailed(self._target.url, text))
            return
        took_ns = time.monotonic_ns() - started_ns
        self._writer.emit(events.SnapshotWritten(self._target.url, label, size, took_ns, versions))

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
