"""The faults of a run and what each of them cost: its own learner, and the others.

A fault is one that the chaos plan put in (FaultInjected) or a process that ended with an error by itself. One that ends
a process lasts until the first step of its successor (for the syncer: until it serves again); one with a planned end
until FaultEnded; any other is an instant.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.core.config import SECOND_NS
from atoll.observe.events import (
    Event,
    FaultEnded,
    FaultInjected,
    LearnerFinished,
    LearnerJoined,
    LearnerStarted,
    LearnerSteps,
    ProcessExited,
    ProcessStarted,
    RunFinished,
    SyncerStarted,
)
from atoll.observe.goodput import REPORTED, TRACKED, Account

CLAIM_NS_MAX = 10 * SECOND_NS
"""A process that ends within this of an injected fault on it ended because of it."""
BEFORE_NS_MIN, BEFORE_NS_MAX = 5 * SECOND_NS, 30 * SECOND_NS
"""The stretch before a fault that speeds are compared with is as long as the fault, within these."""
FAULTS_MAX = 1000

_STEPS, _STALL, _EVALUATE = (TRACKED.index(name) for name in ("steps", "stall", "evaluate"))


@dataclass(slots=True)
class Fault:
    name: str
    target: str
    detail: str
    start_ns: int
    until_ns: int = 0
    end_ns: int | None = None
    exit_code: int | None = None
    restarted: bool = False
    joined_ns: int | None = None
    joined_step: int = 0
    joined_generation: int = 0

    @property
    def ended_process(self) -> bool:
        return self.exit_code is not None

    def end_by(self, last_ns: int) -> int:
        """When it was over, or the end of what is known if it is not."""
        if self.end_ns is not None:
            return self.end_ns
        # A planned end is only a guess: a lasting fault is over when FaultEnded says so.
        return max(last_ns, self.start_ns) if self.ended_process or self.until_ns else self.start_ns

    @property
    def text(self) -> str:
        """ "killed (SIGKILL)", "slow: every step takes 4x as long": what happened, without to whom."""
        if self.ended_process:
            return exit_text(self.exit_code or 0)
        return f"{self.name}: {self.detail}" if self.detail else self.name


def exit_text(code: int) -> str:
    """-9 -> "killed (SIGKILL)"; 3 -> "exited with status 3"."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"killed ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed (signal {-code})"


class FaultBook:
    """Every fault, in order of its start."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.moments_ns: list[int] = []
        """Beginnings and ends of faults that nobody has looked at yet: `RunState` pins them in the tracks."""
        self._started: set[str] = set()
        self._finished: set[str] = set()
        self._syncers: set[str] = set()
        self._over = False

    def apply(self, t_ns: int, event: Event) -> None:
        if isinstance(event, FaultInjected):
            self._add(Fault(event.fault, event.target, event.detail, t_ns, event.until_ns))
        elif isinstance(event, FaultEnded):
            for fault in self._unended(event.target):
                if fault.name == event.fault:
                    self._end(fault, t_ns)
        elif isinstance(event, ProcessStarted):
            self._process_started(event.id)
            if event.role == "learner":
                self._started.add(event.id)
        elif isinstance(event, ProcessExited):
            self._exited(t_ns, event)
        elif isinstance(event, LearnerStarted):
            self._process_started(event.learner)
        elif isinstance(event, SyncerStarted):
            self._syncer_started(t_ns)
        elif isinstance(event, LearnerJoined):
            self._finished.discard(event.learner)
            for fault in self._unended(event.learner):
                if fault.ended_process and fault.joined_ns is None:
                    fault.joined_ns = t_ns
                    fault.joined_step, fault.joined_generation = event.step, event.generation
        elif isinstance(event, LearnerSteps):
            self._stepped(t_ns, event)
        elif isinstance(event, LearnerFinished):
            self._finished.add(event.learner)
            # Once every learner is through, what ends (the syncer) was told to.
            self._over = self._started <= self._finished
        elif isinstance(event, RunFinished):
            self._over = True

    def _add(self, fault: Fault) -> None:
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(fault)
            self.moments_ns.append(fault.start_ns)

    def _end(self, fault: Fault, end_ns: int) -> None:
        fault.end_ns = end_ns
        self.moments_ns.append(end_ns)

    def _unended(self, target: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.target == target and fault.end_ns is None]

    def _process_started(self, target: str) -> None:
        for fault in self._unended(target):
            fault.restarted = fault.restarted or fault.ended_process

    def _syncer_started(self, t_ns: int) -> None:
        for fault in self.faults:
            if fault.target in self._syncers and fault.end_ns is None and fault.ended_process:
                self._end(fault, t_ns)

    def _exited(self, t_ns: int, event: ProcessExited) -> None:
        if event.role == "syncer":
            self._syncers.add(event.id)
        if event.code == 0:
            self._finished.add(event.id)
        if event.code == 0 or self._over or event.id in self._finished:
            return
        for fault in reversed(self._unended(event.id)):
            if not fault.until_ns and not fault.ended_process and t_ns - fault.start_ns <= CLAIM_NS_MAX:
                fault.exit_code = event.code
                return
        self._add(Fault("crash", event.id, "", t_ns, exit_code=event.code))

    def _stepped(self, t_ns: int, event: LearnerSteps) -> None:
        begin_ns = t_ns - sum(max(0, getattr(event, f"{name}_ns")) for name in REPORTED)
        for fault in self._unended(event.learner):
            # The last reports of the process that died may still be on their way; they began before the fault.
            if fault.ended_process and begin_ns > fault.start_ns and (fault.restarted or fault.joined_ns):
                self._end(fault, begin_ns)


# ---------------------------------------------------------------- what it cost


@dataclass(frozen=True, slots=True)
class OtherCost:
    """How a learner that had no fault of its own fared meanwhile."""

    learner: str
    steps_s_before: float
    steps_s_during: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class FaultCost:
    fault: Fault
    duration_s: float
    lost_s: float
    """Seconds of training that the target lost: down and recovering, or the share by which it was slower."""
    lost_steps: float
    others: list[OtherCost]

    @property
    def others_ratio(self) -> float:
        """The others' steps per second during the fault over before it; NaN when there is nothing to compare."""
        before = sum(other.steps_s_before for other in self.others)
        return sum(other.steps_s_during for other in self.others) / before if before > 0 else float("nan")

    @property
    def others_stall_s(self) -> float:
        return sum(other.stall_s for other in self.others)


