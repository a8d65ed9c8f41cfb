"""What the lab trains: a model, its loss and its data. The reference GPT on bytes, or a user's own.

A user's task is a function `make(spec: LabSpec) -> Task`, named MODULE:FUNCTION in the spec. Its data must be a pure
function of (stream, position): every learner is a stream of its own, and data-parallel is stream 0 with a larger batch.
"""

from __future__ import annotations

import importlib
import traceback
from typing import Protocol, cast

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from atoll.errors import AtollError, ConfigError
from atoll.instruments.lab.spec import BUILT_IN, LOCAL_METHODS, LabSpec
from atoll.zoo import Batches, Corpus, Shard, build_model, held_out_batches, load_corpus, next_byte_loss, own_lr

Batch = tuple[Tensor, ...]

EVAL_BATCH_TOKENS = 65_536
"""Tokens of one evaluation batch: enough to fill a device, and half a GB of logits of the reference GPT."""


class Model(Protocol):
    """Whatever can be called like the module: the module itself, or one with other parameters in its place."""

    def __call__(self, *inputs: Tensor) -> Tensor: ...


class Feeder(Protocol):
    """The batches of one stream."""

    def load(self, position: int) -> Batch:
        """The batch at this position, on the device, in order with what is queued on the current stream."""


class Task(Protocol):
    lr: float
    """Peak learning rate if the spec does not say one."""

    def build(self, seed: int) -> nn.Module:
        """The model, with parameters that depend on the seed alone."""

    def loss(self, model: Model, batch: Batch) -> Tensor:
        """Mean loss of a batch. It calls `model` and changes nothing."""

    def feeder(self, stream: int, size: int, seed: int, device: torch.device) -> Feeder:
        """Batches of `size` sequences. Another stream or seed gives other data."""

    def held_out(self) -> list[Batch]:
        """What is evaluated, always the same, on the CPU; batches of equal weight but for the last."""


def load_task(spec: LabSpec) -> Task:
    if spec.task in BUILT_IN:
        return ByteTask(spec)
    module, _, name = spec.task.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"cannot load the task {spec.task!r}: {error}; give MODULE:FUNCTION that Python can import from here"
        ) from None
    try:
        task = make(spec)
    except AtollError:
        raise
    except Exception as error:  # a user's code may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"the task {spec.task!r} could not be made: {type(error).__name__}: {error} ({frame.filename}, line "
            f"{frame.lineno}); it is called with the LabSpec and must give an object like "
            "atoll.instruments.lab.task.Task"
        ) from error
    missing = [name for name in ("lr", "build", "loss", "feeder", "held_out") if not hasattr(task, name)]
    if missing:
        raise ConfigError(
            f"{spec.task} gave {type(task).__name__}, which has no {', '.join(missing)}; it must give an object like "
            "atoll.instruments.lab.task.Task (docs/LAB.md has an example)"
        )
    return cast(Task, task)


class ByteFeeder:
    """Random windows of a corpus, as `zoo.Batches` draws them."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def load(self, position: int) -> Batch:
        return self._batches.at(position)


class DeviceByteFeeder:
    """The same windows, cut on the device: only where they start comes from the CPU."""

    def __init__(self, batches: Batches, corpus: Tensor, seq: int) -> None:
        self._batches = batches
        self._corpus = corpus
        self._offsets = torch.arange(seq + 1, device=corpus.device)

    def load(self, position: int) -> Batch:
        starts = torch.from_numpy(self._batches.starts(position)).pin_memory()
        places = starts.to(self._corpus.device, non_blocking=True)[:, None] + self._offsets
        windows = self._corpus[places].long()
        return windows[:, :-1], windows[:, 1:]


class ByteTask:
    """The reference GPT on the bytes of a corpus. Every learner draws windows of all of it; or, as task `domains`, of a
    stretch of its own. Neighbouring files of a corpus are alike, distant ones are not."""

    def __init__(self, spec: LabSpec) -> None:
        self.lr = own_lr(spec.model, spec.optimizer)
        self._spec = spec
        self._corpus: Corpus = load_corpus(spec.corpus)
        self._corpus.check(1, spec.seq)
        self.fingerprint = f"{len(self._corpus.train)} bytes, {xxhash.xxh3_64_hexdigest(self._corpus.train.data)}"
        """Kept with every result: `stdlib` and `python` are not the same text on every machine."""
        self._on_device: dict[torch.device, Tensor] = {}

    def build(self, seed: int) -> nn.Module:
        return build_model(self._spec.model, seed)

    def loss(self, model: Model, batch: Batch) -> Tensor:
        return next_byte_loss(cast(nn.Module, model), batch[0], batch[1])

    def feeder(self, stream: int, size: int, seed: int, device: torch.device) -> Feeder:
        text = self._stretch(stream)
        batches = Batches(Shard(self._corpus.train[text], stream), batch=size, seq=self._spec.seq, seed=seed)
        if device.type == "cpu":
            return ByteFeeder(batches)
        if device not in self._on_device:
            self._on_device[device] = torch.from_numpy(np.ascontiguousarray(self._corpus.train)).to(device)
        return DeviceByteFeeder(batches, self._on_device[device][text], self._spec.seq)

    def _stretch(self, stream: int) -> slice:
        if self._spec.task != "domains" or self._spec.method in LOCAL_METHODS:
            return slice(None)
        length = len(self._corpus.train) // self._spec.learners
        begin = stream % self._spec.learners * length
        return slice(begin, begin + length)

    def held_out(self) -> list[Batch]:
        size = max(1, EVAL_BATCH_TOKENS // self._spec.seq)
        size = min(size, self._spec.eval_windows)
        count = -(-self._spec.eval_windows // size)
        return list(held_out_batches(self._corpus, batch=size, seq=self._spec.seq, batches_max=count))
