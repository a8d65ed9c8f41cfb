"""Keeps the claim on the snapshot location alive, and ends this syncer when a newer one has taken it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from atoll.errors import FencedSyncerError
from atoll.observe import Writer, events
from atoll.store import CLAIM_BEAT_S, Hold
from atoll.syncer.shell import SyncerShell


class ClaimKeeper:
    """One per syncer with a snapshot location. A location that cannot be reached costs nothing but its protection."""

    def __init__(self, shell: SyncerShell, hold: Hold, writer: Writer, beat_s: float = CLAIM_BEAT_S) -> None:
        self._shell = shell
        self._hold = hold
        self._writer = writer
        self._beat_s = beat_s
        self._failing = False
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="atoll-claim")
        self._task = self._loop.create_task(self._run())

    async def close(self) -> None:
        """Say that this syncer has ended in order, so that nobody need watch its claim."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if not self._shell.fenced:
            await self._renew(ended=True)
        self._thread.shutdown(wait=True)

    async def still_ours(self) -> bool:
        """Look whether this syncer is still the newest; asked before each snapshot."""
        try:
            await self._loop.run_in_executor(self._thread, self._hold.check)
        except FencedSyncerError as error:
            self._shell.overtaken(error)
        except OSError:
            pass  # the snapshot will say more
        return not self._shell.fenced

    async def _run(self) -> None:
        while not self._shell.fenced:
            await self._renew()
            await asyncio.sleep(self._beat_s)

    async def _renew(self, ended: bool = False) -> None:
        machine = self._shell.machine

        def renew() -> None:
            self._hold.renew(machine.run, machine.epoch, begun=machine.committed, ended=ended)

        try:
            await self._loop.run_in_executor(self._thread, renew)
        except FencedSyncerError as error:
            self._shell.overtaken(error)
        except OSError as error:
            self._tell(f"the claim on {self._hold.place.url} cannot be renewed ({error}); training goes on")
            self._failing = True
        else:
            self._failing = False

    def _tell(self, text: str) -> None:
        if not self._failing:
            self._writer.emit(events.Warned("syncer", text))
