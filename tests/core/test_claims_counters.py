"""What a learner says of its steps and tokens counts as far as it can be true. Honest learners are never touched."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from world import STEP_NS, FakeLearner, World, config

from atoll.core import effects as fx
from atoll.core.messages import STEP_MAX, TOKENS_MAX, DiscardCount, Progress, PushHeader, PushKind, Ready, Refused
from atoll.core.plausible import AWAY_STEPS_MAX, BURST_PERIODS, PACE_FACTOR, SPEND_PERIODS, SPEND_SLACK

SECOND = 1_000_000_000


def running(learners: int = 3, steps: int = 20, **changes: object) -> World:
    world = World(config(fragments=1, learners_expected=learners, **changes), learners)
    world.join_all()
    world.everyone_steps(steps)
    return world


def lie(world: World, name: str, **claims: Any) -> None:
    """From now on its reports say this, the rest being true."""
    learner = world.learners[f"{name}@{name}-1"]
    host: Any = learner.driver._host
    send = type(host).send

    def say(message: Any) -> None:
        if isinstance(message, Progress):
            said = {field: claim(message) if callable(claim) else claim for field, claim in claims.items()}
            message = replace(message, **said)
        send(host, message)

    host.send = say


def refusals(world: World) -> list[str]:
    said = [effect.message for effect in world.driver.said if isinstance(effect, fx.ToLearner)]
    return [message.detail for message in said if isinstance(message, Refused)]


def honest(world: World) -> list[FakeLearner]:
    return [learner for key, learner in world.learners.items() if not key.startswith("l0")]


# ---------------------------------------------------------------- the clock


def jump(claim: int) -> dict[str, Any]:
    return {"step": lambda m: m.step + claim, "steps": lambda m: m.steps + claim}


@pytest.mark.parametrize("claim", [2**30, STEP_MAX // 2])
def test_a_claim_of_many_steps_neither_jumps_nor_freezes_the_clock_of_a_quorum_of_one(claim: int) -> None:
    world = running(quorum="1")
    clock, merges = world.syncer.book.clock_last, len(world.merges)
    lie(world, "l0", **jump(claim))
    world.everyone_steps(40)
    most = (BURST_PERIODS + 1) * world.config.sync_every + PACE_FACTOR * 40
    assert world.syncer.book.clock_last - clock <= most
    assert len(world.merges) - merges >= 8, "the others' rounds go on"
    world.check_ledger()


def test_one_that_was_ahead_and_stops_does_not_hold_the_others() -> None:
    """A quorum of one: the clock is the leader's step, and the leader says the same one for ever."""
    world = running(quorum="1")
    ahead = world.learners["l0@l0-1"]
    for _ in range(300):
        world.step(ahead)
        world.advance(STEP_NS)
    merges = len(world.merges)
    for _ in range(60):
        for learner in honest(world):
            world.step(learner)
        world.advance(STEP_NS)
        for learner in honest(world):
            world.boundary(learner)
    assert len(world.merges) - merges >= 5, "one every two periods and more"


def test_a_newcomer_begins_where_it_was_told() -> None:
    world = running(quorum="1")
    world.add("l9")
    session = world.learners["l9@l9-1"].session
    world.to_syncer(fx.FromLearner(session, Ready(10**9, (world.syncer.book.tracks[0].version,))))
    assert any("said ready at step 1000000000, and was told to begin at" in text for text in refusals(world))


def test_one_that_claims_a_past_in_a_run_without_one_does_not_move_the_clock() -> None:
    world = running(quorum="1")
    clock, merges = world.syncer.book.clock_last, len(world.merges)
    liar = world.add_later("liar")
    hello = replace(liar.machine.hello(), run="run-1", generation=7, bases=(3,), checksums=(1,))
    world.sessions += 1
    world.to_syncer(fx.SessionOpened(world.sessions, hello))
    world.to_syncer(fx.FromLearner(world.sessions, Ready(10**9, (3,))))
    world.run()
    assert world.syncer.membership.members["liar"].step_counted <= clock + BURST_PERIODS * world.config.sync_every
    world.everyone_steps(20)
    assert len(world.merges) - merges >= 4


