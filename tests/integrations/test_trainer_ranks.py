"""Trainers of others with several ranks, started by torchrun or `accelerate launch`: together they are one learner."""

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


def run(kind: str, folder: Path, *, ranks: list[str], launcher: list[str]) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "atoll", "run", "--learners", "1", *ranks, "--sync-every", "4"]
    return subprocess.run(
        [*argv, "--out", str(folder / "run"), "--", *launcher, str(SCRIPT), kind, str(folder), str(STEPS)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )


def check_one_learner(ended: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert ended.returncode == 0, ended.stdout[-3000:]
    told = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(RANKS)]
    assert [(one["size"], one["step"], one["handed_over"]) for one in told] == [(RANKS, STEPS, True)] * RANKS
    ledger = json.loads((folder / "run" / "result.json").read_text())["ledger"]
    assert ledger["processed"] == ledger["merged"] == STEPS * RANKS * BATCH * WIDTH, "every token once"


@pytest.mark.parametrize(
    ("kind", "library"),
    [("hf", "transformers"), ("lightning", "lightning"), ("accelerate", "accelerate"), ("fsdp2", "transformers")],
)
def test_ranks_of_a_trainer_are_one_learner_and_count_every_token_once(kind: str, library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    ended = run(kind, tmp_path, ranks=["--ranks", str(RANKS)], launcher=[sys.executable])
    check_one_learner(ended, tmp_path)


@pytest.mark.parametrize("kind", ["hf", "fsdp2"])
def test_ranks_that_accelerate_launch_has_started_are_one_learner(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(RANKS)]
    options = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    ended = run(kind, tmp_path, ranks=[], launcher=[*launch, *options])
    check_one_learner(ended, tmp_path)


def test_the_trainers_first_kind_of_fsdp_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ended = run("fsdp1", tmp_path, ranks=["--ranks", str(RANKS)], launcher=[sys.executable])
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("learner*"))
    assert ended.returncode != 0 and "fully_shard" in logs, logs[-3000:]
