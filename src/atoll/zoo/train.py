"""The training loops of the four methods. They share everything but the way in which parameters or gradients meet.

decoupled, diloco   atoll.Learner: the three lines that a user would write
dp                  DistributedDataParallel over gloo: one gradient average per step
single              nobody to wait for
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import atoll.data
from atoll.errors import ConfigError
from atoll.learner import EXIT_NOT_HANDED_OVER, Learner
from atoll.observe import EventWriter, LearnerEvaluated, LearnerFinished, LearnerJoined, LearnerStarted
from atoll.zoo.corpus import Batches, Corpus, load_corpus
from atoll.zoo.evaluate import autocast, eval_totals, held_out_batches, save_model
from atoll.zoo.gpt import GPT, build_model, next_byte_loss
from atoll.zoo.optim import TrainingOptimizer, clip_grad_norm, lr_at, make_optimizer, set_lr
from atoll.zoo.pacing import SlowDown, StepReporter
from atoll.zoo.settings import RANKS_FILE, WorkerConfig, WorkerSeat
from atoll.zoo.stop import StopSignal

CHUNK_STEPS = 8
"""Steps of one leased chunk: what the loss of a learner repeats at most, and some seconds between two leases."""
DP_WAIT_S_MAX = 300
"""A rank that waits this long for the others gives up. Above the start of a large model on a busy machine."""


class StallClock:
    """Measures how long a backward pass waited for the other ranks' gradients.

    DDP calls the hook when a bucket's gradients are ready here; the buckets before the last travel while backward still
    computes. So the wait that is not hidden runs from the last call of the hook to the return of `backward`. On a GPU,
    where kernels run behind the Python thread, this is a lower bound. Without DDP nobody calls the hook: no stall.
    """

    def __init__(self) -> None:
        self.stall_ns = 0
        """Wait of the last backward pass."""
        self._ready_ns: int | None = None

    def average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The hook: DDP's own averaging, and a note of the time."""
        self._ready_ns = time.monotonic_ns()
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]

    def backward_done(self) -> None:
        self.stall_ns = 0 if self._ready_ns is None else time.monotonic_ns() - self._ready_ns


@dataclass
class Workbench:
    """What every method starts from: the same initial parameters on every learner, and data of its own."""

    config: WorkerConfig
    seat: WorkerSeat
    device: torch.device
    model: GPT
    optimizer: TrainingOptimizer
    corpus: Corpus
    held_out: list[tuple[Tensor, Tensor]]
    slow: SlowDown

    @classmethod
    def build(cls, config: WorkerConfig, seat: WorkerSeat) -> Workbench:
        if config.threads:
            torch.set_num_threads(config.threads)
        device = pick_device(config.device, seat.rank)
        corpus = load_corpus(config.corpus)
        corpus.check(1 if config.method == "single" else config.learners, config.seq)
        held_out = held_out_batches(corpus, batch=config.batch, seq=config.seq, batches_max=config.eval_batches)
        model = build_model(config.model, config.seed).to(device)
        optimizer = make_optimizer(model, config.optimizer, config.peak_lr)
        slow = SlowDown(seat.slow_file, step_s_min=config.step_ms / 1000.0)
        return cls(config, seat, device, model, optimizer, corpus, held_out, slow)

    def batches(self) -> Batches:
        """This process's data: a shard of its own (dp), or all of it (single)."""
        shards = 1 if self.config.method == "single" else self.config.learners
        return Batches(
            self.corpus.shard(self.seat.rank, shards),
            batch=self.config.batch,
            seq=self.config.seq,
            seed=self.config.seed,
        )

    def leased_batches(self, learner: Learner) -> Iterator[tuple[Tensor, Tensor]]:
        """The run's data, as it is leased: each chunk is some steps of random windows of the whole corpus, the same
        wherever it is read. A learner that dies or leaves gives up a chunk and not a shard."""
        config = self.config
        for chunk in atoll.data.chunks(learner):
            windows = Batches(self.corpus.shard(chunk.number, 1), batch=config.batch, seq=config.seq, seed=config.seed)
            for step in range(chunk.start, CHUNK_STEPS):
                if chunk.revoked:
                    break
                chunk.reached(step + 1)
                yield windows.at(step)

    def train_step(self, model: nn.Module, pair: tuple[Tensor, Tensor], *, lr: float, stall: StallClock) -> Tensor:
        """Forward, backward, clip, update. `model` is the bench's own or a wrapper of it. Gives the loss, detached."""
        set_lr(self.optimizer, lr)
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device):
            loss = next_byte_loss(model, pair[0].to(self.device), pair[1].to(self.device))
        loss.backward()  # type: ignore[no-untyped-call]
        stall.backward_done()
        clip_grad_norm(self.model.parameters())
        self.optimizer.step()
        return loss.detach()

    def lr(self, step: int, total: int) -> float:
        """Learning rate of a step of a run of `total` steps."""
        config = self.config
        return lr_at(step, total, peak=config.peak_lr, schedule=config.schedule)

    def eval_due(self, step: int) -> bool:
        return self.config.eval_every > 0 and step % self.config.eval_every == 0


