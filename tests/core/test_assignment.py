"""Who has which fragment: balanced, stable, and never two for one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core import assign, reassign, rebalance
from atoll.errors import ConfigError


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=64), st.integers(1, 8))
def test_bytes_are_balanced_up_to_one_fragment(sizes: list[int], count: int) -> None:
    names = [f"s{i}" for i in range(count)]
    chosen = assign(sizes, names)
    loads = {name: sum(size for size, own in zip(sizes, chosen, strict=True) if own == name) for name in names}
    assert max(loads.values()) - min(loads.values()) <= max(sizes)
    assert chosen == assign(sizes, names)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=64), st.integers(1, 8), st.randoms())
def test_few_moves_balance_what_is_not(sizes: list[int], count: int, random: Random) -> None:
    """Whatever was before, e.g. one shard that has just come and has nothing."""
    names = [f"s{i}" for i in range(count)]
    owners = [random.choice(names) for _ in sizes]
    moves = rebalance(sizes, owners, names)
    after = [moves.get(fragment, owner) for fragment, owner in enumerate(owners)]
    loads = {name: sum(size for size, own in zip(sizes, after, strict=True) if own == name) for name in names}
    assert max(loads.values()) - min(loads.values()) <= max(sizes)
    assert all(owners[fragment] != to for fragment, to in moves.items())
    assert rebalance(sizes, after, names) == {}


def test_a_shard_that_has_come_gets_its_share_and_no_more() -> None:
    assert sorted(rebalance([1] * 6, ["a", "a", "a", "b", "b", "b"], ["a", "b", "c"]).values()) == ["c", "c"]


def test_a_move_counts_once_it_is_on_record_and_its_copy_is_nobodys_then() -> None:
    """Between the two the new one has it as well: the record says whose it is."""
    held = {"a": frozenset({0}), "b": frozenset({0, 1})}
    assert reassign(("b", "b"), held, moved_from={0: "a"}, leftovers={"a": frozenset({0})}) == ("b", "b")
    assert reassign(("a", "b"), held) == ("a", "b")


def test_what_has_moved_and_is_lost_there_goes_on_where_it_came_from() -> None:
    held = {"a": frozenset({0}), "b": frozenset({1})}
    assert reassign(("b", "b"), held, moved_from={0: "a"}, leftovers={"a": frozenset({0})}) == ("a", "b")
    empty = {"a": frozenset[int](), "b": frozenset({1})}
    assert reassign(("b", "b"), empty, moved_from={0: "a"}) == ("b", "b")


def test_copies_of_a_shard_that_was_given_up_do_not_count() -> None:
    held = {"back": frozenset({0}), "b": frozenset({1})}
    assert reassign(("b", "b"), held, leftovers={"back": frozenset({0})}) == ("b", "b")
    with pytest.raises(ConfigError, match="which the run's record gives to another shard"):
        reassign(("b", "b"), held)


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
