"""One learner's model and inner optimizer on the device, and one training step of it as a thing that can be queued.

On a GPU the step (forward, backward, clipping, optimizer) is captured into a graph, so that a step of a small model
costs one launch. Every replica has a stream of its own: what it computes, copies out and adopts is in order there, and
several replicas run side by side. Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from atoll.errors import ConfigError
from atoll.instruments.lab.spec import LabSpec
from atoll.instruments.lab.task import Batch, Feeder, Task
from atoll.zoo import CombinedOptimizer, autocast, clip_grad_norm, create_state, make_optimizer, set_lr

RECOMPILED_MAX = 64
"""Batch sizes of one process: beyond its limit (8 by default) torch.compile falls back to slow code, with a warning."""
WARM_UPS = 3
"""Steps before a capture: libraries choose their algorithms and allocate their workspaces in the first ones."""


class Optimizer(Protocol):
    @property
    def state(self) -> Any: ...

    def step(self) -> Any: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{name!r} is no device; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"the lab runs on CPUs and CUDA devices, not on {name!r}; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device that this PyTorch can use; take --device cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there are {torch.cuda.device_count()} CUDA devices here, counted from 0; not {name}")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _compile(function: Any) -> Any:
    """Compiled for each batch size by itself: shapes that are left open would make the speed and the rounding of a run
    depend on the runs before it."""
    import torch._dynamo.config as dynamo

    for name in ("recompile_limit", "cache_size_limit"):  # the second is the first one's older name
        if hasattr(dynamo, name):
            setattr(dynamo, name, RECOMPILED_MAX)
    return torch.compile(function, dynamic=False)


class Bench:
    """What the replicas of a run share: the task, the device, and the compiled step. It serves any number of runs that
    differ in nothing that a captured step contains."""

    def __init__(self, spec: LabSpec, task: Task, device: torch.device, *, compiles: bool = False) -> None:
        self.task = task
        self.device = device
        self.optimizer = spec.optimizer
        self.size = spec.learner_batch
        self.template = self.task.build(0).to(device)
        """Never trained: it lends its structure to compiled steps, and its memory to evaluations."""
        if any(True for _ in self.template.buffers()):
            raise ConfigError(
                "the model has buffers, which stay local to each learner, so there is no published model to evaluate; "
                "use a model without buffers (LayerNorm instead of BatchNorm)"
            )
        self._compiled: Any = _compile(self._loss_of_parameters) if compiles else None
        self._initial: tuple[int, list[Tensor]] = (-1, [])
        self._held_out = [tuple(part.to(device) for part in batch) for batch in self.task.held_out()]
        if not sum(len(batch[0]) for batch in self._held_out if batch):
            raise ConfigError(f"the task {spec.task} holds nothing out to evaluate on; held_out() must give batches")

    def _loss_of_parameters(self, parameters: dict[str, Tensor], batch: Batch) -> Tensor:
        def model(*inputs: Tensor) -> Tensor:
            return cast(Tensor, functional_call(self.template, parameters, inputs))

        with autocast(self.device):
            return self.task.loss(model, batch)

    @property
    def compiles(self) -> bool:
        return self._compiled is not None

    def compile_no_more(self) -> None:
        """Go on without: this machine cannot compile."""
        self._compiled = None

    @torch.no_grad()
    def initialise(self, model: nn.Module, seed: int) -> None:
        """Give the model the parameters of this seed, frozen ones too."""
        if self._initial[0] != seed:
            fresh = self.task.build(seed)
            self._initial = (seed, [value.detach().to(self.device) for value in fresh.parameters()])
        for parameter, value in zip(model.parameters(), self._initial[1], strict=True):
            parameter.copy_(value)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self._compiled is not None:
            return cast(Tensor, self._compiled(dict(model.named_parameters()), batch))
        with autocast(self.device):
            return self.task.loss(model, batch)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Mean loss on the held-out data."""
        was_training = model.training
        model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in self._held_out:
            with autocast(self.device):
                total += self.task.loss(model, batch).double() * len(batch[0])
        model.train(was_training)
        return float(total) / sum(len(batch[0]) for batch in self._held_out)


