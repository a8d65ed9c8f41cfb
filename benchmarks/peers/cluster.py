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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import result as r
from net import Loopback, Net, lack_of_delays, lack_of_links
from result import Result
from scenarios import Fault, Scenario
from systems import HERE, System, machine

PORT = 29_417
LISTEN_S_MAX = 90.0
FIRST_STEPS = 3
"""A worker takes part once it has made so many."""
WARM_STEPS, WARM_S_MAX = 30, 30.0
"""The window begins when all have made so many, an exchange of every system among them, or after so long."""
EVALUATE_S_MAX = 5.0
GO_ON_S_MAX = 50.0
"""After a cut link is back TCP tries again later and later, after 52 s at most for a cut of a minute: so long whoever
stands still is watched, beyond the window, before it is said that somebody must do something."""
FINISH_S_MAX = 300.0
TICK_S = os.sysconf("SC_CLK_TCK")
COORDINATOR = 0
"""The coordinator's host; worker r is on host r + 1."""


class Cluster:
    def __init__(
        self,
        name: str,
        system: System,
        scenario: Scenario,
        *,
        world: int,
        seed: int,
        steps: int = 0,
        outer: str = "",
        place: int = 0,
    ) -> None:
        self._name, self._system, self._scenario = name, system, scenario
        self._world, self._seed, self._steps, self._place = world, seed, steps, place
        self._outer = outer or system.outer
        self.folder = Path(tempfile.mkdtemp(prefix=f"bakeoff-{name}-"))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        """By host."""
        self._started: list[tuple[int, float]] = []
        self._cpu_of_dead_s: dict[bool, float] = {True: 0.0, False: 0.0}
        """Of the coordinators and of the workers that were killed."""
        self._logs = itertools.count()

    def run(self, label: str) -> Result:
        scenario = self._scenario
        result = Result(self._name, label, self._seed, outer=self._outer, window_s=scenario.seconds)
        result.cores = len(os.sched_getaffinity(0))
        result.date, result.machine = f"{datetime.now(UTC):%Y-%m-%d}", machine()
        result.versions = self._system.versions
        lack = lack_of_links()
        if (scenario.needs_links and lack) or (scenario.delay_ms and (lack := lack_of_delays())):
            result.why = f"not measured: {lack}"
            return result
        rates = [scenario.rate] + [scenario.rates.get(rank, scenario.rate) for rank in range(self._world)]
        hosts = 1 + self._world
        net = Loopback(hosts, place=self._place)
        self._net = net if lack else Net(hosts, rates, scenario.delay_ms, place=self._place)
        LIVING.add(self)
        try:
            with self._net:
                self._measure(result)
        finally:
            self.clear()
            LIVING.discard(self)
        result.load = os.getloadavg()[0]
        return result

    def clear(self) -> None:
        for host in list(self._processes):
            self._kill(host)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------ a run

    def _measure(self, result: Result) -> None:
        began = time.monotonic()
        late = {fault.worker for fault in self._scenario.faults if fault.what == "join"}
        expected = [rank for rank in range(self._world) if rank not in late]
        if self._system.coordinator == "syncer":
            self._prepare()
            began = time.monotonic()  # keys are made once, before any run
        self._start_coordinator()
        if self._system.listens and not self._wait_until_it_listens():
            result.void(f"the coordinator did not start: {self._last_words(-1)}")
            return
        for rank in expected:
            self._start_worker(rank)
        while self._fewest_steps(expected) < FIRST_STEPS:
            # -1: the coordinator, where there is one
            gone = [rank for rank in (-1, *expected) if self._has_ended(rank)]
            if time.monotonic() - began > self._scenario.start_s_max or (gone and not self._steps):
                words = self._last_words(gone[0] if gone else expected[0])
                result.void(f"did not start in {time.monotonic() - began:.0f} s{too_busy()}: {words}")
                return
            time.sleep(0.05)
        result.start_s = time.monotonic() - began
        (self.folder / "running").touch()
        if self._steps:
            self._wait_for_the_end(result)
        else:
            warm_until = time.monotonic() + WARM_S_MAX
            while time.monotonic() < warm_until and self._fewest_steps(expected) < WARM_STEPS:
                time.sleep(0.05)
            self._window(result)

    def _fewest_steps(self, ranks: list[int]) -> int:
        return min(len(r.worker_lines(self.folder, rank)) for rank in ranks)

    def _wait_for_the_end(self, result: Result) -> None:
        """Equal tokens: every worker makes so many steps, and the model is looked at."""
        result.loss = self._loss(FINISH_S_MAX)
        if result.loss is None:
            result.void(f"did not finish: {self._last_words(0)}")
        self._check(result, [r.worker_lines(self.folder, rank) for rank in range(self._world)])

    def _check(self, result: Result, workers: list[list[r.Line]]) -> None:
        """Steps of workers that exchange nothing say nothing of their system."""
        if self._system.period and not result.why.startswith(r.FAILED):
            result.exchanges = r.exchanges(self._system.kept, self.folder, workers)
            if not result.exchanges:
                result.void(f"no exchange was made since it began: {self._last_words(0)}")

    def _loss(self, seconds_max: float) -> float | None:
        final, deadline = self.folder / "final-0.json", time.monotonic() + seconds_max
        while not final.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        return float(json.loads(final.read_text())["loss"]) if final.exists() else None

    def _window(self, result: Result) -> None:
        begin = time.monotonic()
        before = self._net.bytes_sent(), self._cpu_s(coordinator=True), self._cpu_s(coordinator=False)
        end = begin + self._scenario.seconds
        for at, action, fault in sorted(self._actions(begin), key=lambda action: action[0]):
            time.sleep(max(0.0, min(at, end) - time.monotonic()))
            if at < end:
                action(fault)
        time.sleep(max(0.0, end - time.monotonic()))
        self._reduce(result, begin, time.monotonic(), *before)
        if result.standing and any(fault.what == "partition" for fault in self._scenario.faults):
            self._watch_those_who_stand(result)
        if self._system.whole and not result.standing and not result.why:
            (self.folder / "evaluate").touch()
            result.loss = self._loss(EVALUATE_S_MAX)

    def _watch_those_who_stand(self, result: Result) -> None:
        """Numbers stay those of the window."""
        began, ranks = time.monotonic(), range(self._world)
        before = [len(r.worker_lines(self.folder, rank)) for rank in ranks]
        while (gone_s := time.monotonic() - began) < GO_ON_S_MAX and not all(map(self._has_ended, ranks)):
            if all(len(r.worker_lines(self.folder, rank)) > before[rank] for rank in ranks):
                result.why += f" (all went on {gone_s:.0f} s after the window)"
                result.person = "nothing"
                return
            time.sleep(0.2)

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
            self._kill(COORDINATOR)
        elif fault.what == "partition":
            self._net.cut(fault.worker + 1)  # type: ignore[union-attr]
        elif fault.what == "rate":
            for host in range(1 + self._world):
                self._net.set_rate(host, fault.rate)  # type: ignore[union-attr]

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
            "device": scenario.device,
            "batch": scenario.batch,
            "seq": scenario.seq,
            "seed": self._seed,
            "steps": self._steps,
            "step-ms": scenario.step_ms,
            "factor": scenario.factors.get(rank, 1.0),
            "jitter": scenario.jitter,
            "period": system.period,
            "outer": self._outer,
            "form": system.form,
        }
        return [word for name, value in words.items() for word in (f"--{name}", str(value))]

    @property
    def _coordinator(self) -> str:
        host = 1 if self._system.coordinator == "rank" else COORDINATOR
        return f"{self._net.addresses[host]}:{PORT}"

    def _start_coordinator(self) -> None:
        system, script = self._system, str(HERE / "systems" / self._system.script)
        if system.coordinator == "syncer":
            self._start(COORDINATOR, self._syncer())
        elif system.coordinator == "lighthouse":
            self._start(COORDINATOR, [system.python, script, "coordinator", self._coordinator, "2"])
        elif system.coordinator == "dht":
            self._start(COORDINATOR, [system.python, script, "coordinator", self._coordinator], "coordinator.txt")
            _wait_for_text(self.folder / "coordinator.txt")
        elif system.coordinator == "server":
            self._start(COORDINATOR, [system.python, script, "coordinator", *self._arguments(0)])

    def _prepare(self) -> None:
        keys, token = self.folder / "keys", self.folder / "token"
        make = [sys.executable, "-m", "atoll", "keys", "init", str(keys), "--name", self._net.addresses[0]]
        place = {**os.environ, "PYTHONPATH": self._system.python_path}  # cryptography may be there alone
        done = subprocess.run(make, capture_output=True, text=True, env=place)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise RuntimeError(f"`atoll keys init` says: {said[-1] if said else 'nothing'}")
        token.touch(0o600)
        token.write_text("0123456789abcdef")

    def _wait_until_it_listens(self) -> bool:
        """Its own list of sockets is that of its namespace."""
        host = self._net.addresses[COORDINATOR]
        folder, deadline = Path(f"/proc/{self._processes[COORDINATOR].pid}/net"), time.monotonic() + LISTEN_S_MAX
        while time.monotonic() < deadline and not self._has_ended(-1):
            with contextlib.suppress(OSError):
                if any(_has_listener((folder / name).read_text(), host) for name in ("tcp", "tcp6")):
                    return True
            time.sleep(0.05)
        return False

    def _syncer(self) -> list[str]:
        """With TLS and a token, as it must be beyond one machine; the others speak in plain text."""
        keys, token = self.folder / "keys", self.folder / "token"
        lr, momentum = self._outer.split(",")
        command = [sys.executable, "-m", "atoll", "syncer", "--listen", self._coordinator, "--plain"]
        command += ["--learners", str(self._world), "--run-folder", str(self.folder / "run"), *self._system.settings]
        command += ["--sync-every", str(self._system.period), "--outer-lr", lr, "--outer-momentum", momentum]
        command += ["--token-file", str(token)]
        if not (self.folder / "run" / "state").exists():
            command.append("--new-run")  # nobody holds an earlier one, so there is nobody to wait for
        return [*command, "--tls-certificate", str(keys / "cert.pem"), "--tls-key", str(keys / "key.pem")]

    def _start(self, host: int, command: list[str], output: str = "") -> None:
        log = self.folder / (output or f"host-{host}-{next(self._logs)}.log")
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "PYTHONPATH": self._system.python_path,
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
        process = self._processes.get(host)
        if process is not None:
            found = self._stats({process.pid})
            self._cpu_of_dead_s[host == COORDINATOR] += sum(_cpu_s(fields) for _, fields in found)
            del self._processes[host]
            for pid in (process.pid, *(int(path.name) for path, _ in found)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    # ------------------------------------------------------------ numbers

    def _reduce(
        self, result: Result, begin: float, end: float, sent: list[int] | None, cpu_first_s: float, cpu_rest_s: float
    ) -> None:
        workers = [r.worker_lines(self.folder, rank) for rank in range(self._world)]
        touched = {fault.worker for fault in self._scenario.faults}
        made = sum(begin <= line["t"] < end for lines in workers for line in lines)
        result.lost_steps = self._lost(workers, begin, end)
        result.steps_per_s = (made - max(0.0, result.lost_steps or 0.0)) / (end - begin)
        if self._scenario.step_ms:
            factors = (self._scenario.factors.get(rank, 1.0) for rank in range(self._world))
            result.ideal_steps_per_s = sum(1e3 / self._scenario.step_ms / factor for factor in factors)
        untouched = [lines for rank, lines in enumerate(workers) if rank not in touched]
        result.pause_s = r.longest_pause(untouched, begin, end)
        self._rejoin(result, workers, begin)
        now = self._net.bytes_sent()
        if made:
            result.megabytes_per_step = None if sent is None or now is None else (sum(now) - sum(sent)) / made / 1e6
            first_s, rest_s = self._cpu_s(coordinator=True) - cpu_first_s, self._cpu_s(coordinator=False) - cpu_rest_s
            result.coordinator_cpu_s_per_step, result.learner_cpu_s_per_step = first_s / made, rest_s / made
            result.busy = (first_s + rest_s) / (end - begin) / result.cores
        result.coordinator_memory_mb = self._memory_mb(coordinator=True)
        result.learner_memory_mb = self._memory_mb(coordinator=False) / self._world
        self._condition(result, workers, end)
        self._check(result, workers)

    def _lost(self, workers: list[list[r.Line]], begin: float, end: float) -> float | None:
        if self._system.kept == "ledger":
            return r.lost_by_ledger(self.folder, workers, begin, end, self._scenario.batch * self._scenario.seq)
        if self._system.kept == "rounds":
            return r.lost_by_round(self.folder, workers, self._alive(), begin, end)
        return r.lost_by_count(workers, self._alive(), begin, end)

    def _rejoin(self, result: Result, workers: list[list[r.Line]], begin: float) -> None:
        comebacks = [(rank, at) for rank, at in self._started if at > begin]
        firsts = [(min((x["t"] for x in workers[rank] if x["t"] > at), default=None), at) for rank, at in comebacks]
        waits = [first - at for first, at in firsts if first is not None]
        result.rejoin_s = sum(waits) / len(waits) if waits else None
        result.returned = f"{len(waits)} of {len(comebacks)}" if comebacks else ""

    def _condition(self, result: Result, workers: list[list[r.Line]], end: float) -> None:
        """Who stands still at the end, and what somebody would have to do about it. Where no process was killed and no
        link cut, who makes no step waits for a slow link or a slow peer, and will go on."""
        back = {rank for rank, at in self._started if at > end - self._scenario.seconds}
        absent = {rank for rank in back if not any(line["t"] > self._latest_start(rank) for line in workers[rank])}
        broken = any(fault.what != "rate" for fault in self._scenario.faults)
        still = [rank for rank in r.standing_still(workers, end) if broken and rank not in absent]  # see `returned`
        ended = [rank for rank in range(self._world) if self._has_ended(rank)]
        result.standing = len(still)
        if ended:
            result.why = f"{len(ended)} of {self._world} workers had ended: {self._last_words(ended[0])}"
        elif still:
            result.why = f"{len(still)} of {self._world} workers stood still: {self._last_words(still[0])}"
        result.person = f"start {len(still)} learners again by hand" if still else "nothing"

    def _latest_start(self, rank: int) -> float:
        return max(at for one, at in self._started if one == rank)

    def _has_ended(self, rank: int) -> bool:
        process = self._processes.get(rank + 1)
        return process is not None and process.poll() is not None

    def _last_words(self, rank: int) -> str:
        logs = sorted(self.folder.glob(f"host-{rank + 1}-*.log"), key=lambda path: path.stat().st_mtime)
        lines = [line for line in (logs[-1].read_text(errors="replace") if logs else "").splitlines() if line.strip()]
        return lines[-1][:160] if lines else "it said nothing"

    def _pids(self, *, coordinator: bool) -> set[int]:
        return {process.pid for host, process in self._processes.items() if (host == COORDINATOR) == coordinator}

    def _alive(self) -> set[int]:
        """Every process of the workers, with their children: who records its steps may be any of them."""
        return {int(path.name) for path, _ in self._stats(self._pids(coordinator=False))}

    @staticmethod
    def _stats(sessions: set[int]) -> list[tuple[Path, list[str]]]:
        """Of all processes in these sessions, and of their descendants: some systems give children sessions."""
        every = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError):
                every[int(stat.parent.name)] = (stat.parent, stat.read_text().rpartition(")")[2].split())
        mine = {pid for pid, (_, fields) in every.items() if int(fields[3]) in sessions}
        while more := {pid for pid, (_, fields) in every.items() if int(fields[1]) in mine} - mine:
            mine |= more
        return [every[pid] for pid in mine]

    def _cpu_s(self, *, coordinator: bool) -> float:
        living = sum(_cpu_s(fields) for _, fields in self._stats(self._pids(coordinator=coordinator)))
        return self._cpu_of_dead_s[coordinator] + living

    def _memory_mb(self, *, coordinator: bool) -> float:
        total = 0.0
        for process, _ in self._stats(self._pids(coordinator=coordinator)):
            with contextlib.suppress(OSError):
                for line in (process / "status").read_text().splitlines():
                    if line.startswith("VmHWM"):
                        total += int(line.split()[1]) / 1024
        return total


