"""Which samples a chunk number stands for, and in which order: pure functions of numbers.

The same seed gives the same chunk the same samples in the same order on every learner, so that a chunk which is handed
over half done can be continued at its sample `start` somewhere else. Nothing here holds an array of chunks: a run may
have 10^9 of them.
"""

from __future__ import annotations

from hashlib import blake2b
from random import Random

ROUNDS = 6
"""Of the Feistel network. Four make it look random to anybody who does not know the key (Luby and Rackoff); two more
for the small halves of small epochs."""


def place(number: int, chunks_per_epoch: int, seed: int = 0, *, shuffle: bool = True) -> tuple[int, int]:
    """(epoch, index within the epoch) of a chunk number. Every epoch is a permutation of its own."""
    epoch, position = divmod(number, chunks_per_epoch)
    return epoch, permute(position, chunks_per_epoch, (seed, epoch)) if shuffle else position


def permute(index: int, size: int, key: tuple[int, ...]) -> int:
    """Where `index` goes in a permutation of 0..size-1 that the key chooses: a Feistel network over the next power of
    four, walked until it lands inside, four times on average at the very most."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (_mix(*key, turn, right) & mask)
        index = left << half | right
        if index < size:
            return index


def shuffled(count: int, key: tuple[int, ...]) -> list[int]:
    """0..count-1 in an order that the key chooses. Only `Random.random` is used, whose numbers Python promises never to
    change, unlike those of `shuffle`: learners with different Pythons must agree."""
    numbers = list(range(count))
    draw = Random(_mix(*key)).random
    for last in range(count - 1, 0, -1):
        other = int(draw() * (last + 1))
        numbers[last], numbers[other] = numbers[other], numbers[last]
    return numbers


def _mix(*numbers: int) -> int:
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")
