"""The comparison with other systems: its cells are real runs, and its tables say what was and was not possible."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
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
    assert "DDP gloo, kill: not possible" in tables


@pytest.mark.parametrize("options", [("--systems", "atol"), ("--scenarios", "clean,slo")])
def test_names_that_nobody_knows_are_answered_with_those_that_there_are(
    tmp_path: Path, options: tuple[str, str]
) -> None:
    done = bakeoff(tmp_path, *options)
    assert done.returncode != 0 and "choose from" in done.stderr


def test_a_bakeoff_that_is_told_to_end_leaves_nobody_behind(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "bakeoff.py"), "--folder", str(tmp_path / "out"), "--systems", "bare"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.Popen([*command, "--scenarios", "clean", "--world", "2"], env=environment)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("bakeoff-bare-*/worker-*.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert started_in(tmp_path)
    run.terminate()
    assert run.wait(30) == 128 + signal.SIGTERM
    assert not started_in(tmp_path) and not list(tmp_path.glob("bakeoff-bare-*"))


def started_in(folder: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text().replace("\0", " "))
    return [text for text in found if f"--folder {folder}/bakeoff-" in text]
