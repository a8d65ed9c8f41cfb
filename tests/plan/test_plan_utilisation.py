"""The model of synchronous methods on a link, against plain formulas and against the published tables."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.instruments.plan import agreement, compare, published
from atoll.instruments.plan.claims import bandwidth_ratios, claims, link_ratio
from atoll.instruments.plan.utilisation import bandwidth_for, compute_utilisation, data_parallel, diloco, streaming

positive = st.floats(0.01, 100.0)


@given(gbit=positive, step_s=positive, gbit_s=positive, layers=st.integers(1, 40), period=st.integers(1, 500))
def test_all_layers_at_once_wait_as_the_formula_says(
    gbit: float, step_s: float, gbit_s: float, layers: int, period: int
) -> None:
    """What is exposed is the last layer's transfer, or all transfers less the backward pass after the first."""
    backward_s, transfer_s = 2 / 3 * step_s / layers, gbit / layers / gbit_s
    stall_s = max(transfer_s, layers * transfer_s - (layers - 1) * backward_s)
    expected = period * step_s / (period * step_s + stall_s)
    exchange = diloco(gbit, layers, step_s, sync_every=period)
    assert compute_utilisation(exchange, gbit_s) == pytest.approx(expected, rel=1e-9)


def test_data_parallel_is_diloco_with_a_period_of_one() -> None:
    every_step, each_step = data_parallel(10.0, 24, 0.1), diloco(10.0, 24, 0.1, sync_every=1)
    assert compute_utilisation(every_step, 50.0) == compute_utilisation(each_step, 50.0)


@given(gbit_s=st.floats(0.1, 100.0), overlap=st.integers(0, 5))
def test_more_bandwidth_and_more_overlap_never_hurt(gbit_s: float, overlap: int) -> None:
    slow = streaming(13.0, 24, 0.1, sync_every=100, layers_each=3, overlap=overlap)
    more = replace(slow, overlap=overlap + 1)
    assert compute_utilisation(slow, gbit_s) <= compute_utilisation(slow, 1.1 * gbit_s) + 1e-12
    assert compute_utilisation(slow, gbit_s) <= compute_utilisation(more, gbit_s) + 1e-12


def test_latency_is_waited_for_once() -> None:
    at_once = diloco(1.0, 10, 1.0, sync_every=10)
    late = replace(at_once, latency_s=0.5)
    stalls = [10.0 / compute_utilisation(exchange, 1e6) - 10.0 for exchange in (at_once, late)]
    assert stalls[1] - stalls[0] == pytest.approx(0.5)


@given(wanted=st.floats(0.05, 0.999))
def test_the_bandwidth_for_a_utilisation_is_just_enough(wanted: float) -> None:
    exchange = streaming(130.0, 48, 0.8, sync_every=100, layers_each=3, overlap=1)
    gbit_s = bandwidth_for(exchange, wanted)
    assert compute_utilisation(exchange, gbit_s) >= wanted
    assert compute_utilisation(exchange, 0.999 * gbit_s) < wanted


def test_latency_can_forbid_a_utilisation() -> None:
    assert math.isinf(bandwidth_for(data_parallel(1.0, 10, 1.0, latency_s=1.0), 0.99))


# ---------------------------------------------------------------- published


def test_the_published_tables_are_met() -> None:
    """What docs/results/plan.md states. No cell of Table 4 is more than one point of the grid off."""
    streaming_table, scaling_table = agreement(compare())
    assert (streaming_table.cells, streaming_table.exact, streaming_table.more_off) == (75, 71, 0)
    assert (scaling_table.cells, scaling_table.exact, scaling_table.more_off) == (45, 32, 1)


@pytest.mark.parametrize("table", [published.STREAMING_TABLE, published.SCALING_TABLE])
def test_the_bits_are_those_that_agree_with_the_most_cells(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = published.BITS_PER_PARAMETER[table]
    exact = {}
    for bits in (chosen - 1.0, chosen, chosen + 1.0):
        monkeypatch.setitem(published.BITS_PER_PARAMETER, table, bits)
        exact[bits] = next(total.exact for total in agreement(compare()) if total.table == table)
    assert max(exact, key=lambda bits: exact[bits]) == chosen


def test_every_published_value_is_on_the_grid() -> None:
    """Printed with one decimal, so that small ones are up to 0.06 away."""
    for row in published.ROWS:
        for value in row.gbit_s:
            nearest = published.grid_value(published.grid_index(value))
            assert nearest == value or abs(nearest - value) < max(0.06, 0.002 * value), (row.method, value, nearest)


def test_ratios_that_others_can_check() -> None:
    """docs/results/bytes.md: 69.8x by bytes sent for 4 learners; one way of a link is twice that."""
    assert link_ratio(4, 24) == pytest.approx(2 * 69.8, rel=0.001)
    low, high = bandwidth_ratios("+ overlap")
    low4, high4 = bandwidth_ratios("+ overlap + FP4")
    assert (low4, high4) == (pytest.approx(4 * low), pytest.approx(4 * high))
    assert len(claims()) == 4
