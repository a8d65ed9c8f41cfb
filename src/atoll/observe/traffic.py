"""What synchronous data-parallel training would have sent for the same steps: the yardstick for our bytes."""

from __future__ import annotations

BF16_BYTES = 2


def data_parallel_bytes(parameters: int, learner_steps: int, learners: int) -> int:
    """Bytes sent by all learners together in a ring all-reduce of bf16 gradients at every step.

    In a ring of M each learner sends 2 * (M - 1) / M of the gradient per step (reduce-scatter, then all-gather):

        bytes = learner_steps * 2 * (M - 1) / M * 2 bytes * parameters

    `learner_steps` is the sum of steps over the learners. One learner alone sends nothing.
    """
    if learners <= 1:
        return 0
    return 2 * (learners - 1) * BF16_BYTES * parameters * learner_steps // learners
