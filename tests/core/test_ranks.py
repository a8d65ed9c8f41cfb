"""Numbers for learners that were given none, and learners that read the same data without knowing it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from world import STEP_NS, World, config

from atoll.core.effects import Stepped
from atoll.core.events import Warned
from atoll.core.membership import Member, MemberState
from atoll.core.ranks import rank_of
from atoll.core.twins import EQUAL_IN_A_ROW, HEARD_MAX, SEEN_MAX, STEPS_HEARD, Echoes, Twins


def joins(members: dict[str, Member], learner: str, expected: int = 4) -> int:
    """A new process joins under this id; returns its rank."""
    before = members.get(learner)
    member = members[learner] = Member(learner, 1, "i", 1, MemberState.ACTIVE, 0)
    member.rank = rank_of(member, before, members.values(), expected)
    return member.rank


def test_ids_that_end_with_a_number_of_the_run_get_it() -> None:
    members: dict[str, Member] = {}
    assert [joins(members, learner) for learner in ("learner-2", "node00", "gpu3", "learner-1")] == [2, 0, 3, 1]


@pytest.mark.parametrize(
    "ids",
    [
        ("paris", "oslo", "rome", "kyiv"),
        ("rack1-gpu0", "rack2-gpu0", "rack3-gpu0", "rack4-gpu0"),
        ("node-1", "node-2", "node-3", "node-4"),
        ("host-77", "host-1077", "h100", "h200"),
        ("learner-3", "paris", "learner-0", "learner-1"),
    ],
)
def test_whatever_the_ids_every_learner_has_a_number_of_its_own_below_the_world(ids: tuple[str, ...]) -> None:
    members: dict[str, Member] = {}
    assert sorted(joins(members, learner) for learner in ids) == [0, 1, 2, 3]


def test_a_learner_that_is_started_again_keeps_its_number_unless_it_was_given_away() -> None:
    members: dict[str, Member] = {}
    assert [joins(members, learner) for learner in ("paris", "oslo")] == [0, 1]
    assert joins(members, "paris") == 0  # while the old process is still there
    members["paris"].state = MemberState.LOST
    assert joins(members, "paris") == 0
    members["paris"].state = MemberState.LEFT
    assert joins(members, "rome") == 0  # it takes the place, and the part of the data, of the one that left
    assert joins(members, "paris") == 2
    assert len({member.rank for member in members.values()}) == 3


def test_equal_losses_of_two_learners_are_noticed_once() -> None:
    twins, found = Twins(), []
    for step in range(1, 10):
        for learner in ("a", "b", "c"):
            loss = 3.0 / step if learner != "a" else 2.0 / step
            found.append(twins.report(learner, step, loss))
    assert [pair for pair in found if pair is not None] == [("b", "c")]
    assert found.index(("b", "c")) == 3 * EQUAL_IN_A_ROW - 1


def test_twins_are_found_at_different_speeds_and_with_steps_left_out() -> None:
    twins = Twins()
    assert not any(twins.report("fast", step, 1.0 / step) for step in range(1, 200))
    pairs = [twins.report("slow", step, 1.0 / step) for step in range(2, 200, 3)]
    assert pairs[EQUAL_IN_A_ROW - 1] == ("fast", "slow")


@pytest.mark.parametrize("loss", [0.0, float("nan"), float("inf"), 0.6931])
def test_losses_that_say_nothing_make_no_twins(loss: float) -> None:
    """None, a loss that is not reported, and one that stays: a head that begins at zero, a loop that reports rarely."""
    twins = Twins()
    for step in range(1, 50):
        assert twins.report("a", step, loss) is None
        assert twins.report("b", step, loss) is None
        assert twins.report("b", step, loss) is None  # a heartbeat


def test_learners_that_are_equal_now_and_then_are_no_twins() -> None:
    twins = Twins()
    for step in range(1, 100):
        assert twins.report("a", step, 1.0 / step) is None
        assert twins.report("b", step, 1.0 / step if step % 3 == 0 else 2.0 / step) is None


def test_what_is_remembered_of_losses_is_bounded() -> None:
    twins = Twins()
    for step in range(1, 3 * SEEN_MAX):
        twins.report(f"learner-{step}", step, 1.0 + step)
    assert max(len(twins._seen), len(twins._step_of)) <= SEEN_MAX + 1


@pytest.mark.parametrize("same", [True, False])
def test_the_syncer_warns_once_of_learners_that_read_the_same_data(same: bool) -> None:
    world = World(config(), 2)
    world.join_all()
    for step in range(1, 20):
        for number, learner in enumerate(world.learners.values()):
            loss = 5.0 / step + (0.0 if same else 0.125 * number)
            world.learner_input(learner, Stepped(10, STEP_NS, loss))
            world.run()
    warned = [event.text for event in world.noted(Warned)]
    assert len(warned) == int(same)
    assert all("'l0' and 'l1'" in text and "learner.rank" in text and "ATOLL_RANK" in text for text in warned)


# ---------------------------------------------------------------- learners that begin one after the other


def trained(data: int, *, steps_before: int = 0, batch: int = 16) -> list[float]:
    """The first losses of a small regression: on this data, from parameters that are so many steps old."""
    truth, weights = np.random.default_rng(7).normal(size=12), np.zeros(12)
    losses, dice = [], np.random.default_rng(12345)
    for step in range(steps_before + STEPS_HEARD):
        dice = np.random.default_rng(data) if step == steps_before else dice
        x = dice.normal(size=(batch, 12)) * dice.uniform(0.5, 2.0)
        errors = x @ (weights - truth) + dice.normal(size=batch)
        losses.append(float(np.square(errors).mean()))
        weights = weights - 0.01 * x.T @ errors / batch
    return losses[steps_before:]


def heard(*learners: list[float], echoes: Echoes | None = None) -> list[tuple[str, str]]:
    echoes = echoes or Echoes()
    found = [
        echoes.report(f"learner-{number}", step + 1, loss)
        for number, losses in enumerate(learners)
        for step, loss in enumerate(losses)
    ]
    return [pair for pair in found if pair is not None]


def test_a_learner_that_begins_later_with_the_same_data_is_noticed_once() -> None:
    late, again = trained(1, steps_before=44), trained(1, steps_before=90)
    assert late[0] != trained(1)[0], "no digit is equal"
    assert heard(trained(1), late, again) == [("learner-0", "learner-1")]
    gaps = [loss if step % 9 else math.nan for step, loss in enumerate(late)]
    assert heard(trained(1), [*gaps, 1.0]) == [("learner-0", "learner-1")], "some losses may be missing"


def test_learners_with_data_of_their_own_are_no_echoes() -> None:
    for seed in range(0, 18, 3):
        assert heard(trained(seed), trained(seed + 1, steps_before=44), trained(seed + 2)) == []


def test_losses_that_are_alike_whatever_was_read_are_no_echoes() -> None:
    smooth = [1.0 / (step + 10) for step in range(STEPS_HEARD)]
    turns = [1.0 + step % 2 for step in range(STEPS_HEARD)]
    still = [1.0] * STEPS_HEARD
    for losses in (smooth, turns, still):
        assert heard(losses, list(losses)) == []


def test_first_losses_are_kept_of_few_learners() -> None:
    echoes = Echoes()
    heard(*(trained(seed) for seed in range(HEARD_MAX + 20)), echoes=echoes)
    assert len(echoes._losses) <= HEARD_MAX + 1
