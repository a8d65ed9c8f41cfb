"""One learner of two JAX processes, or the same alone. Prints JSON.

python two_processes.py ADDRESS RANK SIZE PORT STEPS FOLDER KIND
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import atoll.jax

SPECS = {"rows": PartitionSpec("x", "y"), "columns": PartitionSpec(None, "x"), "whole": PartitionSpec()}
SHAPES = {"rows": (64, 48), "columns": (48, 64), "whole": (64,)}
optimizer = optax.adam(0.01)


def placed(value: Any, spec: PartitionSpec, mesh: Any) -> Any:
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


@partial(jax.jit, donate_argnums=(0, 1))
def train(params: Any, state: Any, x: Any) -> Any:
    def loss_of(p: Any) -> Any:
        return jnp.square(jnp.tanh(x @ p["rows"]) @ p["columns"] + p["whole"] - x).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


@jax.jit
def moved(params: Any) -> Any:
    """The same change of every element however it is cut."""
    return jax.tree.map(lambda p: p + jnp.float32(0.25) * jnp.sign(p) + jnp.float32(0.125), params)


@jax.jit
def numbers_of(state: Any) -> Any:
    """One for each leaf, which depends on every bit of it, and not on how it is cut."""

    def number(leaf: Any) -> Any:
        bits = jax.lax.bitcast_convert_type(leaf, jnp.int32).ravel()
        return (bits * (2 * jnp.arange(bits.size) + 1)).sum()

    return jax.tree.map(number, state)


def main() -> None:
    address, rank, size, port, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
    folder, kind = sys.argv[6] or None, sys.argv[7]
    if size > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=size, process_id=rank, initialization_timeout=60)
    mesh = jax.make_mesh((size, len(jax.local_devices())), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))
    dice = np.random.default_rng(0)
    values = {name: dice.normal(size=shape).astype(np.float32) * 0.1 for name, shape in SHAPES.items()}
    params = {name: placed(values[name], SPECS[name], mesh) for name in SHAPES}
    if kind == "alone":
        params["whole"] = jnp.asarray(values["whole"])
    if kind == "differ" and rank:
        params["other"] = params.pop("rows")
    if kind == "absent" and rank:
        time.sleep(1000)
    state = jax.jit(optimizer.init)(params) if kind != "alone" else None
    given = {"island_timeout_s": 5.0} if kind in ("absent", "idle") else {}
    learner = atoll.jax.Learner(params, state, address=address, run_folder=folder, checkpoint_every_s=0.2, **given)
    with learner:
        params, state = learner.params, learner.opt_state
        first, began = learner.step_count, numbers_of(state)
        for step in range(first, steps):
            if kind == "recut":
                params["rows"] = placed(values["rows"], PartitionSpec(None, "x"), mesh)
            if kind == "raises" and rank and step == first + 4:
                raise ValueError("a defect of the script")
            if kind == "idle" and rank:
                time.sleep(1000)
            if kind in ("moved", "recut", "idle"):
                params = learner.step(moved(params), tokens=8)
                continue
            x = placed(np.random.default_rng(step).normal(size=(16, 64)).astype(np.float32), PartitionSpec("x"), mesh)
            params, state, loss = train(params, state, x)
            params = learner.step(params, state, tokens=8, loss=loss)
        published = learner.published()
        told = {"first": first, "step": learner.step_count, "size": learner.island_size, "rank": learner.island_rank}
        told |= {"generation": learner.generation, "versions": learner.versions()}
        told["here"] = {
            name: sorted({str(shard.index): _digest(shard.data) for shard in leaf.addressable_shards}.items())
            for name, leaf in published.items()
        }
        parts = [np.asarray(leaf.addressable_shards[0].data).ravel() for leaf in jax.tree.leaves(state)]
        told |= {"began": _texts(began), "ended": _texts(numbers_of(state))}
        told["state"] = _digest(np.concatenate(parts))
    print(json.dumps(told), flush=True)


def _texts(numbers: Any) -> list[int]:
    return [int(number) for number in jax.tree.leaves(numbers)]


def _digest(values: Any) -> str:
    return hashlib.sha256(np.asarray(values).tobytes()).hexdigest()[:12]


if __name__ == "__main__":
    main()
