"""Joining a run: waiting for its published parameters, and for the best inner state there is."""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.core import INNER_WAIT_NS, JOIN_TIMEOUT_NS, WAIT_SLICE_NS
from atoll.core import effects as fx
from atoll.errors import UnreachableError
from atoll.learner.doctor import Doctor
from atoll.learner.inner_state import InnerState
from atoll.learner.join_deadline import JoinDeadline
from atoll.learner.shell import LearnerShell

JOIN_TIMEOUT_S = JOIN_TIMEOUT_NS / 1e9
INNER_WAIT_S = INNER_WAIT_NS / 1e9
WAIT_SLICE_S = WAIT_SLICE_NS / 1e9


def join(shell: LearnerShell, doctor: Doctor | None, address: str, timeout_s: float, stand: Callable[[], None]) -> None:
    """Training thread: returns when the model holds the run's published parameters. `stand` waits a while at the
    boundary, and does what there is to do there."""
    machine = shell.machine
    join_deadline = JoinDeadline(timeout_s, machine.learner, shell.driver.fetches.arriving, time.monotonic())
    while not machine.joined:
        with shell.changed:
            if shell.failure is not None:
                raise shell.failure
            missing = shell.bytes_missing()
            if join_deadline.is_over(time.monotonic(), linked=shell.linked, started=machine.linked, fragments=missing):
                raise UnreachableError(_why_not_joined(shell, doctor, address, timeout_s))
        stand()


def _why_not_joined(shell: LearnerShell, doctor: Doctor | None, address: str, timeout_s: float) -> str:
    waited = f"after {timeout_s:g} s"
    if shell.ever_linked:
        return (
            f"the syncer at {address} answered but its state did not arrive {waited}; "
            "see its log, or raise join_timeout_s for a large model on a thin link"
        )
    cause = (doctor.cause if doctor is not None else "") or shell.last_down
    if cause:
        return f"no syncer could be joined at {address} {waited}: {cause}"
    return (
        f"no syncer could be joined at {address} {waited}; start one with "
        f"`atoll syncer --listen {address}`, or correct ATOLL_SYNCER"
    )


def recover(inner: InnerState, shell: LearnerShell) -> str:
    """Find this learner's inner state on the best rung there is; returns its name."""
    if inner.restore_own():
        return "checkpoint"
    if shell.machine.step == 0 or not inner.shared:
        return "fresh"
    blob, peer, reason = _wait_for_peer(shell)
    if blob and inner.take_peer(blob, peer):
        return "peer"
    inner.detail = inner.detail or reason
    inner.warm_up()
    return "parameters"


def _wait_for_peer(shell: LearnerShell) -> tuple[bytes, str, str]:
    """A healthy learner's inner state is asked for with the first Hello; it comes while nothing is trained yet."""
    if not shell.machine.wants_inner:
        return b"", "", ""
    deadline = time.monotonic() + INNER_WAIT_S
    with shell.changed:
        while shell.inner is None and shell.failure is None:
            if time.monotonic() > deadline:
                return b"", "", f"no peer's inner state came within {INNER_WAIT_S:g} s"
            shell.changed.wait(WAIT_SLICE_S)
            shell.apply(fx.Boundary())
        return shell.inner or (b"", "", "the link broke")
