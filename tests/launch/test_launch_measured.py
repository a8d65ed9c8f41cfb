"""`atoll run` for people who measure: a budget, a method, minutes, and one JSON object, around a real script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 120

SCRIPT = """
import torch, atoll
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
with atoll.Learner(model, optimizer) as learner:
    print("rank", learner.rank, "of", learner.world, flush=True)
    while {more}:
        x = torch.randn(8, 16)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(tokens=8, loss=loss)
"""


def atoll(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "atoll", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)


def test_a_script_runs_to_its_budget_by_another_method_and_gives_its_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ("--tokens-budget", "400", "--method", "diloco", "--sync-every", "4", "--out", str(folder), "--json")
    ran = atoll("run", *options, "--", "python", "-c", SCRIPT.format(more="not learner.done"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [line] = ran.stdout.splitlines()  # what the script prints is on standard error
    assert "rank 0 of 2" in ran.stderr
    result = json.loads(line)
    assert result == json.loads((folder / "result.json").read_text())
    assert (result["method"], result["finished"], result["reason"]) == ("diloco", True, "finished")
    ledger = result["ledger"]
    assert ledger["processed"] == ledger["merged"] + ledger["pending"] + sum(ledger["discarded"].values()) >= 400
    assert 8 * sum(result["steps_by_learner"].values()) == ledger["processed"]
    assert sorted(result["steps_by_learner"]) == ["learner-0", "learner-1"]

    reported = atoll("report", str(folder), "--json")
    assert reported.returncode == 0, reported.stderr
    numbers = json.loads(reported.stdout.splitlines()[-1])
    assert {name: numbers[name] for name in result} == result
    assert numbers["parameters"] == 16 * 17 and numbers["report"] == str(folder / "report.html")


def test_a_script_that_never_steps_ends_with_1_and_no_model_is_called_published(tmp_path: Path) -> None:
    options = ("--learners", "1", "--out", str(tmp_path / "run"))
    ran = atoll("run", *options, "--", "python", "-c", SCRIPT.format(more="False"))
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "learner.step was never called" in ran.stdout  # as learner-0 said it
    assert "nothing was trained" in ran.stderr and "published model" not in ran.stderr


def test_a_script_without_an_end_leaves_in_order_after_its_minutes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ("--learners", "1", "--minutes", "0.05", "--out", str(folder), "--json")
    ran = atoll("run", *options, "--", "python", "-c", SCRIPT.format(more="True"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert (result["finished"], result["reason"]) == (True, "the time is up")
    assert result["ledger"]["merged"] == result["ledger"]["processed"] > 0  # it handed everything over
    assert (folder / "model.safetensors").exists()
