"""How each kind of fault is put into real processes, and taken out again: signals, small files, and the proxy.

    kill, freeze       signals
    slow               a file that the training loop of `atoll train` looks at; a user's script is stopped and continued
    away, join         the launcher's own ways for learners that come and go
    partition .. cut   the proxy between learner and syncer
    disk_full, poison, lie   files that the syncer's store and the learner look at

`begin` gives the reason why a fault cannot be put in now, or nothing once it is in.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from atoll.instruments.chaos.family import descendants, rank_pid
from atoll.instruments.chaos.fault import Fault
from atoll.instruments.chaos.lies import LIES

NOT_RUNNING = "its process was not running"
NO_RANK = "its process of that rank was not running"
NO_LINKS = "the learners of this run talk to the syncer directly, so that their links cannot be touched"
CYCLE_S = 2.0
"""One stop and go of a learner that is slow by signals: some ticks of the launcher long (0.1 s each), short against the
lease of 15 s."""
FREEZE_S_MAX = 600.0
"""The same where a freeze lasts until a share of the run: RELIABILITY row 16 freezes for at most ten minutes."""
THAW_MARGIN_S = 2.0
"""How much later than planned a frozen process is thawed if the launcher is no longer there to do it."""


class ProcessControl(Protocol):
    """What the injector needs of whoever runs the processes (the launcher's supervisor)."""

    def pid_of(self, target: str) -> int | None:
        """The process of a learner, of the syncer or of another part, by its id; None while it is not running."""

    def slow_file(self, learner: str) -> Path:
        """The file that, while it exists, holds how many times as long the learner's steps shall take."""

    def poison_file(self, learner: str) -> Path:
        """The file that, while it exists, says what is wrong with the learner's contributions."""

    def lie_file(self, learner: str) -> Path:
        """The file that, while it exists, names the lies that the learner tells."""

    def disk_full_file(self, target: str) -> Path:
        """The file that, while it exists, makes every write of the syncer's store fail, or of a shard's."""

    def send_away(self, learner: str) -> bool:
        """Ask a learner to leave, for a while; False if it is not in the run now."""

    def bring_back(self, learner: str) -> bool:
        """Start it again; False if its old process has not ended yet."""

    def add_guest(self, learner: str) -> str:
        """Start a learner that the run did not have; gives the reason why that cannot be."""

    def end_guest(self, learner: str) -> None:
        """Ask it to leave for good."""


class Links(Protocol):
    """The proxy between the learners and the syncer, and before shards and relays."""

    def hold(self, learner: str, faults: Sequence[Fault]) -> None:
        """Make a learner's link as bad as these faults together; none: clear."""

    def cut(self, learner: str) -> None:
        """Reset all of its connections."""


class Injector:
    def __init__(self, control: ProcessControl, *, links: Links | None = None, duty_cycle: bool = False) -> None:
        self._control = control
        self._links = links
        self._duty_cycle = duty_cycle
        self._frozen: dict[str, tuple[int, subprocess.Popen[bytes] | None]] = {}
        self._weather: dict[str, list[Fault]] = {}
        self._cycles: dict[str, _Cycle] = {}
        self._lies: dict[str, dict[str, float]] = {}

    def begin(self, fault: Fault) -> str:
        """Put it in. Gives the reason if that is not possible now."""
        target = fault.target
        if fault.kind == "join":
            return self._control.add_guest(target)
        pid = self._control.pid_of(target)
        if pid is None and fault.kind != "disk_full":
            return NOT_RUNNING
        if fault.kind == "disk_full":
            _write_atomically(self._control.disk_full_file(target), "")
        elif fault.kind == "poison":
            _write_atomically(self._control.poison_file(target), fault.variant + "\n")
        elif fault.kind == "lie":
            self._begin_lie(fault)
        elif fault.kind == "away":
            return "" if self._control.send_away(target) else NOT_RUNNING
        elif fault.kind in ("kill", "freeze", "slow"):
            assert pid is not None
            hit = pid if fault.rank < 0 else rank_pid(pid, fault.rank)
            return NO_RANK if hit is None else self._begin_on_process(fault, hit)
        else:
            return self._begin_on_link(fault)
        return ""

    def end(self, fault: Fault) -> bool:
        """Take it out; False: not yet, ask again."""
        target = fault.target
        if fault.kind == "freeze":
            self._thaw(target)
        elif fault.kind == "slow":
            if cycle := self._cycles.pop(target, None):
                cycle.go_on()
            self._control.slow_file(target).unlink(missing_ok=True)
        elif fault.kind == "disk_full":
            self._control.disk_full_file(target).unlink(missing_ok=True)
        elif fault.kind == "poison":
            self._control.poison_file(target).unlink(missing_ok=True)
        elif fault.kind == "lie":
            self._lies[target].pop(fault.variant, None)
            self._tell_lies(target)
        elif fault.kind == "away":
            return self._control.bring_back(target)
        elif fault.kind == "join":
            self._control.end_guest(target)
        elif self._links is not None:
            self._weather[target] = [one for one in self._weather.get(target, []) if one is not fault]
            self._links.hold(target, self._weather[target])
        return True

    def tick(self, now_ns: int) -> None:
        """Stop and continue those that are slow by signals."""
        for target, cycle in self._cycles.items():
            if target not in self._frozen:
                cycle.tick(self._control.pid_of(target), now_ns)

    def release(self) -> None:
        """Leave nobody stopped, whatever happened to the plan."""
        for target in list(self._frozen):
            self._thaw(target)
        for cycle in self._cycles.values():
            cycle.go_on()
        self._cycles.clear()

    # ------------------------------------------------------------ processes

    def _begin_on_process(self, fault: Fault, pid: int) -> str:
        if fault.kind == "kill":
            return "" if _kill(pid) else NOT_RUNNING
        if fault.kind == "freeze":
            if not signal_all(pid, signal.SIGSTOP):
                return NOT_RUNNING
            after_s = (fault.lasts_s or FREEZE_S_MAX) + THAW_MARGIN_S
            self._frozen[fault.target] = (pid, _thaw_later(pid, after_s))
        elif self._duty_cycle:
            self._cycles[fault.target] = _Cycle(fault.amount)
        else:
            _write_atomically(self._control.slow_file(fault.target), json.dumps({"factor": fault.amount}) + "\n")
        return ""

    def _thaw(self, target: str) -> None:
        pid, helper = self._frozen.pop(target, (0, None))
        if pid:
            signal_all(pid, signal.SIGCONT)  # it may have been killed meanwhile: then there is nobody to wake
        if helper is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(helper.pid, signal.SIGKILL)
            helper.wait()

    def _begin_lie(self, fault: Fault) -> None:
        self._lies.setdefault(fault.target, {})[fault.variant] = fault.amount
        self._tell_lies(fault.target)
        if LIES[fault.variant].says_hello and self._links is not None:
            self._links.cut(fault.target)  # to say hello again

    def _tell_lies(self, target: str) -> None:
        file = self._control.lie_file(target)
        if self._lies[target]:
            _write_atomically(file, json.dumps(self._lies[target]) + "\n")
        else:
            file.unlink(missing_ok=True)

    # ------------------------------------------------------------ links

    def _begin_on_link(self, fault: Fault) -> str:
        if self._links is None:
            return NO_LINKS
        if fault.kind == "cut":
            self._links.cut(fault.target)
            return ""
        active = self._weather.setdefault(fault.target, [])
        active.append(fault)
        self._links.hold(fault.target, active)
        return ""


class _Cycle:
    """A process that runs one part in `factor` of the time."""

    def __init__(self, factor: float) -> None:
        self._run_share = 1.0 / factor
        self._stopped_pid: int | None = None
        self._since_ns = 0

    def tick(self, pid: int | None, now_ns: int) -> None:
        self._since_ns = self._since_ns or now_ns
        phase = ((now_ns - self._since_ns) / 1e9 % CYCLE_S) / CYCLE_S
        if phase < self._run_share:
            self.go_on()
        elif pid is not None and pid != self._stopped_pid and signal_all(pid, signal.SIGSTOP):
            self._stopped_pid = pid

    def go_on(self) -> None:
        if self._stopped_pid is not None:
            signal_all(self._stopped_pid, signal.SIGCONT)
            self._stopped_pid = None


def signal_all(pid: int, number: int) -> bool:
    """Signal a process and all that it has started: its group, where it leads one as the launcher's processes do, and
    those below it that have sessions of their own, as the ranks of an island have."""
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    for below in descendants(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(below, number)
    return True


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _thaw_later(pid: int, after_s: float) -> subprocess.Popen[bytes] | None:
    """A small process of its own that continues `pid` and what is below it after a while: if the launcher is killed in
    between, its frozen syncer would otherwise stay for ever, because a stopped process does not hear SIGTERM."""
    all_of_it = shlex.join(map(str, (pid, *descendants(pid))))
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", f"sleep {after_s:.1f}; kill -s CONT -- -{pid}; kill -s CONT {all_of_it}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None


def _write_atomically(path: Path, text: str) -> None:
    # Another process polls this file: it must never read half a word.
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
