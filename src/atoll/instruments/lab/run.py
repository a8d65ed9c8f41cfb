"""Run one spec: the whole cluster in virtual time, its training on one device."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import platform
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from atoll import kernels
from atoll.core import effects as fx
from atoll.core import elements_of, fragments_for
from atoll.errors import LabError
from atoll.instruments.lab.payloads import AtOnce
from atoll.instruments.lab.replica import Bench, Replica, pick_device
from atoll.instruments.lab.scenario import LabScenario
from atoll.instruments.lab.spec import BUILT_IN, LOCAL_METHODS, LabResult, LabSpec
from atoll.instruments.lab.task import Task, load_task
from atoll.instruments.lab.world import LabWorld
from atoll.instruments.sim import Scenario
from atoll.learner import TorchParameters, describe, into
from atoll.zoo import lr_at

Progress = Callable[[int, int], None]
"""Tokens done and wanted."""

KERNEL_THREADS_MAX = 4
"""Threads of the merge and the codecs: beyond these, fragments of a small model gain nothing."""
BACKGROUND_THREADS = max(4, (os.cpu_count() or 1) // 2)
"""Threads that encode and stage while a GPU computes: about 7 ns of one core per parameter that is sent
(benchmarks/lab_host.py). With eight learners of 10.8M parameters and H = 8 that is more than an H200 takes for their
steps."""
COMPILE_TOKENS_MIN = 20_000_000
"""A run of fewer tokens is over before a compilation (about a minute) has paid."""
STANDSTILL_NS = 3_600_000_000_000
"""A virtual hour without a step: the scenario leaves nobody who could finish the run."""
CLOSE_NS = 600_000_000_000
"""Virtual time for leaving: far above the waits of a learner that closes."""


class Workshop:
    """What runs that follow each other on one device can share: data, compiled and captured steps."""

    def __init__(self, device: str = "auto", *, compiles: bool | None = None) -> None:
        self.device = pick_device(device)
        on_gpu = self.device.type == "cuda"
        self.threads: Executor = (
            ThreadPoolExecutor(BACKGROUND_THREADS, "lab", initializer=kernels.work_alone) if on_gpu else AtOnce()
        )
        self._compiles = compiles
        self._tasks: dict[tuple[Any, ...], Task] = {}
        self._bench: tuple[tuple[Any, ...], Bench] | None = None
        self._replicas: list[Replica] = []

    def bench(self, spec: LabSpec) -> Bench:
        """The bench for runs like this one. Only the last is kept: each holds the memory of its captured steps."""
        compiles = self._compiles
        if compiles is None:
            compiles = self.device.type == "cuda" and spec.tokens >= COMPILE_TOKENS_MIN
        about: tuple[Any, ...] = (spec.task, spec.model, spec.corpus, spec.seq, spec.eval_windows, spec.optimizer)
        about += (spec.learners, spec.method) if spec.task == "domains" else ()
        if spec.task not in BUILT_IN:
            about = (spec.key,)  # a user's task may depend on anything
        key = (*about, spec.learner_batch, compiles)
        if self._bench is None or self._bench[0] != key:
            self.clear()
            if about not in self._tasks:
                self._tasks = {about: load_task(spec)}
            bench = Bench(spec, self._tasks[about], self.device, compiles=compiles)
            self._bench = (key, bench)
        return self._bench[1]

    def clear(self) -> None:
        """Give the memory of captured steps back."""
        self._bench, self._replicas = None, []
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def replica(self, bench: Bench, index: int) -> Replica:
        while len(self._replicas) <= index:
            self._replicas.append(Replica(bench))
        return self._replicas[index]

    def ready(self, bench: Bench, index: int, spec: LabSpec) -> None:
        """Make the replica at this place ready for the run. Where torch.compile does not work, go on without it."""
        try:
            self.replica(bench, index).get_ready(spec, index)
        except Exception as error:
            if not bench.compiles:
                raise
            warnings.warn(f"this machine cannot compile the step, so it runs without: {error}", stacklevel=2)
            bench.compile_no_more()
            self._replicas = self._replicas[:index]
            self.replica(bench, index).get_ready(spec, index)

    def wait_for_all(self) -> None:
        """Everything that was queued is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def run(
    spec: LabSpec, *, device: str = "auto", progress: Progress | None = None, keep: Workshop | None = None
) -> LabResult:
    """Train as the spec says. `keep` is a workshop that serves several runs."""
    workshop = keep or Workshop(device)
    kernels.set_threads(min(KERNEL_THREADS_MAX, os.cpu_count() or 1))
    kernels.warm_up()
    one = LocalRun if spec.method in LOCAL_METHODS else ClusterRun
    try:
        return one(spec, workshop, progress).run()
    except BaseException:
        workshop.clear()  # nobody knows in which state its replicas are
        raise


