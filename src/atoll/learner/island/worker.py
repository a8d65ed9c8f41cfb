"""The thread on which a rank carries out commands: at the speaker those that are posted, elsewhere those that come."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.errors import IslandError
from atoll.learner.island.link import COMMAND_WORDS, SPEAKER, RankLink
from atoll.learner.island.work import Op, RankCommand, RankWork, read_head

COMMANDS_MAX = 65_536
"""Commands that may wait at the speaker: ranks that are that far behind will not catch up."""
QUIET_S = 5.0
"""The speaker says something that often, so that a rank which waits for a command knows that somebody is there."""


@dataclass(frozen=True, slots=True)
class Posted:
    command: RankCommand
    boundary: int
    payload: Any
    done: Callable[[Any], None] | None


class RankWorker:
    """Ends with STOP, or with the first thing that goes wrong, which `failed` is told."""

    def __init__(self, link: RankLink, work: RankWork, changed: threading.Condition) -> None:
        self._link = link
        self._work = work
        self._changed = changed
        self._posted: queue.Queue[Posted] = queue.Queue(COMMANDS_MAX)
        self.boundary = 0
        """Boundaries that the training thread has behind it; changed under the lock."""
        self.failure: Exception | None = None
        self._over = False
        speaks = link.rank == SPEAKER
        self._thread = threading.Thread(
            target=self._run, args=(self._speak if speaks else self._follow,), name="atoll-rank", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Speaker: the last command, which ends all ranks' workers."""
        if self._thread.is_alive():
            self.post(RankCommand(Op.STOP))

    def finish(self) -> None:
        """Follower that leaves in order: wait for STOP, however long the speaker takes to save and to say goodbye. A
        thread that is still in a collective when its process ends aborts it (SIGABRT), and a learner that had finished
        would be started again. A speaker that is gone, or silent for the link's deadline, ends the thread, too."""
        if self._thread.is_alive():
            self._thread.join()

    def stop(self, timeout_s: float) -> bool:
        """Wait for the end, which the speaker gives; a follower that goes on without it ends at the next command."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def post(self, command: RankCommand, payload: Any = None, done: Callable[[Any], None] | None = None) -> None:
        """Speaker, under the lock: have this done by all ranks, after everything that was posted before."""
        try:
            self._posted.put_nowait(Posted(command, self.boundary, payload, done))
        except queue.Full:
            raise IslandError(
                f"{COMMANDS_MAX} commands wait for the ranks of this learner; one of them stands still: see their logs"
            ) from None

    def passed(self, boundary: int) -> None:
        """Training thread, under the lock: this boundary is over."""
        self.boundary = boundary
        self._changed.notify_all()

    # ------------------------------------------------------------ the thread

    def _run(self, turn: Callable[[], bool]) -> None:
        try:
            while turn():
                pass
        except Exception as error:  # whatever it is must reach the training thread
            with self._changed:
                self.failure = error
                self._changed.notify_all()

    def _speak(self) -> bool:
        try:
            posted = self._posted.get(timeout=QUIET_S)
        except queue.Empty:
            posted = Posted(RankCommand(Op.NOTHING), 0, None, None)
        self._link.tell(posted.command.head(posted.boundary))
        if posted.command.op is Op.STOP:
            return False
        result = self._work.run(posted.command, posted.payload)
        if posted.done is not None:
            posted.done(result)
        return True

    def _follow(self) -> bool:
        head = np.zeros(COMMAND_WORDS, np.int64)
        self._link.tell(head)
        command, boundary = read_head(head)
        if command.op is Op.STOP or self._over:
            return False
        with self._changed:
            self._changed.wait_for(lambda: self.boundary >= boundary or self._over)
            if self.boundary < boundary:
                return False
        self._work.run(command)
        return True
