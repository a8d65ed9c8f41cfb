"""The syncer dies and comes back: what was on disk, what learners bring back, and that the books stay exact."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from world import TENSORS, FakeLearner, World, config

from atoll.core import effects as fx
from atoll.core import messages
from atoll.core.config import SECOND_NS
from atoll.core.events import ContributionRefused, FragmentHealed, Warned
from atoll.core.healing import HEAL_WAIT_NS
from atoll.core.inner_slots import INNER_SILENCE_NS
from atoll.core.messages import PROTOCOL_VERSION, DataReport, Hello, InnerPiece, InnerPieceRequest, Lease, Refusal


def running(learners: int = 3, steps: int = 20, **changes: object) -> World:
    world = World(config(**changes), learners)
    world.join_all()
    world.everyone_steps(steps)
    return world


def versions(world: World) -> list[int]:
    return [track.version for track in world.syncer.book.tracks]


def check(world: World) -> None:
    world.check_ledger()
    world.check_rebase()


def test_a_killed_syncer_goes_on_where_it_was() -> None:
    world = running()
    before, merged = versions(world), world.syncer.ledger.totals().merged
    world.crash_syncer()
    for learner in world.learners.values():  # they train on
        world.step(learner)
    world.restart_syncer(reconnect=False)
    assert versions(world) == before
    assert world.syncer.run == "run-1"
    assert world.syncer.ledger.totals().merged == merged
    for learner in world.learners.values():
        world.connect(learner)
    world.everyone_steps(20)
    assert min(versions(world)) > max(before)
    assert all(learner.machine.generation == 1 for learner in world.learners.values())
    check(world)


def test_a_learner_keeps_its_rank_over_restarts_of_the_syncer_and_its_own() -> None:
    world = World(config(learners_expected=3))
    for name in ("paris", "learner-0", "oslo"):
        world.add(name)
    world.join_all()
    ranks = {learner.machine.learner: learner.machine.rank for learner in world.learners.values()}
    assert ranks == {"paris": 0, "learner-0": 1, "oslo": 2}
    world.everyone_steps(8)
    world.crash_syncer()
    world.restart_syncer(reconnect=False)
    again = world.add("oslo", instance="oslo-2")
    world.run()
    assert again.machine.rank == 2
    assert {one.learner: one.rank for one in world.syncer.membership.members.values()} == ranks


def test_a_commit_that_was_not_published_is_not_merged_again() -> None:
    world = running(steps=10)
    world.crash_before_publish = True
    world.everyone_steps(8)
    written = {p: fragment_record["version"] for p, fragment_record in world.disk_records.items()}
    world.restart_syncer(reconnect=False)
    assert dict(enumerate(versions(world))) == written
    for learner in world.learners.values():
        world.connect(learner)
    world.everyone_steps(20)
    check(world)


def test_contributions_that_died_with_the_syncer_are_handed_over_again() -> None:
    world = running(learners=2, quorum="all")
    slow = world.learners["l1@l1-1"]
    slow.push_delay = 10**9  # a round stays open: l0's contribution is in the syncer's memory only
    world.everyone_steps(6)
    held = [p for p in world.learners["l0@l0-1"].machine.fragments if any(s.pushed for s in p.outstanding)]
    assert held
    slow.push_delay = 0
    world.crash_syncer()
    world.restart_syncer()
    assert all(s.merged_version >= 0 for p in held for s in p.outstanding)  # none waits for a word that never comes
    world.everyone_steps(20)
    for learner in list(world.learners.values()):
        world.close(learner)
    line = world.syncer.ledger.totals()
    assert line.merged == line.processed
    check(world)


def test_generations_stay_fenced_over_a_restart() -> None:
    world = running(learners=2)
    old = world.learners["l0@l0-1"]
    world.disconnect(old)
    new = world.add("l0", instance="l0-2")
    world.boundary(new)
    assert new.machine.generation == 2
    world.crash_syncer()
    world.restart_syncer(reconnect=False)
    world.connect(new)
    world.connect(old)
    assert old.code == "fenced" and new.machine.generation == 2
    world.everyone_steps(10)
    check(world)


def test_what_the_disk_missed_comes_back_from_the_learners() -> None:
    world = running()
    world.disk_works = False  # the disk is full: training goes on without it
    world.everyone_steps(16)
    published, theta = versions(world), dict(world.theta)
    merged = world.syncer.ledger.totals()
    assert max(fragment_record["version"] for fragment_record in world.disk_records.values()) < max(published)
    world.crash_syncer()
    world.disk_works = True
    world.restart_syncer(exact=False)
    world.advance(HEAL_WAIT_NS)
    healed = [world.history[fragment, version] for fragment, version in enumerate(published)]
    assert healed == list(theta.values()) and all(v >= p for v, p in zip(versions(world), published, strict=True))
    assert len(world.noted(FragmentHealed)) == 4
    world.everyone_steps(1)
    assert world.syncer.ledger.totals().merged >= merged.merged
    world.everyone_steps(20)
    check(world)
    assert "rolled_back" not in world.syncer.ledger.totals().discarded


def test_without_a_holder_the_run_goes_back_and_says_what_that_cost() -> None:
    world = running(learners=2)
    world.disk_works = False
    world.everyone_steps(12)
    world.disk_works = True
    world.crash_syncer()
    written = {p: fragment_record["version"] for p, fragment_record in world.disk_records.items()}
    for learner in world.learners.values():
        learner.dead = True
    fresh = world.add_later("new")
    world.restart_syncer(exact=False, reconnect=False)
    world.connect(fresh)
    world.advance(HEAL_WAIT_NS)
    world.boundary(fresh)
    assert dict(enumerate(versions(world))) == written
    # One that was only cut off returns with versions that the run no longer knows.
    lost = world.learners["l0@l0-1"]
    lost.dead = False
    world.connect(lost)
    for _ in range(4):
        world.boundary(lost)
    assert [p.base for p in lost.machine.fragments] == versions(world)
    world.everyone_steps(20)
    assert world.syncer.ledger.totals().discarded["rolled_back"] > 0
    check(world)


def test_a_holder_whose_checksum_is_not_the_tapes_is_not_believed() -> None:
    world = running(learners=2)
    world.disk_works = False
    world.everyone_steps(8)
    world.crash_syncer()
    world.disk_works = True
    liar = world.learners["l0@l0-1"]
    for progress in liar.machine.fragments:
        world.disk_rows[f"version/{progress.index}"] = {"version": progress.newest, "checksum": 12345}
    world.restart_syncer(exact=False)
    world.advance(HEAL_WAIT_NS)
    assert any("checksum" in event.text for event in world.noted(Warned))
    assert not world.noted(FragmentHealed)
    world.everyone_steps(20)
    check(world)


def test_an_old_syncer_hears_of_a_newer_one_looks_at_its_disk_and_ends() -> None:
    world = running(learners=1)
    world.newer = "a newer syncer has opened the run"
    hello = replace(world.learners["l0@l0-1"].machine.hello(), epoch=7)
    world.to_syncer(fx.SessionOpened(99, hello))
    assert world.fenced == world.newer
    before = world.learners["l0@l0-1"].machine.bases
    world.everyone_steps(20)
    assert world.learners["l0@l0-1"].machine.bases == before, "nothing is published any more"


@pytest.mark.parametrize("liars", [1, 20])
def test_learners_that_speak_of_a_newer_syncer_end_none_that_the_disk_does_not_know(liars: int) -> None:
    world = running(learners=2)
    before = versions(world)
    for index in range(liars):
        hello = Hello(f"liar{index}", "x", PROTOCOL_VERSION, TENSORS, run=world.syncer.run, epoch=2**61)
        for _ in range(3):
            said = world.to_syncer(fx.SessionOpened(1000 + index, hello))
            assert any(isinstance(e, fx.ToLearner) and e.message.code == Refusal.STALE_EPOCH for e in said)
    assert world.looks == 1, "one look at a time"
    world.run()
    warned = [event.text for event in world.noted(Warned)]
    assert len(warned) == liars and "restart that learner" in warned[0]
    world.everyone_steps(20)
    assert not world.fenced and min(versions(world)) > min(before)
    check(world)


def test_a_joiner_gets_inner_state_from_a_peer_that_has_caught_up() -> None:
    world = running(learners=2)
    joiner = world.add_later("new")
    joiner.driver.handle(fx.InnerMissing())
    world.connect(joiner)
    world.boundary(joiner)
    assert joiner.machine.joined and len(world.syncer.inner_slots.open) == 1
    inner_slot = world.syncer.inner_slots.open[0]
    assert not world.given_inner
    world.everyone_steps(2)
    assert world.given_inner == [(inner_slot.peer, 0)]
    world.advance(INNER_SILENCE_NS)  # the pieces never come
    assert not world.syncer.inner_slots.open
    assert world.taken_inner[-1] == ("new", 0)


def test_a_piece_of_inner_state_that_nobody_waits_for_is_refused_and_counts_no_tokens() -> None:
    world = running(learners=2)
    secret = world.syncer.membership.members["l0"].secret
    piece = InnerPiece("l0", 1, slot=3, piece=0, pieces=1, whole_bytes=5000, size=5000, checksum=7, secret=secret)
    assert InnerPiece.of(piece.header()) == piece
    wanted = InnerPieceRequest("l0", 1, slot=3, piece=2, secret=secret)
    assert InnerPieceRequest.of(wanted.request()) == wanted
    reply = world.driver.complete_push(piece.header(), b"", finite=True)
    assert (reply.accepted, reply.code) == (False, Refusal.NOT_READY)
    assert [event.tokens for event in world.noted(ContributionRefused)] == [0]
    check(world)


def test_a_joiner_alone_is_told_at_once_that_nobody_can_help() -> None:
    world = World(config(learners_expected=1), 1)
    world.join_all()
    world.everyone_steps(10)
    world.close(world.learners["l0@l0-1"])
    joiner = world.add_later("new")
    joiner.driver.handle(fx.InnerMissing())
    world.connect(joiner)
    world.boundary(joiner)
    assert world.taken_inner == [("new", 0)]


def test_a_joiner_at_step_0_gets_nobodys_inner_state() -> None:
    """Nobody's is of any use yet, and with a large model it would be in the way of the first contributions."""
    world = World(config(quorum="all", learners_expected=2))
    first, second = world.add_later("first"), world.add_later("second")
    for learner in (first, second):
        learner.driver.handle(fx.InnerMissing())
        world.connect(learner)
        world.boundary(learner)
        world.step(learner)
    assert first.machine.steps == second.machine.steps == 1
    assert not world.given_inner and not world.taken_inner


