"""The seam to frameworks: models that are no torch modules, and islands of several processes, in real runs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from cluster import WAIT_S, SyncerThread
from numpy.typing import NDArray
from torch import nn

from atoll import ConfigError
from atoll.core.config import SyncConfig
from atoll.core.layout import Layout
from atoll.core.messages import TensorSpec
from atoll.learner import Learner, ParametersLearner
from atoll.learner.parameters import F32, MakeValues, Snapshot

STEPS = 12
SHAPES = {"short.weight": (24, 32), "one.weight": (40, 30), "two.bias": (70,)}


def config(**changes: Any) -> SyncConfig:
    """One learner waits for each merge, so that a run gives the same bits every time."""
    values = {"sync_every": 4, "fragments": 3, "overlap": 0, "quorum": "all", "learners_expected": 1}
    return SyncConfig.from_dict({**values, "grace_cap_steps": 0.0, **changes})


def first(name: str) -> F32:
    size = int(np.prod(SHAPES[name]))
    values: F32 = (np.sin(np.arange(size)) / 8).astype(np.float32).reshape(SHAPES[name])
    return values


def inner_step(array: NDArray[Any], step: int) -> None:
    """Training, the same in every framework: bf16 arrays are rounded once."""
    array[...] = array.astype(np.float32) * np.float32(0.97) + np.float32(0.01 * (step % 5))


# ---------------------------------------------------------------- numpy behind the seam


class Copied:
    def __init__(self, flat: F32) -> None:
        self._flat = flat

    def values(self) -> F32:
        return self._flat


class NumpyParameters:
    """A model that is a dict of arrays."""

    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        self.arrays = arrays
        self.specs = tuple(TensorSpec(name, a.shape, str(a.dtype), "rda") for name, a in arrays.items())
        self._flat = [array.reshape(-1) for array in arrays.values()]  # views

    def lay_out(self, layout: Layout) -> None:
        self._fragments = layout.fragments

    def read(self, fragment: int) -> Snapshot:
        flat = np.zeros(self._fragments[fragment].size, np.float32)
        for own, place in self._pieces(fragment, flat):
            place[:] = own
        return Copied(flat)

    def release(self, snapshot: Snapshot) -> None: ...
    def stage(self, fragment: int, make: MakeValues) -> F32:
        return make(None)

    def write(self, fragment: int, staged: F32) -> None:
        for own, values in self._pieces(fragment, staged):
            own[:] = values

    def add(self, fragment: int, staged: F32) -> None:
        for own, values in self._pieces(fragment, staged):
            own[:] = own.astype(np.float32) + values

    def mix(self, fragment: int, staged: F32, alpha: float) -> None:
        for own, values in self._pieces(fragment, staged):
            theta = own.astype(np.float32)
            own[:] = theta - (theta - values) * np.float32(1.0 - alpha)

    def as_kept(self, fragment: int, theta: F32) -> F32:
        kept = theta.copy()
        for own, values in self._pieces(fragment, kept):
            values[:] = values.astype(own.dtype)
        return kept

    def save(self) -> list[NDArray[Any]]:
        return [array.copy() for array in self._flat]

    def restore(self, saved: list[NDArray[Any]]) -> None:
        for array, values in zip(self._flat, saved, strict=True):
            array[:] = values

    def _pieces(self, fragment: int, flat: F32) -> Iterator[tuple[NDArray[Any], F32]]:
        for piece in self._fragments[fragment].slices:
            yield self._flat[piece.tensor][piece.start : piece.stop], flat[piece.offset : piece.offset + piece.size]


def numpy_model() -> NumpyParameters:
    arrays: dict[str, NDArray[Any]] = {name: first(name) for name in SHAPES}
    arrays["short.weight"] = arrays["short.weight"].astype(ml_dtypes.bfloat16)
    return NumpyParameters(arrays)


class TorchModel(nn.Module):
    """The same model in torch."""

    def __init__(self) -> None:
        super().__init__()
        for name in SHAPES:
            owner = nn.Module()
            owner.register_parameter(name.split(".")[1], nn.Parameter(torch.from_numpy(first(name))))
            self.add_module(name.split(".")[0], owner)
        self.short.to(torch.bfloat16)

    def step(self, step: int) -> None:
        for parameter in self.parameters():
            array = parameter.detach().float().numpy()
            inner_step(array, step)
            parameter.data.copy_(torch.from_numpy(array))


@pytest.fixture
def syncers() -> Iterator[list[SyncerThread]]:
    started: list[SyncerThread] = []
    yield started
    for syncer in started:
        syncer.stop()


def versions(syncer: SyncerThread) -> list[tuple[int, int]]:
    return syncer.ask(lambda shell: [(t.version, t.checksum) for t in shell.machine.book.tracks])  # type: ignore[no-any-return]


def train(syncer: SyncerThread, parameters: NumpyParameters, **options: Any) -> tuple[list[tuple[int, int]], list[F32]]:
    """A run of numpy arrays: the syncer's versions at its end, and the learner's own parameters."""
    with ParametersLearner(parameters, address=syncer.address, learner_id="l", **options) as learner:
        for step in range(STEPS):
            for array in parameters.arrays.values():
                inner_step(array, step)
            learner.step(tokens=7, loss=0.5)
        seen = versions(syncer)
        own = [array.astype(np.float32) for array in parameters.arrays.values()]
    return seen, own


@pytest.mark.parametrize("adopt_rule", ["rebase", "overwrite", "mix:0.5"])
def test_a_model_of_numpy_arrays_gives_the_bits_of_the_same_model_in_torch(
    adopt_rule: str, syncers: list[SyncerThread]
) -> None:
    syncers += [SyncerThread(config(adopt=adopt_rule)) for _ in range(2)]
    seen, own = train(syncers[0], numpy_model())
    model = TorchModel()
    modes = dict.fromkeys(SHAPES, "rda")
    with Learner(model, address=syncers[1].address, learner_id="l", merge_modes=modes) as learner:
        for step in range(STEPS):
            model.step(step)
            learner.step(tokens=7, loss=0.5)
        assert versions(syncers[1]) == seen
        assert all(version >= 2 for version, _ in seen)
        for array, parameter in zip(own, model.parameters(), strict=True):
            assert np.array_equal(array, parameter.detach().float().numpy())


def test_learners_of_two_frameworks_train_one_model(syncers: list[SyncerThread]) -> None:
    syncers.append(SyncerThread(config(overlap=2, learners_expected=2)))
    parameters, model = numpy_model(), TorchModel()
    modes = dict.fromkeys(SHAPES, "rda")
    with (
        ParametersLearner(parameters, address=syncers[0].address, learner_id="arrays") as arrays,
        Learner(model, address=syncers[0].address, learner_id="module", merge_modes=modes) as module,
    ):
        deadline = time.monotonic() + WAIT_S
        while min(arrays.versions() + module.versions()) < 3:
            assert time.monotonic() < deadline
            for array in parameters.arrays.values():
                inner_step(array, arrays.step_count)
            model.step(module.step_count)
            arrays.step(tokens=7)
            module.step(tokens=5)
            time.sleep(0.01)
        with arrays.global_params():
            published = {name: array.astype(np.float32) for name, array in parameters.arrays.items()}
        assert all(np.isfinite(array).all() for array in published.values())
    syncers[0].check_ledger()


def test_published_parameters_are_swapped_in_and_the_own_ones_back(syncers: list[SyncerThread]) -> None:
    syncers.append(SyncerThread(config()))
    parameters = numpy_model()
    with ParametersLearner(parameters, address=syncers[0].address, learner_id="l") as learner:
        for array in parameters.arrays.values():
            inner_step(array, 0)
        own = parameters.save()
        with learner.global_params():
            assert np.array_equal(parameters.arrays["one.weight"], first("one.weight"))
        assert all(np.array_equal(a, b) for a, b in zip(own, parameters.save(), strict=True))


def test_a_learner_without_inner_state_has_no_place_for_extras(syncers: list[SyncerThread]) -> None:
    syncers.append(SyncerThread(config()))
    learner = ParametersLearner(numpy_model(), address=syncers[0].address, learner_id="l")
    with learner, pytest.raises(ConfigError, match="make it with `inner`"):
        learner.keep("schedule", torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


@pytest.mark.parametrize(
    "asked", ["atoll.learner.ParametersLearner", "atoll.instruments.sim.world", "atoll.instruments.sim.arrays"]
)
def test_a_learner_of_another_framework_and_the_simulator_need_no_torch(asked: str) -> None:
    script = f"import pkgutil, sys; pkgutil.resolve_name({asked!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
