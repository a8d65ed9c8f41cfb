"""A pacing policy of a user's own, in the virtual world: faults break nothing, and the run is paced as it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

import atoll
from atoll.core.config import SyncConfig
from atoll.core.pacing import PACING, Pace
from atoll.instruments.sim.run import run_scenario
from atoll.instruments.sim.scenario import LearnerSpec, Scenario, SimFault


class Slower:
    """Three times the steps between rounds, from the start."""

    def period(self, config: SyncConfig, pace: Pace) -> tuple[int, str]:
        return 3 * config.sync_every, "slower"


FAULTS = (SimFault("kill", "learner-0", 10.0), SimFault("kill", "syncer", 20.0))


@pytest.mark.parametrize("overlap", [2, 0])
def test_a_run_under_another_pace_breaks_nothing_repeats_itself_and_merges_less(
    overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PACING, "_entries", dict(PACING._entries))
    atoll.register_pacing("slower", Slower())
    config = SyncConfig(sync_every=4, fragments=2, learners_expected=3, overlap=overlap)
    usual = Scenario(1, config, (LearnerSpec(),) * 3, seconds=40.0, faults=FAULTS)
    paced = replace(usual, config=replace(config, pacing="slower"))
    first, again, other = run_scenario(paced, tracing=True), run_scenario(paced), run_scenario(usual)
    assert not first.violations and not other.violations and first.final == again.final
    assert sum("PaceChanged" in line for line in first.lines) >= config.fragments, "each new pace is told"
    assert 2 * sum(version for version, _ in first.final) < sum(version for version, _ in other.final)
