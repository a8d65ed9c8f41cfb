"""Learners whose answers take about equally long are in the same rounds, however long that is."""

from __future__ import annotations

import pytest
from world import STEP_NS, World, config

ONE = {"sync_every": 8, "fragments": 1, "learners_expected": 8, "grace_cap_steps": 1.0}


def delay_all(world: World, steps: float, late: float = 0.0) -> None:
    """Answers take so many steps, each a little longer than the one before; those of the second half so much more."""
    for index, learner in enumerate(world.learners.values()):
        learner.push_delay = int((steps + index / 16 + (late if index >= 4 else 0.0)) * STEP_NS)


def contributions(world: World, last: int) -> list[int]:
    return [len(merge.contributions) for merge in world.merges[-last:]]


@pytest.mark.parametrize("fragments", [1, 2, 4])
@pytest.mark.parametrize("steps", [1.0, 2.5, 4.0, 6.0, 10.0])
def test_answers_that_take_longer_than_tau_steps_are_merged_together(steps: float, fragments: int) -> None:
    """4 of 8 in each round is what it was."""
    world = World(config(**{**ONE, "fragments": fragments}), 8)
    world.join_all()
    delay_all(world, steps)
    world.everyone_steps(160)
    assert contributions(world, 10) == [8] * 10
    assert len(world.merges) >= 0.8 * fragments * 160 / max(8.0, (steps + 1) * fragments)
    world.check_ledger()


def test_learners_that_have_parted_meet_again() -> None:
    """Without it each half finds the other one's contributions waiting, which are a quorum, and comes too late."""
    world = World(config(**ONE), 8)
    world.join_all()
    delay_all(world, 4.0, late=3.0)
    world.everyone_steps(40)
    assert 4 in contributions(world, 4)
    delay_all(world, 4.0)
    world.everyone_steps(80)
    assert contributions(world, 6) == [8] * 6
    world.check_ledger()


def test_rounds_of_late_ones_do_not_wait_for_answers_that_take_longer_than_a_period() -> None:
    world = World(config(**ONE), 8)
    world.join_all()
    delay_all(world, 2.0)
    for learner in list(world.learners.values())[4:]:
        learner.push_delay = 30 * STEP_NS
    world.everyone_steps(160)
    assert len(world.merges) >= 18  # one in a period
    world.check_ledger()
