"""How a process takes part in its learner: as the only one, or as one of several ranks (`island`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from atoll.core import ASKED_TO_LEAVE, PREEMPTED, SYNC_WAIT_NS_MAX, WAIT_SLICE_NS, Refusal
from atoll.core import effects as fx
from atoll.errors import FencedError, RefusedError
from atoll.learner.doctor import Doctor
from atoll.learner.joining import join
from atoll.learner.leave_deadline import LeaveDeadline
from atoll.learner.leaving import hand_over, run_closed
from atoll.learner.preempt import Preemption
from atoll.learner.shell import LearnerShell
from atoll.observe import events

SYNC_WAIT_S_MAX = SYNC_WAIT_NS_MAX / 1e9
WAIT_SLICE_S = WAIT_SLICE_NS / 1e9


class Seat(Protocol):
    """All of it is called on the training thread."""

    def join(self, doctor: Doctor | None, address: str, timeout_s: float) -> None:
        """Returns when the model holds the run's published parameters."""

    def step(self, tokens: int, step_ns: int, loss: float) -> tuple[int, int]:
        """One step is done. Returns the tokens that count for it, and the nanoseconds that a synchronous run waited."""

    def hand_over(self, address: str, deadline: LeaveDeadline, *, flush: bool, reason: str) -> tuple[int, str]:
        """Leave. Returns the tokens that the syncer does not have, and why."""

    def raise_failure(self) -> None:
        """Raise what ended this session for good."""

    @property
    def done(self) -> bool: ...
    @property
    def told_to_leave(self) -> str:
        """Why this process is to end after the step, if it is."""

    @property
    def capture_now(self) -> bool | None:
        """Whether a checkpoint is kept at this boundary; None: as the clock says."""


def raise_as_failure(failure: Exception | None) -> None:
    if failure is None or run_closed(failure):
        return  # a run that ended while this learner was reconnecting: `done` says so
    if isinstance(failure, RefusedError) and failure.code == Refusal.FENCED:
        raise FencedError(failure.code, failure.detail)
    raise failure


class SingleSeat:
    """The only process of its learner."""

    def __init__(self, shell: LearnerShell, preemption: Preemption | None) -> None:
        self._shell = shell
        self._machine = shell.machine
        self._preemption = preemption
        self._alone = False
        """A synchronous learner gave up waiting; it waits again after the next merge that it adopts."""

    def join(self, doctor: Doctor | None, address: str, timeout_s: float) -> None:
        join(self._shell, doctor, address, timeout_s, self._stand)

    def _stand(self) -> None:
        """A while at a step boundary, with what there is to do there."""
        with self._shell.changed:
            if self._machine.boundary_wanted:
                self._shell.apply(fx.Boundary())
            elif self._shell.failure is None:
                self._shell.changed.wait(WAIT_SLICE_S)

    def _stand_leaving(self) -> None:
        with self._shell.changed:
            if not self._shell.driver.left and self._shell.failure is None:
                self._shell.changed.wait(WAIT_SLICE_S)
            self._shell.apply(fx.Boundary())

    def step(self, tokens: int, step_ns: int, loss: float) -> tuple[int, int]:
        with self._shell.changed:
            self.raise_failure()
            self._shell.apply(fx.Stepped(tokens, step_ns, loss))
        return tokens, self._wait_if_synchronous(self._stand)

    def _wait_if_synchronous(self, stand: Callable[[], None]) -> int:
        """In a synchronous run, stand at the boundary until the merge that is due here has been adopted."""
        if not self._machine.must_wait:
            self._alone = False
            return 0
        if self._alone:
            return 0
        began = time.monotonic()
        busy_ns = self._busy_ns
        while self._machine.must_wait:
            self.raise_failure()
            if time.monotonic() - began > SYNC_WAIT_S_MAX:
                text = f"no merge for {SYNC_WAIT_S_MAX:g} s; going on alone until the syncer answers"
                self._shell.writer.emit(events.Warned(self._machine.learner, text))
                self._alone = True
                break
            stand()
        return max(0, int((time.monotonic() - began) * 1e9) - (self._busy_ns - busy_ns))

    @property
    def _busy_ns(self) -> int:
        return self._shell.arrays.adopt_ns + self._shell.arrays.snapshot_ns

    def hand_over(self, address: str, deadline: LeaveDeadline, *, flush: bool, reason: str) -> tuple[int, str]:
        return hand_over(
            self._shell, address, self._stand_leaving, deadline, told=self._preempted, flush=flush, reason=reason
        )

    def _preempted(self) -> bool:
        return self._preemption is not None and self._preemption.requested

    def raise_failure(self) -> None:
        raise_as_failure(self._shell.failure)

    @property
    def done(self) -> bool:
        if self._preemption is not None and self._machine.dismissed:
            # The next `step` ends this process as SIGTERM does: its run is not over.
            return run_closed(self._shell.failure)
        return bool(self._machine.stopped) or run_closed(self._shell.failure)

    @property
    def told_to_leave(self) -> str:
        if self._preemption is None:
            return ""
        return PREEMPTED if self._preemption.requested else ASKED_TO_LEAVE if self._machine.dismissed else ""

    @property
    def capture_now(self) -> bool | None:
        return None
