"""JAX learners: pytrees behind the seam, alone and beside torch learners in real runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import WAIT_S, SyncerThread, TrainingThread
from torch import nn

jax = pytest.importorskip("jax", reason="pip install 'atoll[jax]'")
optax = pytest.importorskip("optax")
jnp = jax.numpy

import atoll.jax  # noqa: E402
from atoll.core import SyncConfig, build_layout  # noqa: E402
from atoll.errors import ConfigError, LayoutError, LocalProtocolError, PayloadError, RefusedError  # noqa: E402
from atoll.jax.checkpoints import FILE, PackedPart, find_sets, pack, unpack, write  # noqa: E402
from atoll.jax.parameters import JaxParameters, Transposed  # noqa: E402
from atoll.learner import Learner, TorchParameters, into  # noqa: E402

TORCH_NAMES = {
    "first.kernel": Transposed("0.weight"),
    "first.bias": "0.bias",
    "second.kernel": Transposed("2.weight"),
    "second.bias": "2.bias",
}


def torch_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 32))


def tree_of(model: nn.Module, dtype: Any = jnp.float32) -> dict[str, dict[str, Any]]:
    """The same model as flax would have it: kernels are (in, out), and the tree's order is the alphabet's."""
    weights = {name: jnp.asarray(p.detach().numpy(), dtype) for name, p in model.named_parameters()}
    return {
        "first": {"kernel": weights["0.weight"].T, "bias": weights["0.bias"]},
        "second": {"kernel": weights["2.weight"].T, "bias": weights["2.bias"]},
    }


def apply(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    return hidden @ params["second"]["kernel"] + params["second"]["bias"]


def config(**changes: Any) -> SyncConfig:
    return SyncConfig.from_dict({"sync_every": 4, "fragments": 3, "learners_expected": 2, **changes})


@pytest.fixture
def parts() -> Iterator[list[Any]]:
    started: list[Any] = []
    yield started
    for part in reversed(started):
        part.stop()


def trainer(optimizer: Any) -> Any:
    @partial(jax.jit, donate_argnums=(0, 1))  # as people do it: yesterday's memory is today's
    def train(params: Any, state: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: jnp.square(apply(p, x) - x).mean())(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return train


# ---------------------------------------------------------------- the seam


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tree_reads_writes_adds_and_mixes_as_torch_does(dtype: Any) -> None:
    model = torch_model().to(torch.bfloat16 if dtype == jnp.bfloat16 else torch.float32)
    ours = JaxParameters(tree_of(model.float(), dtype), names=TORCH_NAMES)
    model.to(torch.bfloat16 if dtype == jnp.bfloat16 else torch.float32)
    theirs = TorchParameters(model)
    assert ours.specs == theirs.specs
    layout = build_layout(ours.specs, 3)
    ours.lay_out(layout)
    theirs.lay_out(layout)
    dice = np.random.default_rng(0)
    for fragment, shape in enumerate(layout.fragments):
        values = dice.standard_normal(shape.size).astype(np.float32)
        assert np.array_equal(ours.as_kept(fragment, values), theirs.as_kept(fragment, values))
        for change in ("write", "add"):
            for parameters in (ours, theirs):
                getattr(parameters, change)(fragment, parameters.stage(fragment, partial(into, values)))
            assert np.array_equal(ours.read(fragment).values(), theirs.read(fragment).values()), change
        for parameters in (ours, theirs):
            parameters.mix(fragment, parameters.stage(fragment, partial(into, values)), 0.25)
        close = 1e-6 if dtype == jnp.float32 else 4e-2
        assert np.allclose(ours.read(fragment).values(), theirs.read(fragment).values(), atol=close)


def test_a_snapshot_survives_the_donation_of_what_it_was_taken_of() -> None:
    parameters = JaxParameters(tree_of(torch_model()))
    parameters.lay_out(build_layout(parameters.specs, 1))
    before = parameters.read(0).values().copy()
    snapshot = parameters.read(0)
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(parameters.tree)
    assert np.array_equal(snapshot.values(), before)


def test_what_cannot_be_synced_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"'count' is int32"):
        JaxParameters({"count": jnp.zeros(3, jnp.int32)})
    with pytest.raises(LayoutError, match="no JAX array"):
        JaxParameters({"rate": 0.1})
    with pytest.raises(LayoutError, match="no leaves"):
        JaxParameters({})
    with pytest.raises(ConfigError, match="nothing for 'b'"):
        JaxParameters({"a": jnp.zeros(3), "b": jnp.zeros(3)}, names={"a": "x"})
    with pytest.raises(ConfigError, match="'c', which is no leaf"):
        JaxParameters({"a": jnp.zeros(3)}, names={"a": "x", "c": "y"})
    with pytest.raises(ConfigError, match="only matrices"):
        JaxParameters({"a": jnp.zeros(3)}, names=Transposed)
    with pytest.raises(ConfigError, match="merge_modes"):
        JaxParameters({"a": jnp.zeros(3)}, merge_modes={"b": "mean"})
    parameters = JaxParameters({"a": jnp.zeros(3)})
    with pytest.raises(LayoutError, match="structure"):
        parameters.tree = {"b": jnp.zeros(3)}
    with pytest.raises(LayoutError, match="shapes"):
        parameters.tree = {"a": jnp.zeros(4)}


def test_embeddings_merge_by_mean_and_scalars_have_one_value() -> None:
    specs = JaxParameters({"embed": {"embedding": jnp.zeros((4, 2))}, "scale": jnp.float32(1.0)}).specs
    assert [(spec.name, spec.shape, spec.merge) for spec in specs] == [
        ("embed.embedding", (4, 2), "mean"),
        ("scale", (1,), "rda"),
    ]


def test_an_optimizers_state_comes_back_and_another_ones_does_not_fit() -> None:
    params = tree_of(torch_model(), jnp.bfloat16)
    state = optax.adamw(1e-3).init(params)
    state = jax.tree.map(lambda x: x + 3, state)
    blob = pack(state, {"step": 7})
    assert PackedPart.of_bytes(blob).about["step"] == 7
    back = unpack([PackedPart.of_bytes(blob)], optax.adamw(1e-3).init(params))
    assert all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True))
    with pytest.raises(PayloadError, match="another optimizer"):
        unpack([PackedPart.of_bytes(blob)], optax.sgd(1e-3, momentum=0.9).init(params))
    for damaged in (b"", blob[:100], b"\xff" * 64):
        with pytest.raises(PayloadError, match="cannot be read"):
            PackedPart.of_bytes(damaged)


def test_processes_whose_last_checkpoints_are_of_different_steps_have_the_one_before_in_common(tmp_path: Path) -> None:
    state = optax.adam(1e-3).init(tree_of(torch_model()))
    files = [tmp_path / f"rank-{rank}-of-2" / FILE for rank in range(2)]
    for step, writers in ((5, files), (6, files[:1])):  # the second one died while it wrote
        for file in writers:
            write(file, pack(state, {"run": "r", "generation": 3, "step": step}))
    assert [one.key for one in find_sets(tmp_path, "r")] == [(3, 5, 2)]
    assert not find_sets(tmp_path, "another run")
    files[1].write_bytes(files[1].read_bytes()[:100])
    assert not find_sets(tmp_path, "r"), "one of them cannot be read"


# ---------------------------------------------------------------- real runs


def test_torch_and_jax_learners_train_one_model(parts: list[Any], tmp_path: Path) -> None:
    syncer = SyncerThread(config(), folder=tmp_path)
    parts.append(syncer)
    beside = TrainingThread(syncer.address, "torch", model=torch_model())
    parts.append(beside)
    optimizer = optax.sgd(0.01)
    params = tree_of(torch_model())
    state = optimizer.init(params)
    train = trainer(optimizer)
    learner = atoll.jax.Learner(params, state, names=TORCH_NAMES, address=syncer.address, learner_id="jax")
    with learner:
        params, state = learner.params, learner.opt_state
        deadline, step = time.monotonic() + WAIT_S, 0
        while min(learner.versions()) < 5:
            x = jax.random.normal(jax.random.key(step), (8, 32))
            params, state, loss = train(params, state, x)
            params = learner.step(params, state, tokens=32, loss=loss)
            time.sleep(0.01)
            step += 1
            assert time.monotonic() < deadline
        published = learner.published()
        again = learner.published()
        assert all(bool((a == b).all()) for a, b in zip(*map(jax.tree.leaves, (published, again)), strict=True))
    beside.stop()
    assert beside.error is None
    stats = syncer.check_ledger()
    assert stats["tokens_merged"] > 0
    merged = syncer.ask(lambda shell: shell.machine.membership.members["jax"].merged)
    assert all(merged), "every fragment has contributions of the JAX learner"


def test_a_jax_learner_that_is_started_again_goes_on_with_its_optimizer(parts: list[Any], tmp_path: Path) -> None:
    syncer = SyncerThread(config(learners_expected=1))
    parts.append(syncer)
    optimizer = optax.adam(0.01)
    train = trainer(optimizer)
    where = {"address": syncer.address, "learner_id": "jax", "run_folder": tmp_path}

    class Position:
        at = 0

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    def fresh() -> tuple[Any, Any]:
        params = tree_of(torch_model())
        return params, optimizer.init(params)

    position = Position()
    with atoll.jax.Learner(*fresh(), **where) as learner:
        learner.keep("position", position)
        params, state = learner.params, learner.opt_state
        for step in range(10):
            params, state, loss = train(params, state, jax.random.normal(jax.random.key(step), (8, 32)))
            position.at += 1
            params = learner.step(params, state, tokens=32, loss=loss)
        assert learner.rank == 0 and learner.warmup_factor == 1.0
        moments = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    again = Position()
    with atoll.jax.Learner(*fresh(), **where) as learner:
        learner.keep("position", again)
        assert learner.generation == 2 and learner.step_count == 10 and again.at == 10
        restored = [np.asarray(leaf) for leaf in jax.tree.leaves(learner.opt_state)]
        assert all(np.array_equal(a, b) for a, b in zip(moments, restored, strict=True))


def test_a_learner_without_optimizer_state_says_so_and_another_model_is_refused(parts: list[Any]) -> None:
    syncer = SyncerThread(config(learners_expected=1))
    parts.append(syncer)
    with atoll.jax.Learner(tree_of(torch_model()), address=syncer.address, learner_id="jax") as learner:
        with pytest.raises(LocalProtocolError, match="without opt_state"):
            learner.step(learner.params, {"m": jnp.zeros(3)}, tokens=1)
        params = learner.step(learner.params, tokens=1, loss=0.5)
        assert jax.tree.structure(params) == jax.tree.structure(learner.params)
        with pytest.raises(RefusedError, match="tensor"):
            Learner(torch_model(), address=syncer.address, learner_id="other").start()


def test_arrays_that_are_cut_over_devices_keep_their_cut(parts: list[Any]) -> None:
    if len(jax.devices()) < 2:
        pytest.skip("one device: XLA_FLAGS=--xla_force_host_platform_device_count=4 gives more")
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    parameters = JaxParameters({"w": jax.device_put(jnp.arange(1024.0).reshape(32, 32), cut)})
    parameters.lay_out(build_layout(parameters.specs, 2))
    for fragment in range(2):
        values = parameters.read(fragment).values()
        parameters.add(fragment, parameters.stage(fragment, partial(into, values)))
    assert parameters.tree["w"].sharding == cut
    assert np.array_equal(np.asarray(parameters.tree["w"]), 2 * np.arange(1024.0).reshape(32, 32))
