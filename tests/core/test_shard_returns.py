"""A shard that comes back: its fragments go on from its disk, what it lost comes from learners, others never wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from test_fragments_down import lose_pushes
from world import World, config

from atoll.core import NO_VERSION, PushReply
from atoll.core import effects as fx
from atoll.core.events import FragmentHealed

OWN = frozenset({0, 1})


def running(**changes: object) -> World:
    world = World(config(quorum="all", learners_expected=2, **changes), 2)
    world.join_all()
    world.everyone_steps(20)
    return world


def on_disk(world: World) -> dict[int, tuple[int, int]]:
    return {f: world.syncer.published[f] for f in OWN}


def versions(world: World) -> list[int]:
    return world.syncer.versions


def test_contributions_that_died_with_it_are_given_again_and_the_books_add_up() -> None:
    world = running()
    hanging: list[Callable[[PushReply | None], None]] = []
    lose_pushes(next(iter(world.learners.values())), OWN, hanging)
    for _ in range(20):
        world.everyone_steps(1)
    assert hanging and any(world.syncer.book.kept(fragment) for fragment in OWN)
    world.driver.apply(fx.FragmentsDown(OWN))
    before = versions(world)
    world.everyone_steps(12)
    assert [versions(world)[f] for f in OWN] == [before[f] for f in OWN]
    for learner in world.learners.values():
        learner.driver._host.__dict__.pop("push", None)
    world.driver.shard_back(fx.FragmentsBack(on_disk(world)))
    assert not any(world.syncer.book.kept(fragment) for fragment in OWN)
    for done in hanging:
        done(None)
    world.everyone_steps(24)
    assert all(now >= then + 3 for now, then in zip(versions(world), before, strict=True))
    world.check_ledger()


def test_a_merge_whose_answer_was_lost_is_committed_by_what_the_disk_says() -> None:
    world = running()
    merges, host = [], world.driver._host
    merge = host.merge
    host.merge = lambda effect, payloads, done: merges.append((effect, payloads))  # type: ignore[method-assign]
    world.everyone_steps(8)
    effect, payloads = merges[0]
    host.merge = merge  # type: ignore[method-assign]
    world.driver.apply(fx.FragmentsDown(frozenset({effect.fragment})))
    results: list[fx.MergeFinished] = []
    merge(effect, payloads, results.append)
    world.everyone_steps(1)
    merged = world.syncer.book.contributions_merged
    world.driver.shard_back(fx.FragmentsBack({effect.fragment: (effect.version, results[0].checksum)}))
    assert versions(world)[effect.fragment] == effect.version
    assert world.syncer.book.contributions_merged == merged + len(effect.contributions)
    world.everyone_steps(24)
    assert versions(world)[effect.fragment] > effect.version
    world.check_ledger()


def test_what_its_disk_has_lost_comes_from_a_learner_while_the_others_go_on() -> None:
    world = running()
    world.driver.apply(fx.FragmentsDown(OWN))
    world.everyone_steps(8)
    before = versions(world)
    healed: list[int] = []
    host = world.driver._host
    host.heal = lambda heal, payload, done: (healed.append(heal.fragment), done())  # type: ignore[assignment]
    host.version = lambda fragment: NO_VERSION if fragment in OWN else versions(world)[fragment]  # type: ignore
    world.driver.shard_back(fx.FragmentsBack(dict.fromkeys(OWN, (NO_VERSION, 0))))
    assert world.syncer.book.down == OWN
    world.everyone_steps(4)
    assert sorted(healed) == sorted(OWN) and len(world.noted(FragmentHealed)) == 2
    world.everyone_steps(24)
    assert all(now >= then + 2 for now, then in zip(versions(world), before, strict=True))
    world.check_ledger()


def test_what_nobody_holds_is_not_waited_for_for_ever() -> None:
    world = running()
    for member in world.syncer.members.values():
        member.bases = (NO_VERSION,) * 4
    world.driver.shard_back(fx.FragmentsBack({0: (NO_VERSION, 0)}))
    assert not world.syncer.mends_in_vain(world.now_ns)
    assert world.syncer.mends_in_vain(world.now_ns + 21 * 10**9)


def test_what_waits_for_a_shard_that_is_away_takes_no_place_on_the_uplink() -> None:
    """A coordinator that starts without a shard: pushes to it that were under way are not under way any more."""
    world = running()
    learner = next(iter(world.learners.values()))
    hanging: list[Callable[[PushReply | None], None]] = []
    lose_pushes(learner, OWN, hanging)
    world.everyone_steps(20)
    assert hanging
    machine = learner.machine
    start = replace(world.syncer._state.start(), away=tuple(sorted(OWN)))
    machine.handle(fx.FromSyncer(start), world.now_ns)
    waiting = [s for p in machine.fragments if p.index in OWN for s in p.outstanding if not s.pushed]
    assert waiting and all(sent.stuck for sent in waiting)
