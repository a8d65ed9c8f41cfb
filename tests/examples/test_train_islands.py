"""The example of an island, run as its reader would."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "train_fsdp.py"
STEPS, BATCH, RANKS = 40, 64, 2


def test_the_fsdp_example_trains_under_atoll_run_with_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = [sys.executable, "-m", "atoll", "run", "--learners", "2", "--ranks", str(RANKS), "--sync-every", "12"]
    argv += ["--fragments", "4", "--out", str(run), "--", "python", str(SCRIPT), "--steps", str(STEPS)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"learner-0: held-out loss [0-9.]+ nats", done.stdout), done.stdout
    result = json.loads((run / "result.json").read_text())
    assert result["tokens"] == 2 * RANKS * STEPS * BATCH
    assert (run / "model.safetensors").exists()
