"""A pacing policy of a user's own runs in the virtual world: storms break nothing, and it is paced as it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.core.config import SyncConfig
from atoll.core.pacing import PACING, Pace
from atoll.sim.run import run_scenario
from atoll.sim.scenario import draw


class Slower:
    """Three times the steps between rounds, from the start."""

    def period(self, config: SyncConfig, pace: Pace) -> tuple[int, str]:
        return 3 * config.sync_every, "slower"


PACING.register("slower", Slower())


@pytest.mark.parametrize("seed", [28, 29, 33])
def test_a_storm_under_another_pace_breaks_nothing_repeats_itself_and_merges_less(seed: int) -> None:
    drawn = draw(seed)
    scenario = replace(drawn, config=replace(drawn.config, pacing="slower"))
    first, again, usual = run_scenario(scenario, tracing=True), run_scenario(scenario), run_scenario(drawn)
    assert not first.violations and first.final == again.final
    assert sum("PaceChanged" in line for line in first.lines) >= drawn.config.fragments, "each new pace is told"
    assert sum(version for version, _ in first.final) < sum(version for version, _ in usual.final)
