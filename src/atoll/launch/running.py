"""Which processes of a run are alive: what its processes*.json files say and the kernel confirms.

A number alone proves nothing, because process ids are used again, after a reboot at the latest. So a listing also holds
when the process started, in the kernel's own count, and both must agree.
"""

from __future__ import annotations

import glob
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.launch.folder import RunFolder, write_text
from atoll.launch.process import send_signal

LISTING_BYTES_MAX = 1 << 20
"""A thousand processes take about 100 KB."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One process as it was listed."""

    role: str
    id: str
    pid: int
    started: str = ""
    """When it started, as the kernel counts; empty where the kernel does not say."""

    @property
    def alive(self) -> bool:
        if not Path("/proc/self/stat").exists():
            return _answers(self.pid)
        now = started_mark(self.pid)
        return bool(now) and (now == self.started or not self.started)

    def entry(self) -> dict[str, Any]:
        return asdict(self)


def listed(role: str, id: str, pid: int) -> Listed:
    """The listing of a process that runs now."""
    return Listed(role, id, pid, started_mark(pid))


def started_mark(pid: int) -> str:
    """Clock ticks from the start of the machine to that of the process; empty if it is gone or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return ""
    # proc(5) counts from 1 and begins with pid and name, which are cut off here: the state is 3, the start time 22.
    return "" if fields[0] in "ZX" else fields[19]


def main_processes(folder: RunFolder) -> list[Listed]:
    """The launcher, the syncer and the learners that the run was started (or resumed) with."""
    return _read(folder.processes_file)


def launcher_pid(folder: RunFolder) -> int | None:
    """The process that keeps the run going on this machine; None if none does."""
    return next((one.pid for one in main_processes(folder) if one.role == "launcher" and one.alive), None)


def joined_processes(folder: RunFolder) -> list[Listed]:
    """What `atoll join` has added."""
    return [one for path in _joined_files(folder) for one in _read(path)]


def forget_dead(folder: RunFolder) -> None:
    """Remove the listings that were left behind by `atoll join`s that were killed, so that they cannot pile up."""
    for path in _joined_files(folder):
        if not any(one.alive for one in _read(path)):
            path.unlink(missing_ok=True)


def training_pid(folder: RunFolder, learner: str, leader: int) -> int:
    """The process that holds the atoll.Learner: `leader`, or one that it started where the command is a wrapper. Of
    several ranks that is the one that speaks, which tells the others.

    A polite signal goes to that one alone. The others of its session, such as the workers of a DataLoader, must not end
    before it has finished its step. Every Learner writes events to a file that is named after its process.
    """
    files = folder.events.glob(f"learner-{glob.escape(learner)}-*.jsonl")
    pids = [int(pid) for path in files if (pid := path.stem.rpartition("-")[2]).isdigit()]
    own = [pid for pid in pids if started_mark(pid) and (_session(pid) == leader or _parent(pid) == leader)]
    return max(own, key=lambda pid: int(started_mark(pid) or "0"), default=leader)


def ask_to_leave(folder: RunFolder, learner: str, leader: int) -> None:
    """The file tells the learner's supervisor that its end is no failure, and not to ask again."""
    write_text(folder.leave_file(learner), f"{leader}\n")
    send_signal(training_pid(folder, learner, leader), signal.SIGTERM)


def asked_to_leave(folder: RunFolder, learner: str, leader: int) -> bool:
    """Whether this very process was asked: a second SIGTERM would cut its hand-over short."""
    try:
        return folder.leave_file(learner).read_text().strip() == str(leader)
    except OSError:
        return False


def _joined_files(folder: RunFolder) -> Iterator[Path]:
    return folder.path.glob("processes-*.json")


def _read(path: Path) -> list[Listed]:
    try:
        if path.stat().st_size > LISTING_BYTES_MAX:
            return []
        entries = json.loads(path.read_text())
        return [Listed(str(e["role"]), str(e["id"]), int(e["pid"]), str(e.get("started", ""))) for e in entries]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return []


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError, ValueError):
        return -1


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
