"""`atoll sim goodput` as a user meets it."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.app import main
from atoll.instruments import fleet

CELL = {"chips", "method", "learners", "goodput", "half_width", "uptime", "published", "simulated_seconds", "events"}


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["atoll", "sim", "goodput", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_cells_as_json_and_as_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--chips", "2.4M,150k", "--method", "elastic", "--seconds", "40000", "--jobs", "1", "--json")
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == 0
    answer: dict[str, Any] = json.loads(out)
    assert [cell["chips"] for cell in answer["cells"]] == [2_400_000, 150_000]
    for cell in answer["cells"]:
        assert cell.keys() >= CELL
        assert (cell["method"], cell["learners"]) == ("elastic", 1)
        assert abs(cell["goodput"] - cell["published"]) < 4.0
        assert 0.0 < cell["goodput"] <= cell["uptime"] <= 100.0
    assert answer["published_cells"] == 2
    assert "2.4M" in err and "elastic" in err and "mean difference" in err


def test_all_methods_of_a_fleet_in_one_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = "inelastic,elastic,decoupled,diloco"
    words = ("--chips", "20k", "--learners", "4", "--method", methods, "--seconds", "480", "--jobs", "1", "--json")
    code, out, _ = run(monkeypatch, capsys, *words)
    found = [(cell["method"], cell["learners"]) for cell in json.loads(out)["cells"]]
    assert code == 0 and found == [("inelastic", 1), ("elastic", 1), ("decoupled", 4), ("diloco", 4)]


def test_learners_alone_mean_decoupled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--chips", "10k", "--learners", "2", "--mtbi-years", "2", "--seconds", "480", "--json")
    _, out, _ = run(monkeypatch, capsys, *words)
    (cell,) = json.loads(out)["cells"]
    assert (cell["method"], cell["learners"], cell["published"]) == ("decoupled", 2, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--learners", "0"), "whole number from 1"),
        (("--learners", "8", "--chips", "4"), "give more chips"),
        (("--chips", "many"), "not a whole number"),
        (("--chips", "1.5"), "not a whole number"),
        (("--chips", "inf"), "not a whole number"),
        (("--method", "magic"), "must be one of"),
        (("--mtbi-years", "nan"), "--mtbi-years must be above 0"),
        (("--mtbi-years", "0"), "--mtbi-years must be above 0, not 0"),
        (("--method", "diloco", "--learners", "8", "--figures", "figures"), "name one of them in --method too"),
        (("--detect", "-1"), "detect_s"),
        (("--precision", "0"), "precision"),
        (("--jobs", "-1"), "jobs"),
        (("--heterogeneous", "--chips", "20"), "do not use --chips"),
        (("--heterogeneous", "--grow", "5"), "do not use --grow"),
        (("--scavenging", "--mtbi-years", "2", "--return", "5"), "do not use --mtbi-years, --return"),
    ],
)
def test_bad_input_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == 2
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_what_cannot_be_written_is_said_before_anything_is_simulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "atoll.instruments.fleet.simulate_table", lambda *_, **__: pytest.fail("it was simulated first")
    )
    code, _, err = run(monkeypatch, capsys, "--save", str(tmp_path / "nofolder" / "x.json"))
    assert code == 2 and "folder that exists" in err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run(monkeypatch, capsys, "--figures", str(tmp_path / "figures"))
    assert code == 2 and "matplotlib" in err


def test_a_cell_with_hardly_a_failure_says_so_and_shows_the_estimate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("fleet.cell", "fleet"):  # the room's door remembers what was asked for before
        monkeypatch.setattr(f"atoll.instruments.{place}.EVENTS_MAX", 20_000)
    monkeypatch.setattr("atoll.instruments.fleet.cell.WINDOW_STEPS_MAX", 400)
    times = ("--slice-chips", "8", "--return", "86400", "--restart", "3600")
    _, out, _ = run(monkeypatch, capsys, "--chips", "64", "--learners", "4", *times, "--jobs", "1")
    assert "no failure seen" in out or "only 1 failure" in out
    assert "on paper 97.9%" in out
    assert "limit of 20,000 events" in out


def test_a_log_hears_of_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--method", "elastic", "--seconds", "2400", "--jobs", "1")
    _, _, err = run(monkeypatch, capsys, *words)
    assert "5 of 5 cells" in err


def test_unequal_speeds_and_helpers_are_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(fleet, "simulate_unequal", partial(fleet.simulate_unequal, periods=20))
    monkeypatch.setattr(fleet, "simulate_scavenging", partial(fleet.simulate_scavenging, steps=1000))
    words = ("--heterogeneous", "--scavenging", "--figures", str(tmp_path / "figures"), "--json")
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == 0 and json.loads(out)["cells"] == []
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"{name}.{kind}" for name in ("heterogeneous", "scavenging") for kind in ("png", "html")}
    assert "heterogeneous.html" in err and "scavenging.html" in err
    page = (tmp_path / "figures" / "heterogeneous.html").read_text()
    assert "K=1 + grace" in page and "84.0" in page and "difference" not in page


def test_parts_that_fail_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fleet_of = ("--chips", "512", "--learners", "2", "--seconds", "480", "--jobs", "1")
    code, out, err = run(monkeypatch, capsys, *fleet_of, "--shards", "2", "--relays", "1", "--standby", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["parts"]["shards"] == 2 and answer["parts"]["standby"] is True
    assert 99.9 < answer["cells"][0]["exchange_estimate"] < 100.0
    assert "can exchange a fragment" in err and "coordinator with a standby, 2 shards, 1 relays" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--shards", "65"), "shards must be"),
        (("--shards", "-1"), "shards must be"),
        (("--relays", "3", "--learners", "2", "--chips", "512"), "give fewer relays"),
        (("--part-mtbf-days", "0"), "mean time between failures of a part"),
        (("--part-restart", "-5"), "restart_s must be"),
        (("--takeover", "5"), "give --standby"),
        (("--shards", "2", "--method", "elastic"), "has no coordinator"),
        (("--shards", "2", "--heterogeneous"), "do not use --shards"),
    ],
)
def test_parts_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == 2 and said in " ".join((out + err).split())
