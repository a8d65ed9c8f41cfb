"""A learner that does not deliver harms nobody: not the length of everybody's steps, not the clock, not the quorum."""

from __future__ import annotations

from typing import Any

import pytest
from world import STEP_NS, FakeLearner, World, config

from atoll.core import effects as fx
from atoll.core.events import MemberAside, RoundAborted, Warned
from atoll.core.expected_learners import SHORT_SAY_NS, SHORT_WAIT_NS
from atoll.core.membership import PROOF_NS
from atoll.core.merge_watch import STALL_SAY_NS
from atoll.core.policy import ASIDE_PERIODS, MISSING_PERIODS
from atoll.core.seed_intake import SEED_PATIENCE_NS
from atoll.core.silence import QUIET_NS

NEVER_NS = 10**15
SECOND = 1_000_000_000


def running(learners: int = 4, **changes: object) -> World:
    world = World(config(fragments=1, learners_expected=learners, **changes), learners)
    world.join_all()
    world.everyone_steps(20)
    return world


def shares(world: World, since: int) -> list[float]:
    return [sum(merge.weights) for merge in world.merges[since:]]


def mute(world: World, name: str) -> FakeLearner:
    """Its reports arrive, its contributions do not."""
    learner = world.learners[name]
    learner.push_delay = NEVER_NS
    return learner


