"""One island: what a failure, another one in the middle of it, a return and the loss of the last slice come to."""

from __future__ import annotations

import math
from random import Random

import pytest

from atoll.instruments.fleet.island import Island
from atoll.instruments.fleet.mechanics import YEAR_S, Mechanics

MECHANICS = Mechanics(detect_s=10.0, shrink_s=7.0, grow_s=18.0, hold_off_s=75.0, return_s=300.0)
NEVER = 1e9


class Script(Random):
    """Exponential draws that were decided before: times until failures and until returns, in the order of use."""

    def __init__(self, *draws: float) -> None:
        super().__init__(0)
        self.draws = list(draws)

    def expovariate(self, lambd: float = 1.0) -> float:
        return self.draws.pop(0)


def island(*draws: float, slices: int = 4, mechanics: Mechanics = MECHANICS) -> Island:
    return Island(1024, slices, mechanics, mtbi_s=YEAR_S, rng=Script(*draws))


def test_a_failure_costs_detection_and_a_resize_and_a_slice() -> None:
    one = island(100.0, 400.0, NEVER, NEVER)  # fails at 100, back 400 later, no other failure in the stall or after it
    assert one.run_at(0.0).fail_s == 100.0
    stall = one.fail(100.0)
    assert stall == (117.0, False)
    run = one.run_at(stall.until_s)
    assert run.share == 0.75
    assert run.grow_s == 500.0 + 75.0


def test_failures_during_detection_are_found_together_and_during_the_resize_begin_it_again() -> None:
    one = island(100.0, 400.0, 5.0, 400.0, 8.0, 400.0, NEVER, NEVER)
    one.run_at(0.0)
    # At 105 (detection runs until 110) and at 113 (the resize would have ended at 117).
    assert one.fail(100.0).until_s == 113.0 + 7.0
    assert one.live == 1
    assert one.counts.failures == 3


def test_slices_that_return_during_a_stall_join_it_for_nothing() -> None:
    one = island(100.0, 3.0, NEVER, NEVER)  # back at 103, while the stall lasts until 117
    one.run_at(0.0)
    stall = one.fail(100.0)
    run = one.run_at(stall.until_s)
    assert (run.share, run.grow_s) == (1.0, math.inf)


def test_growing_is_a_planned_stall_and_a_failure_makes_it_an_unplanned_one() -> None:
    one = island(100.0, 400.0, NEVER, NEVER, NEVER, NEVER)
    one.run_at(0.0)
    run = one.run_at(one.fail(100.0).until_s)
    assert one.grow(run.grow_s) == (575.0 + 18.0, False)
    assert one.run_at(593.0).share == 1.0
    two = island(100.0, 400.0, NEVER, NEVER, 4.0, 400.0, NEVER)
    two.run_at(0.0)
    run = two.run_at(two.fail(100.0).until_s)
    assert two.grow(run.grow_s) == (579.0 + 17.0, False)


def test_the_loss_of_the_last_slice_is_a_restart_that_loses_the_state() -> None:
    one = island(100.0, 400.0, NEVER, NEVER, slices=1)
    one.run_at(0.0)
    stall = one.fail(100.0)
    assert stall.state_lost
    assert stall.until_s > 110.0
    assert one.run_at(stall.until_s).share == 1.0  # on spares, whole


def test_failures_follow_the_live_chips() -> None:
    """Failures minus the integral of their rate has mean zero: it stays within some roots of their number."""
    one = Island(600_000, 2344, MECHANICS, mtbi_s=YEAR_S, rng=Random(1))
    now_s = 0.0
    while now_s < 500_000.0:
        run = one.run_at(now_s)
        stall = one.grow(run.grow_s) if run.grow_s < run.fail_s else one.fail(run.fail_s)
        now_s = stall.until_s
    counts = one.counts
    assert counts.failures == pytest.approx(500_000 * 600_000 / YEAR_S, rel=0.05)
    assert abs(counts.failures - counts.hazard) < 4.0 * math.sqrt(counts.hazard)
    assert counts.shrinks > counts.grows > 0


def test_without_elasticity_every_failure_is_a_restart_on_all_chips() -> None:
    one = Island(600_000, 2344, MECHANICS, mtbi_s=YEAR_S, rng=Random(2))
    one.elastic = False
    for _ in range(50):
        run = one.run_at(0.0)
        assert run.share == 1.0
        assert one.fail(run.fail_s).until_s > run.fail_s + MECHANICS.detect_s
