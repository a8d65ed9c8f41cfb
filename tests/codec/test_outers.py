"""Outer optimizers besides Nesterov: how far they move a model, and what they leave as it is."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.codec.outer import OuterRates, get_outer
from atoll.codec.outer.delayed import EVERY
from atoll.codec.outer.rownorm import FACTOR_MAX, levelled, row_squares
from atoll.codec.protocol import BLOCK, F32


def moved(name: str, gradients: list[F32], momentum: float = 0.3) -> F32:
    outer = get_outer(name)
    state, way = outer.init(gradients[0].size), np.zeros_like(gradients[0])
    for updates, gradient in enumerate(gradients):
        way += outer.update(gradient, state, OuterRates(0.7, momentum, updates))
    return way


def rows(*lengths: float) -> F32:
    dice = np.random.default_rng(3)
    made = dice.standard_normal((len(lengths), BLOCK))
    made *= np.array(lengths)[:, None] / np.sqrt(np.square(made).sum(axis=1))[:, None]
    return made.astype(np.float32).ravel()


def test_delayed_momentum_moves_as_far_as_nesterov_where_the_gradient_stays() -> None:
    gradients = [rows(1.0, 2.0)] * (20 * EVERY)
    assert np.allclose(moved("delayed", gradients), moved("nesterov", gradients), rtol=0.02)


def test_delayed_momentum_waits_for_four_updates() -> None:
    first = rows(1.0)
    assert np.array_equal(moved("delayed", [first]), np.float32(-0.7) * first)
    three = moved("delayed", [first, first, first])
    assert np.allclose(three, -0.7 * 3 * first, rtol=1e-6)
    assert np.linalg.norm(moved("delayed", [first] * 4)) > 1.2 * 4 * 0.7 * np.linalg.norm(first)


def test_rows_come_half_way_to_one_length_and_the_whole_keeps_its_own() -> None:
    before = rows(1.0, 4.0, 0.0)
    after = levelled(before)
    assert np.linalg.norm(after) == pytest.approx(np.linalg.norm(before), rel=1e-6)
    short, long, none = np.sqrt(row_squares(after))
    assert long / short == pytest.approx(2.0, rel=1e-5) and none == 0.0
    assert np.array_equal(np.sign(after), np.sign(before))


def test_a_row_that_hardly_moves_is_not_blown_up() -> None:
    lengths = np.sqrt(row_squares(levelled(rows(*[1.0] * 9, 1e-9))))
    assert lengths[-1] <= FACTOR_MAX**2 * 1e-9 and np.isfinite(lengths).all()
    assert not levelled(np.zeros(BLOCK, np.float32)).any()


def test_row_sums_do_not_depend_on_the_machine_s_order() -> None:
    values = rows(1.0, 3.0)
    sums = [float(square) for square in np.square(values[:BLOCK].astype(np.float64))]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [one + other for one, other in zip(sums[:half], sums[half:], strict=True)]
    assert row_squares(values)[0] == sums[0]
