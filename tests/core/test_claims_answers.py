"""Ids are free: only learners that answer raise a quorum, hold the clock or shrink a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from world import STEP_NS, TENSORS, World, config

from atoll.core import effects as fx
from atoll.core.ledger import Ledger
from atoll.core.membership import PROOF_NS, Membership
from atoll.core.merging import MergeScales
from atoll.core.messages import Hello, Progress, Ready
from atoll.core.plausible import capped
from atoll.core.rounds import ContributionId, ContributionRecord, FragmentTrack, Round
from atoll.core.sizes import LearnerSizes

SECOND = 1_000_000_000


class Crowd:
    """Ids that say hello, ready and how far they are, and answer nothing."""

    def __init__(self, world: World, count: int, *, steps: bool = False) -> None:
        self._world, self._steps, self._step = world, steps, 0
        self.sessions: list[int] = []
        for index in range(count):
            world.sessions += 1
            self.sessions.append(world.sessions)
            hello = Hello(f"x{index}", f"x{index}-1", 2, TENSORS)
            world.to_syncer(fx.SessionOpened(world.sessions, hello))
            world.to_syncer(fx.FromLearner(world.sessions, Ready(0, (0,) * world.config.fragments)))
        world.run()

    def report(self) -> None:
        self._step += self._steps
        for session in self.sessions:
            member = self._world.syncer.membership.by_session(session)
            if member is not None:
                step = member.start_step + self._step
                report = Progress(step, self._step, 10 * self._step, STEP_NS, 1.0, member.bases)
                self._world.to_syncer(fx.FromLearner(session, report))
        self._world.run()


def train(world: World, crowd: Crowd, rounds: int) -> int:
    """Everybody steps and reports; returns how many versions came of it."""
    before = len(world.merges)
    for _ in range(rounds):
        world.everyone_steps(1)
        crowd.report()
    return len(world.merges) - before


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("quorum", ["50%", "75%", "1", "all"])
def test_a_hundred_ids_that_never_answer_change_nothing(quorum: str, steps: bool) -> None:
    made = []
    for count in (0, 100):
        world = World(config(fragments=1, learners_expected=4, quorum=quorum), 4)
        world.join_all()
        world.everyone_steps(20)
        assert train(world, Crowd(world, count, steps=steps), 40) >= 9
        made.append([(merge.contributions, merge.weights) for merge in world.merges])
        world.check_ledger()
    assert made[0] == made[1]


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("expected", [1, 4])
def test_a_hundred_ids_that_were_there_first_hold_the_run_for_half_a_minute(expected: int, steps: bool) -> None:
    world = World(config(fragments=1, learners_expected=expected, quorum="50%"), 4)
    world.join_all()
    crowd = Crowd(world, 100, steps=steps)
    train(world, crowd, 20)
    assert world.syncer.membership.first_proof_ns >= 0, "a round was launched all the same"
    world.advance(PROOF_NS)
    assert train(world, crowd, 40) >= 9


def test_ids_that_answered_once_are_set_aside_when_they_keep_a_round_from_closing() -> None:
    world = World(config(fragments=1, learners_expected=4, quorum="75%", quorum_timeout_ns=20 * SECOND), 4)
    world.join_all()
    world.everyone_steps(20)
    for name in ("l1@l1-1", "l2@l2-1"):
        world.learners[name].push_delay = 10**15
    done = len(world.merges)
    for _ in range(60):
        world.everyone_steps(1)
        world.advance(SECOND)
    assert len(world.merges) - done >= 5
    assert all(world.syncer.membership.members[name].aside for name in ("l1", "l2"))


def test_a_newcomer_counts_from_its_first_contribution_on() -> None:
    world = World(config(fragments=1, learners_expected=2, quorum="all"), 2)
    world.join_all()
    world.everyone_steps(10)
    world.add("l2")
    world.join_all()
    assert world.syncer.membership.counted() == 2
    world.everyone_steps(8)
    assert world.syncer.membership.counted() == 3 and world.syncer.book.quorum() == 3


def test_who_has_answered_counts_at_once_after_a_restart_of_its_process_or_of_the_syncer() -> None:
    world = World(config(fragments=1, learners_expected=3, quorum="all"), 3)
    world.join_all()
    world.everyone_steps(10)
    world.kill(world.learners["l0@l0-1"])
    world.add("l0", "l0-2")
    world.join_all()
    assert world.syncer.membership.counted() == 3
    world.crash_syncer()
    world.restart_syncer()
    world.everyone_steps(1)
    assert world.syncer.membership.counted() == 3


def test_where_too_few_have_answered_the_others_count_for_a_while() -> None:
    """Seed 136: a quorum of two, one of whom had sent nothing but NaN before the syncer was restarted."""
    world = World(config(fragments=1, learners_expected=2, quorum="2"), 2)
    world.join_all()
    world.everyone_steps(3)
    world.crash_syncer()
    world.restart_syncer()
    world.syncer.membership.prove(world.syncer.membership.members["l0"], world.now_ns)
    world.advance(2 * PROOF_NS)
    world.everyone_steps(20)
    assert len(world.merges) >= 4


# ---------------------------------------------------------------- sizes


def sized(world: World, **tokens: int) -> None:
    for name, learner in world.learners.items():
        if learner.machine.joined and not learner.dead:
            world.step(learner, tokens.get(name[:2], 10))
    world.advance(STEP_NS)
    for learner in world.learners.values():
        world.boundary(learner)


def part(world: World, name: str, last: int = 1) -> float:
    """What this learner weighs in the last merges it was in."""
    found = []
    for merge in reversed(world.merges):
        weights = {i.learner: w for i, w in zip(merge.contributions, merge.weights, strict=True)}
        if name in weights:
            found.append(weights[name] / sum(weights.values()))
    return max(found[:last])


def test_a_sudden_claim_of_a_hundred_times_the_tokens_gains_a_little_and_no_more() -> None:
    world = World(config(fragments=1, learners_expected=8, quorum="all"), 8)
    world.join_all()
    for _ in range(20):
        sized(world)
    assert part(world, "l0") == 1 / 8, "equal learners are not touched"
    for _ in range(4):
        sized(world, l0=1000)
    assert part(world, "l0") <= 4 / 11 + 1e-9, "by its claim it would be 0.9993"
    assert world.syncer.ledger.account("l0", 1).merged[0] >= 4000, "the ledger takes down what was said"
    world.check_ledger()


def test_an_island_of_64_times_the_size_has_its_true_weight_soon() -> None:
    world = World(config(fragments=1, learners_expected=4, quorum="all"), 4)
    world.join_all()
    parts = []
    for _ in range(80):
        sized(world, l0=640)
        parts.append(part(world, "l0") if world.merges else 0.0)
    assert parts[-1] == pytest.approx(4096 / 4099)
    assert parts[5] < 0.6
    world.crash_syncer()
    world.restart_syncer()
    for _ in range(5):
        sized(world, l0=640)
    assert part(world, "l0") == pytest.approx(4096 / 4099), "what it has shown is on record"


def test_a_declared_size_counts_at_once_and_nothing_beyond_it() -> None:
    world = World(config(fragments=1, learners_expected=4, quorum="all"), 4)
    world.join_all()
    world.syncer.membership.members["l0"].tokens_per_step_declared = 640
    world.syncer.membership.members["l1"].tokens_per_step_declared = 10
    for _ in range(40):
        sized(world, l0=640, l1=10_000)
    assert part(world, "l0", 99) == pytest.approx(4096 / 4099)
    assert part(world, "l1", 99) <= 0.25


def test_with_sizes_as_claimed_every_claim_counts_at_once() -> None:
    world = World(config(fragments=1, learners_expected=2, quorum="all", sizes="claimed"), 2)
    world.join_all()
    for _ in range(5):
        sized(world, l0=1000)
    assert part(world, "l0") == pytest.approx(10_000 / 10_001)


def test_what_is_missing_weighs_no_more_than_it_can_be() -> None:
    """One claims to hold a hundred times what the others bring, and does not bring it."""
    world = World(config(fragments=1, learners_expected=4, quorum="75%"), 4)
    world.join_all()
    for _ in range(12):
        sized(world)
    world.learners["l0@l0-1"].push_delay = 10**15
    done = len(world.merges)
    for _ in range(12):
        sized(world, l0=1000)
    assert min(sum(merge.weights) for merge in world.merges[done:]) > 0.2


def test_no_learner_weighs_more_than_the_operator_allows() -> None:
    world = World(config(fragments=1, learners_expected=4, quorum="all", sizes="claimed", share_max=0.4), 4)
    world.join_all()
    for _ in range(20):
        sized(world, l0=1000)
    assert part(world, "l0", 99) == pytest.approx(0.4)
    assert [sum(merge.weights) for merge in world.merges] == pytest.approx([1.0] * len(world.merges))


@given(st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=9), st.floats(0.001, 1.0))
def test_a_cap_takes_from_the_largest_and_leaves_the_others_their_ratios(
    weights: list[float], share_max: float
) -> None:
    left = capped(weights, share_max)
    assert max(left) <= max(share_max, 1 / len(weights)) * sum(left) * (1 + 1e-6)
    assert all(after == before or after == max(left) for before, after in zip(weights, left, strict=True))
    assert capped(weights, 1.0) == weights


def test_one_that_is_alone_in_a_merge_of_several_takes_its_share_of_the_step() -> None:
    world = World(config(fragments=1, learners_expected=4, quorum="1", share_max=0.4), 4)
    world.join_all()
    for _ in range(12):
        sized(world)
    alone = [merge for merge in world.merges if len(merge.contributions) == 1]
    assert alone and all(sum(merge.weights) <= 0.4 + 1e-9 for merge in alone)


def test_what_is_taken_from_old_contributions_gives_nobody_more_than_its_cap() -> None:
    """Where only the ratios of weights count, others' being too old must not raise one learner's share."""
    settings = config(fragments=1, partial="full", share_max=0.4, carry_versions_max=2, sizes="claimed")
    membership, ledger = Membership(), Ledger([4])
    scales = MergeScales(settings, membership, ledger, LearnerSizes(settings, membership))
    track = FragmentTrack(0, 4, 4, version=20)
    bases = {"fresh": 20, "old": 2, "older": 1}
    items = [
        ContributionRecord(ContributionId(name, 1, 0, 0), 1, base, 4, 400 if name == "fresh" else 40, 8, 1.0, False)
        for name, base in bases.items()
    ]
    opened = Round(1, 0, 0, 0, 4, 4, 8, asked=list(bases), waiting=set())
    weights = scales.weigh(track, opened, items, 0).weights
    assert max(weights) <= 0.4 * sum(weights) * (1 + 1e-9)


@pytest.mark.parametrize("steps_claimed", [20, 5000, 2**40])
def test_who_claims_many_steps_for_few_tokens_does_not_take_the_weight_of_the_one_beside_it(steps_claimed: int) -> None:
    """Of two sizes the smaller is the usual one. What counts of the larger is more than that, and never nothing."""
    settings = config(fragments=1, partial="full")
    membership, ledger = Membership(), Ledger([4])
    scales = MergeScales(settings, membership, ledger, LearnerSizes(settings, membership))
    claims = {"honest": (2, 110), "liar": (steps_claimed, 110)}
    items = [
        ContributionRecord(ContributionId(name, 1, 0, 0), 1, 0, steps, tokens, 8, 1.0, False)
        for name, (steps, tokens) in claims.items()
    ]
    opened = Round(1, 0, 0, 0, 4, 4, 8, asked=list(claims), waiting=set())
    honest, liar = scales.weigh(FragmentTrack(0, 4, 4), opened, items, 0).weights
    assert honest >= liar > 0.0
