"""Who is left out of a merge because it points against the others: the rule, and a run with a liar in it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import STEP_NS, World, config

from atoll.core.agreement import (
    DOUBT_MAX,
    LENGTH_FACTOR,
    AgreementWatch,
    doubt_after,
    left_out,
    length_factors,
    suspects,
)
from atoll.core.config import SyncConfig
from atoll.core.effects import Compare, Compared
from atoll.core.events import ContributionRefused, Warned
from atoll.core.membership import Membership
from atoll.core.messages import Discard
from atoll.core.rounds import ContributionId, ContributionRecord

LIAR = "l3"

names = st.sampled_from("abcdefgh")
cosines = st.floats(-1.0, 1.0, allow_subnormal=False) | st.just(math.nan)


# ---------------------------------------------------------------- the rule


@settings(deadline=None)
@given(st.dictionaries(names, cosines, min_size=3))
def test_suspects_point_against_the_others_and_are_a_minority(found: dict[str, float]) -> None:
    suspected = suspects(found)
    assert 2 * len(suspected) < len(found)
    assert all(found[name] < 0.0 for name in suspected)
    worst = max((found[name] for name in suspected), default=-1.0)
    spared = [name for name, cosine in found.items() if cosine < 0.0 and name not in suspected]
    assert all(found[name] >= worst for name in spared), "the most opposed come first"


@settings(deadline=None)
@given(st.dictionaries(names, cosines, min_size=3))
def test_nobody_is_left_out_who_is_no_suspect(found: dict[str, float]) -> None:
    suspected = suspects(found)
    assert left_out(found, suspected).keys() <= set(suspected)
    assert left_out(found, []) == {}


@pytest.mark.parametrize(
    ("found", "out"),
    [
        ({"a": 0.5, "b": 0.49, "c": 0.51, "liar": -0.53}, True),
        ({"a": 0.06, "b": 0.07, "c": 0.08, "liar": -0.07}, True),
        ({"a": 0.5, "b": 0.49, "c": 0.51, "liar": -0.1}, False),
        ({"a": 0.01, "b": 0.02, "c": 0.03, "liar": -0.3}, False),
        ({"a": -0.9, "b": -0.9, "c": -0.9, "liar": -0.95}, False),
        ({"a": 0.5, "b": math.nan, "c": 0.5, "liar": -0.5}, True),
        ({"a": 0.5, "b": 0.5, "c": 0.5, "liar": math.nan}, False),
    ],
    ids=["flip", "little in common", "other data", "noise", "balance of opposed data", "one is zero", "it is zero"],
)
def test_only_who_points_as_far_against_them_as_they_agree_is_left_out(found: dict[str, float], out: bool) -> None:
    assert ("liar" in left_out(found, ["liar"])) == out


def test_three_verdicts_in_a_row_are_news_and_time_heals() -> None:
    doubts = [0.0]
    for _ in range(3):
        doubts.append(doubt_after(doubts[-1], opposed=True))
    assert [doubt > DOUBT_MAX for doubt in doubts] == [False, False, False, True]
    for _ in range(20):
        doubts.append(doubt_after(doubts[-1], opposed=False))
    assert doubts[-1] == 0.0, "small doubts are forgotten"


def given_by(learner: str, norm: float, steps: int = 8) -> ContributionRecord:
    return ContributionRecord(ContributionId(learner, 1, 0, 0), 1, 0, steps, 10 * steps, 100, norm, late=False)


@pytest.mark.parametrize(
    ("norms", "steps", "usual", "factors"),
    [
        ([1.0, 1.2, 0.9, 1.9], [8, 8, 8, 8], [], [1, 1, 1, 1]),
        ([1.0, 1.2, 0.9, 8.0], [8, 8, 8, 8], [], [1, 1, 1, LENGTH_FACTOR * 1.2 / 8.0]),
        ([1.0, 1.0, 1.0, 8.0], [8, 8, 8, 40], [], [1, 1, 1, 1]),
        ([1.0, 8.0], [8, 8], [], [1, 1]),
        ([1.0, 8.0], [8, 8], [1.0] * 8, [1, LENGTH_FACTOR / 8.0]),
        ([8.0, 8.0, 8.0], [8, 8, 8], [1.0] * 33, [1, 1, 1]),
        ([0.0, 0.0, 0.0], [8, 8, 8], [0.0] * 8, [1, 1, 1]),
    ],
    ids=["honest", "long", "many steps", "two cannot tell", "known norms", "everybody has grown", "nobody moves"],
)
def test_who_is_far_longer_than_the_others_weighs_as_much_less(
    norms: list[float], steps: list[int], usual: list[float], factors: list[float]
) -> None:
    items = [given_by(f"l{index}", *pair) for index, pair in enumerate(zip(norms, steps, strict=True))]
    assert length_factors(SyncConfig(), usual, items) == pytest.approx(factors)


# ---------------------------------------------------------------- a run with a liar


def lived(steps: int, liar: str = LIAR, **changes: object) -> World:
    """Everybody moves by one per step; the liar says that it went the other way."""
    world = World(config(quorum="all", learners_expected=4, **changes), 4)
    world.join_all()
    if liar:
        world.learners[f"{liar}@{liar}-1"].sign = -1.0
    world.everyone_steps(steps)
    world.check_ledger()
    return world


def test_a_liar_costs_little_with_robust_and_much_without() -> None:
    honest, lied, robust = lived(80, ""), lived(80), lived(80, robust="cosine")
    for fragment, moved in honest.theta.items():
        assert lied.theta[fragment] < 0.6 * moved
        assert robust.theta[fragment] == pytest.approx(moved, rel=0.02)
    robust.check_rebase()


def test_without_a_liar_robust_changes_nothing() -> None:
    plain, robust = lived(40, ""), lived(40, "", robust="cosine")
    assert [merge.weights for merge in plain.merges] == [merge.weights for merge in robust.merges]
    assert plain.history == robust.history


def test_everybody_hears_what_became_of_a_liars_tokens() -> None:
    world = lived(60, robust="cosine")
    assert not any(identity.learner == LIAR for merge in world.merges for identity in merge.contributions)
    told = world.noted(ContributionRefused)
    assert told and {(event.learner, event.code) for event in told} == {(LIAR, Discard.QUARANTINED)}
    assert "points against the others: cosine -1.00" in told[0].detail
    [news] = [event.text for event in world.noted(Warned) if LIAR in event.text]
    assert "is left out of merges" in news and "atoll leave" in news, "once, and with what to do"
    for fragment in range(4):
        line = world.syncer.ledger.fragment_totals(fragment)
        assert line.discarded.keys() == {Discard.QUARANTINED}
        account = world.syncer.ledger.account(LIAR, 1)
        assert account.merged[fragment] == 0 and account.discarded[fragment][Discard.QUARANTINED] > 400
    learner = world.learners[f"{LIAR}@{LIAR}-1"]
    for progress in learner.machine.fragments:
        ahead = learner.theta[progress.index] - world.theta[progress.index]
        assert abs(ahead) <= 8.0, "it trains on from the run's parameters"


def test_who_stops_lying_is_merged_again() -> None:
    world = lived(40, robust="cosine")
    world.learners[f"{LIAR}@{LIAR}-1"].sign = 1.0
    before = len(world.merges)
    world.everyone_steps(80)
    assert any(identity.learner == LIAR for merge in world.merges[before:] for identity in merge.contributions)
    assert any("agrees with the others again" in event.text for event in world.noted(Warned))
    world.check_ledger()
    world.check_rebase()


def test_rounds_of_one_go_on_without_the_liar() -> None:
    """Every round closes with the first that comes, which is the liar. What comes late is merged with the next."""
    world = World(config(quorum="1", learners_expected=4, robust="cosine"), 4)
    world.join_all()
    for index, name in enumerate(["l3", "l0", "l1", "l2"]):
        world.learners[f"{name}@{name}-1"].push_delay = index * STEP_NS // 4
    world.learners["l3@l3-1"].sign = -1.0
    world.everyone_steps(200)
    world.check_ledger()
    assert {len(merge.contributions) for merge in world.merges} >= {1, 3}
    late = [merge for merge in world.merges if merge.version > 2]
    assert len(late) > 40 and not any(i.learner == "l3" for merge in late for i in merge.contributions)


def test_when_nobody_else_is_left_a_doubted_learner_is_all_there_is() -> None:
    world = lived(60, robust="cosine")
    before = len(world.merges)
    for name in ("l0", "l1", "l2"):
        world.kill(world.learners[f"{name}@{name}-1"])
    world.everyone_steps(40)
    world.close(world.learners[f"{LIAR}@{LIAR}-1"])
    world.advance(world.config.lost_after_ns * 2)
    assert any(identity.learner == LIAR for merge in world.merges[before:] for identity in merge.contributions)
    world.check_ledger()


def test_only_the_last_contribution_of_whoever_is_there_is_kept() -> None:
    world = lived(60, robust="cosine")
    kept = [(identity.learner, identity.fragment) for identity in sorted(world.driver.held)]
    assert kept == [(f"l{number}", fragment) for number in range(3) for fragment in range(4)]
    assert all(world.syncer.keeps(identity) and not world.syncer.holds(identity) for identity in world.driver.held)
    world.kill(world.learners["l0@l0-1"])
    world.everyone_steps(20)
    assert {identity.learner for identity in world.driver.held} == {"l1", "l2"}
    assert not lived(60).driver.held, "nothing, if it is off"


def test_a_syncer_that_comes_back_finds_the_liar_again() -> None:
    world = lived(40, robust="cosine")
    world.crash_syncer()
    world.restart_syncer()
    before = len(world.merges)
    world.everyone_steps(60)
    assert len(world.merges) > before + 8
    assert not any(identity.learner == LIAR for merge in world.merges for identity in merge.contributions)
    world.check_ledger()


def test_what_a_liar_hands_over_when_it_leaves_counts_as_quarantined() -> None:
    world = lived(42, robust="cosine")
    world.close(world.learners[f"{LIAR}@{LIAR}-1"])
    world.everyone_steps(20)
    world.check_ledger()
    for fragment in range(4):
        assert world.syncer.ledger.fragment_totals(fragment).discarded.keys() == {Discard.QUARANTINED}


class LoneRounds:
    """Rounds of one: each is judged by what the others gave last, as directions on a line."""

    def __init__(self, learners: int) -> None:
        membership = Membership()
        for number in range(learners):
            member, _ = membership.admit(f"l{number}", "i", number, 0, 1)
            membership.activate(member, 0)
        self.watch = AgreementWatch(config(robust="cosine"), membership)
        self.ways: dict[ContributionId, float] = {}

    def is_merged(self, learner: str, way: float) -> bool:
        identity = ContributionId(learner, 1, 0, len(self.ways))
        self.ways[identity] = way
        items = [ContributionRecord(identity, 1, 0, 4, 40, 8, 1.0, False)]
        decided = self.watch.judge(items)
        while isinstance(decided, Compare):
            decided = self.watch.heard(Compared(0, self._cosines(decided)), items)
        if learner not in decided.left_out:
            self.watch.merged(items)
        return learner not in decided.left_out

    def _cosines(self, compare: Compare) -> dict[str, float]:
        ways = {identity.learner: self.ways[identity] for identity in compare.contributions}
        voices = {name: way for name, way in ways.items() if name in compare.voices}
        sums = {name: sum(way for other, way in voices.items() if other != name) for name in ways}
        return {name: math.copysign(1.0, way * sums[name]) if sums[name] else 0.0 for name, way in ways.items()}


def test_when_the_run_has_turned_its_old_witnesses_are_forgotten() -> None:
    rounds = LoneRounds(4)
    learners = ["l0", "l1", "l2", "l3"]
    assert all(rounds.is_merged(name, 1.0) for name in learners)
    assert [rounds.is_merged(name, -1.0) for name in learners] == [False, False, True, True]
    assert all(rounds.is_merged(name, -1.0) for name in learners)


def test_a_run_has_turned_even_if_a_minority_is_merged_all_the_while() -> None:
    """Draw 5, seed 31061: one small learner was merged alone, the two others left out by turns, for ever."""
    rounds = LoneRounds(3)
    assert all(rounds.is_merged(name, 1.0) for name in ("l0", "l1", "l2"))
    turns = [("l1", -1.0), ("l0", 1.0), ("l2", -1.0), ("l1", -1.0)]
    assert [rounds.is_merged(*turn) for turn in turns] == [False, True, True, True]


def test_one_liar_alone_turns_no_run() -> None:
    rounds = LoneRounds(4)
    assert all(rounds.is_merged(name, 1.0) for name in ("l0", "l1", "l2"))
    assert not any(rounds.is_merged("l3", -1.0) for _ in range(20))


def test_nor_does_a_liar_whom_one_honest_learner_joins_once() -> None:
    rounds = LoneRounds(5)
    assert all(rounds.is_merged(name, 1.0) for name in ("l0", "l1", "l2", "l3"))
    turns = [("l4", -1.0), ("l3", -1.0), ("l4", -1.0), ("l3", 1.0), ("l4", -1.0)]
    assert [rounds.is_merged(*turn) for turn in turns] == [False, False, False, True, False]


def test_nobody_waits_for_the_share_of_one_that_is_left_out_whenever_it_comes() -> None:
    world = World(config(quorum="75%", learners_expected=4, robust="cosine", partial="scaled"), 4)
    world.join_all()
    liar = world.learners["l3@l3-1"]
    liar.sign, liar.push_delay = -1.0, 3 * STEP_NS
    world.everyone_steps(120)
    assert len(world.merges) > 20 and not any(i.learner == "l3" for m in world.merges[-8:] for i in m.contributions)
    assert all(track.share > 0.95 for track in world.syncer.book.tracks)
