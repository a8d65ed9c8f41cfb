"""The faults of a run and what each of them cost: its own learner, and the others.

A fault is one that the chaos plan put in (FaultInjected) or a process that ended with an error by itself. One that ends
a process lasts until the first step of its successor (for the syncer: until it serves again); one with a planned end
until FaultEnded; any other is an instant. None outlasts the launch that it fell into (see `launches`), and what a
launcher ends together with the run is no fault.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.core import SECOND_NS
from atoll.observe import events
from atoll.observe.account import TRACKED, TimeAccount
from atoll.observe.launches import LaunchBook, report_begin_ns, stopped_with_run

CLAIM_NS_MAX = 10 * SECOND_NS
"""A process that ends within this of an injected fault on it ended because of it."""
BEFORE_NS_MIN, BEFORE_NS_MAX = 5 * SECOND_NS, 30 * SECOND_NS
"""The stretch before a fault that speeds are compared with is as long as the fault, within these."""
FAULTS_MAX = 1000
CRASH = "crash"
"""The name of a fault that nobody planned."""
SYNCER = "syncer"
"""The id that launchers give to the syncer's process."""

_STEPS, _STALL, _EVALUATE = (TRACKED.index(name) for name in ("steps", "stall", "evaluate"))


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault that really happened, `t_s` seconds after the run made its first progress."""

    fault: str
    target: str
    t_s: float
    detail: str = ""


@dataclass(slots=True)
class ObservedFault:
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
    role: str = "learner"
    rung: str = ""
    """What its successor went on from: the rung of a learner's recovery, the source of a syncer's."""
    cut_ns: int | None = None
    """The run was stopped at this time, before the fault was over."""

    @property
    def ended_process(self) -> bool:
        return self.exit_code is not None

    def end_by(self, last_ns: int) -> int:
        """When it was over, or the end of what is known if it is not."""
        if self.end_ns is not None:
            return self.end_ns
        if self.cut_ns is not None:
            last_ns = self.cut_ns
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
        self.faults: list[ObservedFault] = []
        self.moments_ns: list[int] = []
        """Beginnings and ends of faults that nobody has looked at yet: `RunState` pins them in the tracks."""
        self._started: set[str] = set()
        self._finished: set[str] = set()
        self._syncers: set[str] = {SYNCER}
        self._asked: set[str] = set()  # learners that the plan has asked to leave
        self._ended = False
        self._last_step_ns = 0

    def apply(self, t_ns: int, event: events.Event) -> None:
        if isinstance(event, events.LearnerSteps):
            self._stepped(t_ns, event)
        elif isinstance(event, events.FaultInjected):
            role = "syncer" if event.target in self._syncers else "learner"
            if event.fault == "away":
                self._asked.add(event.target)
            self._add(ObservedFault(event.fault, event.target, event.detail, t_ns, event.until_ns, role=role))
        elif isinstance(event, events.FaultEnded):
            if event.fault == "join":
                self._asked.add(event.target)
            for fault in self._unended(event.target):
                if fault.name == event.fault:
                    self._end(fault, t_ns)
        elif isinstance(event, events.ProcessStarted):
            self._process_started(event.id)
            self._finished.discard(event.id)
            self._asked.discard(event.id)
            if event.role == "learner":
                self._started.add(event.id)
        elif isinstance(event, events.ProcessExited):
            self._exited(t_ns, event)
        elif isinstance(event, events.LearnerStarted):
            self._process_started(event.learner)
        elif isinstance(event, events.SyncerStarted | events.SyncerRecovered):
            self._syncer_back(t_ns, event)
        elif isinstance(event, events.LearnerJoined | events.LearnerRecovered):
            self._learner_back(t_ns, event)
        elif isinstance(event, events.LearnerFinished):
            self._finished.add(event.learner)
        elif isinstance(event, events.RunFinished):
            self._ended = True
            self._excuse()

    def new_launch(self, end_ns: int) -> None:
        """Whatever ran is gone since `end_ns`: what was not over by then ends with it."""
        for fault in self.faults:
            if fault.end_ns is None and fault.cut_ns is None:
                fault.cut_ns = max(end_ns, fault.start_ns)
        self._started, self._finished, self._ended = set(), set(), False

    @property
    def _over(self) -> bool:
        """Once every learner is through, what ends (the syncer) was told to."""
        return self._ended or (bool(self._started) and self._started <= self._finished)

    def _excuse(self) -> None:
        """The run is over: what the launcher ended with it is no fault."""
        self.faults = [
            fault
            for fault in self.faults
            if fault.name != CRASH
            or fault.restarted
            or fault.end_ns is not None
            or not stopped_with_run(fault.exit_code, fault.start_ns, self._last_step_ns)
        ]

    def _add(self, fault: ObservedFault) -> None:
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(fault)
            self.moments_ns.append(fault.start_ns)

    def _end(self, fault: ObservedFault, end_ns: int) -> None:
        fault.end_ns = end_ns
        self.moments_ns.append(end_ns)

    def _unended(self, target: str) -> list[ObservedFault]:
        return [f for f in self.faults if f.target == target and f.end_ns is None and f.cut_ns is None]

    def _process_started(self, target: str) -> None:
        for fault in self._unended(target):
            fault.restarted = fault.restarted or fault.ended_process

    def _syncer_back(self, t_ns: int, event: events.SyncerStarted | events.SyncerRecovered) -> None:
        """Both are said, in either order."""
        deaths = [fault for fault in self.faults if fault.role == "syncer" and fault.ended_process]
        if isinstance(event, events.SyncerRecovered):
            if deaths and not deaths[-1].rung and deaths[-1].cut_ns is None:
                deaths[-1].rung = event.source
            return
        for fault in deaths:
            if fault.end_ns is None and fault.cut_ns is None:
                fault.joined_generation = event.epoch
                self._end(fault, t_ns)

    def _learner_back(self, t_ns: int, event: events.LearnerJoined | events.LearnerRecovered) -> None:
        self._finished.discard(event.learner)
        for fault in self._unended(event.learner):
            if not fault.ended_process:
                continue
            if isinstance(event, events.LearnerRecovered):
                fault.rung = event.rung
            elif fault.joined_ns is None:
                fault.joined_ns = t_ns
                fault.joined_step, fault.joined_generation = event.step, event.generation

    def _exited(self, t_ns: int, event: events.ProcessExited) -> None:
        if event.role == "syncer":
            self._syncers.add(event.id)
        if event.code == 0:
            self._finished.add(event.id)
        if event.code == 0 or self._over or event.id in self._finished or event.id in self._asked:
            return
        for fault in reversed(self._unended(event.id)):
            if not fault.until_ns and not fault.ended_process and t_ns - fault.start_ns <= CLAIM_NS_MAX:
                fault.exit_code = event.code
                return
        self._add(ObservedFault(CRASH, event.id, "", t_ns, exit_code=event.code, role=event.role))

    def _stepped(self, t_ns: int, event: events.LearnerSteps) -> None:
        begin_ns = report_begin_ns(t_ns, event)
        self._last_step_ns = max(self._last_step_ns, t_ns)
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
    fault: ObservedFault
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


@dataclass(frozen=True, slots=True)
class Reckoning:
    """What the cost of a fault is reckoned from."""

    faults: list[ObservedFault]
    accounts: Mapping[str, TimeAccount]
    launches: LaunchBook
    last_ns: int


def fault_costs(data: Reckoning) -> list[FaultCost]:
    """The cost of every fault. Other learners that had a fault of their own in the two stretches are not compared."""
    return [_cost(fault, data) for fault in data.faults]


def _cost(fault: ObservedFault, data: Reckoning) -> FaultCost:
    faults, accounts, last_ns = data.faults, data.accounts, data.last_ns
    start_ns, end_ns = fault.start_ns, fault.end_by(last_ns)
    before_ns = start_ns - min(max(end_ns - start_ns, BEFORE_NS_MIN), BEFORE_NS_MAX)
    before_ns = max(before_ns, data.launches.since_ns(start_ns))
    troubled = {f.target for f in faults if f.start_ns < end_ns and f.end_by(last_ns) > before_ns} | {fault.target}
    others = []
    for learner, account in accounts.items():
        began_ns, until_ns = account.track.start_ns, account.track.end_ns
        if learner in troubled or began_ns is None or until_ns is None or began_ns >= start_ns:
            continue
        if account.given_back_at(start_ns):
            continue  # a guest that had left by then
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


def _lost(fault: ObservedFault, account: TimeAccount | None, times_ns: tuple[int, int, int]) -> tuple[float, float]:
    before_ns, start_ns, end_ns = times_ns
    if account is None or account.track.start_ns is None or end_ns <= start_ns:
        return 0.0, 0.0
    duration_s = (end_ns - start_ns) / SECOND_NS
    usual = _steps_s(account, max(before_ns, account.track.start_ns), start_ns)
    if fault.ended_process:
        return duration_s, usual * duration_s
    lost_steps = max(0.0, usual * duration_s - account.track.between(start_ns, end_ns)[_STEPS])
    return (lost_steps / usual if usual > 0 else 0.0), lost_steps


def _steps_s(account: TimeAccount, start_ns: int, end_ns: int) -> float:
    """Steps per second between two times, without the time spent on testing the model, which is nobody's fault."""
    if end_ns <= start_ns:
        return 0.0
    totals = account.track.between(start_ns, end_ns)
    span_ns = end_ns - start_ns - totals[_EVALUATE]
    return totals[_STEPS] * SECOND_NS / span_ns if span_ns > 0 else 0.0
