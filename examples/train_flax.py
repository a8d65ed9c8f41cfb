"""A flax (nnx) loop with Atoll: the four lines marked "Atoll" are all that was added.

atoll run --learners 2 -- python examples/train_flax.py --steps 200
"""

import argparse
import os
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import atoll.jax  # Atoll, line 1

CONTEXT = 32
optimizer = optax.adamw(3e-3)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.up = nnx.Linear(CONTEXT * 32, 512, rngs=rngs)
        self.down = nnx.Linear(512, 256, rngs=rngs)

    def __call__(self, context: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(self.embed(context).reshape(len(context), -1))))


def loss_of(graph: nnx.GraphDef, params: nnx.State, windows: jax.Array) -> jax.Array:
    guesses = nnx.merge(graph, params)(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(guesses, windows[:, -1]).mean()


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def train_step(graph: nnx.GraphDef, params: nnx.State, opt_state: optax.OptState, windows: jax.Array):
    loss, gradients = jax.value_and_grad(loss_of, argnums=1)(graph, params, windows)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps, files = parser.parse_args().steps, sorted(Path(os.__file__).parent.glob("[a-b]*.py"))
    text = b"".join(file.read_bytes() for file in files)
    data = np.lib.stride_tricks.sliding_window_view(np.frombuffer(text, np.uint8), CONTEXT + 1).astype(np.int32)
    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
    with atoll.jax.Learner(params, optimizer.init(params)) as learner:  # Atoll, line 2
        params, opt_state = learner.params, learner.opt_state  # Atoll, line 3
        dice = np.random.default_rng(1 + learner.rank)  # each learner reads data of its own
        while learner.step_count < steps and not learner.done:
            batch = data[dice.integers(len(data) - 4096, size=512)]
            params, opt_state, loss = train_step(graph, params, opt_state, batch)
            params = learner.step(params, opt_state, tokens=len(batch), loss=loss)  # Atoll, line 4
        print(f"published model: held-out loss {loss_of(graph, learner.published(), data[-2048:]):.3f}")
