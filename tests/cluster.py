"""Real syncers and learners for tests: real sockets, real arrays, and a proxy that makes links thin or cuts them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ports import quiet_port
from torch import nn

from atoll.core.config import SyncConfig
from atoll.errors import UnreachableError
from atoll.learner import Learner
from atoll.observe import EventWriter, NullWriter
from atoll.syncer.shell import SyncerShell
from atoll.wire import ClientOptions, ServerOptions, fetch_status, serve

WAIT_S = 120.0
"""No wait in a test is longer; nothing is asserted about how long things take."""
_started: list[subprocess.Popen[str]] = []


class SyncerThread:
    """A syncer on its own thread and event loop, with its machine open to the test."""

    def __init__(
        self,
        config: SyncConfig,
        *,
        listen: str = "127.0.0.1:0",
        token: str = "",
        run: str = "r1",
        folder: Path | None = None,
        **port: str,
    ) -> None:
        self._ready = threading.Event()
        self._port = port
        self._config, self._listen, self._token, self._run = config, listen, token, run
        self._folder = folder
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._ready.wait(WAIT_S), "the syncer did not start"

    async def _main(self) -> None:
        writer = EventWriter(self._folder / "events" / "syncer.jsonl") if self._folder else NullWriter()
        self.shell = SyncerShell(self._config, self._run, writer)
        self.server = await serve(self.shell, ServerOptions(listen=self._listen, token=self._token, **self._port))
        self.shell.platform.close_link = self.server.close_session
        self.address = self.server.address
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        await self._stop.wait()
        await self.shell.close()
        await self.server.stop(0.1)
        writer.close()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(WAIT_S)

    def ask(self, function: Callable[[SyncerShell], Any]) -> Any:
        """Run something on the syncer's loop, where its state may be read."""

        async def call() -> Any:
            return function(self.shell)

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(WAIT_S)

    def wait_for(self, condition: Callable[[SyncerShell], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.ask(condition):
            assert time.monotonic() < deadline, f"never happened: {what}"
            time.sleep(0.02)

    def check_ledger(self) -> dict[str, Any]:
        """Every fragment's line and the folded one add up to the token; returns the folded one."""

        def check(shell: SyncerShell) -> dict[str, Any]:
            ledger = shell.machine.ledger
            for fragment in range(shell.machine.config.fragments):
                line = ledger.fragment_totals(fragment)
                assert line.processed == line.merged + line.pending + sum(line.discarded.values())
                assert min(line.merged, line.pending, *line.discarded.values(), 0) == 0
            stats = shell.machine.stats()
            parts = stats["tokens_merged"] + stats["tokens_pending"] + sum(stats["tokens_discarded"].values())
            assert stats["tokens_processed"] == parts
            return stats

        return self.ask(check)  # type: ignore[no-any-return]


class SyncerProcess:
    """`atoll syncer` as a real process on a run folder, to be killed and started again."""

    def __init__(self, folder: Path, *options: str, host: str = "127.0.0.1", **environment: str) -> None:
        self.folder = folder
        self._listen = f"{host}:{quiet_port()}"
        self._options = options
        # As launchers do: else the first learners wait for somebody who might hold an earlier run.
        known = {"--snapshots", "--new-run", "--must-continue", "--first-start", "--standby", "--take-over"}
        self.process = self._start(environment, *(() if known & {*options} else ("--first-start",)))
        self.address = self._wait_ready()

    def _start(self, environment: dict[str, str], *first: str) -> subprocess.Popen[str]:
        where = ("--listen", self._listen, "--run-folder", str(self.folder), *first)
        self.log = (self.folder / "syncer.log").open("a")
        return _remembered(
            subprocess.Popen(
                [sys.executable, "-m", "atoll", "syncer", *where, *self._options],
                stdout=self.log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "ATOLL_PRELOAD": "atoll.instruments.chaos.inside", **environment},
            )
        )

    def _wait_ready(self) -> str:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                told = json.loads((self.folder / "syncer.json").read_text())
            except (OSError, ValueError):
                told = {"pid": 0}
            if told["pid"] == self.process.pid:
                return str(told["address"])
            assert self.process.poll() is None, self.output()
            time.sleep(0.02)
        raise AssertionError(f"the syncer was not ready: {self.output()}")

    def output(self) -> str:
        return (self.folder / "syncer.log").read_text()

    def status(self) -> dict[str, Any]:
        return asyncio.run(fetch_status(ClientOptions(address=self.address)))

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        status: dict[str, Any] = {}
        while not status or not condition(status):
            assert time.monotonic() < deadline, f"never happened: {what}: {status}"
            time.sleep(0.05)
            with contextlib.suppress(UnreachableError):  # a busy machine
                status = self.status()
        return status

    def wait_dead(self) -> int:
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()

    def again(self, *options: str, **environment: str) -> None:
        """Start it again with the same command."""
        self._options = (*self._options, *options)
        self.process = self._start(environment)
        address = self._wait_ready()
        assert address == self.address, "it must come back where learners look for it"

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(WAIT_S)
        self.log.close()
        return code


def check_books(status: dict[str, Any]) -> None:
    """The ledger's one line adds up to the token."""
    parts = status["tokens_merged"] + status["tokens_pending"] + sum(status["tokens_discarded"].values())
    assert status["tokens_processed"] == parts, status


class TrainingThread:
    """A learner with a small model, stepping on a thread of its own until told to stop."""

    def __init__(
        self,
        address: str,
        name: str,
        *,
        steps: int = 10**9,
        step_s: float = 0.01,
        seed: int = 0,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = model if model is not None else small_model()
        self.optimizer = optimizer if optimizer is not None else torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.name, self.steps, self.step_s = name, steps, step_s
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self.taken = 0
        self.learner = Learner(self.model, self.optimizer, address=address, learner_id=name, **options)
        self._generator = torch.Generator().manual_seed(seed)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with self.learner as learner:
                while self.taken < self.steps and not self.stopping.is_set() and not learner.done:
                    self.train()
                    learner.step(tokens=32, loss=0.5)
                    self.taken += 1
                    time.sleep(self.step_s)
        except BaseException as error:
            self.error = error

    def train(self) -> None:
        x = torch.randn(8, 32, generator=self._generator).to(next(self.model.parameters()).device)
        loss = (self.model(x) - x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def wait_steps(self, count: int) -> None:
        deadline = time.monotonic() + WAIT_S
        target = self.taken + count
        while self.taken < target:
            assert self.error is None, self.error
            assert time.monotonic() < deadline, f"{self.name} stopped stepping at {self.taken}"
            time.sleep(0.01)

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), f"{self.name} hangs"


def small_model(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 32))


class Proxy:
    """A TCP proxy on loopback. `bytes_per_s` limits each direction of `ways` (0: no limit); `cut` drops everything and
    refuses new connections until `mend`; `freeze` keeps connections open but moves nothing."""

    def __init__(self, target: str, bytes_per_s: int = 0, ways: tuple[str, ...] = ("up", "down")) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self.bytes_per_s = bytes_per_s
        self._ways = ways
        self.moved = {"up": 0, "down": 0}
        self._down = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._flow = threading.Event()
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True).start()
        assert self._ready.wait(WAIT_S)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._down:
            writer.close()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._pump(reader, far_writer, "up"), self._pump(far_reader, writer, "down"))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        try:
            while data := await reader.read(8192):
                if self.bytes_per_s and way in self._ways:
                    await asyncio.sleep(len(data) / self.bytes_per_s)
                if self._down:
                    break
                writer.write(data)
                await writer.drain()
                self.moved[way] += len(data)
        except (OSError, asyncio.CancelledError):
            pass
        writer.close()
        self._writers.discard(writer)

    def cut(self) -> None:
        self._down = True

        def drop() -> None:
            for writer in list(self._writers):
                writer.transport.abort()

        self._loop.call_soon_threadsafe(drop)

    def mend(self) -> None:
        self._down = False

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)


def spawn(script: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A real Python process that runs `script`."""
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return _remembered(
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places), **(env or {})},
        )
    )


def _remembered(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    _started.append(process)
    return process


def kill_leftovers() -> None:
    """A test that failed half way has not stopped its processes; they must not slow down the tests after it."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.kill()
            process.wait()


def last_json(process: subprocess.Popen[str]) -> Any:
    """Wait for a process and read the JSON on its last line."""
    out, _ = process.communicate(timeout=2 * WAIT_S)
    assert process.returncode == 0, out
    return json.loads(out.strip().splitlines()[-1])
