"""Who has which fragment: balanced, stable, and never two for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core import assign, reassign
from atoll.errors import ConfigError


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=64), st.integers(1, 8))
def test_bytes_are_balanced_up_to_one_fragment(sizes: list[int], count: int) -> None:
    names = [f"s{i}" for i in range(count)]
    chosen = assign(sizes, names)
    loads = {name: sum(size for size, own in zip(sizes, chosen, strict=True) if own == name) for name in names}
    assert max(loads.values()) - min(loads.values()) <= max(sizes)
    assert chosen == assign(sizes, names)


def test_what_is_recorded_stays_whatever_the_order_of_the_list() -> None:
    recorded = ("a", "b", "b", "a")
    assert reassign(recorded, {"b": frozenset({1, 2}), "a": frozenset({0, 3})}) == recorded


def test_a_shard_without_its_disk_takes_the_place_of_the_missing_one() -> None:
    held = {"a": frozenset({0, 3}), "new": frozenset[int]()}
    assert reassign(("a", "b", "b", "a"), held) == ("a", "new", "new", "a")


def test_of_two_that_hold_one_fragment_the_recorded_one_counts() -> None:
    held = {"a": frozenset({0, 1}), "b": frozenset({1})}
    assert reassign(("a", "b"), held) == ("a", "b")


def test_who_is_absent_keeps_its_place_and_nobody_else_gets_it() -> None:
    held = {"a": frozenset({0}), "new": frozenset[int]()}
    assert reassign(("a", "b", "c"), held, absent=1) == ("a", "b", "c")
    assert reassign(("a", "b", "c"), held, absent=1, successors={"c": "new"}) == ("a", "b", "new")


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"a": frozenset({0})}, "are not among those given"),
        ({"a": frozenset({1}), "b": frozenset({0})}, "which the run's record gives to another shard"),
    ],
)
def test_what_cannot_be_is_refused_by_name(held: dict[str, frozenset[int]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        reassign(("a", "b"), held)
