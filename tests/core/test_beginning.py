"""A syncer without state: whose parameters begin the run, whoever says hello first."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from world import TENSORS, FakeLearner, World, config

from atoll.core import effects as fx
from atoll.core.beginning import EPOCH_CLAIMED_MAX, Begin
from atoll.core.config import SECOND_NS
from atoll.core.events import LearnerDiscarded, Warned
from atoll.core.healing import HEAL_WAIT_NS
from atoll.core.messages import PushHeader, PushReply, Refusal, TensorSpec

LOST = Begin(had_versions="its events tell of version 0")
DOUBT = Begin(doubt="no snapshot found at s3://bucket/rum")
RANDOM = -1000.0
"""A newcomer's parameters, far from anything that was trained."""


def trained(learners: int = 2, steps: int = 14, **changes: object) -> World:
    world = World(config(**changes), learners)
    world.join_all()
    world.everyone_steps(steps)
    return world


def newcomer(world: World, name: str = "new") -> FakeLearner:
    learner = world.add_later(name)
    learner.theta = dict.fromkeys(range(world.config.fragments), RANDOM)
    return learner


def versions(world: World) -> list[int]:
    return [track.version for track in world.syncer.book.tracks]


def go_on(world: World, steps: int = 20) -> None:
    """Everybody says hello until taken in, then trains."""
    for _ in range(4):
        world.reconnect_refused()
        world.advance(HEAL_WAIT_NS // 2)
    world.join_all()
    world.everyone_steps(steps)


def texts(world: World) -> str:
    return "\n".join(event.text for event in world.noted(Warned))


ORDERS = sorted(set(itertools.permutations(["l0", "l1", "new", "tick"])))


@pytest.mark.parametrize("begin", [Begin(), DOUBT, LOST], ids=["no reason", "a doubt", "traces"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_whoever_comes_first_the_run_goes_on_from_the_newest_versions_held(
    order: tuple[str, ...], begin: Begin
) -> None:
    world = trained()
    held, before = dict(world.theta), versions(world)
    new = newcomer(world)
    by_name = {learner.machine.learner: learner for learner in world.learners.values()}
    world.lose_state(begin)
    for name in order:
        if name == "tick":
            world.advance(2 * SECOND_NS)
        else:
            world.connect(by_name[name])
    go_on(world, steps=0)
    assert world.syncer.run == "run-1" and versions(world) == before and world.theta == held
    discards = [n for name in ("l0", "l1") for n in by_name[name].notes if isinstance(n, LearnerDiscarded)]
    assert {n.cause for n in discards} <= {"uncertain"}, "those that were in the run stay in it"
    go_on(world)
    assert min(versions(world)) > max(before)
    assert new.machine.joined and new.machine.step >= 14, "a newcomer starts at the run's step"
    assert all(abs(value) < 500 for value in world.theta.values()), "nothing of the random parameters is inside"
    world.check_ledger()
    world.check_rebase()


def test_a_part_of_the_run_that_nobody_holds_any_more_is_told_to_the_operator() -> None:
    """The last learner that held the run goes before it has brought all of it back: newcomers wait, and it is said."""
    world = trained(learners=1)
    holder, push = world.learners["l0@l0-1"], world.push

    def once(header: PushHeader, value: float) -> PushReply:
        if header.fragment == 0:
            return push(header, value)
        world.kill(holder)
        return PushReply(False, Refusal.CLOSED, "it is gone")

    world.lose_state(LOST)
    world.push = once  # type: ignore[method-assign]
    world.connect(holder)
    world.advance(HEAL_WAIT_NS)
    assert "nobody who is connected holds fragments [1" in texts(world) and "--new-run" in world.syncer.waits
    world.push = push  # type: ignore[method-assign]
    joiner = newcomer(world)
    world.connect(joiner)
    world.advance(10 * HEAL_WAIT_NS)
    assert not joiner.machine.joined


def test_the_newest_version_of_each_fragment_is_taken_from_whoever_holds_it() -> None:
    world = trained(learners=3)
    older = world.learners["l0@l0-1"]
    world.disconnect(older)
    world.everyone_steps(12)
    newest = versions(world)
    assert [p.newest for p in older.machine.fragments] != newest
    held = dict(world.theta)
    world.lose_state()
    world.connect(older)  # the one that has missed the most is first
    go_on(world, steps=0)
    assert versions(world) == newest and world.theta == held
    go_on(world)
    world.check_ledger()


def test_a_fresh_run_begins_at_the_first_hello() -> None:
    world = World(config(), 1)
    assert world.now_ns == 0 and world.syncer.committed
    doubtful = World(config())
    doubtful.syncer._beginning.begin = replace(DOUBT, learners=2)
    for name in ("a", "b"):
        doubtful.add(name)
    assert doubtful.now_ns == 0
    doubtful.reconnect_refused()
    assert doubtful.syncer.committed, "all that were expected are newcomers: there is nobody to wait for"


def test_a_doubt_lasts_as_long_as_healing_waits() -> None:
    world = World(config())
    world.syncer._beginning.begin = DOUBT
    learner = world.add("only")
    assert not world.syncer.committed and "no snapshot found at s3://bucket/rum" in learner.waits
    world.advance(HEAL_WAIT_NS)
    world.reconnect_refused()
    assert world.syncer.committed and world.syncer.waits == ""


def test_where_the_run_had_versions_newcomers_wait_for_ever_and_the_operator_hears_what_to_type() -> None:
    world = World(config())
    world.syncer._beginning.begin = LOST
    learner = world.add("new")
    for _ in range(50):
        world.advance(60 * SECOND_NS)
        world.reconnect_refused()
    assert not world.syncer.committed and "--new-run" in world.syncer.waits
    assert "its events tell of version 0" in learner.waits
    assert texts(world).count("--new-run") == 1, "it is said once, not with every hello"


def test_by_the_operators_word_a_new_run_begins_and_takes_everybody_in() -> None:
    world = trained()
    world.lose_state(Begin(new_run=True))
    new = newcomer(world)
    world.connect(new)
    assert world.syncer.committed and set(world.theta.values()) == {RANDOM}
    go_on(world)
    assert world.syncer.run != "run-1" and min(versions(world)) > 0
    assert all(learner.machine.run == world.syncer.run for learner in world.learners.values())
    world.check_ledger()


def test_after_a_merge_two_histories_are_kept_apart_until_the_operator_decides() -> None:
    world = trained()
    holder = world.learners["l0@l0-1"]
    held = dict(holder.base)
    world.lose_state()
    world.kill(world.learners["l1@l1-1"])
    world.connect(newcomer(world))
    world.join_all()
    for _ in range(12):
        world.step(world.learners["new@new-1"])
        world.advance(SECOND_NS // 10)
    assert min(versions(world)) > 0
    for _ in range(3):
        world.reconnect_refused()
    assert "two histories" in holder.waits and "--new-run" in holder.waits and holder.machine.run == "run-1"
    assert "run-1" in holder.waits and world.syncer.run in holder.waits
    assert texts(world).count("two histories") == 1 and "two histories" in world.syncer.waits
    world.step(holder)  # it trains on, and keeps what it holds
    assert holder.base == held
    world.syncer._beginning.begin = Begin(new_run=True)  # the operator gives the older run up
    go_on(world)
    assert holder.machine.run == world.syncer.run
    world.check_ledger()


def test_what_was_trained_from_a_seed_that_was_given_up_does_not_enter_the_run() -> None:
    world = trained(sync_every=16, steps=40)
    held = dict(world.theta)
    world.lose_state()
    new = newcomer(world)
    world.connect(new)
    world.boundary(new)
    assert new.machine.joined
    world.step(new)  # nothing is due yet
    assert world.syncer.committed and max(versions(world)) == 0
    go_on(world, steps=0)
    assert world.theta == held
    for _ in range(3):
        world.boundary(new)
    assert new.theta == held, "its own step from random parameters is discarded"
    assert any(isinstance(n, LearnerDiscarded) for n in new.notes)
    go_on(world)
    world.check_ledger()
    world.check_rebase()


def test_a_learner_that_missed_its_welcome_is_not_taken_for_an_older_process() -> None:
    """Simulator seed 1 at its time: a new generation was given, and the link broke before the learner heard of it."""
    world = trained(learners=1)
    learner = world.learners["l0@l0-1"]
    world.lose_state()
    world.to_syncer(fx.SessionOpened(99, learner.machine.hello()))
    world.to_syncer(fx.SessionClosed(99, "cut"))
    assert world.syncer.membership.members["l0"].generation != learner.machine.generation
    go_on(world)
    assert learner.stopped == "" and world.syncer.run == "run-1" and learner.session >= 0
    world.check_ledger()


def test_a_restart_in_the_middle_asks_the_learners_again() -> None:
    world = trained()
    held, before = dict(world.theta), versions(world)
    world.lose_state()
    world.connect(world.learners["l0@l0-1"])
    assert world.disk_rows["run"]["seeded"] is False
    epoch = world.syncer.epoch
    world.lose_state()  # what is not seeded is not read
    go_on(world, steps=0)
    assert world.theta == held and versions(world) == before and world.syncer.epoch > epoch
    assert world.disk_rows["run"]["seeded"] is True and world.disk_rows["epoch"] == world.syncer.epoch
    go_on(world, steps=4)
    world.crash_syncer()
    world.restart_syncer()  # and from now on there is a state again
    world.everyone_steps(20)
    assert min(versions(world)) > max(before)
    world.check_ledger()


def test_learners_that_cannot_give_versions_seed_a_new_run_before_any_newcomer() -> None:
    world = trained()
    held = dict(world.theta)
    world.lose_state()
    older = [world.learners["l0@l0-1"], world.learners["l1@l1-1"]]
    for learner in older:  # protocol 1 sends no checksums
        real = learner.machine.hello
        learner.machine.hello = lambda real=real: replace(real(), protocol=1, checksums=())  # type: ignore[method-assign]
    new = newcomer(world)
    world.connect(older[0])
    world.connect(new)
    assert not world.syncer.committed and new.session < 0
    go_on(world, steps=0)
    assert {p: world.history[p, 0] for p in held} == held and world.syncer.run != "run-1"
    go_on(world)
    assert min(versions(world)) > 0
    world.check_ledger()


@pytest.mark.parametrize("broken", ["epoch", "generation", "version", "tensors"])
def test_a_hello_that_makes_no_sense_begins_nothing(broken: str) -> None:
    world = trained(learners=1)
    world.lose_state()
    learner = world.learners["l0@l0-1"]
    hello = learner.machine.hello()
    changes: dict[str, object] = {
        "epoch": {"epoch": EPOCH_CLAIMED_MAX + 1},
        "generation": {"generation": 2**60},
        "version": {"bases": (-1, *hello.bases[1:])},
        "tensors": {"tensors": (TensorSpec("w0", (1,), "float32"),)},
    }[broken]  # type: ignore[assignment]
    world.to_syncer(fx.SessionOpened(99, replace(hello, **changes)))  # type: ignore[arg-type]
    assert not world.syncer.committed and world.syncer.healing is None
    go_on(world)
    assert world.syncer.committed


def test_a_newcomer_with_another_model_does_not_keep_the_run_out() -> None:
    world = trained()
    held = dict(world.theta)
    world.lose_state()
    other = world.add("other", tensors=(*TENSORS, TensorSpec("more", (256,), "float32")))
    go_on(world, steps=0)
    assert world.theta == held and world.syncer.run == "run-1"
    assert other.code == "wrong_layout"
