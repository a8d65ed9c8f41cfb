"""`atoll lab study --processes N`: each process claims runs of its own, and what they say comes out here by line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import IO, TYPE_CHECKING, Any

from atoll.cli import EXIT_BAD_INPUT, sigterm_as_interrupt
from atoll.errors import ConfigError
from atoll.instruments.cli.amounts import duration
from atoll.instruments.lab import Planned, ResultStore, Study, StudyOutcome, pending
from atoll.launch import die_with

if TYPE_CHECKING:
    from rich.console import Console

LOOK_S = 5.0
"""Between two looks at the store."""
PROCESSES_MAX = 64
"""Of one device; each holds models of its own there."""
LEAVE_S = 5.0
"""Ctrl-C in a terminal reaches every process; those that have not ended after this are told again."""
STOP_S_MAX = 30.0
"""From then to the end of a process that is in the middle of something."""

Chosen = Sequence[tuple[Study, Sequence[Planned], ResultStore]]


@dataclass(slots=True)
class ProcessTotals:
    """What all processes came to."""

    outcomes: list[StudyOutcome] = field(default_factory=list)
    """Of each study."""
    broken: list[str] = field(default_factory=list)
    """Processes that ended without a word, and how."""
    refused: bool = False
    """All of them have refused what they were asked to do, and have said why."""


@dataclass(slots=True)
class _Told:
    failed: dict[int, dict[str, str]] = field(default_factory=dict)
    """By the study's place and the run's key: why."""
    broken: list[str] = field(default_factory=list)
    refused: int = 0
    interrupted: bool = False


def check_processes(processes: int) -> None:
    if not 1 <= processes <= PROCESSES_MAX:
        raise ConfigError(f"--processes must be from 1 to {PROCESSES_MAX}; not {processes}")


def words(positional: Sequence[object], options: Mapping[str, object]) -> list[str]:
    """Arguments as a command line. An option that is None was not given, one with a list was given several times."""
    found: list[str] = []
    for flag, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            found += [flag, str(one)] if one is not None else []
    return [*found, "--", *map(str, positional)]


def study_together(
    chosen: Chosen, arguments: Sequence[str], processes: int, threads: int, console: Console
) -> ProcessTotals:
    """`atoll lab study` with these arguments in so many processes, until nothing is left for them."""
    queued = [len(pending(planned, results.records())) for _, planned, results in chosen]
    told = _Told()
    each = threads or max(1, (os.cpu_count() or 1) // processes)
    with tempfile.TemporaryDirectory(prefix="atoll-lab-") as failures:
        command = [sys.executable, "-m", "atoll", "lab", "study", "--threads", str(each), "--failures", failures]
        started = min(processes, sum(queued))
        if started:
            with _telling(chosen, sum(queued), console):
                told = _run([[*command, "--json", *arguments]] * started, console)
    if told.refused and told.refused == started:
        return ProcessTotals(refused=True)
    outcomes = []
    for place, ((_, planned, results), before) in enumerate(zip(chosen, queued, strict=True)):
        left = {one.spec.key: one for one in pending(planned, results.records())}
        # What failed in one process may have gone well in another.
        failed = [(left[key], reason) for key, reason in told.failed.get(place, {}).items() if key in left]
        waiting = len(left) - len(failed)
        stopped = told.interrupted and waiting > 0
        outcomes.append(StudyOutcome(before - len(left), failed, waiting, interrupted=stopped))
    return ProcessTotals(outcomes, told.broken)


@contextlib.contextmanager
def _telling(chosen: Chosen, before: int, console: Console) -> Iterator[None]:
    """Say how far all of them are together, whenever a run is finished."""
    over, began_s = threading.Event(), monotonic()

    def tell() -> None:
        said = 0
        while not over.wait(LOOK_S):
            with contextlib.suppress(Exception):  # a store that cannot be read now; an output that is closed
                left = sum(len(pending(planned, results.records())) for _, planned, results in chosen)
                done = before - left
                if said < done < before:
                    said = done
                    left_s = (monotonic() - began_s) / done * left
                    console.print(f"{done} of {before} runs done, about {duration(left_s)} left", markup=False)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _run(commands: Sequence[Sequence[str]], console: Console) -> _Told:
    told, children = _Told(), list[subprocess.Popen[str]]()
    said: list[list[str]] = [[] for _ in commands]
    readers: list[threading.Thread] = []
    with sigterm_as_interrupt():
        try:
            for number, command in enumerate(commands):
                child = _start(command)
                children.append(child)
                readers.append(threading.Thread(target=_show, args=(child.stderr, number + 1, console), daemon=True))
                readers.append(threading.Thread(target=said[number].extend, args=(child.stdout,), daemon=True))
                readers[-2].start()
                readers[-1].start()
            for child in children:
                child.wait()
        except KeyboardInterrupt:
            told.interrupted = True
        finally:
            _end(children)
    for reader in readers:
        reader.join(STOP_S_MAX)
    for number, child in enumerate(children):
        _hear(told, number + 1, child.returncode, said[number])
    return told


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    parent, pipe = os.getpid(), subprocess.PIPE
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        preexec_fn=lambda: die_with(parent, signal.SIGTERM),
    )


def _show(stream: IO[str], number: int, console: Console) -> None:
    """Whatever happens to our own output (closed, a full disk), the pipe is read, or its writer would stand still."""
    lost = False
    for line in stream:
        if not lost:
            try:
                console.print(f"[{number}] {line.rstrip()}", markup=False, highlight=False, soft_wrap=True)
            except (Exception, SystemExit):
                lost = True


def _end(children: Sequence[subprocess.Popen[str]]) -> None:
    """Let them end by themselves, then tell them (not by SIGINT, which a shell's background jobs ignore), then kill.
    Who interrupts once more does not want to wait."""
    try:
        for wait_s, number in ((LEAVE_S, signal.SIGTERM), (STOP_S_MAX, signal.SIGKILL)):
            deadline_s = monotonic() + wait_s
            for child in [child for child in children if not _ended(child, deadline_s - monotonic())]:
                child.send_signal(number)
    except KeyboardInterrupt:
        for child in children:
            child.kill()
    for child in children:
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
        told.refused += code == EXIT_BAD_INPUT
        if not told.interrupted:
            how = f"signal {-code}" if code < 0 else f"status {code}"
            told.broken.append(f"process {number} ended with {how} before its studies were done")
        return
    for place, study in enumerate(studies):
        failed = told.failed.setdefault(place, {})
        failed |= {entry["key"]: entry["reason"] for entry in study["failed"]}
        told.interrupted |= bool(study["interrupted"])