def fault_costs(faults: list[Fault], accounts: Mapping[str, Account], last_ns: int) -> list[FaultCost]:
    """The cost of every fault. Other learners that had a fault of their own in the two stretches are not compared."""
    return [_cost(fault, faults, accounts, last_ns) for fault in faults]


def _cost(fault: Fault, faults: list[Fault], accounts: Mapping[str, Account], last_ns: int) -> FaultCost:
    start_ns, end_ns = fault.start_ns, fault.end_by(last_ns)
    before_ns = start_ns - min(max(end_ns - start_ns, BEFORE_NS_MIN), BEFORE_NS_MAX)
    troubled = {f.target for f in faults if f.start_ns < end_ns and f.end_by(last_ns) > before_ns} | {fault.target}
    others = []
    for learner, account in accounts.items():
        began_ns, until_ns = account.track.start_ns, account.track.end_ns
        if learner in troubled or began_ns is None or until_ns is None or began_ns >= start_ns:
            continue
        during = account.track.between(start_ns, end_ns)
        others.append(
            OtherCost(
                learner=learner,
                steps_s_before=_steps_s(account, max(before_ns, began_ns), start_ns),
                steps_s_during=_steps_s(account, start_ns, min(end_ns, until_ns)),
                stall_s=during[_STALL] / SECOND_NS,
            )
        )
    lost_s, lost_steps = _lost(fault, accounts.get(fault.target), (before_ns, start_ns, end_ns))
    return FaultCost(fault, (end_ns - start_ns) / SECOND_NS, lost_s, lost_steps, others if end_ns > start_ns else [])


def _lost(fault: Fault, account: Account | None, times_ns: tuple[int, int, int]) -> tuple[float, float]:
    before_ns, start_ns, end_ns = times_ns
    if account is None or account.track.start_ns is None or end_ns <= start_ns:
        return 0.0, 0.0
    duration_s = (end_ns - start_ns) / SECOND_NS
    usual = _steps_s(account, max(before_ns, account.track.start_ns), start_ns)
    if fault.ended_process:
        return duration_s, usual * duration_s
    lost_steps = max(0.0, usual * duration_s - account.track.between(start_ns, end_ns)[_STEPS])
    return (lost_steps / usual if usual > 0 else 0.0), lost_steps


def _steps_s(account: Account, start_ns: int, end_ns: int) -> float:
    """Steps per second between two times, without the time spent on testing the model, which is nobody's fault."""
    if end_ns <= start_ns:
        return 0.0
    totals = account.track.between(start_ns, end_ns)
    span_ns = end_ns - start_ns - totals[_EVALUATE]
    return totals[_STEPS] * SECOND_NS / span_ns if span_ns > 0 else 0.0
