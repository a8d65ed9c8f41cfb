"""Arrays that are cut over several JAX processes inside of each learner, Atoll between the learners.

    atoll run --learners 2 --ranks 2 -- python examples/train_jax_ranks.py --steps 100

Every process makes the Learner and calls it in the same way. None has the whole model: each sends what it has.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from train_jax import CONTEXT, HIDDEN, WIDTH, loss_of, optimizer

import atoll.jax

CUTS = {"embed": PartitionSpec(), "up": PartitionSpec(None, "ranks"), "down": PartitionSpec("ranks", None)}
SHAPES = {"embed": (256, WIDTH), "up": (CONTEXT * WIDTH, HIDDEN), "down": (HIDDEN, 256)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    atoll.jax.initialize()  # jax.distributed, as torchrun says
    mesh = jax.make_mesh((jax.device_count(),), ("ranks",), axis_types=(AxisType.Auto,))
    cuts = {name: NamedSharding(mesh, cut) for name, cut in CUTS.items()}
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("[a-b]*.py")))
    data = np.lib.stride_tricks.sliding_window_view(np.frombuffer(text, np.uint8), CONTEXT + 1).astype(np.int32)

    @partial(jax.jit, out_shardings=cuts)
    def begin(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(SHAPES))
        return {n: 0.05 * jax.random.normal(k, s) for k, (n, s) in zip(keys, SHAPES.items(), strict=True)}

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(cuts, None, None))
    def train_step(params: dict[str, jax.Array], opt_state: optax.OptState, windows: jax.Array):
        loss, gradients = jax.value_and_grad(loss_of)(params, windows)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = begin(jax.random.key(0))
    with atoll.jax.Learner(params, jax.jit(optimizer.init)(params)) as learner:
        params, opt_state = learner.params, learner.opt_state
        dice = np.random.default_rng(1 + learner.rank)  # the same in all processes: each is given its part of the batch
        while learner.step_count < parser.parse_args().steps and not learner.done:
            batch = data[dice.integers(len(data) - 4096, size=512)]
            windows = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("ranks")))
            params, opt_state, loss = train_step(params, opt_state, windows)
            params = learner.step(params, opt_state, tokens=len(batch) // learner.island_size, loss=loss)
        held_out = float(jax.jit(loss_of)(learner.published(), data[-2048:]))
        print(f"{learner.learner_id}, process {learner.island_rank}: held-out loss {held_out:.3f}, published model")


if __name__ == "__main__":
    main()