class Replica:
    """One learner's model, inner optimizer and data. `begin` comes before anything else."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._cuda = bench.device.type == "cuda"
        self._queue: Any = torch.cuda.Stream(bench.device) if self._cuda else None  # type: ignore[no-untyped-call]
        self.position = 0
        """Batches taken so far."""
        with self.queue():
            self.losses = torch.zeros((), dtype=torch.float64, device=bench.device)
            """Sum of the losses of all steps, on the device."""
            self.model = bench.task.build(0).to(bench.device)
            made = make_optimizer(self.model, bench.optimizer, bench.task.lr, capturable=self._cuda)
            create_state(made)
            self.optimizer = cast(Optimizer, made)
        self._feeder: Feeder | None = None
        self._inputs: Batch = ()
        self._graph: Any = None
        self._saved: list[Tensor] = []

    def begin(self, spec: LabSpec, stream: int) -> None:
        """As new: parameters of the seed, an optimizer without memory, data from the start."""
        with self.queue(), torch.no_grad():
            self.bench.initialise(self.model, spec.seed)
            self.losses.zero_()
            self._feeder = self.bench.task.feeder(stream, self.bench.size, spec.seed, self.bench.device)
        self.forget_inner()
        self.position = 0
        self._saved = []

    @contextlib.contextmanager
    def queue(self) -> Iterator[None]:
        """Everything about this replica's tensors happens in here."""
        if self._queue is None:
            yield
        else:
            with torch.cuda.stream(self._queue):
                yield

    def get_ready(self, spec: LabSpec, stream: int) -> None:
        """Capture the step ahead of the run, and begin."""
        if self._graph is None and self._cuda:
            self.begin(spec, stream)
            self.launch(0.0)
        self.begin(spec, stream)

    def launch(self, lr: float) -> None:
        """Queue one training step with the next batch."""
        assert self._feeder is not None
        with self.queue():
            self._put(self._feeder.load(self.position))
            self.position += 1
            set_lr(cast(Any, self.optimizer), lr)
            if self._graph is None and self._cuda:
                self._capture()
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()

    def _put(self, batch: Batch) -> None:
        """A captured step finds its batch always in the same memory."""
        if not self._cuda:
            self._inputs = batch
            return
        if not self._inputs:
            like = torch.contiguous_format
            self._inputs = tuple(torch.empty_like(part, device=self.bench.device, memory_format=like) for part in batch)
        for target, source in zip(self._inputs, batch, strict=True):
            target.copy_(source, non_blocking=True)

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.bench.loss(self.model, self._inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm(self.model.parameters())
        self.optimizer.step()
        self.losses += loss.detach()

    def _capture(self) -> None:
        """Record a step. The steps before it leave no trace."""
        before = [parameter.detach().clone() for parameter in self.model.parameters()]
        losses = self.losses.clone()
        for _ in range(WARM_UPS):
            self._step()
        self.forget_inner()
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, stream=self._queue, capture_error_mode="thread_local"):
            self._step()
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), before, strict=True):
                parameter.copy_(value)
        self.losses.copy_(losses)
        self._graph = graph

    # ------------------------------------------------------------ inner state

    def _inner(self) -> list[Tensor]:
        """The optimizer's tensors, in a fixed order."""
        parts = self.optimizer.optimizers if isinstance(self.optimizer, CombinedOptimizer) else [self.optimizer]
        return [
            value
            for part in parts
            for state in part.state.values()
            for _, value in sorted(state.items())
            if isinstance(value, Tensor)
        ]

    @torch.no_grad()
    def forget_inner(self) -> None:
        """The optimizer begins anew."""
        with self.queue():
            for tensor in self._inner():
                tensor.zero_()

    @torch.no_grad()
    def save_inner(self) -> None:
        """Keep the optimizer's state, as a checkpoint does."""
        with self.queue():
            inner = self._inner()
            if len(self._saved) != len(inner):
                self._saved = [tensor.clone() for tensor in inner]
            else:
                for kept, tensor in zip(self._saved, inner, strict=True):
                    kept.copy_(tensor)

    @torch.no_grad()
    def restore_inner(self) -> bool:
        """Go back to the last checkpoint; False if there is none."""
        return self._take(self._saved)

    def take_inner(self, peer: Replica) -> bool:
        """Go on with a peer's state."""
        if self._queue is None:
            return self._take(peer._inner())
        self._queue.wait_stream(peer._queue)
        taken = self._take(peer._inner())
        peer._queue.wait_stream(self._queue)
        return taken

    @torch.no_grad()
    def _take(self, source: list[Tensor]) -> bool:
        inner = self._inner()
        if not source:
            return False
        assert len(inner) == len(source), "replicas of one bench have one optimizer"
        with self.queue():
            for tensor, kept in zip(inner, source, strict=True):
                tensor.copy_(kept)
        return True