def test_after_a_restart_of_the_syncer_learners_have_come_far_and_are_believed() -> None:
    world = running(quorum="1")
    world.crash_syncer()
    for learner in world.learners.values():
        for _ in range(500):
            world.step(learner)
    world.restart_syncer()
    world.everyone_steps(8)
    assert world.syncer.book.clock_last > 500
    assert max(m.step_counted for m in world.syncer.membership.members.values()) < AWAY_STEPS_MAX


def test_a_learner_that_was_cut_off_counts_with_all_its_steps_again() -> None:
    world = running(quorum="1")
    away = world.learners["l0@l0-1"]
    world.disconnect(away)
    for _ in range(200):
        world.step(away)
        world.advance(STEP_NS)
    world.connect(away)
    world.everyone_steps(2)
    member = world.syncer.membership.members["l0"]
    assert member.step_counted == member.step > 200


# ---------------------------------------------------------------- reports that nobody can make


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"step": lambda m: m.step + 5}, "a step that its own steps do not lead to"),
        ({"tokens": TOKENS_MAX + 1}, "counters that cannot be"),
        (jump(STEP_MAX), "counters that cannot be"),
        ({"discarded": (DiscardCount(0, "stale", 2**50),)}, "counters that cannot be"),
        ({"discarded": (DiscardCount(0, "stale", 150), DiscardCount(0, "refused", 150))}, "counters that cannot be"),
    ],
)
def test_counters_that_no_honest_learner_has_end_its_session(claims: dict[str, Any], words: str) -> None:
    world = running()
    lie(world, "l0", **claims)
    before = world.syncer.ledger.totals()
    world.step(world.learners["l0@l0-1"])
    assert any(words in text for text in refusals(world))
    assert world.syncer.ledger.totals() == before
    world.check_ledger()


# ---------------------------------------------------------------- contributions


def pushed(world: World, name: str, steps: int, tokens: int) -> str:
    member, track = world.syncer.membership.members[name], world.syncer.book.tracks[0]
    fields = (member.generation, 0, 0, 0, member.seq_seen[0] + 1, track.version, steps, tokens)
    header = PushHeader(PushKind.CONTRIBUTION, name, *fields, world.config.codec_up, 1, 1, member.secret)
    return world.complete_push(header, 1.0).code


def test_a_contribution_of_tokens_that_were_never_reported_is_refused() -> None:
    world = running()
    assert pushed(world, "l0", 10**6, 10**9) == "bad_counters"
    assert pushed(world, "l0", 4, TOKENS_MAX + 1) == pushed(world, "l0", STEP_MAX + 1, 40) == "bad_counters"
    assert pushed(world, "l0", 4, 40) == "", "a report may be overtaken by some steps"
    world.check_ledger()


# ---------------------------------------------------------------- the budget


def test_one_claim_does_not_spend_the_budget() -> None:
    world = running(4, tokens_budget=3_000)
    lie(world, "l0", tokens=lambda m: m.tokens + 10**9)
    world.everyone_steps(20)
    assert world.syncer.ledger.processed > 10**9 and not world.syncer.stopping
    world.check_ledger()
    for _ in range(4):
        world.everyone_steps(10)
    assert "budget" in world.syncer.stopping, "what the others make, and what it can have made, is spent"


def test_one_of_two_that_says_its_steps_take_no_time_does_not_spend_the_budget() -> None:
    world = running(2, tokens_budget=6_000)
    lie(world, "l0", tokens=lambda m: m.tokens + 10**9, step_ns=1)
    world.everyone_steps(100)
    assert world.syncer.ledger.processed > 10**9 and not world.syncer.stopping
    world.everyone_steps(200)
    assert "budget" in world.syncer.stopping, "its two shares and the other's one are spent"


