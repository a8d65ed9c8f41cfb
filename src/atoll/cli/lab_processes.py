"""`atoll lab study --processes N`: each process claims runs of its own, and what they say comes out here by line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import IO, TYPE_CHECKING, Any

from atoll.errors import ConfigError
from atoll.lab.conduct import Outcome, pending
from atoll.lab.store import ResultStore
from atoll.lab.study import Planned, Study

if TYPE_CHECKING:
    from rich.console import Console

PROCESSES_MAX = 64
"""Of one device; each holds models of its own there."""
LEAVE_S = 5.0
"""Ctrl-C in a terminal reaches every process; those that have not ended after this are told again."""
STOP_S_MAX = 30.0
"""From then to the end of a process that is in the middle of something."""


@dataclass(slots=True)
class Together:
    """What all processes came to."""

    outcomes: list[Outcome]
    """Of each study."""
    broken: list[str]
    """Processes that ended without a word, and how."""
    interrupted: bool


@dataclass(slots=True)
class _Told:
    failed: dict[str, dict[tuple[str, int], str]] = field(default_factory=dict)
    """By study, the run's title and its seed: why."""
    broken: list[str] = field(default_factory=list)
    interrupted: bool = False


def check_processes(processes: int) -> None:
    if not 1 <= processes <= PROCESSES_MAX:
        raise ConfigError(f"--processes must be from 1 to {PROCESSES_MAX}; not {processes}")


def words(positional: Sequence[object], options: Mapping[str, object]) -> list[str]:
    """Arguments as a command line. An option that is None was not given, one with a list was given several times."""
    found = [str(one) for one in positional]
    for flag, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            found += [flag, str(one)] if one is not None else []
    return found


def study_together(
    chosen: Sequence[tuple[Study, Sequence[Planned], ResultStore]],
    arguments: Sequence[str],
    processes: int,
    threads: int,
    console: Console,
) -> Together:
    """`atoll lab study` with these arguments in so many processes, until nothing is left for them."""
    queued = [len(pending(planned, results.records())) for _, planned, results in chosen]
    each = threads or max(1, (os.cpu_count() or 1) // processes)
    command = [sys.executable, "-m", "atoll", "lab", "study", *arguments, "--threads", str(each), "--json"]
    told = _run([command] * processes, console)
    outcomes = []
    for (study, planned, results), before in zip(chosen, queued, strict=True):
        left = {(one.title, one.spec.seed): one for one in pending(planned, results.records())}
        # What failed in one process may have gone well in another.
        failed = [(left[run], reason) for run, reason in told.failed.get(study.name, {}).items() if run in left]
        outcomes.append(Outcome(before - len(left), failed, len(left) - len(failed), interrupted=told.interrupted))
    return Together(outcomes, told.broken, told.interrupted)


def _run(commands: Sequence[Sequence[str]], console: Console) -> _Told:
    pipe = subprocess.PIPE
    children = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace")
        for command in commands
    ]
    said: list[list[str]] = [[] for _ in children]
    readers = []
    for number, child in enumerate(children):
        readers.append(threading.Thread(target=_show, args=(child.stderr, number + 1, console), daemon=True))
        readers.append(threading.Thread(target=said[number].extend, args=(child.stdout,), daemon=True))
    for reader in readers:
        reader.start()
    told = _Told()
    try:
        for child in children:
            child.wait()
    except KeyboardInterrupt:
        told.interrupted = True
    finally:
        _end(children)
    for reader in readers:
        reader.join(STOP_S_MAX)
    for number, (child, lines) in enumerate(zip(children, said, strict=True), 1):
        _hear(told, number, child.returncode, lines)
    return told


def _show(stream: IO[str], number: int, console: Console) -> None:
    for line in stream:
        console.print(f"[{number}] {line.rstrip()}", markup=False, highlight=False, soft_wrap=True)


def _end(children: Sequence[subprocess.Popen[str]]) -> None:
    deadline_s = monotonic() + LEAVE_S
    running = [child for child in children if not _ended(child, deadline_s - monotonic())]
    for child in running:
        child.send_signal(signal.SIGINT)
    deadline_s = monotonic() + STOP_S_MAX
    for child in running:
        if not _ended(child, deadline_s - monotonic()):
            child.kill()
            child.wait()


def _ended(child: subprocess.Popen[str], wait_s: float) -> bool:
    try:
        child.wait(max(0.0, wait_s))
    except subprocess.TimeoutExpired:
        return False
    return True


def _hear(told: _Told, number: int, code: int, lines: Sequence[str]) -> None:
    """What a process has said at its end."""
    try:
        studies: list[dict[str, Any]] = json.loads(lines[-1])["studies"]
    except (IndexError, ValueError, KeyError, TypeError):
        if not told.interrupted:
            how = f"signal {-code}" if code < 0 else f"status {code}"
            told.broken.append(f"process {number} ended with {how} before its studies were done")
        return
    for study in studies:
        failed = told.failed.setdefault(study["study"], {})
        failed |= {(entry["run"], entry["seed"]): entry["reason"] for entry in study["failed"]}
        told.interrupted |= bool(study["interrupted"])
