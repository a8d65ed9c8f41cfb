"""One child process: its own session, its output in a log file, and no life beyond its parent's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.errors import LaunchError
from atoll.private import users_umask

LOG_TAIL_LINES = 15
LOG_TAIL_BYTES_MAX = 8192
"""Enough for a traceback; an error message longer than a screen hides its own remedy."""
WAIT_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
# Loaded here because nothing may be imported or loaded between fork and exec.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class Command:
    """What to start: `environment` is added to that of the launcher."""

    role: str
    id: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)  # the run token is in it
    orphan_signal: int = signal.SIGKILL
    """What the process gets when the launcher dies without having stopped it."""
    cpus: frozenset[int] = frozenset()
    """Those that it runs on, with all that it starts; none: all that the launcher may use."""


def child_environment(command: Command) -> dict[str, str]:
    """This process's own, and the command's over it."""
    return {**os.environ, **command.environment}


class Child:
    """A started process. It leads a process group, so that what it started itself is ended together with it."""

    def __init__(self, command: Command, log_file: Path) -> None:
        self.role = command.role
        self.id = command.id
        self.log_file = log_file
        self.started_ns = time.time_ns()
        parent = os.getpid()
        environment = child_environment(command)
        try:
            with log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    list(command.argv),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                    umask=users_umask(),
                    preexec_fn=lambda: _begin(command, parent),
                )
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise LaunchError(
                f"cannot start {command.role} {command.id}: {command.argv[0]!r} ({reason}); check that the command "
                f"exists and may be executed"
            ) from error
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit status once it has ended (negative: the signal that ended it), else None."""
        code = self._process.poll()
        if code is not None:
            self._signal_group(signal.SIGKILL)
        return code

    def terminate(self, pid: int | None = None) -> None:
        """Ask it to end: its whole group, or only the process `pid` of it."""
        if pid is None:
            self._signal_group(signal.SIGTERM)
        else:
            send_signal(pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it now."""
        self._signal_group(signal.SIGKILL)

    def wait(self, timeout_s: float, *, hurry: Callable[[], bool]) -> int | None:
        """Wait for its end, at most `timeout_s` and only while nobody is in a hurry."""
        deadline_s = time.monotonic() + timeout_s
        while (code := self.poll()) is None and time.monotonic() < deadline_s and not hurry():
            time.sleep(WAIT_POLL_S)
        return code

    def log_tail(self) -> str:
        return tail_of(self.log_file)

    def _signal_group(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            # The group is gone already, which is what was wanted.
            pass


def send_signal(pid: int, number: int) -> bool:
    """Signal one process; False if it is gone or not ours."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def tail_of(path: Path) -> str:
    """The last lines of a log, for an error message."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL_BYTES_MAX))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return "(no log)"
    return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:]) or "    (it printed nothing)"


def note(log_file: Path, text: str) -> None:
    """Add a line of the launcher's own to a log. A full disk must not end a run."""
    with contextlib.suppress(OSError), log_file.open("a") as log:
        log.write(f"{text}\n")


def describe_exit(code: int) -> str:
    """0 -> "finished"; 3 -> "exit status 3"; -9 -> "killed by SIGKILL"."""
    if code >= 0:
        return "finished" if code == 0 else f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _begin(command: Command, parent: int) -> None:
    """Runs in the child before exec."""
    die_with(parent, command.orphan_signal)
    if command.cpus:
        with contextlib.suppress(OSError):  # they may have been taken away meanwhile: the machine's administrator knows
            os.sched_setaffinity(0, command.cpus)


def die_with(parent: int, number: int) -> None:
    """Runs in the child before exec: it gets this signal when its parent dies. Linux ties that to the thread that
    forked, so processes must be started by a thread that lives as long as they do."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            # The launcher died between fork and prctl.
            os._exit(1)
