"""A run of a learner whose arrays are cut over four devices of one process. Prints JSON.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python sharded_run.py
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cluster import SyncerThread
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import atoll.jax
from atoll.core import SyncConfig

STEPS = 24


def values() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "both": 0.1 * jax.random.normal(keys[0], (64, 32)),
        "one": 0.1 * jax.random.normal(keys[1], (32, 64)),
        "whole": 0.1 * jax.random.normal(keys[2], (64,)),
    }


def cut() -> dict[str, Any]:
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))
    places = {"both": PartitionSpec("x", "y"), "one": PartitionSpec(None, "x"), "whole": PartitionSpec()}
    return {name: NamedSharding(mesh, place) for name, place in places.items()}


optimizer = optax.adam(0.01)


@partial(jax.jit, donate_argnums=(0, 1))
def train(params: Any, state: Any, x: Any) -> Any:
    def loss_of(p: Any) -> Any:
        return jnp.square(jnp.tanh(x @ p["both"]) @ p["one"] + p["whole"] - x).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def learn(address: str, name: str, params: Any, told: dict[str, Any]) -> None:
    with atoll.jax.Learner(params, optimizer.init(params), address=address, learner_id=name) as learner:
        params, state = learner.params, learner.opt_state
        kept = True
        for step in range(STEPS):
            x = jax.random.normal(jax.random.key(step), (16, 64))
            params, state, loss = train(params, state, x)
            before = {leaf: array.sharding for leaf, array in params.items()}
            params = learner.step(params, state, tokens=16, loss=loss)
            kept = kept and all(
                params[leaf].sharding.is_equivalent_to(was, params[leaf].ndim) for leaf, was in before.items()
            )
            jax.block_until_ready(params)
    told[name] = {
        "versions": learner.versions(),
        "kept": kept,
        "state": sorted({len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)}),
    }


def main() -> None:
    syncer = SyncerThread(SyncConfig(sync_every=4, fragments=2, learners_expected=1, codec_up="fp32"))
    told: dict[str, Any] = {}
    learn(syncer.address, "cut", jax.device_put(values(), cut()), told)
    members = syncer.ask(lambda shell: {n: all(m.merged) for n, m in shell.machine.membership.members.items()})
    syncer.check_ledger()
    syncer.stop()
    ours, theirs = (_contribution(params) for params in (jax.device_put(values(), cut()), values()))
    print(json.dumps({"told": told, "merged": members, "same_bits": ours == theirs, "devices": len(jax.devices())}))


def _contribution(params: Any) -> list[bytes]:
    """What each fragment's snapshot is, to the bit."""
    from atoll.core import build_layout
    from atoll.jax.parameters import JaxParameters

    parameters = JaxParameters(params)
    parameters.lay_out(build_layout(parameters.specs, 2))
    return [np.asarray(parameters.read(fragment).values()).tobytes() for fragment in range(2)]


if __name__ == "__main__":
    main()
