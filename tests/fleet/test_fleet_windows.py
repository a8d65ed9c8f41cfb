"""Shares with intervals: they cover the truth as often as they say, and known luck makes them narrower."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.instruments.fleet.windows import Windows, ratio, student_95


def test_the_interval_covers_the_truth_and_the_control_makes_it_narrower() -> None:
    rng = np.random.default_rng(5)
    covered, widths, plain_widths = 0, [], []
    for _ in range(400):
        luck = rng.poisson(20.0, 30) - 20.0
        parts = 80.0 - luck + rng.normal(0.0, 1.0, 30)
        wholes = np.full(30, 100.0)
        share, half = ratio(list(parts), list(wholes), list(luck))
        covered += abs(share - 0.8) <= half
        widths.append(half)
        plain_widths.append(ratio(list(parts), list(wholes), [0.0] * 30)[1])
    assert 0.90 <= covered / 400 <= 0.99
    assert np.mean(widths) < 0.4 * np.mean(plain_widths)


def test_windows_of_different_length_weigh_by_their_length() -> None:
    share, _ = ratio([90.0, 0.0, 90.0, 0.0], [100.0, 10.0, 100.0, 10.0], [0.0] * 4)
    assert share == pytest.approx(180 / 220)


@pytest.mark.parametrize(("freedom", "table"), [(5, 2.571), (10, 2.228), (22, 2.074), (60, 2.000)])
def test_the_student_points_are_those_of_the_tables(freedom: int, table: float) -> None:
    assert student_95(freedom) == pytest.approx(table, rel=0.01)


def test_uptime_is_of_wall_time() -> None:
    windows = Windows()
    windows.add(allocated_s=800.0, useful_s=600.0, up_s=99.0, wall_s=100.0, luck=0.0)
    assert windows.uptime() == pytest.approx(0.99)
