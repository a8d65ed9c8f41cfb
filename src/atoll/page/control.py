"""What an operator may do from the page, where it was started with --control: only what the commands can do as well.

    drain       `atoll leave`: the learner hands over its progress and ends
    add         `atoll join`: one more learner on this machine, kept by a process of its own
    kill        SIGKILL to a learner of this machine, for a drill; its launcher starts it again
    snapshot    `atoll snapshot`: the syncer writes the whole run down, now
    stop        SIGTERM to the launcher: everybody hands over, the model is written, `atoll resume` goes on

Each is written down in the run's events. Where learners have keys, the key that the page was started with must be an
operator's, for all of them. Add, kill and stop reach processes of this machine alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from atoll.core import Role
from atoll.errors import ConfigError, LaunchError, UnreachableError
from atoll.launch import RunFolder, launcher_pid, learners_here, reach
from atoll.launch import ask_to_leave as ask_here
from atoll.observe import EventWriter, FaultInjected, Warned
from atoll.page.watching import WatchedRun
from atoll.wire import ClientOptions, ask_to_leave, fetch_status, take_snapshot

SOURCE = "page"


class Control:
    """Carries out what an operator asks for. `syncer` is how it is reached with the operator's key, where that was
    given."""

    def __init__(self, syncer: ClientOptions | None = None) -> None:
        self._syncer = syncer

    def act(self, action: str, learner: str, folder: RunFolder | None, run: WatchedRun) -> str:
        """Do it, and say in words what was done. Raises an AtollError if it cannot be."""
        if action not in ACTIONS:
            raise ConfigError(f"the page cannot {action!r}; it can {', '.join(ACTIONS)}")
        if action in ("drain", "kill") and not run.knows(learner):
            raise ConfigError(f"the run has no learner {learner!r}; choose one of its rows")
        self._check_key(folder)
        return ACTIONS[action](self, learner, folder)

    def _check_key(self, folder: RunFolder | None) -> None:
        """The syncer knows whose key this is. One that is away cannot say it: what may be done to processes of this
        machine then is the kernel's to say, and the others need the syncer anyhow."""
        try:
            answer = asyncio.run(fetch_status(self._reached(folder)))
        except (UnreachableError, LaunchError):
            return
        caller = answer.get("caller")
        if isinstance(caller, dict) and caller.get("role") != Role.OPERATOR:
            raise LaunchError(
                f"the key of {caller.get('name')!r} is no operator's; start the page with one (--token-file)"
            )

    def _reached(self, folder: RunFolder | None) -> ClientOptions:
        options = self._syncer or (reach(str(folder.path)).options if folder is not None else None)
        if options is None:
            raise LaunchError("no syncer is known; start the page with HOST:PORT or a run folder")
        return options

    def _drain(self, learner: str, folder: RunFolder | None) -> str:
        here = learners_here(folder) if folder is not None else {}
        if folder is not None and learner in here:
            ask_here(folder, learner, here[learner].pid)
        else:
            asyncio.run(ask_to_leave(self._reached(folder), learner))
        _note(folder, f"the operator asked {learner} to leave")
        return f"{learner} was asked to leave; it hands over its progress first"

    def _add(self, learner: str, folder: RunFolder | None) -> str:
        here = _on_this_machine(folder)
        log = here.logs / f"page-join-{os.getpid()}.log"
        with log.open("ab") as output:
            subprocess.Popen(
                [sys.executable, "-m", "atoll", "join", str(here.path)],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # it outlives the page, and ends with the run
            )
        _note(here, "the operator added a learner")
        return f"one more learner is started; {log.name} says how it goes"

    def _kill(self, learner: str, folder: RunFolder | None) -> str:
        here = _on_this_machine(folder)
        found = learners_here(here).get(learner)
        if found is None:
            raise LaunchError(f"{learner} does not run on this machine; only those that do can be killed from here")
        with EventWriter(here.events / f"{SOURCE}-{os.getpid()}.jsonl") as writer:
            writer.emit(FaultInjected("kill", learner, "a drill, from the page"))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(found.pid, signal.SIGKILL)  # a launcher starts each learner in a session of its own
        return f"{learner} (pid {found.pid}) was killed; its launcher starts it again"

    def _snapshot(self, learner: str, folder: RunFolder | None) -> str:
        said = asyncio.run(take_snapshot(self._reached(folder)))
        _note(folder, "the operator asked for a snapshot")
        return said

    def _stop(self, learner: str, folder: RunFolder | None) -> str:
        here = _on_this_machine(folder)
        pid = launcher_pid(here)
        if pid is None:
            raise LaunchError("no launcher of this run is alive on this machine; stop it where it was started")
        _note(here, "the operator stopped the run")
        os.kill(pid, signal.SIGTERM)
        return f"the run was told to stop; learners hand over first, and `atoll resume {here.path}` goes on with it"


ACTIONS: dict[str, Callable[[Control, str, RunFolder | None], str]] = {
    "drain": Control._drain,
    "add": Control._add,
    "kill": Control._kill,
    "snapshot": Control._snapshot,
    "stop": Control._stop,
}


HERE_ONLY = ("add", "kill", "stop")
"""They start or signal processes of the machine that the page runs on."""


def _on_this_machine(folder: RunFolder | None) -> RunFolder:
    if folder is None:
        raise LaunchError("only the syncer's address is known here; start the page with the run folder, where it runs")
    return folder


def _note(folder: RunFolder | None, text: str) -> None:
    if folder is not None and Path(folder.events).is_dir():
        with EventWriter(folder.events / f"{SOURCE}-{os.getpid()}.jsonl") as writer:
            writer.emit(Warned(SOURCE, text))
