"""One process, kept by a Ray actor: written where the actor is, started, started again, asked to leave.

Plain Python: `ray` makes an actor of the class. Each start of the actor is a new object on some node.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.keys import write_private
from atoll.launch import Command, child_environment, die_with, path_with_this_python
from atoll.private import make_private_folder
from atoll.wire import split_addresses

TOLD = "syncer.address"
"""Where the syncer is, in the run folder of each node: every actor of the node writes the same."""
PAUSE_S = 2.0
"""Before a process that failed is started again."""
TELL_S = 1.0
"""How often an island looks where the syncer is."""


@dataclass(frozen=True, slots=True)
class ActorSpec:
    name: str
    role: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, bytes] = field(repr=False)
    """By their path under `folder`; keys among them."""
    folder: str
    workdir: str
    syncer: str
    """Name of the actor that knows where the syncer is; empty: it need not be asked."""
    namespace: str
    resources: Mapping[str, float]
    wait_s: float = math.inf
    """How long it waits to hear where the syncer is; then it fails, and says why."""


class KeptProcess:
    def __init__(self, spec: ActorSpec) -> None:
        self._spec = spec
        self._folder = Path(spec.folder)
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._state = "waiting"
        self._why = ""
        self.put(spec.files)
        make_private_folder(self._folder / "logs")
        self._thread = threading.Thread(target=self._keep, name=f"atoll-{spec.name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ what others may ask

    def put(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            path = self._folder / name
            make_private_folder(path.parent)
            write_private(path, data)

    def look(self) -> dict[str, Any]:
        pid = self._process.pid if self._process is not None else 0
        return {
            "state": self._state,
            "host": socket.gethostname(),
            "pid": pid,
            "starts": self._starts,
            "why": self._why,
        }

    def address(self) -> str:
        """Where the syncer of this actor is; empty while it is not known."""
        process = self._process
        with contextlib.suppress(Exception):
            told = self._folder / "syncer.json"
            if process is not None and f'"pid": {process.pid},' in told.read_text():
                return ",".join(split_addresses(f"@{told}"))
        return ""

    def end(self) -> None:
        """It leaves in order, and is not started again."""
        self._ending.set()
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def tail(self, lines: int) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    # ------------------------------------------------------------ the thread that keeps it

    @property
    def _log(self) -> Path:
        return self._folder / "logs" / f"{self._spec.name}.log"

    def _keep(self) -> None:
        if self._spec.syncer and not self._await_syncer():
            return
        while not self._ending.is_set():
            code = self._run_once()
            self._state = "ended" if code == 0 else "failed"
            self._why = "" if code == 0 else f"status {code}; its log says why"
            if code == 0:
                return
            self._ending.wait(PAUSE_S)
        if self._state == "waiting":
            self._state = "ended"

    def _await_syncer(self) -> bool:
        """Whether it is known where the syncer is; False if this process shall end, or nobody has told in time."""
        give_up_s = time.monotonic() + self._spec.wait_s
        self._why = "waits for the syncer"
        while not self._ending.is_set() and time.monotonic() < give_up_s:
            if self._find_syncer():
                return True
            self._ending.wait(TELL_S)
        self._state = "ended" if self._ending.is_set() else "failed"
        self._why = f"no syncer in {self._spec.wait_s:g} s; see its log" if self._state == "failed" else ""
        if self._why:
            with contextlib.suppress(OSError), self._log.open("a") as log:
                log.write(f"atoll: {self._why}\n")
        return False

    def _run_once(self) -> int:
        parent = os.getpid()
        environment = {"PATH": path_with_this_python(), **self._spec.environment}
        command = Command(self._spec.role, self._spec.name, self._spec.argv, environment)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                list(self._spec.argv),
                cwd=self._spec.workdir if Path(self._spec.workdir).is_dir() else self._folder,
                env=child_environment(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent, signal.SIGKILL),  # Ray kills an actor without a word to it
            )
        self._starts += 1
        self._state, self._why = "running", ""
        if self._ending.is_set():
            self._process.send_signal(signal.SIGTERM)
        while True:
            try:
                code = self._process.wait(TELL_S)
                break
            except subprocess.TimeoutExpired:
                if self._spec.syncer:
                    self._find_syncer()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return code

    def _find_syncer(self) -> bool:
        """Write down where the syncer is now, for a learner that reads it whenever it does not answer."""
        import ray

        told = self._folder / TOLD
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            actor = ray.get_actor(self._spec.syncer, namespace=self._spec.namespace)
            address = ray.get(actor.address.remote(), timeout=TELL_S * 5)
            if address and (not told.exists() or told.read_text() != address):
                write_private(told, address.encode())
        return told.exists()
