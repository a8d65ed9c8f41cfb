"""The comparison with other systems: its cells are real runs, and its tables say what was and was not possible."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "benchmarks" / "peers"


def bakeoff(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "bakeoff.py"), "--folder", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_cells_are_real_runs_and_what_is_impossible_is_said_and_not_counted_as_zero(tmp_path: Path) -> None:
    options = ("--systems", "atoll,ddp", "--scenarios", "clean", "--seconds", "3", "--world", "2")
    done = bakeoff(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    done = bakeoff(tmp_path, "--systems", "ddp", "--scenarios", "kill")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    by = {(row["scenario"], row["system"]): row for row in rows}
    assert by["clean", "atoll"]["steps_per_s"] > 0, by["clean", "atoll"]["why"]
    assert by["clean", "ddp"]["steps_per_s"] > 0, by["clean", "ddp"]["why"]
    assert by["clean", "atoll"]["loss"] > 0 and not by["clean", "atoll"]["why"]
    assert by["kill", "ddp"]["why"].startswith("not possible")
    tables = (tmp_path / "tables.md").read_text()
    assert "| kill |  | - |" in tables and "DDP gloo, kill: not possible" in tables


@pytest.mark.parametrize("options", [("--systems", "atol"), ("--scenarios", "clean,slo")])
def test_names_that_nobody_knows_are_answered_with_those_that_there_are(
    tmp_path: Path, options: tuple[str, str]
) -> None:
    done = bakeoff(tmp_path, *options)
    assert done.returncode != 0 and "choose from" in done.stderr