@pytest.mark.parametrize("files_stay", [False, True])
def test_what_a_leaver_handed_over_outlives_the_syncer(files_stay: bool) -> None:
    world = running(learners=3, quorum="all")
    world.files_stay = files_stay
    leaver = world.learners["l2@l2-1"]
    world.step(leaver)
    world.close(leaver)
    assert leaver.left and world.handed
    world.crash_syncer()
    world.restart_syncer()
    for _ in range(3):  # merged at most once, however often the syncer dies and whatever files it leaves
        world.everyone_steps(6)
        world.crash_syncer()
        world.restart_syncer()
        check(world)
    world.everyone_steps(10)
    check(world)
    assert "learner_lost" not in world.syncer.ledger.totals().discarded
    line = world.syncer.ledger.fragment_totals(0)
    assert line.merged + line.pending == line.processed


def test_a_contribution_inside_a_healed_version_is_not_merged_again() -> None:
    """The tape knows who is in a version whose record was never written; one learner missed its publication."""
    world = running(learners=2, quorum="1")
    one, two = world.learners["l0@l0-1"], world.learners["l1@l1-1"]
    for _ in range(40):
        on_disk = json.loads(json.dumps(world.disk_records)), dict(world.disk_theta)
        merges = len(world.merges)
        world.disconnect(two)
        world.step(one)
        world.connect(two)
        world.step(two)
        mine = [i for m in world.merges[merges:] for i in m.contributions if i.learner == "l0"]
        if mine and any(p.outstanding for p in one.machine.fragments):
            break
    world.everyone_steps(4)
    in_air = one.machine.fragments[0]
    world.disk_records, world.disk_theta = {int(p): c for p, c in on_disk[0].items()}, on_disk[1]
    theta = dict(world.theta)
    world.crash_syncer()
    world.restart_syncer(exact=False)
    world.advance(HEAL_WAIT_NS)
    assert all(world.theta[p] >= theta[p] - 1e-9 for p in theta)
    assert all(s.merged_version >= 0 or not s.pushed for s in in_air.outstanding)
    world.everyone_steps(20)
    check(world)


