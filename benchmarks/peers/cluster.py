"""One run: processes of a system on the hosts of a net, the scenario's faults, and what was measured."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from net import Loopback, Net, namespaces_work
from scenarios import Fault, Scenario
from systems import HERE, System

PORT = 29_417
START_S_MAX = 120.0
FIRST_STEPS = 3
"""A worker takes part once it has made so many."""
TICK_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Result:
    system: str
    scenario: str
    seed: int
    steps_per_s: float = 0.0
    pause_s: float = 0.0
    """The longest gap between two steps of a worker to whom nothing was done."""
    rejoin_s: float = 0.0
    """From the start of a process that comes back to its first step; the mean."""
    start_s: float = 0.0
    """From the start of the first process to the third step of the last."""
    megabytes_per_step: float = 0.0
    cpu_s_per_step: float = 0.0
    memory_mb: float = 0.0
    loss: float = 0.0
    """At equal time: the mean training loss of the last tenth of the window; at equal tokens: held out."""
    why: str = ""
    """Not possible, or how it ended early."""
    notes: list[str] = field(default_factory=list)

    def line(self) -> str:
        return json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()})


class Cluster:
    def __init__(self, name: str, system: System, scenario: Scenario, *, world: int, seed: int, steps: int) -> None:
        self._name, self._system, self._scenario = name, system, scenario
        self._world, self._seed, self._steps = world, seed, steps
        self.folder = Path(tempfile.mkdtemp(prefix=f"bakeoff-{name}-"))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        """By host: 0 is the coordinator, worker r is r + 1."""
        self._started: list[tuple[int, float]] = []
        self._logs = itertools.count()

    def run(self, label: str) -> Result:
        result = Result(self._name, label, self._seed)
        scenario = self._scenario
        if scenario.needs_links and not namespaces_work():
            result.why = "not measured: links need root and network namespaces"
            return result
        rates = [scenario.rate] + [scenario.rates.get(rank, scenario.rate) for rank in range(self._world)]
        hosts = 1 + self._world
        self._net = Net(hosts, rates, scenario.delay_ms) if namespaces_work() else Loopback(hosts)
        try:
            with self._net:
                self._measure(result)
        finally:
            for host in list(self._processes):
                self._kill(host)
            shutil.rmtree(self.folder, ignore_errors=True)
        return result

    # ------------------------------------------------------------ a run

    def _measure(self, result: Result) -> None:
        began = time.monotonic()
        late = {fault.worker for fault in self._scenario.faults if fault.what == "join"}
        self._start_coordinator()
        for rank in range(self._world):
            if rank not in late:
                self._start_worker(rank)
        expected = [rank for rank in range(self._world) if rank not in late]
        while any(len(self._lines(rank)) < FIRST_STEPS for rank in expected):
            # -1: the coordinator, where there is one
            gone = [r for r in (-1, *expected) if (p := self._processes.get(r + 1)) and p.poll() is not None]
            if time.monotonic() - began > START_S_MAX or (gone and not self._steps):
                result.why = f"did not start: {self._last_words(gone[0] if gone else expected[0])}"
                return
            time.sleep(0.05)
        result.start_s = time.monotonic() - began
        (self.folder / "running").touch()
        if self._steps:
            self._wait_for_the_end(result)
        else:
            self._window(result)

    def _wait_for_the_end(self, result: Result) -> None:
        """Equal tokens: every worker makes so many steps, and the model is looked at."""
        deadline = time.monotonic() + 600
        final = self.folder / "final-0.json"
        while not final.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(0.2)
        result.loss = json.loads(final.read_text())["loss"] if final.exists() else 0.0
        result.why = "" if final.exists() else f"did not finish: {self._last_words(0)}"

    def _window(self, result: Result) -> None:
        begin = time.monotonic()
        sent, cpu = self._net.bytes_sent(), self._cpu_s()
        end = begin + self._scenario.seconds
        actions = sorted(self._actions(begin), key=lambda action: action[0])
        for at, action, fault in actions:
            time.sleep(max(0.0, min(at, end) - time.monotonic()))
            if at < end:
                action(fault)
        while time.monotonic() < end:
            time.sleep(0.05)
        self._reduce(result, begin, end, sent, cpu)

    def _actions(self, begin: float) -> list[Any]:
        found: list[Any] = []
        for fault in self._scenario.faults:
            found.append((begin + fault.at_s, self._break, fault))
            found.append((begin + fault.at_s + fault.back_s, self._mend, fault))
        return found

    def _break(self, fault: Fault) -> None:
        if fault.what == "kill":
            self._kill(fault.worker + 1)
        elif fault.what == "coordinator":
            self._kill(0)
        elif fault.what == "partition":
            self._net.cut(fault.worker + 1)  # type: ignore[union-attr]

    def _mend(self, fault: Fault) -> None:
        if fault.what in ("kill", "join"):
            self._start_worker(fault.worker)
        elif fault.what == "coordinator":
            self._start_coordinator()
        elif fault.what == "partition":
            self._net.mend(fault.worker + 1)  # type: ignore[union-attr]

    # ------------------------------------------------------------ processes

    def _start_worker(self, rank: int) -> None:
        command = [self._system.python, str(HERE / "systems" / self._system.script), *self._arguments(rank)]
        self._started.append((rank, time.monotonic()))
        self._start(rank + 1, command)

    def _arguments(self, rank: int) -> list[str]:
        scenario, system = self._scenario, self._system
        words: dict[str, Any] = {
            "folder": self.folder,
            "rank": rank,
            "world": self._world,
            "hosts": ",".join(self._net.addresses[1:]),
            "coordinator": self._coordinator,
            "shape": scenario.shape,
            "seed": self._seed,
            "steps": self._steps,
            "step-ms": 0 if self._steps else scenario.step_ms,
            "factor": scenario.factors.get(rank, 1.0),
            "jitter": scenario.jitter,
            "period": system.period,
            "outer": system.outer,
            "form": system.form,
        }
        return [word for name, value in words.items() for word in (f"--{name}", str(value))]

    @property
    def _coordinator(self) -> str:
        host = 1 if self._system.coordinator == "rank" else 0
        return f"{self._net.addresses[host]}:{PORT}"

    def _start_coordinator(self) -> None:
        system, script = self._system, str(HERE / "systems" / self._system.script)
        if system.coordinator == "syncer":
            lr, momentum = system.outer.split(",") if system.settings else ("0.7", "0.3")
            keys = self.folder / "keys"
            if not keys.exists():
                subprocess.run(
                    [sys.executable, "-m", "atoll", "keys", "init", str(keys), "--name", self._net.addresses[0]],
                    check=True,
                    capture_output=True,
                )
                (self.folder / "token").touch(0o600)
                (self.folder / "token").write_text("0123456789abcdef")
            command = [sys.executable, "-m", "atoll", "syncer", "--listen", self._coordinator, "--plain"]
            command += ["--learners", str(self._world), "--run-folder", str(self.folder / "run"), *system.settings]
            command += ["--sync-every", str(system.period), "--outer-lr", lr, "--outer-momentum", momentum]
            command += ["--token-file", str(self.folder / "token")]
            self._start(0, [*command, "--tls-certificate", str(keys / "cert.pem"), "--tls-key", str(keys / "key.pem")])
        elif system.coordinator == "lighthouse":
            self._start(0, [system.python, script, "coordinator", self._coordinator, "2"])
        elif system.coordinator == "dht":
            self._start(0, [system.python, script, "coordinator", self._coordinator], "coordinator.txt")
            _wait_for_text(self.folder / "coordinator.txt")
        elif system.coordinator == "server":
            self._start(0, [system.python, script, "coordinator", *self._arguments(0)])

    def _start(self, host: int, command: list[str], output: str = "") -> None:
        log = self.folder / (output or f"host-{host}-{next(self._logs)}.log")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0" if self._net.limited else "lo",
            "ATOLL_TOKEN_FILE": str(self.folder / "token"),
            "ATOLL_TLS_CA": str(self.folder / "keys" / "ca.pem"),
            "LOGLEVEL": "WARNING",
        }
        with log.open("wb") as out:
            self._processes[host] = subprocess.Popen(
                self._net.wrap(host, command),
                stdout=out,
                stderr=subprocess.DEVNULL if output else subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _kill(self, host: int) -> None:
        process = self._processes.pop(host, None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # ------------------------------------------------------------ numbers

    def _reduce(self, result: Result, begin: float, end: float, sent: list[int], cpu: float) -> None:
        lines = {rank: [x for x in self._lines(rank) if begin <= x["t"] < end] for rank in range(self._world)}
        count = sum(map(len, lines.values()))
        touched = {fault.worker for fault in self._scenario.faults}
        result.steps_per_s = count / (end - begin)
        gaps = [
            after - before
            for rank, found in lines.items()
            if rank not in touched
            for before, after in itertools.pairwise([begin, *(x["t"] for x in found), end])
        ]
        result.pause_s = max(gaps, default=0.0)
        comebacks = [(rank, at) for rank, at in self._started if at > begin]
        waits = [min((x["t"] for x in lines[rank] if x["t"] > at), default=end) - at for rank, at in comebacks]
        result.rejoin_s = sum(waits) / len(waits) if waits else 0.0
        now = self._net.bytes_sent()
        if count:
            result.megabytes_per_step = (sum(now) - sum(sent)) / count / 1e6
            result.cpu_s_per_step = max(0.0, self._cpu_s() - cpu) / count
        result.memory_mb = self._memory_mb() / max(1, self._world)
        last = [x["loss"] for found in lines.values() for x in found if x["t"] > end - (end - begin) / 10]
        result.loss = sum(last) / len(last) if last else 0.0
        ended = [rank for rank in range(self._world) if (p := self._processes.get(rank + 1)) and p.poll() is not None]
        if ended:
            result.why = f"{len(ended)} of {self._world} workers had ended: {self._last_words(ended[0])}"

    def _lines(self, rank: int) -> list[dict[str, Any]]:
        try:
            text = (self.folder / f"worker-{rank}.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def _last_words(self, rank: int) -> str:
        logs = sorted(self.folder.glob(f"host-{rank + 1}-*.log"), key=lambda path: path.stat().st_mtime)
        lines = [line for line in (logs[-1].read_text(errors="replace") if logs else "").splitlines() if line.strip()]
        return lines[-1][:160] if lines else "it said nothing"

    def _sessions(self) -> set[int]:
        return {process.pid for process in self._processes.values()}

    def _stats(self) -> list[tuple[Path, list[str]]]:
        sessions, found = self._sessions(), []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) in sessions:
                    found.append((stat.parent, fields))
        return found

    def _cpu_s(self) -> float:
        """Of all processes that live now: those that were killed take their share with them."""
        return sum((int(fields[11]) + int(fields[12])) / TICK_S for _, fields in self._stats())

    def _memory_mb(self) -> float:
        total = 0.0
        for process, _ in self._stats():
            with contextlib.suppress(OSError):
                for line in (process / "status").read_text().splitlines():
                    if line.startswith("VmHWM"):
                        total += int(line.split()[1]) / 1024
        return total


def _wait_for_text(path: Path) -> None:
    deadline = time.monotonic() + START_S_MAX
    while not path.read_text().strip() and time.monotonic() < deadline:
        time.sleep(0.1)
