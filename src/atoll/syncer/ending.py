"""How a syncer comes to its end by itself, and the model that it leaves: written whenever nobody trains any more, not
only at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from atoll.core import MemberState
from atoll.errors import FencedSyncerError
from atoll.observe import Writer, events
from atoll.syncer.shell import SyncerShell

LOST_TIMES = 2
"""A lost learner trains on and may come back with all its progress: it is waited for as long again as it took to call
it lost."""


class Ending:
    """Looked at once a second."""

    def __init__(self, shell: SyncerShell, *, end_when_left: bool, stay: bool, end_when_finished: bool = False) -> None:
        self._shell = shell
        self._end_when_left = end_when_left
        self._end_when_finished = end_when_finished
        self._stay = stay
        self._continued = MemberState.AWAY in shell.machine.member_states
        """Learners were in the run when an earlier syncer of it ended."""

    def reason(self, now_ns: int) -> str:
        """Why the syncer should end now; empty: it goes on."""
        if self._stay or not self._everybody_gone(now_ns):
            return ""
        if self._shell.machine.stopping and self._shell.finished.is_set():
            return self._shell.machine.stopping
        idle = self._shell.machine.idle
        if self._end_when_left and idle and (self._shell.news.ever_active or self._continued):
            return "everybody has left"
        if self._end_when_finished and idle and self._shell.news.ever_active and self._everybody_finished():
            return "every learner's script has ended"
        return ""

    @property
    def nobody_trains(self) -> bool:
        """Whether what is published now is all there will be, until somebody comes (back)."""
        machine = self._shell.machine
        states = machine.member_states
        present = {MemberState.ACTIVE, MemberState.JOINING, *(() if machine.stopping else (MemberState.AWAY,))}
        return bool(states) and not states & present and machine.idle

    def _everybody_gone(self, now_ns: int) -> bool:
        patience_ns = LOST_TIMES * self._shell.machine.config.lost_after_ns
        members = self._shell.machine.members.values()
        return all(
            m.state is MemberState.LEFT or (m.state is MemberState.LOST and now_ns - m.away_ns >= patience_ns)
            for m in members
        )

    def _everybody_finished(self) -> bool:
        """Whoever was told to go by its machine comes back as soon as it gets another one."""
        members = self._shell.machine.members.items()
        return all(m.state is MemberState.LEFT and name not in self._shell.news.preempted for name, m in members)


class ModelFile:
    """RUN/model.safetensors: the published model, written whole or not at all, and only when it has changed."""

    def __init__(self, shell: SyncerShell, folder: Path | None, writer: Writer, say: Callable[[str], None]) -> None:
        self._shell = shell
        self._path = folder / "model.safetensors" if folder is not None else None
        self._writer = writer
        self._say = say
        self._tried: list[int] = []
        self._written: list[int] = []
        self._written_s = 0.0

    async def refresh(self) -> None:
        """Write it beside a syncer that goes on. A failure is told once, and tried again when there is more to write,
        and at the end."""
        if self._path is None or self._shell.state is None or self._versions() in (self._tried, self._written):
            return
        self._tried = self._versions()
        await self._shell.gather()
        async with AsyncExitStack() as stack:  # whoever joins meanwhile must not have it changed under our hands
            for fragment in range(len(self._tried)):
                await stack.enter_async_context(self._shell.lock_of(fragment))
            await self._shell.on_a_worker(self.write)

    def write(self) -> int:
        """Write it if it is not written yet; returns the exit status. A full disk must not cost the final statistics as
        well."""
        shell, path = self._shell, self._path
        model = shell.published
        if path is None or model is None or shell.failure is not None or shell.fenced:
            return 0
        versions = [arrays.version for arrays in model.fragments]
        if versions == self._written:
            return 0
        try:
            shell.keeper.check_epoch()
            model.save(path)
        except FencedSyncerError:
            return 0  # told by whoever looks next
        except (OSError, SafetensorError) as error:
            text = f"could not write the model to {path.parent}: {error}; make room there and run again"
            self._writer.emit(events.Warned("syncer", text))
            print(f"atoll syncer: {text}", file=sys.stderr, flush=True)
            return 1
        self._written, self._written_s = versions, time.time()
        self._say(f"the model is written: {path} (versions {min(versions)} to {max(versions)})")
        return 0

    def status(self) -> dict[str, Any]:
        if not self._written:
            return {}
        versions = [min(self._written), max(self._written)]
        return {"model": {"path": str(self._path), "versions": versions, "time_s": round(self._written_s)}}

    def _versions(self) -> list[int]:
        assert self._shell.state is not None
        return [arrays.version for arrays in self._shell.state.fragments]
