"""The kernel behind an adopt that keeps a learner's progress: the same bits as the formula, whatever the threads."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll import kernels
from atoll.errors import PayloadError
from atoll.kernels import BLOCK

F32 = NDArray[np.float32]


def values(n: int, seed: int) -> F32:
    return np.random.default_rng(seed).normal(0, 1, n).astype(np.float32)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 3 * 1024 * BLOCK + 77])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_it_is_the_formula_in_its_order(n: int, count: int) -> None:
    new, old = values(n, 1), values(n, 2)
    moves = [(values(n, 10 + i), values(n, 20 + i)) for i in range(count)]
    expected = new - old
    for after, before in moves:
        expected -= after - before
    threads = kernels.threads()
    try:
        for number in (1, 3):
            kernels.set_threads(number)
            target = np.full(n, np.nan, np.float32)
            kernels.rebase(new, old, moves, target)
            assert np.array_equal(target, expected)
    finally:
        kernels.set_threads(threads)


def test_arrays_that_may_only_be_read_can_be_read() -> None:
    new = np.frombuffer(values(300, 1).tobytes(), np.float32)
    target = np.empty(300, np.float32)
    kernels.rebase(new, new, [(new, new)], target)
    assert not target.any()


def test_arrays_of_another_fragment_are_refused() -> None:
    n = 300
    good, short = values(n, 1), values(n - 1, 2)
    for new, old, moves in ((short, good, []), (good, short, []), (good, good, [(good, short)])):
        with pytest.raises(PayloadError, match="has 299 elements, expected 300"):
            kernels.rebase(new, old, moves, np.empty(n, np.float32))
    locked = np.empty(n, np.float32)
    locked.flags.writeable = False
    with pytest.raises(PayloadError, match="target is read-only"):
        kernels.rebase(good, good, [], locked)
