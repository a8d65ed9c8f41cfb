"""The invariants, and the replay of every merge, hold in the virtual world with settings that `draw` never draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.sim.run import run_scenario
from atoll.sim.scenario import draw, load, to_json

SEEDS = (28, 64)
"""With arrays, and with nine faults or more each."""
CHANGES: list[dict[str, Any]] = [
    {"correction": "heloco", "outer_schedule": "cosine", "tokens_budget": 10**6},
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: " ".join(changes))
def test_a_storm_with_new_settings_breaks_nothing_and_repeats_itself(
    seed: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    drawn = draw(seed)
    scenario = replace(drawn, config=replace(drawn.config, **changes))
    path = tmp_path / "scenario.json"
    path.write_text(to_json(scenario))
    assert load(path) == scenario
    first, again = run_scenario(scenario, tracing=True), run_scenario(scenario, tracing=True)
    assert not first.violations and (first.digest, first.final) == (again.digest, again.final)
    assert first.final != run_scenario(drawn).final
