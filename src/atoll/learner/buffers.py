"""Buffers that training changes, such as BatchNorm's running statistics: each learner's own, and kept with its inner
state.

They are not synced (`tensors` says why), so the syncer's model does not have them. With a run folder they are in the
learner's checkpoints: one that is started again goes on with its own, and `atoll export --buffers` takes those of one
learner, or the mean of all, out of there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from atoll.errors import StoreError
from atoll.learner.checkpoint import CheckpointFile
from atoll.learner.checkpoint_sets import find_sets
from atoll.learner.inner import Captured, common_extras, keep_extras, restore
from atoll.learner.inner_state import BUFFERS
from atoll.learner.names import named_buffers

MEAN = "mean"


def local_statistics(model: nn.Module) -> str:
    """What to say of a model whose layers count statistics of what they see; nothing if there are none."""
    counting = [m for m in model.modules() if isinstance(m, _NormBase) and m.training and m.running_mean is not None]
    if not counting:
        return ""
    return (
        f"the running statistics of {type(counting[0]).__name__} stay each learner's own and are not in the run's "
        "model.safetensors; `atoll export RUN --to FILE --buffers mean` writes it with those of the learners"
    )


class KeptBuffers:
    """The persistent buffers of a model that training changes, as something to keep in checkpoints. Those that never
    change (masks, tables of positions) may be large, and every process makes them itself."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first = {name: (buffer, _writes(buffer)) for name, buffer, _ in named_buffers(model)}

    def state_dict(self) -> dict[str, Any]:
        return {name: buffer for name, buffer, module in named_buffers(self._model) if self._kept(name, buffer, module)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        own = {name: buffer for name, buffer, _ in named_buffers(self._model)}
        with torch.no_grad():
            for name, value in state_dict.items():
                if name in own and own[name].shape == value.shape:
                    own[name].copy_(value)

    def _kept(self, name: str, buffer: torch.Tensor, module: nn.Module) -> bool:
        if type(buffer) is not torch.Tensor or buffer.layout is not torch.strided or buffer.is_meta:
            return False
        # A CUDA graph writes without being counted, so layers that are known to write are taken at their word.
        first, writes = self._first.get(name, (None, 0))
        return isinstance(module, _NormBase) or buffer is not first or _writes(buffer) != writes


def _writes(buffer: torch.Tensor) -> int:
    """How often something was written into a tensor, as torch counts it; tensors made for inference are not counted."""
    return -1 if buffer.is_inference() else buffer._version


# ---------------------------------------------------------------- for `atoll export`


class _Sink:
    """Takes what a checkpoint holds, without a model."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.state = state_dict


def read_buffers(folder: Path, whose: str, run: str | None) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """The buffers of the learner `whose` in a run's folder, or the mean of everybody's. In words: whose."""
    names = sorted(entry.name for entry in folder.glob("learners/*") if entry.is_dir())
    chosen = names if whose == MEAN else [whose]
    found, told = [], []
    for name in chosen:
        captured, problems = _newest(folder, name, run)
        told += [f"buffers: {problem}" for problem in problems]
        if captured is not None:
            sink = _Sink()
            restore(captured, None, {BUFFERS: sink}, rng=False)
            found.append(sink.state)
            told.append(f"buffers are those of {captured.about.learner} at its step {captured.about.step}")
    if not found:
        raise StoreError(
            f"{folder} holds no checkpoint of {'any learner' if whose == MEAN else whose} in which buffers could be "
            f"(there are those of: {', '.join(names) or 'nobody'}); learners write them with a run folder, every "
            "minute and when they leave"
        )
    return {name: _as_array(name, [state.get(name) for state in found]) for name in found[0]}, told


def _newest(folder: Path, name: str, run: str | None) -> tuple[Captured | None, list[str]]:
    """A learner's newest checkpoint. Of one with several ranks: the buffers of the first that has each."""
    captured, problems = CheckpointFile(folder, name).load(run=run)
    key = (captured.about.generation, captured.about.step) if captured is not None else (-1, -1)
    for one in find_sets(folder, name, run):
        if one.size > 1 and one.key[:2] > key:
            problem = one.damaged(range(one.size))
            if not problem:
                parts = one.open()
                return keep_extras(common_extras(parts, merged=BUFFERS)[0], parts[0].about), problems
            problems.append(problem)
    return captured, problems


def _as_array(name: str, values: list[Any]) -> NDArray[Any]:
    """The mean; whole numbers are rounded to one."""
    first = values[0]
    if any(value is None or value.shape != first.shape or value.dtype != first.dtype for value in values):
        raise StoreError(f"the learners keep {name!r} in different forms, or not all of them do; take one learner's")
    mean = first
    if len(values) > 1:
        mean = torch.stack([value.double() for value in values]).mean(0)
        mean = (mean if first.is_floating_point() else mean.round()).to(first.dtype)
    if first.dtype is torch.bfloat16:  # which numpy does not have by itself
        mean = mean.view(torch.int16)
    array: NDArray[Any] = mean.numpy()
    return array if first.dtype is not torch.bfloat16 else array.view(ml_dtypes.bfloat16)
