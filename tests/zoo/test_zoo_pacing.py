"""The least time of a step, alone and together with a learner that is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.zoo import SlowDown, WorkerConfig


def test_a_short_step_is_filled_up_and_a_long_one_left_alone() -> None:
    pace = SlowDown(None, step_s_min=0.02)
    assert pace.after_step(0.005) == pytest.approx(0.015)
    assert pace.after_step(0.5) == 0.0


def test_without_a_floor_or_a_file_nothing_is_slept() -> None:
    assert SlowDown(None).after_step(0.005) == 0.0


def test_a_slow_learner_takes_that_many_times_the_floor(tmp_path: Path) -> None:
    (tmp_path / "slow").write_text('{"factor": 4}')
    pace = SlowDown(tmp_path / "slow", step_s_min=0.01)
    assert pace.after_step(0.002) == pytest.approx(0.038)


@pytest.mark.parametrize("step_ms", [-1.0, float("nan"), 1e9, True])
def test_a_floor_that_makes_no_sense_is_refused(step_ms: float) -> None:
    with pytest.raises(ConfigError, match="step_ms"):
        WorkerConfig(step_ms=step_ms)