def pick_device(name: str, rank: int) -> torch.device:
    """The device of learner `rank`: GPUs are dealt out in turn."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device that this PyTorch can use; take --device cpu or auto")
    return torch.device(f"cuda:{rank % max(1, torch.cuda.device_count())}" if name == "cuda" else name)


# ---------------------------------------------------------------- decoupled and diloco


def train_with_atoll(bench: Workbench, stop: StopSignal) -> None:
    """Train through `atoll.Learner` until the run's budget is reached.

    A learner alone may do the whole budget (the others may have died), so that is its own limit. Address, id and token
    are the Learner's own defaults: what the launcher put into the environment.
    """
    config = bench.config
    # A CombinedOptimizer is no torch Optimizer by descent, but has the `state` that the Learner looks at.
    with Learner(bench.model, cast(torch.optim.Optimizer, bench.optimizer)) as learner:
        stop.arm()
        no_stall = StallClock()
        batches = bench.leased_batches(learner)

        def evaluate() -> None:
            with learner.global_params():
                total, count = eval_totals(bench.model, bench.held_out, bench.device)
            learner.events.emit(
                LearnerEvaluated(bench.seat.learner, learner.step_count, total / count, learner.tokens_seen_run)
            )

        evaluates = bench.seat.rank == config.eval_rank
        while not learner.done and not stop.requested() and learner.step_count < config.learners * config.steps:
            began = time.perf_counter()
            lr = bench.lr(learner.step_count, config.steps)
            loss = bench.train_step(bench.model, next(batches), lr=lr, stall=no_stall)
            bench.slow.after_step(time.perf_counter() - began)
            learner.step(tokens=config.tokens_per_step, loss=loss)
            if evaluates and bench.eval_due(learner.step_count):
                evaluate()
        if stop.requested():
            # The launcher reads the reason: this learner was told to leave, and the run is not over.
            learner.close(reason=stop.name)
            if not learner.handed_over:
                raise SystemExit(EXIT_NOT_HANDED_OVER)
        elif evaluates:
            evaluate()


# ---------------------------------------------------------------- dp and single


def train_single(bench: Workbench, stop: StopSignal) -> None:
    """One process, learners x steps steps of the same batch: the tokens of the other methods, one after another."""
    with _events(bench) as events:
        events.emit(LearnerJoined(bench.seat.learner, generation=1, step=0, wait_ns=0))
        _train_locally(bench, stop, events, bench.model, StallClock())


def train_dp(bench: Workbench, stop: StopSignal) -> None:
    """DistributedDataParallel over gloo. The ranks, all on this machine, meet at a file: a port that is free when it is
    chosen may be taken when it is used."""
    with _events(bench) as events:
        began_ns = time.monotonic_ns()
        world = bench.config.learners
        bench.seat.run_folder.mkdir(parents=True, exist_ok=True)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(bench.seat.run_folder / RANKS_FILE), world),  # type: ignore[attr-defined]
            rank=bench.seat.rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=DP_WAIT_S_MAX),
        )
        try:
            stall = StallClock()
            wrapped = DistributedDataParallel(bench.model)
            # A lambda, because DDP refuses a hook whose annotations are strings, which is what they are in this module.
            wrapped.register_comm_hook(None, lambda state, bucket: stall.average(bucket))
            wait_ns = time.monotonic_ns() - began_ns
            events.emit(LearnerJoined(bench.seat.learner, generation=1, step=0, wait_ns=wait_ns))
            _train_locally(bench, stop, events, wrapped, stall)
        finally:
            dist.destroy_process_group()


def _train_locally(
    bench: Workbench, stop: StopSignal, events: EventWriter, model: nn.Module, stall: StallClock
) -> None:
    """The loop of `dp` and `single`."""
    config = bench.config
    world, total = (config.learners, config.steps) if config.method == "dp" else (1, config.learners * config.steps)
    meter = StepReporter(bench.seat.learner, events.emit)
    batches = bench.batches()
    stop.arm()
    try:
        while meter.step_count < total and not stop.requested():
            began = time.perf_counter()
            lr = bench.lr(meter.step_count, total)
            loss = bench.train_step(model, next(batches), lr=lr, stall=stall)
            bench.slow.after_step(time.perf_counter() - began - stall.stall_ns / 1e9)
            meter.step(tokens=config.tokens_per_step, loss=loss, stall_ns=stall.stall_ns)
            if bench.eval_due(meter.step_count) or meter.step_count == total:
                _evaluate(bench, events, meter, world)
    except RuntimeError:
        if not stop.requested():
            raise
        # Else another rank was told to stop as well, and hung up first. The parameters are those of the last step.
    meter.flush()
    if bench.seat.rank == 0:
        save_model(bench.model, bench.seat.run_folder / "model.safetensors")
    reason = "done" if meter.step_count == total else "terminated"
    events.emit(LearnerFinished(bench.seat.learner, meter.step_count, meter.tokens_total, reason))


def _evaluate(bench: Workbench, events: EventWriter, meter: StepReporter, world: int) -> None:
    """Evaluate the model; with dp each rank takes its share of the windows, so that none waits for rank 0 to do it."""
    began_ns = time.monotonic_ns()
    rank = bench.seat.rank if world > 1 else 0
    sums = torch.tensor(eval_totals(bench.model, bench.held_out[rank::world], bench.device), dtype=torch.float64)
    if world > 1:
        dist.all_reduce(sums)
    if rank == 0:
        tokens_seen = world * meter.tokens_total
        events.emit(LearnerEvaluated(bench.seat.learner, meter.step_count, float(sums[0] / sums[1]), tokens_seen))
    meter.overhead(time.monotonic_ns() - began_ns)


@contextmanager
def _events(bench: Workbench) -> Iterator[EventWriter]:
    """The learner's own event file, opened with LearnerStarted."""
    path = bench.seat.run_folder / "events" / f"learner-{bench.seat.learner}.jsonl"
    with EventWriter(path) as events:
        events.emit(LearnerStarted(bench.seat.learner, os.getpid()))
        yield events


TRAINERS = {"decoupled": train_with_atoll, "diloco": train_with_atoll, "dp": train_dp, "single": train_single}
