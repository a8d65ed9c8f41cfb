"""Four kinds of learners in one run, one model: FSDP2 on two ranks, DDP on two ranks, one process, and JAX.

    atoll run --learners 4 -- python examples/train_mixed.py --steps 100

Learner 0 becomes train_fsdp.py, learner 1 train_ddp.py, learner 2 train_plain.py. Learner 3 is below: the same model in
JAX, with a table that says which of its arrays is which tensor. On GPUs the others are started in the same way.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
KINDS = ((*TORCHRUN, "train_fsdp.py"), (*TORCHRUN, "train_ddp.py"), ("train_plain.py",))


def train_jax(steps: int) -> None:
    import jax
    import optax
    import torch
    from train_plain import NextByte, load_bytes, windows

    from atoll.jax import Learner, Transposed

    names = {"embed": "embed.weight", "up": Transposed("mlp.0.weight"), "up_bias": "mlp.0.bias"}
    names |= {"down": Transposed("mlp.2.weight"), "down_bias": "mlp.2.bias"}
    optimizer, data = optax.adamw(2e-3), load_bytes()

    def loss_of(p: dict[str, jax.Array], context: jax.Array, target: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(p["embed"][context].reshape(len(context), -1) @ p["up"] + p["up_bias"], approximate=False)
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ p["down"] + p["down_bias"], target).mean()

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: dict[str, jax.Array], state: optax.OptState, context: jax.Array, target: jax.Array):
        loss, gradients = jax.value_and_grad(loss_of)(params, context, target)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    values = [jax.numpy.asarray(p.detach().numpy()) for p in NextByte().parameters()]  # in the order of the table
    params = {k: v.T if isinstance(names[k], Transposed) else v for k, v in zip(names, values, strict=True)}
    with Learner(params, optimizer.init(params), names=names) as learner:
        params, state, generator = learner.params, learner.opt_state, torch.Generator().manual_seed(1 + learner.rank)
        while learner.step_count < steps and not learner.done:
            context, target = (part.numpy() for part in windows(data[: -len(data) // 10], 64, generator))
            params, state, loss = train_step(params, state, context, target)
            params = learner.step(params, state, tokens=len(target), loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps, number = parser.parse_args().steps, int(os.environ.get("ATOLL_RANK", "3")) % 4
    if number == 3:
        train_jax(steps)
    else:
        *start, script = KINDS[number]
        os.execv(sys.executable, [sys.executable, *start, str(Path(__file__).with_name(script)), "--steps", str(steps)])
