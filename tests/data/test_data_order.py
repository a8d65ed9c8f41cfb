"""Order: permutations that every learner agrees on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data import place
from atoll.data.order import permute, shuffled


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 150), st.integers(0, 2**40))
def test_permute_is_a_permutation(size: int, seed: int) -> None:
    assert sorted(permute(index, size, (seed,)) for index in range(size)) == list(range(size))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 300), st.integers(0, 2**40))
def test_shuffled_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(shuffled(count, (seed,))) == list(range(count))


def test_a_billion_chunks_need_no_table() -> None:
    size = 10**9 + 7
    places = [permute(index, size, (3,)) for index in range(2000)]
    assert len(set(places)) == 2000 and all(0 <= number < size for number in places)
    assert 0.4 * size < sum(places) / 2000 < 0.6 * size, "spread over all of it"


def test_every_epoch_has_an_order_of_its_own_and_every_chunk_once() -> None:
    epochs = [[place(epoch * 50 + n, 50, seed=1) for n in range(50)] for epoch in range(3)]
    assert [sorted(index for _, index in epoch) for epoch in epochs] == [list(range(50))] * 3
    assert [{number for number, _ in epoch} for epoch in epochs] == [{0}, {1}, {2}]
    orders = [[index for _, index in epoch] for epoch in epochs]
    assert orders[0] != orders[1] != orders[2] and orders[0] != list(range(50))
    assert [place(n, 50, seed=2)[1] for n in range(50)] != orders[0]
    assert [place(n, 50, seed=2, shuffle=False) for n in (0, 49, 50)] == [(0, 0), (0, 49), (1, 0)]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ([permute(n, 10, (0, 0)) for n in range(10)], [8, 1, 7, 2, 0, 4, 5, 9, 6, 3]),
        (shuffled(10, (0, 0, 0)), [9, 6, 7, 3, 1, 0, 8, 5, 2, 4]),
    ],
)
def test_the_orders_never_change_between_builds(result: list[int], expected: list[int]) -> None:
    assert result == expected