def test_a_synchronous_learner_that_was_away_contributes_again() -> None:
    world = running(learners=2, steps=12, overlap=0, quorum="1")
    away = world.learners["l1@l1-1"]
    world.disconnect(away)
    for _ in range(20):
        world.everyone_steps(1)
    world.connect(away)
    merged = world.syncer.membership.members["l1"].merged
    before = [pair for pairs in merged for pair in pairs]
    world.everyone_steps(40)
    assert [pair for pairs in merged for pair in pairs] != before
    world.check_ledger()


def test_a_process_that_has_left_is_not_taken_back() -> None:
    """Its link broke after Leave and before the syncer's word: what it would give again is safe already."""
    world = running(learners=2)
    leaver = world.learners["l1@l1-1"]
    world.close(leaver)
    merged = world.syncer.ledger.totals()
    world.connect(leaver)
    assert leaver.code == "run_closed" and "has left" in leaver.stopped
    assert world.syncer.ledger.totals() == merged
    world.everyone_steps(10)
    check(world)


def test_a_healer_that_gives_nothing_usable_is_not_waited_for() -> None:
    world = running(learners=2)
    world.disk_works = False
    world.everyone_steps(8)
    world.crash_syncer()
    world.disk_works = True
    world.restart_syncer(exact=False, reconnect=False)
    first, second = world.learners.values()
    world.refuse_heals = True
    world.connect(first)
    world.connect(second)
    world.advance(HEAL_WAIT_NS)
    assert world.syncer.committed, "healing ended without waiting for pushes that will not come"
    world.everyone_steps(20)
    check(world)


