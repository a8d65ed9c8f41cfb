"""`atoll run --shards learners`: a shard beside each learner, which comes and goes with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import _remembered, check_books

from atoll.errors import AtollError, ConfigError
from atoll.launch import reach, shards_of
from atoll.launch.config import run_config

SCRIPT = """
import time
import torch
import atoll

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
with atoll.Learner(model, optimizer) as learner:
    while not learner.done:
        x = torch.randn(8, 32)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(tokens=8, loss=loss)
        time.sleep(0.02)
"""
WAIT_S = 240.0
"""Python with torch takes a minute to start on a busy machine."""


def atoll(*argv: str, log: Path) -> subprocess.Popen[Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        command = [sys.executable, "-m", "atoll", *argv]
        return _remembered(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))


def wait_for(folder: Path, log: Path, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    deadline, status = time.monotonic() + WAIT_S, {}
    while not status or not condition(status):
        assert time.monotonic() < deadline, f"never happened: {what}: {status}\n{log.read_text()}"
        time.sleep(0.2)
        try:
            status = shards_of(reach(str(folder)).options)[0]
        except AtollError:
            continue
    return status


def with_fragments(status: dict[str, Any]) -> int:
    return sum(bool(shard["fragments"]) for shard in status["shards"])


def test_shards_come_and_go_with_their_learners(tmp_path: Path) -> None:
    """Two learners bring two; a third joins with a third; one learner leaves, and its shard hands over."""
    script, folder, log = tmp_path / "train.py", tmp_path / "run", tmp_path / "run.log"
    script.write_text(SCRIPT)
    options = ["--learners", "2", "--shards", "learners", "--fragments", "6", "--sync-every", "6", "--minutes", "30"]
    run = atoll("run", *options, "--out", str(folder), "--", sys.executable, str(script), log=log)
    try:
        status = wait_for(folder, log, lambda s: min(s["versions"], default=0) >= 2, "they train on two shards")
        assert with_fragments(status) == 2
        guest = atoll("join", str(folder), log=tmp_path / "join.log")
        wait_for(folder, log, lambda s: with_fragments(s) == 3 and s["active"] == 3, "a third comes along")
        listed = json.loads((folder / "processes.json").read_text())
        assert sorted(one["id"] for one in listed if one["role"] == "shard") == ["shard-0", "shard-1"]
        left = subprocess.run([sys.executable, "-m", "atoll", "leave", str(folder), "learner-1"], timeout=WAIT_S)
        assert left.returncode == 0
        wait_for(folder, log, lambda s: len(s["shards"]) == 2 and with_fragments(s) == 2, "its shard hands over")
        guest.send_signal(signal.SIGTERM)
        assert guest.wait(WAIT_S) in (0, 143)
        status = wait_for(folder, log, lambda s: len(s["shards"]) == 1, "the guest's shard hands over, too")
        before = status["versions"]
        status = wait_for(folder, log, lambda s: min(s["versions"]) >= max(before) + 2, "the run goes on")
        check_books(status)
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(WAIT_S)
    assert (folder / "model.safetensors").exists(), log.read_text()


@pytest.mark.parametrize(("shards", "said"), [("many", "a whole number or learners"), ("65", "from 0 to 64")])
def test_a_wrong_word_for_shards_is_refused(shards: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_config({"shards": shards})
