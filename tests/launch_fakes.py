"""Fake processes for the supervisor: short Python programs that write the events a real learner or syncer would."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.launch.folder import RunFolder, create_run_folder
from atoll.launch.local import Supervisor
from atoll.launch.plan import LaunchPlan
from atoll.launch.process import Command
from atoll.observe import EventWriter

WAIT_S_MAX = 30.0

HELPERS = """
import json, os, sys, time, signal, pathlib
run = pathlib.Path(os.environ["ATOLL_RUN_FOLDER"])
me = os.environ.get("ATOLL_LEARNER", "syncer")

def event(kind, **values):
    with open(run / "events" / f"learner-{me}-{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps({"t_ns": time.time_ns(), "kind": kind, **values}) + "\\n")

def joined():
    event("learner_joined", learner=me, generation=1, step=0, wait_ns=0)

def stepped(tokens, steps=1, step=1):
    event("learner_steps", learner=me, generation=1, step=step, steps=steps, tokens=tokens,
          tokens_total=tokens, loss=1.0, compute_ns=1, stall_ns=0, adopt_ns=0, snapshot_ns=0, overhead_ns=0,
          fragments_behind=0)

def first_time():
    mark = run / f"was-here-{me}"
    first = not mark.exists()
    mark.touch()
    return first

def finished(reason, unhanded=0):
    event("learner_finished", learner=me, steps=1, tokens=10, reason=reason, unhanded=unhanded)

def count(name):
    # ... how often this was called, over all processes of the run
    with open(run / name, "a") as file:
        file.write("x")
    return (run / name).stat().st_size

def leaves_politely():
    def leave(*_):
        finished("SIGTERM")
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)

def until(condition):
    while not condition():
        time.sleep(0.02)

def exists(name):
    return (run / name).exists()

def syncer_pid():
    return json.loads((run / "syncer.json").read_text())["pid"]

def kill_syncer():
    # ... and wait until another one serves.
    old = syncer_pid()
    os.kill(old, 9)
    until(lambda: syncer_pid() != old)

def serve():
    def finish(*_):
        (run / "model.safetensors").write_text("the model")
        sys.exit(0)
    signal.signal(signal.SIGTERM, finish)
    partial = run / "syncer.partial"
    partial.write_text(json.dumps({"address": "127.0.0.1:1", "pid": os.getpid(), "run": "r"}))
    partial.replace(run / "syncer.json")
    time.sleep(600)
"""


def folder_in(path: Path) -> RunFolder:
    return create_run_folder(str(path / "run"), name="test")


def command(folder: RunFolder, id: str, program: str, *arguments: str) -> Command:
    """A learner (or, by its id, the syncer) that runs `program` after the helpers."""
    environment = {"ATOLL_RUN_FOLDER": str(folder.path)}
    if id != "syncer":
        environment["ATOLL_LEARNER"] = id
    role = "syncer" if id == "syncer" else "learner"
    argv = (sys.executable, "-c", HELPERS + program, *arguments)
    return Command(role=role, id=id, argv=argv, environment=environment)


def supervisor(folder: RunFolder, plan: LaunchPlan, said: list[str] | None = None) -> Supervisor:
    said = [] if said is None else said
    return Supervisor(folder, plan, writer=EventWriter(folder.events / "launcher.jsonl"), say=said.append)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.02)


class InThread:
    """A call in a thread of its own, with its result or error."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = self._call()
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        self._thread.join(WAIT_S_MAX)
        assert not self._thread.is_alive(), "it did not end"
        if self.error is not None:
            raise self.error
        return self.value


def alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