def report(world: World, learner: FakeLearner, serial: int, want: int, **fields: object) -> None:
    message = DataReport("train", serial, 10, want, **fields)  # type: ignore[arg-type]
    world.to_syncer(fx.FromLearner(learner.session, message))


def test_data_leases_survive_the_syncer_and_come_back_from_the_lost() -> None:
    world = running(learners=2)
    one, two = world.learners["l0@l0-1"], world.learners["l1@l1-1"]
    report(world, one, 1, 3)
    report(world, two, 1, 2)
    report(world, one, 2, 0, done=(0,), holding=(1, 2))
    world.crash_syncer()
    world.restart_syncer()
    status = world.syncer.leases.status()["train"]
    assert (status["issued"], status["done"], status["in_hand"]) == (5, 1, 4)
    world.kill(two)
    world.advance(world.config.lost_after_ns + SECOND_NS)
    assert world.syncer.leases.status()["train"]["pool"] == 2
    report(world, one, 3, 2, holding=(1,), returned=(Lease(2, 7),))
    status = world.syncer.leases.status()["train"]
    assert status["reissued"] == 2 and status["in_hand"] == 3


@pytest.mark.parametrize("seed", range(60))
def test_any_mixture_of_deaths_keeps_the_books(seed: int) -> None:
    dice = random.Random(seed)
    world = World(config(quorum=dice.choice(["50%", "1", "all"]), learners_expected=2), 3)
    world.join_all()
    names = 3
    down = False
    for _ in range(60):
        action = dice.choice(["steps"] * 6 + ["crash", "torn", "cut", "kill", "join", "disk", "leave", "time"])
        alive = [x for x in world.learners.values() if not x.dead and not x.left]
        if down and action != "steps":
            world.restart_syncer(exact=world.disk_works)
            world.disk_works = True
            world.advance(HEAL_WAIT_NS + 1)
            down = False
        if action == "steps":
            world.everyone_steps(dice.randint(1, 5), tokens=dice.randint(1, 20))
        elif action == "crash":
            world.crash_syncer()
            down = True
        elif action == "torn":
            world.crash_before_publish = True
            world.everyone_steps(3)
            if world.crash_before_publish:
                world.crash_before_publish = False
            else:
                down = True
        elif action == "cut" and alive:
            learner = dice.choice(alive)
            world.disconnect(learner)
            world.step(learner) if learner.machine.joined else None
            world.connect(learner)
        elif action == "kill" and len(alive) > 2:
            victim = dice.choice(alive)
            world.kill(victim)
            again = world.add(victim.machine.learner, instance=f"again-{names}")
            names += 1
            world.boundary(again)
        elif action == "join" and len(alive) < 6:
            world.boundary(world.add(f"l{names}"))
            names += 1
        elif action == "leave" and len(alive) > 2:
            world.close(dice.choice(alive))
        elif action == "disk":
            world.disk_works = False
        elif action == "time":
            world.advance(20 * SECOND_NS)
        if not down:
            world.check_ledger()
            world.check_rebase()
    if down:
        world.restart_syncer(exact=False)
    world.disk_works = True
    world.advance(HEAL_WAIT_NS + 1)
    before = sum(versions(world))
    world.everyone_steps(30)
    assert sum(versions(world)) > before
    world.check_ledger()
    world.check_rebase()


@pytest.mark.parametrize(
    "push",
    [
        messages.SeedPart("l0", 2, fragment=3, size=5000, checksum=7, secret="s"),
        messages.HealedVersion("l0", 2, fragment=3, version=41, size=5000, checksum=7, secret="s"),
        messages.InnerPiece("l0", 2, slot=3, piece=0, pieces=1, whole_bytes=5000, size=5000, checksum=7, secret="s"),
    ],
    ids=["seed", "heal", "inner"],
)
def test_every_kind_of_push_is_read_as_what_was_written(push: Any) -> None:
    assert messages.meaning_of(push.header()) == push
