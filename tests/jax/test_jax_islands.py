"""JAX learners of several devices, and of both frameworks in one run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import WAIT_S, SyncerThread, spawn
from torch import nn

jax = pytest.importorskip("jax", reason="pip install 'atoll[jax]'")
optax = pytest.importorskip("optax")
jnp = jax.numpy

import atoll.jax  # noqa: E402
from atoll.core import SyncConfig  # noqa: E402
from atoll.jax import Transposed  # noqa: E402
from atoll.learner import Learner  # noqa: E402

HERE = Path(__file__).parent


def run_script(name: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    source = (HERE / name).read_text()
    return spawn(source, *arguments, env={"JAX_PLATFORMS": "cpu", **environment, "PYTHONPATH": _paths()})


def _paths() -> str:
    return os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_a_learner_whose_arrays_are_cut_over_devices_is_one_of_the_run() -> None:
    script = run_script("sharded_run.py", XLA_FLAGS="--xla_force_host_platform_device_count=4")
    out, _ = script.communicate(timeout=2 * WAIT_S)
    assert script.returncode == 0, out
    told = json.loads(out.strip().splitlines()[-1])
    assert told["devices"] == 4
    assert told["same_bits"], "a cut island contributes the same bits as one process with the same parameters"
    assert told["merged"] == {"cut": True}
    assert told["told"]["cut"]["kept"], "adopted versions are cut as the parameters were"
    assert 4 in told["told"]["cut"]["state"] and min(told["told"]["cut"]["versions"]) >= 1


# ---------------------------------------------------------------- one small GPT, two frameworks

WIDTH, HEADS, CONTEXT, TOKENS = 16, 2, 8, 32


class TorchGPT(nn.Module):
    """One block; pre-norm, causal attention, untied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(TOKENS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place.weight
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).split(WIDTH, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return self.head(x + self.down(nn.functional.gelu(self.up(self.norm2(x)))))


def jax_gpt(params: Any, tokens: Any) -> Any:
    def norm(x: Any, at: str) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return (
            centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * params[at]["scale"]
            + params[at]["bias"]
        )

    def dense(x: Any, at: str) -> Any:
        return x @ params[at]["kernel"] + params[at]["bias"]

    x = params["embed"]["embedding"][tokens] + params["place"]["embedding"]
    heads = [y.reshape(*y.shape[:-1], HEADS, -1) for y in jnp.split(dense(norm(x, "norm"), "qkv"), 3, axis=-1)]
    scores = jnp.einsum("bqhd,bkhd->bhqk", *heads[:2]) / math.sqrt(WIDTH // HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool)), scores, -jnp.inf)
    attended = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads[2])
    x = x + dense(attended.reshape(*x.shape), "out")
    x = x + dense(jax.nn.gelu(dense(norm(x, "norm2"), "up"), approximate=False), "down")
    return x @ params["head"]["kernel"]


KINDS = {"weight": ("kernel", Transposed), "bias": ("bias", str)}


def names_of(model: nn.Module) -> dict[str, Any]:
    """Paths of the JAX tree to names of the torch module, in the module's order."""
    names: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        layer, kind = name.split(".")
        if kind == "weight" and layer in ("embed", "place"):
            names[f"{layer}.embedding"] = name
        elif kind == "weight" and parameter.ndim == 1:
            names[f"{layer}.scale"] = name
        else:
            leaf, spell = KINDS[kind]
            names[f"{layer}.{leaf}"] = spell(name)
    return names


def tree_of(model: nn.Module) -> dict[str, Any]:
    weights = {name: jnp.asarray(p.detach().numpy().copy()) for name, p in model.named_parameters()}
    tree: dict[str, Any] = {}
    for path, name in names_of(model).items():
        layer, leaf = path.split(".")
        value = weights[name.name].T if isinstance(name, Transposed) else weights[name]
        tree.setdefault(layer, {})[leaf] = value
    return tree


def batch_of(seed: int) -> np.ndarray[Any, Any]:
    """Counting upwards from anywhere: easy to learn."""
    starts = np.random.default_rng(seed).integers(0, TOKENS, size=(16, 1))
    return (starts + np.arange(CONTEXT + 1)) % TOKENS


def gpt() -> TorchGPT:
    torch.manual_seed(0)
    return TorchGPT()


STEPS = 40


def torch_learner(address: str, name: str, seed: int, told: dict[str, Any]) -> None:
    model = gpt()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with Learner(model, optimizer, address=address, learner_id=name) as learner:
        for step in range(STEPS):
            batch = torch.from_numpy(batch_of(1000 * seed + step))
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.step(tokens=batch[:, 1:].numel(), loss=loss)
            time.sleep(0.01)
    told[name] = float(loss)


def jax_learner(address: str, name: str, seed: int, told: dict[str, Any]) -> None:
    optimizer = optax.adam(3e-3)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train(params: Any, state: Any, batch: Any) -> Any:
        def loss_of(p: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(jax_gpt(p, batch[:, :-1]), batch[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = tree_of(gpt())
    learner = atoll.jax.Learner(
        params,
        optimizer.init(params),
        names=names_of(gpt()),
        merge_modes={"place.weight": "mean"},  # torch sees that it is an embedding; here its name does not tell
        address=address,
        learner_id=name,
    )
    with learner:
        params, state = learner.params, learner.opt_state
        for step in range(STEPS):
            params, state, loss = train(params, state, batch_of(1000 * seed + step))
            params = learner.step(params, state, tokens=16 * CONTEXT, loss=loss)
            time.sleep(0.01)
    told[name] = float(loss)


def test_the_two_gpts_are_the_same_model() -> None:
    model, batch = gpt(), batch_of(0)[:, :-1]
    with torch.no_grad():
        theirs = model(torch.from_numpy(batch)).numpy()
    assert np.allclose(np.asarray(jax_gpt(tree_of(model), batch)), theirs, atol=1e-5)


def test_two_torch_and_two_jax_learners_train_one_gpt(tmp_path: Path) -> None:
    syncer = SyncerThread(SyncConfig(sync_every=4, fragments=3, learners_expected=4), folder=tmp_path)
    told: dict[str, Any] = {}
    kinds = {"torch-0": torch_learner, "torch-1": torch_learner, "jax-0": jax_learner, "jax-1": jax_learner}
    threads = [
        threading.Thread(target=learn, args=(syncer.address, name, seed, told), daemon=True)
        for seed, (name, learn) in enumerate(kinds.items())
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        assert set(told) == set(kinds)
        assert max(told.values()) < math.log(TOKENS) - 0.3, "all of them learn it"
        merged = syncer.ask(lambda shell: {n: all(m.merged) for n, m in shell.machine.membership.members.items()})
        assert merged == dict.fromkeys(kinds, True), "every fragment has contributions of all four"
        stats = syncer.check_ledger()
        assert stats["tokens_processed"] == 4 * STEPS * 16 * CONTEXT
    finally:
        syncer.stop()
