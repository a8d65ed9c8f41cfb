"""The short form of the fuzzer that every run of the suite makes: 200 seeds, and none of them breaks an invariant."""

from __future__ import annotations

import pytest

from atoll.instruments.sim.drawing import draw
from atoll.instruments.sim.run import run_scenario

SEEDS = 200
CHUNK = 10
"""Seeds per test, so that parallel workers share them."""


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_seed_breaks_an_invariant(first: int) -> None:
    failures = []
    for seed in range(first, first + CHUNK):
        report = run_scenario(draw(seed))
        assert report.events > 0
        if report.violations:
            failures.append(f"seed {seed}: {report.violations[0]}\n    atoll sim run --seed {seed} --trace")
    assert not failures, "\n".join(failures)
