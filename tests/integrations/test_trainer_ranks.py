"""Trainers of others with several ranks: torchrun starts them, as `accelerate launch` does on GPUs, and together they
are one learner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_trainers import BATCH, WIDTH

SCRIPT = Path(__file__).parent / "rank_trainers.py"
STEPS, RANKS = 12, 2


@pytest.mark.parametrize(
    ("kind", "library"), [("hf", "transformers"), ("lightning", "lightning"), ("accelerate", "accelerate")]
)
def test_ranks_of_a_trainer_are_one_learner_and_count_every_token_once(kind: str, library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    run = tmp_path / "run"
    argv = [sys.executable, "-m", "atoll", "run", "--learners", "1", "--ranks", str(RANKS), "--sync-every", "4"]
    ended = subprocess.run(
        [*argv, "--out", str(run), "--", sys.executable, str(SCRIPT), kind, str(tmp_path), str(STEPS)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(RANKS)]
    assert [(one["size"], one["step"], one["handed_over"]) for one in told] == [(RANKS, STEPS, True)] * RANKS
    ledger = json.loads((run / "result.json").read_text())["ledger"]
    assert ledger["processed"] == ledger["merged"] == STEPS * RANKS * BATCH * WIDTH, "every token once"