def test_what_did_not_count_does_not_count_after_a_restart() -> None:
    world = running(4, tokens_budget=100_000)
    lie(world, "l0", tokens=lambda m: m.tokens + 10**9)
    world.everyone_steps(20)
    world.crash_syncer()
    world.kill(world.learners["l0@l0-1"])
    world.restart_syncer()
    world.everyone_steps(8)
    assert world.syncer.ledger.processed > 10**9 and not world.syncer.stopping


def spent_in_full(world: World) -> bool:
    return world.syncer.ledger.spent == world.syncer.ledger.processed


def unequal(tokens: int, pace: int, steps: int) -> World:
    """Three learners of which one has so many times the tokens, and takes so many steps while the others take one."""
    world = World(config(fragments=1, learners_expected=3, tokens_budget=10**9), 3)
    world.join_all()
    for _ in range(steps):
        for learner in world.learners.values():
            large = learner is world.learners["l0@l0-1"]
            for _ in range(pace if large else 1):
                world.step(learner, tokens=10 * tokens if large else 10)
        world.advance(STEP_NS)
        for learner in world.learners.values():
            world.boundary(learner)
    return world


@pytest.mark.parametrize(("tokens", "pace"), [(1, 1), (2, 1), (1, 2)])
def test_tokens_of_learners_that_are_much_alike_count_at_once(tokens: int, pace: int) -> None:
    assert spent_in_full(unequal(tokens, pace, 30))


@pytest.mark.parametrize(("tokens", "pace"), [(64, 1), (1, 8), (8, 8)])
def test_tokens_of_a_large_or_fast_learner_count_in_full_once_it_has_shown_them(tokens: int, pace: int) -> None:
    periods = SPEND_PERIODS * (math.ceil(math.log2(tokens * pace / SPEND_SLACK)) + 1)
    world = unequal(tokens, pace, (periods + 2) * 4)
    assert spent_in_full(world)


def test_a_bold_report_takes_no_more_of_the_budget_than_its_share() -> None:
    """Six learners; the run ends as if the sixth had worked as the others did."""
    world = World(config(fragments=1, learners_expected=6, tokens_budget=6 * 400 * 10), 6)
    world.join_all()
    world.everyone_steps(100)
    lie(world, "l0", tokens=lambda m: 1000 * m.tokens, steps=lambda m: 1000 * m.steps, step=lambda m: 1000 * m.step)
    done = 100
    while not world.syncer.stopping and done < 500:
        world.everyone_steps(1)
        done += 1
    assert 0.95 * 400 <= done < 500
    world.check_ledger()


def test_what_was_done_while_the_syncer_was_down_counts() -> None:
    world = running(3, tokens_budget=10**6)
    world.crash_syncer()
    for learner in world.learners.values():
        for _ in range(500):
            world.step(learner)
    world.restart_syncer()
    world.everyone_steps(8)
    assert world.syncer.ledger.processed > 15_000 and spent_in_full(world)


def test_what_one_alone_says_it_did_meanwhile_does_not() -> None:
    world = running(4, tokens_budget=50_000)
    world.crash_syncer()
    world.restart_syncer()
    lie(world, "l0", tokens=lambda m: m.tokens + 10**9, steps=lambda m: m.steps + 10**6, step=lambda m: m.step + 10**6)
    world.everyone_steps(20)
    assert world.syncer.ledger.processed > 10**9 and not world.syncer.stopping


def test_what_did_not_count_is_in_the_record_of_every_commit() -> None:
    """A claim that has grown since it was last on the tape must not count after a kill."""
    world = running(4, tokens_budget=100_000)
    lie(world, "l0", tokens=lambda m: m.tokens + 10**9 + 10**8 * m.steps)
    world.everyone_steps(20)
    spent = world.syncer.ledger.spent
    world.crash_syncer()
    world.kill(world.learners["l0@l0-1"])
    world.restart_syncer()
    world.everyone_steps(8)
    assert world.syncer.ledger.spent <= spent + 4 * 8 * 10 + 10**3