class _Run(ABC):
    """What both kinds share: progress, evaluations, time."""

    def __init__(self, spec: LabSpec, workshop: Workshop, progress: Progress | None) -> None:
        self.spec = spec
        self.workshop = workshop
        self.bench = workshop.bench(spec)
        self.scenario = LabScenario.from_values(spec.world)
        self.peak_lr = spec.lr or self.bench.task.lr
        self.tokens = 0
        self.curve: list[tuple[int, float]] = []
        self.times_s: list[float] = []
        """Virtual, of the curve's points."""
        self._progress = progress
        self._began_s = 0.0
        self._eval_s = 0.0

    def lr(self, step: int) -> float:
        """Of a step that begins now and is the learner's own `step`-th."""
        spec = self.spec
        if spec.schedule_by == "tokens":
            step = round(spec.steps * self.tokens / spec.tokens)
        return lr_at(step, spec.steps, peak=self.peak_lr, schedule=spec.schedule)

    def count(self, tokens: int) -> None:
        """So many tokens more were processed."""
        self.tokens += tokens
        due = self.spec.tokens * (len(self.curve) + 1) / self.spec.evals
        if self.tokens >= due and len(self.curve) < self.spec.evals - 1:
            self.evaluate()
        if self._progress is not None:
            self._progress(min(self.tokens, self.spec.tokens), self.spec.tokens)

    def evaluate(self, *, last: bool = False) -> None:
        """One point of the curve. While nobody has a model to hand out there is none, unless it is the last."""
        self.workshop.wait_for_all()
        began_s = time.perf_counter()
        loss = self.published_loss()
        self._eval_s += time.perf_counter() - began_s
        if loss is not None or last:
            self.curve.append((self.tokens, loss if loss is not None and math.isfinite(loss) else math.inf))
            self.times_s.append(round(self.passed_s(), 3))

    @abstractmethod
    def passed_s(self) -> float:
        """Virtual time since the first step began."""

    @abstractmethod
    def published_loss(self) -> float | None:
        """Of the model that would be handed out now, if there is somebody who would."""

    @abstractmethod
    def run(self) -> LabResult:
        """Train to the end of the budget."""

    def start_clock(self) -> None:
        self.workshop.wait_for_all()
        torch.manual_seed(self.spec.seed)  # for what a user's model draws, such as dropout
        self._began_s = time.perf_counter()

    def result(self, virtual_s: float, facts: dict[str, Any]) -> LabResult:
        self.workshop.wait_for_all()
        wall_s = time.perf_counter() - self._began_s
        trained_s = wall_s - self._eval_s
        return LabResult(
            spec=self.spec,
            loss=self.curve[-1][1],
            curve=tuple(self.curve),
            tokens=self.tokens,
            virtual_s=virtual_s,
            wall_s=wall_s,
            tokens_per_s=self.tokens / trained_s,
            facts={
                **facts,
                "times_s": self.times_s,
                "parameters": sum(value.numel() for value in self.bench.template.parameters()),
                "data": getattr(self.bench.task, "fingerprint", ""),
                "eval_s": self._eval_s,
                **_machine(self.workshop.device),
            },
        )


