"""Buffers come back only when nobody can see them any more."""

from __future__ import annotations

import numpy as np

from atoll.wire.buffers import Buffers
from atoll.wire.limits import MIB


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_a_dropped_buffer_is_used_again() -> None:
    buffers = Buffers()
    first = buffers.take(3 * MIB)
    where = address(first)
    del first
    again = buffers.take(3 * MIB - 100)
    assert address(again) == where and again.nbytes == 3 * MIB - 100


def test_a_buffer_that_is_seen_through_any_view_is_left_alone() -> None:
    buffers = Buffers()
    for derive in (
        lambda a: a,
        lambda a: a[5:10],
        lambda a: a[5:][3:].view(np.uint16)[::2],
        lambda a: a.view(np.float32).reshape(2, -1).T,
        memoryview,
        lambda a: memoryview(a)[7:9],
        lambda a: np.frombuffer(memoryview(a)[96:200], np.int64),
        lambda a: iter(a),
    ):
        taken = buffers.take(2 * MIB)
        taken[:] = 1
        where = address(taken)
        held = derive(taken)
        del taken
        assert address(buffers.take(2 * MIB)) != where
        del held
        assert where in [address(array) for array in (buffers.take(2 * MIB), buffers.take(2 * MIB))]


def test_the_pool_is_bounded_and_forgets_sizes_that_are_not_asked_for_any_more() -> None:
    buffers = Buffers(bytes_max=10 * MIB)
    several = [buffers.take(4 * MIB) for _ in range(4)]
    assert buffers._pooled_bytes() == 8 * MIB
    assert len({address(array) for array in several}) == 4
    del several
    buffers.take(9 * MIB)
    assert buffers._pooled_bytes() <= 10 * MIB
    buffers.take(100 * MIB)
    assert buffers._pooled_bytes() <= 10 * MIB
