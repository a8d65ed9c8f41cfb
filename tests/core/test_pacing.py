"""How many steps lie between two rounds of the same fragment is a policy, and learners follow what it decides."""

from __future__ import annotations

from itertools import pairwise

import pacing_toy  # noqa: F401
import pytest
from world import World, config

from atoll.core import effects as fx
from atoll.core.admission import check_settings
from atoll.core.config import SyncConfig
from atoll.core.events import PaceChanged, RoundLaunched
from atoll.core.messages import Hello, Published
from atoll.core.pacing import PERIOD_MAX, Pace, period
from atoll.core.policy import first_due_step
from atoll.errors import ConfigError
from atoll.wire.convert import encode_syncer_message, parse_syncer_message
from atoll.wire.versions import settings_in

PACE = Pace(0, 5, 100, 8, 4, 1e9, 1e8, 1e8, 0.5)


def gaps(world: World, fragment: int) -> list[int]:
    """Steps between launches of a fragment."""
    clocks = [event.clock_step for event in world.noted(RoundLaunched) if event.fragment == fragment]
    return [after - before for before, after in pairwise(clocks)]


def running(pacing: str, steps: int = 60, **changes: object) -> World:
    world = World(config(quorum="all", learners_expected=2, pacing=pacing, **changes), 2)
    world.join_all()
    world.everyone_steps(steps)
    return world


def test_by_default_every_period_is_sync_every_and_nothing_is_said_of_it() -> None:
    world = running("fixed")
    assert set(gaps(world, 0)) == {world.config.sync_every}
    assert not world.noted(PaceChanged)


@pytest.mark.parametrize("overlap", [2, 0])
def test_a_policy_of_a_users_own_paces_a_run_and_its_reason_is_told_once(overlap: int) -> None:
    world = running("patient", overlap=overlap)
    every = world.config.sync_every
    for fragment in range(world.config.fragments):
        assert gaps(world, fragment)[-2:] == [2 * every, 2 * every]
    told = [event for event in world.noted(PaceChanged) if event.fragment == 0]
    assert [(event.period, event.reason) for event in told] == [(2 * every, "the run is under way")]
    world.check_ledger()


def test_learners_of_a_synchronous_run_wait_where_the_syncer_asks() -> None:
    world = running("patient", overlap=0)
    for learner in world.learners.values():
        for progress, track in zip(learner.machine.fragments, world.syncer.book.tracks, strict=True):
            assert progress.due_step == track.due_step and progress.period == 2 * world.config.sync_every


def test_a_policy_without_sense_cannot_stop_or_flood_a_run() -> None:
    config = SyncConfig(pacing="mad")
    assert period(config, PACE)[0] == PERIOD_MAX
    assert period(config, Pace(0, 4, 100, 8, 4, 1e9, 1e8, 1e8, 0.5))[0] == 1


def test_a_name_that_nobody_registered_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"pacing is 'fixd', which is no pacing policy \(did you mean 'fixed'\?\)"):
        SyncConfig(pacing="fixd")


def test_the_policy_is_the_syncers_own_and_no_learner_needs_it() -> None:
    assert "pacing" not in SyncConfig().to_dict(), "the hash over settings, and older records, stay as they are"
    told = SyncConfig(pacing="patient").to_dict()
    assert told["pacing"] == "patient" and "pacing" not in settings_in(told, 2)


def test_a_learner_that_waits_and_is_not_told_the_due_step_is_refused() -> None:
    hello = Hello("old", "1", 1, ())
    assert check_settings(hello, SyncConfig(pacing="patient")) is None
    refusal = check_settings(hello, SyncConfig(pacing="patient", overlap=0))
    assert refusal is not None and "pacing patient" in refusal.detail


def test_the_due_step_travels_and_is_worked_out_where_an_older_syncer_does_not_send_it() -> None:
    message = Published(0, 1, 1, 7, -1, 1, 96, due_step=112)
    assert parse_syncer_message(encode_syncer_message(message)) == message
    world = World(config(overlap=0), 1)
    world.join_all()
    machine = next(iter(world.learners.values())).machine
    assert machine.fragments[0].due_step == first_due_step(world.config, 0)
    machine.handle(fx.FromSyncer(Published(0, 0, 1, 7, -1, 1, 40)), 0)
    assert machine.fragments[0].due_step == 40 + world.config.sync_every
    machine.handle(fx.FromSyncer(Published(0, 0, 1, 7, -1, 1, 40, due_step=99)), 0)
    assert (machine.fragments[0].due_step, machine.fragments[0].period) == (99, 59)


def test_only_who_speaks_the_newer_protocol_is_told_the_due_step() -> None:
    world = World(config(), 2)
    world.join_all()
    old = world.syncer.membership.members["l0"]
    old.protocol = 1
    sent: list[fx.SyncerEffect] = []
    real = world.syncer.handle
    world.syncer.handle = lambda e, n: [sent.append(x) or x for x in real(e, n)]  # type: ignore[method-assign,func-returns-value]
    world.everyone_steps(20)
    told = [x for x in sent if isinstance(x, fx.ToLearner) and isinstance(x.message, Published)]
    assert {bool(x.message.due_step) for x in told if x.session == old.session} == {False}
    assert {bool(x.message.due_step) for x in told if x.session != old.session} == {True}


def test_a_warm_up_merges_more_often_at_first_and_ends_at_the_setting() -> None:
    world = running("warmup", steps=200, sync_every=8)
    found = gaps(world, 0)
    assert found[0] == 2 and found[-1] == 8 and found == sorted(found)
    told = [event for event in world.noted(PaceChanged) if event.fragment == 0]
    assert "warm-up, at step" in told[0].reason


def test_adaptive_learning_keeps_to_its_bounds() -> None:
    world = running("fixed", steps=200, sync_every=8, adaptive="learning", period_min=4)
    assert min(gaps(world, 0)) == 4 and gaps(world, 0)[-1] == 8
