"""Cells: the published table within three points, the rule of N/M, uptime, the estimate, bad input."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from atoll.errors import ConfigError
from atoll.instruments.fleet import (
    YEAR_S,
    Aim,
    Mechanics,
    expected_goodput,
    published_grid,
    simulate_cell,
    simulate_scavenging,
    simulate_table,
    simulate_unequal,
)
from atoll.instruments.fleet import cell as cell_module
from atoll.instruments.fleet.memory import Memory, warm_up_s
from atoll.instruments.fleet.published import CHIPS, published_goodput

MECHANICS = Mechanics()
QUICK = Aim(precision=1.0)


def test_one_set_of_times_lands_on_all_thirty_published_cells() -> None:
    errors = []
    for chips, learners, method in published_grid():
        published = published_goodput(chips, learners, method, YEAR_S)
        assert published is not None
        errors.append(abs(expected_goodput(chips, learners, method, MECHANICS, YEAR_S) - published))
    assert len(errors) == 30
    assert max(errors) <= 3.0
    assert sum(errors) / 30 < 1.5


@pytest.mark.parametrize("method", ["inelastic", "elastic"])
def test_the_simulated_baselines_are_within_three_points_and_near_the_estimate(method: str) -> None:
    for chips in CHIPS:
        cell = simulate_cell(chips, 1, method, aim=Aim(precision=1.8))
        assert cell.difference is not None and abs(cell.difference) <= 3.0
        assert abs(cell.goodput - cell.estimate) <= 1.0 + cell.half_width


@pytest.mark.parametrize(("chips", "learners"), [(2_400_000, 8), (1_200_000, 2), (600_000, 4)])
def test_simulated_learners_around_the_machines_are_within_three_points(chips: int, learners: int) -> None:
    cell = simulate_cell(chips, learners, aim=QUICK)
    assert cell.half_width <= 1.0
    assert cell.difference is not None and abs(cell.difference) <= 3.0
    assert abs(cell.goodput - cell.estimate) <= 1.0 + cell.half_width
    assert cell.events > 10_000  # the machines were at work
    if learners >= 8:
        assert cell.uptime >= 99.95


def test_m_learners_on_n_chips_are_like_one_elastic_learner_on_n_over_m() -> None:
    many = simulate_cell(1_200_000, 4, aim=QUICK)
    one = simulate_cell(300_000, 1, "elastic", aim=QUICK)
    assert abs(many.goodput - one.goodput) <= many.half_width + one.half_width + 0.5


def test_waiting_for_everybody_costs_what_the_estimate_says() -> None:
    cell = simulate_cell(2_400_000, 8, "diloco", aim=Aim(precision=2.0))
    assert cell.published is None and cell.difference is None
    assert cell.goodput < 65.0
    assert abs(cell.goodput - cell.estimate) <= 2.0 + cell.half_width


def test_slow_learners_delay_only_those_who_wait_for_them() -> None:
    times = Mechanics(speed_spread=0.2)
    calm = {"mtbi_s": 1e12, "aim": Aim(seconds=2400.0), "mechanics": times}
    assert simulate_cell(1024, 8, "decoupled", **calm).goodput > 99.5  # type: ignore[arg-type]
    assert simulate_cell(1024, 8, "diloco", **calm).goodput < 92.0  # type: ignore[arg-type]


def test_a_fleet_that_hardly_fails_has_an_honest_interval() -> None:
    cell = simulate_cell(64, 2, aim=Aim(seconds=2400.0))
    assert cell.failures == 0
    assert cell.goodput > 99.0
    assert cell.half_width > 0.0


LONG_REPAIRS = Mechanics(slice_chips=8, return_s=86_400.0, restart_s=3600.0)


def test_where_repairs_are_long_and_failures_rare_the_interval_holds_the_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cell_module, "EVENTS_MAX", 40_000)
    monkeypatch.setattr(cell_module, "WINDOW_STEPS_MAX", 400)
    cell = simulate_cell(64, 4, mechanics=LONG_REPAIRS)
    assert cell.failures < 5 and cell.few_failures
    assert cell.events < 100_000
    assert not cell.precise
    assert cell.estimate == pytest.approx(97.85, abs=0.1)
    assert abs(cell.goodput - cell.estimate) <= cell.half_width


def test_a_given_time_that_is_too_short_is_not_called_precise() -> None:
    cell = simulate_cell(300_000, 2, aim=Aim(seconds=1000.0))
    assert cell.half_width > 0.5 and not cell.precise


@pytest.mark.parametrize(
    ("chips", "learners", "method", "years", "return_s"),
    [
        (1000, 2, "decoupled", 0.01, 3600.0),
        (1024, 1, "elastic", 0.002, 300.0),
        (2048, 1, "elastic", 0.01, 7200.0),
        (512, 1, "elastic", 0.01, 300.0),
    ],
)
def test_the_estimate_holds_where_the_last_slice_may_be_lost(
    chips: int, learners: int, method: str, years: float, return_s: float
) -> None:
    mechanics = replace(Mechanics(), return_s=return_s)
    cell = simulate_cell(chips, learners, method, mechanics=mechanics, mtbi_s=years * YEAR_S, aim=Aim(1.0))
    assert cell.estimate == pytest.approx(cell.goodput, abs=3.0)


def test_the_estimate_is_a_number_for_any_fleet() -> None:
    for chips in (512, 2048, 16_384, 16_640):
        for years in (0.01, 1.0, 1e5):
            found = [
                expected_goodput(chips, 1, "elastic", replace(Mechanics(), return_s=wait_s), years * YEAR_S)
                for wait_s in (0.0, 1.0, 1e5)
            ]
            assert 0.0 <= min(found) <= max(found) <= 100.0 and found == sorted(found, reverse=True)


def test_windows_last_some_repairs_where_a_slice_is_a_good_part_of_its_learner() -> None:
    cell = simulate_cell(64, 1, "elastic", mechanics=LONG_REPAIRS, mtbi_s=YEAR_S / 10.0)
    assert cell.window_seconds > 3.0 * LONG_REPAIRS.return_s
    assert cell.precise and not cell.few_failures


def test_windows_of_the_published_table_are_what_they_were() -> None:
    for chips, learners, method in published_grid():
        memory = Memory.of(chips, learners, method, mechanics=MECHANICS, mtbi_s=YEAR_S)
        assert memory.window_s < cell_module.WINDOW_S_MIN
    assert warm_up_s(MECHANICS, 0.0) == 5.0 * (300.0 + 75.0 + 90.0) + 50.0 * 2.0


def test_a_failure_costs_its_repair_by_the_share_of_the_slice() -> None:
    two = Memory.of(64, 4, "decoupled", mechanics=LONG_REPAIRS, mtbi_s=YEAR_S)
    many = Memory.of(6400, 4, "decoupled", mechanics=LONG_REPAIRS, mtbi_s=YEAR_S)
    assert two.cost_s >= (86_400.0 + 75.0) / 2
    assert many.cost_s < two.cost_s / 50
    whole_s = warm_up_s(LONG_REPAIRS, 1e9)
    assert two.bias(whole_s, LONG_REPAIRS) == 0.0
    assert 0.0 < two.bias(whole_s / 2, LONG_REPAIRS) < two.bias(whole_s / 4, LONG_REPAIRS) < two.out


def test_another_seed_gives_another_run_and_the_same_seed_the_same() -> None:
    def goodput(seed: int) -> float:
        return simulate_cell(600_000, 1, "elastic", aim=Aim(seconds=50_000.0, seed=seed)).goodput

    assert goodput(1) == goodput(1) != goodput(2)


def test_a_table_on_two_processes_is_the_table_on_one() -> None:
    grid = [(150_000, 1, "elastic"), (2_400_000, 2, "decoupled")]
    aim = Aim(seconds=1200.0)
    seen: list[int] = []
    one = simulate_table(grid, aim=aim, progress=lambda cell: seen.append(cell.chips))
    two = simulate_table(grid, aim=aim, jobs=2)
    assert [replace(c, wall_seconds=0.0) for c in one.cells] == [replace(c, wall_seconds=0.0) for c in two.cells]
    assert seen == [150_000, 2_400_000]
    answer = one.to_dict()
    assert answer["published_cells"] == 2
    assert answer["error_max"] == max(one.errors)


def test_times_move_the_goodput_where_they_should() -> None:
    def goodput(method: str, **times: float) -> float:
        return expected_goodput(600_000, 1, method, replace(MECHANICS, **times), YEAR_S)  # type: ignore[arg-type]

    for name in ("detect_s", "shrink_s", "grow_s", "step_s"):
        assert goodput("elastic", **{name: 2.0 * getattr(MECHANICS, name)}) < goodput("elastic") - 0.2, name
    assert goodput("inelastic", restart_s=180.0) < goodput("inelastic") - 5.0
    assert goodput("elastic", restart_s=180.0) == goodput("elastic")
    assert expected_goodput(600_000, 1, "elastic", MECHANICS, 3.0 * YEAR_S) > goodput("elastic") + 10.0


def test_quorum_of_all_waits_for_the_slow_and_a_quorum_of_one_does_not() -> None:
    rows = {(row.setting, row.variance): row for row in simulate_unequal(periods=40)}
    assert rows["K=8", "per period"].goodput == pytest.approx(84.0, abs=3.0)
    assert rows["K=1", "per period"].goodput >= 99.5
    assert rows["K=1 + grace", "per period"].goodput >= 99.5
    # Variance within a period averages out, without any only the 18% are left: (1/1.18 + 1) / 2 less the transfers.
    assert rows["K=8", "per period"].goodput < rows["K=8", "per step"].goodput < rows["K=8", "none"].goodput
    assert rows["K=8", "none"].goodput == pytest.approx(100 * (1 / 1.18 + 1) / 2, abs=1.5)
    assert rows["K=1 + grace", "per period"].contributors > rows["K=1", "per period"].contributors


def test_extra_learners_for_half_of_the_tokens_shorten_the_run_as_published() -> None:
    rows = simulate_scavenging(steps=4000)
    assert [row.extra_percent for row in rows] == [0, 25, 50, 100, 300]
    for row in rows:
        assert row.decoupled == pytest.approx(row.decoupled_published, abs=0.015)
        assert row.discarded_percent == 0.0


BAD_FLEETS = [
    ({"learners": 0}, "whole number from 1"),
    ({"learners": -1}, "whole number from 1"),
    ({"learners": 2.0}, "whole number from 1"),
    ({"chips": 0}, "whole number from 1"),
    ({"chips": 10**12}, "whole number from 1"),
    ({"chips": 10, "learners": 11}, "give more chips"),
    ({"method": "magic"}, "must be one of"),
    ({"method": "elastic", "learners": 2}, "use --learners 1"),
    ({"mtbi_s": math.nan}, "must be a number"),
    ({"mtbi_s": -1.0}, "must be a number"),
    ({"mtbi_s": 0.0}, "must be a number"),
    ({"chips": 1_000_000_000, "learners": 1}, "faster than it can come back"),
]


@pytest.mark.parametrize(("change", "words"), BAD_FLEETS)
def test_an_impossible_fleet_is_refused_with_a_remedy(change: dict[str, object], words: str) -> None:
    fleet: dict[str, object] = {"chips": 1000, "learners": 4, "method": "decoupled", "mtbi_s": YEAR_S, **change}
    with pytest.raises(ConfigError, match=words):
        expected_goodput(mechanics=MECHANICS, **fleet)  # type: ignore[arg-type]
    mtbi_s = fleet.pop("mtbi_s")
    with pytest.raises(ConfigError, match=words):
        simulate_cell(mtbi_s=mtbi_s, **fleet)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("detect_s", -1.0),
        ("shrink_s", math.nan),
        ("grow_s", math.inf),
        ("step_s", 0.0),
        ("restart_s", 0.0),
        ("return_s", "long"),
        ("slice_chips", 0),
        ("slice_chips", 2.5),
        ("restart_shape", 0.0),
        ("speed_spread", 2.0),
    ],
)
def test_impossible_times_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        Mechanics(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("aim", [{"precision": 0.0}, {"precision": math.nan}, {"seconds": -1.0}, {"seed": -1}])
def test_impossible_aims_are_refused(aim: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(aim))):
        Aim(**aim)  # type: ignore[arg-type]