def pass_time(world: World, duration_ns: int) -> None:
    """Steps that take a second each."""
    for _ in range(duration_ns // SECOND + 1):
        world.everyone_steps(1)
        world.advance(SECOND)


def deliver(world: World, learner: FakeLearner) -> None:
    """The link is well again: what waited arrives."""
    learner.push_delay = 0
    world.later = [(min(at_ns, world.now_ns + 1), action) for at_ns, action in world.later]


def test_one_that_never_answers_does_not_shorten_everybodys_steps() -> None:
    world = running(quorum="75%")
    mute(world, "l3@l3-1")
    done, moved = len(world.merges), world.theta[0]
    world.everyone_steps(200)
    assert min(shares(world, done)) > 0.4, "it weighs about what it can have on its way"
    assert shares(world, done)[ASIDE_PERIODS + 1 :] == pytest.approx([1.0] * (len(world.merges) - done - 4))
    assert world.theta[0] - moved > 190, "a learner moves by one a step, and so does the model"


def test_it_is_said_once_and_said_again_when_it_answers() -> None:
    world = running()
    silent = mute(world, "l3@l3-1")
    world.everyone_steps(100)
    (said,) = world.noted(MemberAside)
    assert said.learner == "l3" and said.aside and "3 rounds" in said.reason
    assert world.syncer.membership.members["l3"].aside == said.reason
    deliver(world, silent)
    world.everyone_steps(20)
    assert [note.aside for note in world.noted(MemberAside)] == [True, False]
    assert not world.syncer.membership.members["l3"].aside
    assert sum(identity.learner == "l3" for identity in world.merged_ids) > 3


def test_what_comes_late_and_seldom_is_merged_and_does_not_make_it_count() -> None:
    """A link on which a contribution takes ten periods: it is asked and merged, and nobody counts on it."""
    world = running()
    world.learners["l3@l3-1"].push_delay = 40 * STEP_NS
    world.everyone_steps(400)
    merged = sum(identity.learner == "l3" for identity in world.merged_ids)
    assert merged >= 5
    assert [note.aside for note in world.noted(MemberAside)] == [True]


def test_a_quorum_is_of_those_who_answer() -> None:
    """Five of eight: with four silent ones there would be no round any more."""
    world = World(config(fragments=1, learners_expected=8, quorum="50%"), 8)
    world.join_all()
    world.everyone_steps(20)
    for name in ("l4@l4-1", "l5@l5-1", "l6@l6-1"):
        mute(world, name)
    world.everyone_steps(60)
    assert world.syncer.membership.counted() == 5 and world.syncer.book.quorum() == 3
    mute(world, "l7@l7-1")
    mute(world, "l3@l3-1")
    done = len(world.merges)
    world.everyone_steps(100)
    assert len(world.merges) - done > 15


def test_nobody_is_set_aside_where_everybody_is_asked_for_or_where_a_number_needs_them() -> None:
    for quorum in ("all", "3"):
        world = running(3, quorum=quorum)
        mute(world, "l2@l2-1")
        world.everyone_steps(60)
        assert not world.noted(MemberAside), quorum


def test_those_who_were_set_aside_are_needed_when_the_others_go() -> None:
    world = running(2, quorum="1", quorum_timeout_ns=SECOND)
    silent = mute(world, "l1@l1-1")
    world.everyone_steps(60)
    assert world.syncer.membership.members["l1"].aside
    world.close(world.learners["l0@l0-1"])
    world.step(silent)
    assert not world.syncer.membership.members["l1"].aside
    deliver(world, silent)
    done = len(world.merges)
    world.everyone_steps(30)
    assert len(world.merges) - done > 3


def test_a_report_of_long_ago_does_not_hold_the_clock() -> None:
    """Two of three: the third largest step is the second one's, and that one is silent."""
    world = running(2, quorum="100%", lease_ns=60 * SECOND)
    assert world.syncer.book.quorum() == 2  # everybody: nobody may be left out
    world = World(config(fragments=1, learners_expected=3, quorum="60%", lease_ns=60 * SECOND), 3)
    world.join_all()
    world.everyone_steps(20)
    silent = [world.learners["l1@l1-1"], world.learners["l2@l2-1"]]
    clock = world.syncer.book.clock_last
    talking = world.learners["l0@l0-1"]
    for _ in range(40):
        world.step(talking)
        world.advance(QUIET_NS // 20)
    assert {note.learner for note in world.noted(MemberAside)} == {"l1", "l2"}
    assert world.syncer.book.clock_last > clock + 30
    for learner in silent:
        world.step(learner)
    assert not any(world.syncer.membership.members[name].aside for name in ("l1", "l2"))


def test_contributions_of_one_that_cannot_have_newer_versions_count_less_but_count() -> None:
    """Its downlink is so thin that whatever it adopts is old: what it brings is refused, then it is set aside, and
    from then on it is merged with as much less weight as it is too old."""
    world = running(4, quorum="75%", carry_versions_max=2)
    slow = world.learners["l3@l3-1"]
    fetch = world.fetch

    def thin(learner: FakeLearner, request: Any, done: Any) -> None:
        if learner is slow:
            world.later.append((world.now_ns + 40 * STEP_NS, lambda: (fetch(learner, request, done), world.run())))
        else:
            fetch(learner, request, done)

    world.fetch = thin  # type: ignore[method-assign]
    world.everyone_steps(400)
    mine = [merge for merge in world.merges if any(i.learner == "l3" for i in merge.contributions)]
    assert len(mine) >= 5
    (said,) = world.noted(MemberAside)
    assert said.aside
    assert min(sum(merge.weights) for merge in mine) < 0.9, "what is taken from an old one is given to nobody"


def test_too_few_of_those_expected_is_said_and_then_the_run_goes_on_without_them() -> None:
    world = World(config(fragments=1, learners_expected=4, quorum="50%"), 1)
    world.join_all()
    world.everyone_steps(10)
    assert not world.merges and not world.noted(Warned)
    pass_time(world, SHORT_SAY_NS)
    (first,) = world.noted(Warned)
    assert "1 of 4 expected learners are here, and a round needs 2" in first.text and "--learners" in first.text
    pass_time(world, SHORT_WAIT_NS)
    world.everyone_steps(10)
    assert len(world.merges) > 1 and "goes on with those who are here" in world.noted(Warned)[1].text


def test_where_everybody_is_asked_for_it_is_only_said() -> None:
    world = World(config(fragments=1, learners_expected=2, quorum="all"), 1)
    world.join_all()
    world.everyone_steps(10)
    pass_time(world, 2 * SHORT_WAIT_NS)
    world.everyone_steps(10)
    assert not world.merges and len(world.noted(Warned)) == 2


def test_newcomers_are_asked_although_a_round_waits_for_somebody() -> None:
    """A round was launched when only one learner was there, whose link is slow. Four more come: a period later it
    begins anew and asks them as well."""
    world = World(config(fragments=1, learners_expected=1, quorum="50%", sync_every=4), 1)
    world.join_all()
    slow = world.learners["l0@l0-1"]
    slow.push_delay = NEVER_NS
    world.everyone_steps(6)
    assert not world.merges
    for index in range(1, 5):
        world.add(f"l{index}")
    world.join_all()
    world.everyone_steps(16)
    assert any("joined since" in note.reason for note in world.noted(RoundAborted))
    assert len(world.merges) >= 2


def test_a_learner_that_goes_away_while_too_few_are_there_costs_no_wakes() -> None:
    """The machine once wanted to be woken in the past, again and again."""
    world = World(config(fragments=1, learners_expected=4, quorum="50%"), 1)
    world.join_all()
    world.everyone_steps(3)
    world.advance(120 * SECOND)
    wake = world.syncer.next_wake_ns()
    assert wake is None or wake > world.now_ns


def test_a_contribution_of_many_periods_does_not_take_over_the_merge() -> None:
    """One of four was cut off for long. Its way is long already: by its tokens it would outweigh all the others."""
    world = running(4, quorum="75%")
    away = world.learners["l3@l3-1"]
    world.disconnect(away)
    for _ in range(100):
        world.step(away)
    world.everyone_steps(2)
    world.connect(away)
    done = len(world.merges)
    world.everyone_steps(20)
    weights = [
        dict(zip((i.learner for i in merge.contributions), merge.weights, strict=True)) for merge in world.merges[done:]
    ]
    mine = max(weight["l3"] / sum(weight.values()) for weight in weights if "l3" in weight and len(weight) > 2)
    assert 0.2 < mine <= 0.5
    world.check_ledger()


def test_a_learner_that_is_behind_hands_over_at_once_when_it_leaves() -> None:
    """It does not wait for versions that its link cannot bring in time; only what is refused as too old waits."""
    world = running(4)
    leaver = world.learners["l3@l3-1"]
    fetch = world.fetch
    world.fetch = lambda learner, *call: fetch(learner, *call) if learner is not leaver else None  # type: ignore[method-assign]
    for _ in range(10):
        world.everyone_steps(4)
    assert any(p.announced - p.base > world.config.carry_versions_max // 2 for p in leaver.machine.fragments)
    world.close(leaver)
    assert leaver.left


def test_the_first_parameters_are_asked_of_another_when_the_first_learner_is_slow() -> None:
    world = World(config(learners_expected=2))
    slow = world.add_later("slow")
    world.gives_seed = lambda learner: learner is not slow  # type: ignore[method-assign]
    world.connect(slow)
    quick = world.add("quick")
    world.advance(SEED_PATIENCE_NS - 1)
    world.boundary(quick)
    assert not quick.machine.joined
    world.advance(2)
    for learner in (quick, slow):
        world.boundary(learner)
    assert quick.machine.joined and slow.machine.joined
    assert any("'quick' is asked" in note.text for note in world.noted(Warned))


def test_whoever_hands_over_last_does_not_have_the_last_merge_to_itself() -> None:
    """Three of four leave at the end of the run; the fourth, over a thin link, brings 40 steps when they are gone."""
    world = running(4, quorum="75%")
    last = mute(world, "l3@l3-1")
    world.everyone_steps(40)
    world.to_syncer(fx.StopRequested("the budget is spent"))
    world.run()
    for name in ("l0@l0-1", "l1@l1-1", "l2@l2-1"):
        world.close(world.learners[name])
    done, before = len(world.merges), world.theta[0]
    deliver(world, last)
    world.advance(STEP_NS)
    world.close(last)
    world.advance(STEP_NS)
    mine = [merge for merge in world.merges[done:] if any(i.learner == "l3" for i in merge.contributions)]
    assert mine and all(sum(merge.weights) <= 0.25 + 1e-9 for merge in mine)
    assert world.theta[0] - before < 15, "a quarter of its way"
    assert world.finished
    world.check_ledger()


def test_whoever_hands_over_last_counts_as_one_of_all_beside_the_tails_of_the_others() -> None:
    """Three of four hand over the step or two since their last round, and wait for the fourth: it brings 40 steps into
    the same merge, which nothing comes after."""
    world = running(4, quorum="75%")
    last = mute(world, "l3@l3-1")
    world.everyone_steps(41)
    world.to_syncer(fx.StopRequested("the budget is spent"))
    world.run()
    for name in ("l0@l0-1", "l1@l1-1", "l2@l2-1"):
        world.close(world.learners[name])
    done, before = len(world.merges), world.theta[0]
    deliver(world, last)
    world.close(last)
    for _ in range(4):
        world.boundary(last)
        world.advance(STEP_NS)
    together = [merge for merge in world.merges[done:] if len({i.learner for i in merge.contributions}) > 1]
    assert together, "there was no merge of the long one with tails"
    for merge in together:
        of = dict.fromkeys((i.learner for i in merge.contributions), 0.0)
        for identity, weight in zip(merge.contributions, merge.weights, strict=True):
            of[identity.learner] += weight
        assert max(of.values()) <= 0.25 + 1e-9, of
    most = MISSING_PERIODS * world.config.sync_every
    assert world.theta[0] - before <= 0.25 * (most + 3 * 2) + 1e-6, "40 steps of its way would be too far"
    assert world.finished
    world.check_ledger()


@pytest.mark.parametrize("quorum", ["all", "4"])
def test_who_holds_everybody_up_is_named_well_before_the_round_is_given_up(quorum: str) -> None:
    world = running(quorum=quorum)
    silent = mute(world, "l2@l2-1")
    before = world.syncer.book.commits
    pass_time(world, STALL_SAY_NS + 6 * SECOND)
    (said,) = [note.text for note in world.noted(Warned)]
    assert "nothing is merged" in said and "answers of l2." in said and "--quorum 50%" in said
    assert world.syncer.stalled == said and not world.noted(RoundAborted)
    pass_time(world, 2 * world.config.quorum_timeout_ns)
    assert [note.text for note in world.noted(Warned)] == [said], "once, although rounds were given up meanwhile"
    assert world.noted(RoundAborted) and world.syncer.book.commits == before
    deliver(world, silent)
    pass_time(world, 20 * SECOND)
    assert world.syncer.book.commits > before and world.syncer.stalled == ""
    assert "rounds go on" in world.noted(Warned)[-1].text


def test_one_that_stands_still_or_is_gone_is_named_as_well() -> None:
    world = running(quorum="all", overlap=0, grace_cap_steps=0.0)
    others = [learner for name, learner in world.learners.items() if name != "l1@l1-1"]
    for _ in range(STALL_SAY_NS // SECOND + 8):
        for learner in others:
            world.boundary(learner)
            if not learner.machine.must_wait:
                world.step(learner)
        for learner in world.learners.values():  # its script hangs in a step, its connection does not
            if (beat := learner.machine.heartbeat()) is not None:
                world.to_syncer(fx.FromLearner(learner.session, beat))
        world.advance(SECOND)
    assert any("the steps of l1" in note.text for note in world.noted(Warned)), texts(world)
    gone = running(quorum="4")
    gone.disconnect(gone.learners["l3@l3-1"])
    pass_time(gone, STALL_SAY_NS + 6 * SECOND)
    assert any("a round needs 4 (quorum 4); away: l3" in note.text for note in gone.noted(Warned)), texts(gone)


def measured(world: World) -> World:
    """Contributions are as long as they are: the smallest world calls each 1 otherwise."""
    take = world.complete_push
    world.complete_push = lambda header, value, **more: take(header, value, abs(value))  # type: ignore[method-assign]
    return world


def test_who_was_left_behind_does_not_go_the_others_way_once_more() -> None:
    """They were merged all the while. What it brings at last counts as two usual ways, and not as a quarter of 400."""
    world = measured(running(quorum="75%"))
    last = mute(world, "l3@l3-1")
    world.everyone_steps(400)
    deliver(world, last)
    world.everyone_steps(1)
    done, before = len(world.merges), world.theta[0]
    world.everyone_steps(40)
    late = [merge for merge in world.merges[done:] if any(one.learner == "l3" for one in merge.contributions)]
    assert late, "it is merged again"
    assert world.theta[0] - before < 40 + 4 * world.config.sync_every, "40 steps of all, and some of its own"
    world.check_ledger()


def test_after_an_outage_of_the_syncer_nobody_was_left_behind() -> None:
    world = measured(running(quorum="75%"))
    world.everyone_steps(40)
    before = world.theta[0]
    for learner in world.learners.values():
        world.disconnect(learner)
    for _ in range(100):
        for learner in world.learners.values():
            world.step(learner)
    for learner in world.learners.values():
        world.connect(learner)
    world.everyone_steps(40)
    assert world.theta[0] - before > 70, "what all have done meanwhile counts"


def test_a_run_that_has_just_begun_on_a_machine_that_has_been_up_for_long_is_not_called_stalled() -> None:
    """The first look found nobody behind, and the second took the time since the machine's start for a stall."""
    world = World(config(fragments=1, learners_expected=4, quorum="all"), 4)
    world.now_ns = 700 * SECOND
    world.join_all()
    world.advance(2 * SECOND)
    for _ in range(world.config.sync_every + 2):
        world.step(world.learners["l0@l0-1"])
        world.advance(2 * SECOND)
    assert texts(world) == []


def texts(world: World) -> list[str]:
    return [note.text for note in world.noted(Warned)]


def test_several_that_fall_silent_at_once_hold_nobody_up_for_long() -> None:
    world = running(quorum="75%")
    before, began_ns = world.syncer.book.commits, world.now_ns
    for name in ("l2@l2-1", "l3@l3-1"):
        mute(world, name)
    pass_time(world, PROOF_NS + 6 * SECOND)
    assert world.syncer.book.commits > before and not world.noted(RoundAborted)
    assert world.now_ns - began_ns < world.config.quorum_timeout_ns / 2
    aside = {note.learner for note in world.noted(MemberAside) if note.aside}
    assert aside == {"l2", "l3"}, "as many as had to be"


def test_links_on_which_a_round_always_takes_long_are_no_news() -> None:
    world = running(quorum="75%")
    for number, learner in enumerate(world.learners.values()):
        learner.push_delay = (30 + 10 * number) * SECOND
    pass_time(world, 200 * SECOND)
    before, known, aside = world.syncer.book.commits, len(texts(world)), len(world.noted(MemberAside))
    pass_time(world, 600 * SECOND)
    assert world.syncer.book.commits > before + 5 and len(texts(world)) == known
    assert not [note for note in world.noted(MemberAside)[aside:] if "did not answer a round" in note.reason]
