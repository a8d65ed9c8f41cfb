"""Carries a plan out on real processes. It is told the run's progress at every tick and owns no thread or clock."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll.chaos.plan import Fault
from atoll.observe.events import FaultEnded, FaultInjected


class ProcessControl(Protocol):
    """What the executor needs to know of whoever runs the processes (the launcher's supervisor)."""

    def pid_of(self, target: str) -> int | None:
        """The process of a learner, or of the syncer, by its id; None while it is not running."""

    def slow_file(self, learner: str) -> Path:
        """The file that, while it exists, holds how many times as long the learner's steps shall take."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault that really happened, `t_s` seconds after the run made its first progress."""

    fault: str
    target: str
    t_s: float


class ChaosExecutor:
    """Each fault begins once, when the run's progress reaches it, and lasting ones end when it passes their end."""

    def __init__(
        self,
        plan: Sequence[Fault],
        control: ProcessControl,
        *,
        emit: Callable[[FaultInjected | FaultEnded], None],
    ) -> None:
        self._waiting = sorted(plan, key=lambda fault: fault.at_progress)
        self._lasting: list[Fault] = []
        self._control = control
        self._emit = emit
        self._start_ns = 0
        self.injected: list[InjectedFault] = []

    def tick(self, progress: float, now_ns: int) -> None:
        """Begin and end what is due. `progress` is the share of tokens processed, `now_ns` the wall clock."""
        if not self._start_ns and progress > 0.0:
            self._start_ns = now_ns
        for fault in [f for f in self._lasting if progress >= f.until_progress]:
            self._end(fault)
        for fault in [f for f in self._waiting if progress >= f.at_progress]:
            # A process that is down just now cannot be hit: the fault stays due and is tried again at the next tick.
            if self._begin(fault):
                self._waiting.remove(fault)
                self.injected.append(InjectedFault(fault.name, fault.target, (now_ns - self._start_ns) / 1e9))
                until_ns = _planned_end_ns(fault, progress=progress, elapsed_ns=now_ns - self._start_ns, now_ns=now_ns)
                self._emit(FaultInjected(fault.name, fault.target, fault.detail, until_ns))

    def finish(self) -> None:
        """End the lasting faults; those that were never due stay out."""
        for fault in list(self._lasting):
            self._end(fault)
        self._waiting.clear()

    def _begin(self, fault: Fault) -> bool:
        pid = self._control.pid_of(fault.target)
        if pid is None:
            return False
        if fault.name == "kill":
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return False
            return True
        _write_atomically(self._control.slow_file(fault.target), json.dumps({"factor": fault.factor}) + "\n")
        self._lasting.append(fault)
        return True

    def _end(self, fault: Fault) -> None:
        self._control.slow_file(fault.target).unlink(missing_ok=True)
        self._lasting.remove(fault)
        self._emit(FaultEnded(fault.name, fault.target))


def _planned_end_ns(fault: Fault, *, progress: float, elapsed_ns: int, now_ns: int) -> int:
    """The end of a lasting fault if the run goes on at its mean pace so far; 0 for an instant."""
    if not fault.until_progress:
        return 0
    return now_ns + int(elapsed_ns * max(0.0, fault.until_progress - progress) / max(progress, 1e-9))


def _write_atomically(path: Path, text: str) -> None:
    # The learner polls this file: it must never read half a number.
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
