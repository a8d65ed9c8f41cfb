"""The example of the README, run as its reader would."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_plain.py"
UNTRAINED_LOSS = 5.5  # ln 256 is 5.55


def held_out_loss(weights: Path) -> float:
    """What the example prints, of a saved model: a learner's own line may show an older one on a busy machine."""
    spec = importlib.util.spec_from_file_location("train_plain", SCRIPT)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.NextByte()
    model.load_state_dict(load_file(weights))
    data = example.load_bytes()
    context, target = example.windows(data[-len(data) // 10 :], 4096, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(context), target))


def test_the_plain_example_trains_under_atoll_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = [sys.executable, "-m", "atoll", "run", "--learners", "2", "--sync-every", "12", "--fragments", "4"]
    argv += ["--out", str(run), "--", "python", str(SCRIPT), "--steps", "120"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"held-out loss [0-9.]+ nats", result.stdout), result.stdout
    assert "held-out loss" in (run / "logs" / "learner-learner-1.log").read_text()
    assert held_out_loss(run / "model.safetensors") < UNTRAINED_LOSS - 1.0
    roles = sorted(entry["role"] for entry in json.loads((run / "processes.json").read_text()))
    assert roles == ["launcher", "learner", "learner", "syncer"]


def test_the_example_marks_three_lines() -> None:
    assert len(re.findall(r"# Atoll, line \d", SCRIPT.read_text())) == 3