def too_busy() -> str:
    """What to think of numbers here, in parentheses; empty: there is a core for everybody who wants one."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f" (this machine is busy: a load of {load:.0f} on {cores} cores)" if load > 1.5 * cores else ""


LIVING: set[Cluster] = set()
"""Runs that are under way, in whichever thread."""


def end_all(number: int, _: object) -> None:
    """For a signal: nothing that was started stays behind."""
    for cluster in list(LIVING):
        cluster.clear()
        cluster._net.__exit__()
    os._exit(128 + number)


def _cpu_s(fields: list[str]) -> float:
    """Of a process, from /proc/PID/stat, with the children that it has waited for."""
    return sum(map(int, fields[11:15])) / TICK_S


def _has_listener(table: str, host: str) -> bool:
    """At this address or at all: in a text as /proc/net/tcp or tcp6 is, where an address has its last byte first."""
    wanted = f"{bytes(map(int, reversed(host.split('.')))).hex().upper()}:{PORT:04X}"
    rows = (line.split() for line in table.splitlines()[1:])
    return any(row[1].endswith((wanted, f"{0:08X}:{PORT:04X}")) and row[3] == "0A" for row in rows)


def _wait_for_text(path: Path) -> None:
    deadline = time.monotonic() + LISTEN_S_MAX
    while not path.read_text().strip() and time.monotonic() < deadline:
        time.sleep(0.1)