class LocalRun(_Run):
    """Data-parallel and single: one model. Data-parallel takes everybody's batch at once, which is what an average of
    the gradients is."""

    def run(self) -> LabResult:
        self.workshop.ready(self.bench, 0, self.spec)
        replica = self._replica = self.workshop.replica(self.bench, 0)
        self.start_clock()
        steps = -(-self.spec.tokens // self.spec.tokens_per_step)
        for step in range(steps):
            replica.launch(self.lr(step))
            self.count(self.spec.tokens_per_step)
        self.evaluate(last=True)
        return self.result(self.passed_s(), {"train_loss": float(replica.losses) / steps})

    def passed_s(self) -> float:
        specs = self.scenario.learners(self.spec.learners, self.spec.tokens_per_step)
        return self.tokens // self.spec.tokens_per_step * max(spec.step_ns for spec in specs) / 1e9

    def published_loss(self) -> float:
        return self.bench.evaluate(self._replica.model)


class ClusterRun(_Run):
    """Learners around a syncer, as in production."""

    def __init__(self, spec: LabSpec, workshop: Workshop, progress: Progress | None) -> None:
        super().__init__(spec, workshop, progress)
        self.tensors = describe(self.bench.template, {})
        self.threads = workshop.threads
        self.steps: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._first_ns = -1
        self._last_ns = 0
        self.world = self._build_world()

    def _build_world(self) -> LabWorld:
        spec = self.spec
        config = spec.config()
        if not config.fragments:
            parameters = sum(elements_of(tensor) for tensor in self.tensors)
            config = replace(config, fragments=fragments_for(parameters, config.sync_every))
        learners = self.scenario.learners(spec.learners, spec.tokens_per_step)
        names = [f"learner-{index}" for index in range(spec.learners)]
        seconds = self.scenario.seconds(spec.learners, spec.steps)
        faults = self.scenario.faults(names, seconds, spec.seed)
        durable = any(fault.target == "syncer" for fault in faults)
        scenario = Scenario(
            seed=spec.seed,
            config=config,
            learners=learners,
            seconds=max(seconds, 0.001),
            faults=faults,
            inline=False,
            durability="commit" if durable else "none",
        )
        return LabWorld(scenario, self, self.tensors, guests=self.scenario.guests(spec.tokens_per_step))

    def replica(self, name: str) -> Replica:
        if name not in self._places:
            place = self._places[name] = len(self._places)
            self.workshop.ready(self.bench, place, self.spec)
        return self.workshop.replica(self.bench, self._places[name])

    def beginning(self) -> None:
        """A step begins somewhere."""
        if self._first_ns < 0:
            self._first_ns = self.world.now_ns

    def stepped(self, name: str, tokens: int) -> None:
        self._last_ns = self.world.now_ns
        self.steps[name] = self.steps.get(name, 0) + 1
        self.count(tokens)

    def published_loss(self) -> float | None:
        syncer = self.world.lab_syncer()
        if syncer is None:
            return None
        self.bench.initialise(self.bench.template, self.spec.seed)
        parameters = TorchParameters(self.bench.template)
        parameters.lay_out(syncer.state.layout)
        for fragment, arrays in enumerate(syncer.state.fragments):
            parameters.write(fragment, parameters.stage(fragment, partial(into, arrays.theta)))
        return self.bench.evaluate(self.bench.template)

    def passed_s(self) -> float:
        return (self.world.now_ns - self._first_ns) / 1e9

    def run(self) -> LabResult:
        for name in (*self.world.scenario.names, *self.scenario.guests(self.spec.tokens_per_step)):
            self.replica(name)
        self.start_clock()
        self.world.begin()
        self._train()
        self._close()
        self.evaluate(last=True)
        return self.result((self._last_ns - self._first_ns) / 1e9, self._facts())

    def _train(self) -> None:
        """Until the budget is spent."""
        world = self.world
        glance_ns = min(spec.step_ns for spec in world.specs.values())
        while self.tokens < self.spec.tokens:
            world.clock.run(world.now_ns + glance_ns)
            self._check()
            if world.now_ns - self._last_ns > STANDSTILL_NS:
                raise LabError(
                    f"nobody has taken a step for a virtual hour, after {self.tokens} of {self.spec.tokens} tokens; "
                    f"look at the scenario's {self._suspect()}"
                )

    def _suspect(self) -> str:
        """What may hold everybody up: links too thin for the protocol's messages, or faults."""
        specs = self.world.specs.values()
        rates = [rate for spec in specs for rate in (spec.up_bits_per_s, spec.down_bits_per_s) if rate]
        if not rates:
            return "faults"
        size = 4 * sum(value.numel() for value in self.bench.template.parameters())
        return (
            f"links (the slowest carries {min(rates) / 1e6:g} Mbit/s, on which the {size:,} bytes of the parameters "
            f"alone take {8 * size / min(rates):,.0f} s) and at its faults"
        )

    def _check(self) -> None:
        if self.world.broken:
            found = "; ".join(str(violation) for violation in self.world.checkers.violations[:3])
            raise LabError(f"an invariant of the protocol is broken: {found}; please report it with this spec")

    def _close(self) -> None:
        """Everybody leaves; the syncer merges what they handed over."""
        world = self.world
        world.finishing = True
        for host in world.learners.values():
            if not host.dead:
                host.call(host.close, "the run is over")
        until_ns = world.now_ns + CLOSE_NS
        while world.now_ns < until_ns and not all(host.dead for host in world.learners.values()):
            world.clock.run(world.now_ns + 100_000_000)
            self._check()
        syncer = world.syncer
        if syncer is not None:
            syncer.call(syncer.hear, fx.StopRequested("the run is over"))
            while world.now_ns < until_ns and not syncer.finished:
                world.clock.run(world.now_ns + 100_000_000)
                self._check()

    def _facts(self) -> dict[str, Any]:
        world = self.world
        replicas = [self.replica(name) for name in self.steps]
        began = sum(replica.position for replica in replicas)
        happened = [fault for fault in world.scenario.faults if fault.at_s * 1e9 <= self._last_ns]
        able_s = dict.fromkeys(self.steps, 0.0)
        for host in world.hosts:
            host.count_able()
            able_s[host.name] = able_s.get(host.name, 0.0) + host.able_ns / 1e9
        return {
            "steps": dict(self.steps),
            "train_loss": sum(float(replica.losses) for replica in replicas) / max(1, began),
            "able_s": able_s,
            "machine_events": world.events,
            "faults": sum(fault.kind != "join" for fault in happened),
            "rho": fmean(world.rhos) if world.rhos else math.nan,
            **world.carried_bytes(),
            **world.sent.facts(),
            **world.counts(),
        }


def _machine(device: torch.device) -> dict[str, str]:
    """Where this was. The same spec ends a fraction of a percent away on another kind of processor."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            named = next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        return f"{platform.machine()}, {named}"[:200]
    return platform.machine()
