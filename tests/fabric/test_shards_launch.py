"""`atoll run --shards`: shards are started, listed, restarted and ended with the run, and the model is exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from atoll.errors import ConfigError
from atoll.launch.config import run_config

SCRIPT = """
import json, os, signal, time
from pathlib import Path
import torch
import atoll

folder = Path(os.environ["ATOLL_RUN_FOLDER"])
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
        time.sleep(0.005)
        commits = (folder / "events").glob("syncer-*.jsonl")
        if not (folder / "killed").exists() and any('"committed"' in one.read_text() for one in commits):
            shard = next(e for e in json.loads((folder / "processes.json").read_text()) if e["id"] == "shard-0")
            (folder / "killed").write_text(str(shard["pid"]))
            os.kill(shard["pid"], signal.SIGKILL)
"""


def test_a_run_with_shards_outlives_one_and_leaves_a_model(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    options = ["--learners", "1", "--shards", "2", "--fragments", "2", "--sync-every", "4", "--tokens-budget", "3000"]
    argv = [sys.executable, "-m", "atoll", "run", *options, "--out", str(folder), "--", sys.executable, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, env=environment)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "shard-0: killed by SIGKILL" in said and "shard-0 is back (restart 1)" in said
    listed = json.loads((folder / "processes.json").read_text())
    assert sorted(entry["id"] for entry in listed if entry["role"] == "shard") == ["shard-0", "shard-1"]
    for entry in listed:
        assert entry["pid"] == os.getpid() or not Path(f"/proc/{entry['pid']}").exists()
    result = json.loads((folder / "result.json").read_text())
    assert result["finished"] and result["tokens"] >= 3000
    exported = tmp_path / "exported.safetensors"
    export = [sys.executable, "-m", "atoll", "export", str(folder), "--to", str(exported)]
    assert subprocess.run(export, timeout=120).returncode == 0
    own, written = load_file(exported), load_file(folder / "model.safetensors")
    assert own.keys() == written.keys()
    assert all((own[name] == written[name]).all() for name in own)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"shards": 1000}, "shards must be a whole number from 0 to 64"),
        ({"shards": 2, "record": True}, "cannot be replayed yet"),
        ({"shards": "learners", "chaos": "storm"}, "cannot reach shards beside learners"),
    ],
)
def test_what_shards_cannot_do_is_refused(more: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_config(more)
