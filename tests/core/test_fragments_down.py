"""Fragments whose shard is away: no round of theirs begins, and no other round waits for one of theirs."""

from __future__ import annotations

from world import World, config

from atoll.core import effects as fx
from atoll.core.events import RoundLaunched


def launched(world: World, fragment: int) -> int:
    return sum(event.fragment == fragment for event in world.noted(RoundLaunched))


def test_the_others_go_on_and_it_goes_on_when_it_is_back() -> None:
    world = World(config(quorum="all", learners_expected=2), 2)
    world.join_all()
    world.everyone_steps(20)
    world.driver.apply(fx.FragmentsDown(frozenset({0, 1})))
    before = [launched(world, fragment) for fragment in range(4)]
    world.everyone_steps(40)
    after = [launched(world, fragment) for fragment in range(4)]
    assert after[:2] == before[:2]
    assert min(b - a for a, b in zip(before[2:], after[2:], strict=True)) >= 8
    world.driver.apply(fx.FragmentsDown(frozenset()))
    world.everyone_steps(20)
    assert all(launched(world, fragment) > after[fragment] for fragment in range(4))
    world.check_ledger()


def test_a_round_that_hangs_there_takes_no_others_place() -> None:
    """With one round at a time, a merge that never ends would end all rounds."""
    world = World(config(quorum="all", learners_expected=2, overlap=1), 2)
    assert world.config.rounds_in_flight_max == 1
    world.join_all()
    world.everyone_steps(20)
    book = world.syncer.book
    track = next(t for t in book.tracks if not t.busy)
    track.merging = True
    world.driver.apply(fx.FragmentsDown(frozenset({track.index})))
    before = [launched(world, fragment) for fragment in range(4)]
    world.everyone_steps(24)
    assert all(launched(world, f) > before[f] for f in range(4) if f != track.index)
