"""A JAX loop (optax) with Atoll: the four lines marked "Atoll" are all that was added.

atoll run --learners 2 -- python examples/train_jax.py --steps 200
"""

import argparse
import os
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax

import atoll.jax  # Atoll, line 1

CONTEXT, WIDTH, HIDDEN = 32, 32, 512


def loss_of(params: dict[str, jax.Array], windows: jax.Array) -> jax.Array:
    embedded = params["embed"][windows[:, :-1]].reshape(len(windows), -1)
    guesses = jax.nn.gelu(embedded @ params["up"]) @ params["down"]
    return optax.softmax_cross_entropy_with_integer_labels(guesses, windows[:, -1]).mean()


optimizer = optax.adamw(3e-3)


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(params: dict[str, jax.Array], opt_state: optax.OptState, windows: jax.Array):
    loss, gradients = jax.value_and_grad(loss_of)(params, windows)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("[a-b]*.py")))
    data = np.lib.stride_tricks.sliding_window_view(np.frombuffer(text, np.uint8), CONTEXT + 1).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"embed": (256, WIDTH), "up": (CONTEXT * WIDTH, HIDDEN), "down": (HIDDEN, 256)}
    params = {name: 0.05 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}

    with atoll.jax.Learner(params, optimizer.init(params)) as learner:  # Atoll, line 2
        params, opt_state = learner.params, learner.opt_state  # Atoll, line 3
        dice = np.random.default_rng(1 + learner.rank)  # each learner reads data of its own
        while learner.step_count < steps and not learner.done:
            batch = data[dice.integers(len(data) - 4096, size=512)]
            params, opt_state, loss = train_step(params, opt_state, batch)
            params = learner.step(params, opt_state, tokens=len(batch), loss=loss)  # Atoll, line 4
        held_out = loss_of(learner.published(), data[-2048:])
        print(f"published model: held-out loss {held_out:.3f} nats per byte")


if __name__ == "__main__":
    main()
