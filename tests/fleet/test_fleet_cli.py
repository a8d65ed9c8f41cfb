"""`atoll sim goodput` as a user meets it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from atoll.cli import main

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
        (("--mtbi-years", "nan"), "must be a number"),
        (("--detect", "-1"), "detect_s"),
        (("--precision", "0"), "precision"),
        (("--jobs", "-1"), "jobs"),
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
