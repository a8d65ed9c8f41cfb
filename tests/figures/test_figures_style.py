"""The look: colours that every reader can tell apart, settings that stay ours, labels that keep their distance."""

from __future__ import annotations

from itertools import combinations, pairwise

import matplotlib
import numpy as np
import pytest
from figure_samples import PLAIN
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.instruments.figures.labels import by_rows, spread
from atoll.instruments.figures.style import CONTRAST_MIN, PALETTE, look, ramp, text_colour
from atoll.instruments.figures.ticks import room_for, short, signed

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
SIGHT = {
    "full": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def linear(colour: str) -> NDArray[np.float64]:
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIE Lab (D65) of linear RGB."""
    matrix = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
    xyz = matrix @ np.clip(rgb, 0, 1) / np.array([0.95047, 1, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHT)
def test_any_two_colours_differ_for_every_eye(sight: str) -> None:
    seen = [lab(np.array(SIGHT[sight]) @ linear(colour)) for colour in PALETTE]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) >= 10


def test_the_ramp_gets_darker_step_by_step() -> None:
    for count in (1, 2, 5, 10):
        lightness = [lab(linear(colour))[0] for colour in ramp(count)]
        assert len(lightness) == count and all(a > b + 2 for a, b in pairwise(lightness))


def test_coloured_text_can_be_read() -> None:
    for colour in (*PALETTE, *ramp(6)):
        luminance = float(np.dot([0.2126, 0.7152, 0.0722], linear(text_colour(colour))))
        assert 1.05 / (luminance + 0.05) >= CONTRAST_MIN - 0.05  # hex colours are rounded


def test_no_two_series_look_alike() -> None:
    looks = [(look(i)["color"], look(i)["marker"], look(i)["linestyle"]) for i in range(32)]
    assert len(set(looks)) == 32


def test_the_users_settings_neither_change_nor_matter() -> None:
    plain = PLAIN["sweep"]().html()
    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 30.0, "axes.grid": True, "svg.fonttype": "none"}):
        before = dict(matplotlib.rcParams)
        assert PLAIN["sweep"]().html() == plain
        assert dict(matplotlib.rcParams) == before


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 0.9)), min_size=1, max_size=10))
def test_spread_keeps_order_distance_and_limits(labels: list[tuple[float, float]]) -> None:
    wanted, heights = [w for w, _ in labels], [h for _, h in labels]
    centres = spread(wanted, heights, 0.0, 10.0)
    order = sorted(range(len(labels)), key=lambda i: centres[i])
    for a, b in pairwise(order):
        assert centres[b] - centres[a] >= (heights[a] + heights[b]) / 2 - 1e-9
        assert wanted[a] <= wanted[b]
    assert centres[order[0]] >= heights[order[0]] / 2 - 1e-9
    assert centres[order[-1]] <= 10 - heights[order[-1]] / 2 + 1e-9


def test_spread_moves_nothing_that_has_room_and_shares_what_it_must_move() -> None:
    assert spread([1.0, 5.0, 9.0], [1.0] * 3, 0, 10) == [1.0, 5.0, 9.0]
    assert spread([5.0, 5.0], [1.0, 1.0], 0, 10) == [4.5, 5.5]


def test_a_legend_reads_row_by_row() -> None:
    # matplotlib fills column by column: [a b c d e] in 3 columns must come as a d | b e | c.
    assert by_rows(list("abcde"), 3) == list("adbec")
    assert by_rows(list("abcd"), 1) == list("abcd") and by_rows(list("abcd"), 4) == list("abcd")
    assert by_rows(list("abcdefg"), 3) == list("adgbecf")


def test_numbers_as_text() -> None:
    assert [short(v) for v in (0, 0.5, 24, 999.9, 150_000, 2_400_000, 1e9, -1500, 4e15)] == [
        "0", "0.5", "24", "1k", "150k", "2.4M", "1B", "−1.5k", "4000T",
    ]  # fmt: skip
    assert [signed(v) for v in (1.25, -0.34, 0.04, -0.04)] == ["+1.2", "−0.3", "0.0", "0.0"]


def test_crowded_ticks_keep_the_outer_ones() -> None:
    kept = room_for([1, 1.01, 50, 99.9, 100], [1, 1.01, 50, 99.9, 100], 2.0)
    assert kept == [1, 50, 100]
