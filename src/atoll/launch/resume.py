"""`atoll resume` without the terminal: an interrupted run goes on in its folder, from its last commit to the same end.

The settings come from RUN/config.json, the syncer's state from RUN/state (or the run's snapshots), each learner's own
from RUN/learners. The token budget is that of the whole run: what was processed before counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from atoll.errors import AtollError, LaunchError
from atoll.launch.commands import new_token
from atoll.launch.config import TrainConfig
from atoll.launch.faults import WITHOUT_FAULTS, FaultPlanner
from atoll.launch.folder import RunFolder, is_finished, still_running
from atoll.launch.plan import FinishedRun, View
from atoll.launch.run import run_attempt
from atoll.launch.running import forget_dead, joined_processes, main_processes
from atoll.launch.stored import Attempt, StoredRun, read_run
from atoll.launch.train import resume_train
from atoll.observe import FaultInjected, InjectedFault, LearnerSteps, read_events
from atoll.private import private_umask

ENDING_S_MAX = 30.0
"""A syncer whose launcher was killed waits 20 s for its learners and then writes the model."""
POLL_S = 0.1


def can_resume(folder: Path) -> bool:
    """Whether an interrupted run has left something to go on from."""
    try:
        _check_state(read_run(folder))
    except AtollError:
        return False
    return True


@private_umask()
def resume_run(
    path: Path,
    *,
    view: Callable[[Path], View] | None = None,
    say: Callable[[str], None] = lambda text: None,
    say_raw: Callable[[bytes], None] = lambda data: None,
    tell: Callable[[StoredRun], None] = lambda stored: None,
    faults: FaultPlanner = WITHOUT_FAULTS,
    wait_s: float = ENDING_S_MAX,
) -> tuple[StoredRun, FinishedRun]:
    """Go on with the run in `path`. `tell` hears what will be resumed before anything is started."""
    stored = read_run(path)
    faults.check(stored.config)
    folder = stored.folder
    _check_unfinished(folder)
    _check_state(stored)
    with folder.hold():
        _wait_for_rest(folder, wait_s=wait_s, say=say)
        folder.warn_of_open_token(say)
        attempt = _next_attempt(folder)
        tell(stored)
        say(f"resuming the run in {folder.path} (for the {_ordinal(attempt.number)} time)")
        for id in sorted(attempt.taken):
            say(f"{id} runs already: an `atoll join` has kept it going")
        _clear(folder)
        with stored.where_it_began(say):
            if isinstance(stored.config, TrainConfig):
                return stored, resume_train(stored.config, attempt, view=view, say=say, faults=faults)
            return stored, run_attempt(stored.config, stored.command, attempt, say=say, say_raw=say_raw, faults=faults)


def _check_unfinished(folder: RunFolder) -> None:
    if is_finished(folder):
        raise LaunchError(
            f"the run in {folder.path} is finished; `atoll report {folder.path}` shows it, `atoll export {folder.path} "
            f"--to model.safetensors` writes its model, and a new run trains on"
        )


def _check_state(stored: StoredRun) -> None:
    folder, durability = stored.folder, stored.config.durability
    if durability.snapshots or (folder.state.is_dir() and any(folder.state.iterdir())):
        return
    why = "it ran with --durability none" if durability.durability == "none" else "it ended before its first commit"
    again = "run --config" if stored.command else "train --config"
    tail = f" -- {' '.join(stored.command)}" if stored.command else ""
    raise LaunchError(
        f"the run in {folder.path} left no state to go on from ({why}); start it again: "
        f"atoll {again} {folder.path / 'config.toml'}{tail}"
    )


def _wait_for_rest(folder: RunFolder, *, wait_s: float, say: Callable[[str], None]) -> None:
    """The launcher is gone, because we hold its lock; what it had started may still be on its way out."""
    deadline_s, told = time.monotonic() + wait_s, False
    while alive := [one for one in main_processes(folder) if one.pid != os.getpid() and one.alive]:
        who = ", ".join(f"{one.id} has pid {one.pid}" for one in alive)
        if time.monotonic() >= deadline_s:
            raise still_running(folder.path, who, " ".join(str(one.pid) for one in alive))
        if not told:
            say(f"waiting for what is left of the run to end: {who}")
            told = True
        time.sleep(POLL_S)


def _next_attempt(folder: RunFolder) -> Attempt:
    forget_dead(folder)
    return Attempt(
        folder,
        folder.read_token() or new_token(),
        number=1 + sum(1 for _ in folder.events.glob("launcher-*.jsonl")),
        taken=frozenset(one.id for one in joined_processes(folder) if one.role in ("learner", "seat") and one.alive),
        faults=_faults_so_far(folder),
    )


def _faults_so_far(folder: RunFolder) -> tuple[InjectedFault, ...]:
    """A fault happens once in a run, however often it is resumed."""
    start_ns, faults = 0, list[InjectedFault]()
    for t_ns, _, event in read_events(folder.path):
        if isinstance(event, LearnerSteps):
            start_ns = start_ns or t_ns
        elif isinstance(event, FaultInjected):
            faults.append(InjectedFault(event.fault, event.target, (t_ns - start_ns) / 1e9 if start_ns else 0.0))
    return tuple(faults)


def _clear(folder: RunFolder) -> None:
    """Requests to processes that are gone must not reach their successors, and what the run came to so far is no result
    any more."""
    folder.result_file.unlink(missing_ok=True)
    for path in folder.path.glob("leave-*"):
        path.unlink(missing_ok=True)


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
