"""The example of the README, run as its reader would."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_plain.py"
UNTRAINED_LOSS = 5.5  # ln 256 is 5.55


def test_the_plain_example_trains_under_atoll_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = [sys.executable, "-m", "atoll", "run", "--learners", "2", "--sync-every", "12", "--fragments", "4"]
    argv += ["--out", str(run), "--", "python", str(SCRIPT), "--steps", "240"]  # on a busy machine one may join late
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.search(r"held-out loss ([0-9.]+)", result.stdout)
    assert found is not None, result.stdout
    assert float(found[1]) < UNTRAINED_LOSS - 1.0
    assert "held-out loss" in (run / "logs" / "learner-learner-1.log").read_text()
    assert (run / "model.safetensors").exists()
    roles = sorted(entry["role"] for entry in json.loads((run / "processes.json").read_text()))
    assert roles == ["launcher", "learner", "learner", "syncer"]


def test_the_example_marks_three_lines() -> None:
    assert len(re.findall(r"# Atoll, line \d", SCRIPT.read_text())) == 3
