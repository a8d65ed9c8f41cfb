"""Fragments whose shard is away: no round of theirs begins, and no other round waits for one of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from world import FakeLearner, World, config

from atoll.core import PushHeader, PushReply
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


def test_pushes_to_a_shard_that_is_away_do_not_take_the_uplink_from_the_others() -> None:
    """With one push at a time, one that cannot arrive would be the learner's last."""
    world = World(config(quorum="all", learners_expected=2, overlap=1), 2)
    world.join_all()
    world.everyone_steps(20)
    away = frozenset({0, 1})
    hanging: list[Callable[[PushReply | None], None]] = []
    for learner in world.learners.values():
        learner.machine._state.sharded = True
        lose_pushes(learner, away, hanging)
    while len(hanging) < 2:
        world.everyone_steps(1)
    world.driver.apply(fx.FragmentsDown(away))
    world.everyone_steps(8)
    before = [track.version for track in world.syncer.book.tracks]
    broken, hanging[:] = list(hanging), []
    for done in broken:
        done(None)
    world.everyone_steps(40)
    after = [track.version for track in world.syncer.book.tracks]
    assert after[:2] == before[:2]
    assert min(b - a for a, b in zip(before[2:], after[2:], strict=True)) >= 8
    assert len(hanging) >= len(broken), "they are pushed again"
    world.check_ledger()


def test_pushes_that_hang_at_a_frozen_shard_are_not_waited_for() -> None:
    """They neither arrive nor break. The learners are behind a relay, and do not know that there are shards."""
    world = World(config(quorum="all", learners_expected=2, overlap=1), 2)
    world.join_all()
    world.everyone_steps(20)
    frozen = frozenset({0, 1})
    hanging: list[Callable[[PushReply | None], None]] = []
    for learner in world.learners.values():
        lose_pushes(learner, frozen, hanging)
    while len(hanging) < 2:
        world.everyone_steps(1)
    world.driver.apply(fx.FragmentsDown(frozen))
    before = [track.version for track in world.syncer.book.tracks]
    world.everyone_steps(48)
    after = [track.version for track in world.syncer.book.tracks]
    assert after[:2] == before[:2]
    assert min(b - a for a, b in zip(before[2:], after[2:], strict=True)) >= 8
    world.check_ledger()


def lose_pushes(
    learner: FakeLearner, fragments: frozenset[int], hanging: list[Callable[[PushReply | None], None]]
) -> None:
    host = learner.driver._host
    push = host.push

    def lost(header: PushHeader, payload: Any, done: Callable[[PushReply | None], None]) -> None:
        if header.fragment in fragments:
            hanging.append(done)
        else:
            push(header, payload, done)

    host.push = lost  # type: ignore[method-assign]
