"""Learners of several ranks on one machine: what is started, and who gets which GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.launch.config import describe, run_config
from atoll.launch.ranks import gpu_shares, gpus_here, island_argv
from atoll.launch.run import run_command


def test_one_rank_is_the_command_itself_and_several_are_torchrun() -> None:
    assert island_argv(["python", "train.py"], 1) == ["python", "train.py"]
    argv = island_argv(["python", "train.py"], 4)
    assert argv[1:4] == ["-m", "torch.distributed.run", "--standalone"] and argv[4:6] == ["--nproc-per-node", "4"]
    assert argv[-2:] == ["python", "train.py"]


@pytest.mark.parametrize(
    ("gpus", "learners", "ranks", "each", "shares"),
    [
        ("", 2, 4, 0, [None, None]),
        ("0,1", 2, 1, 0, ["0", "1"]),
        ("0", 3, 1, 0, ["0", "0", "0"]),
        ("0,1,2,3,4,5,6,7", 2, 4, 0, ["0,1,2,3", "4,5,6,7"]),
        ("4,5,6,7", 2, 1, 2, ["4,5", "6,7"]),
    ],
)
def test_gpus_are_shared_out(gpus: str, learners: int, ranks: int, each: int, shares: list[str | None]) -> None:
    here = gpus.split(",") if gpus else []
    found = gpu_shares(here, learners=learners, ranks=ranks, per_learner=each)
    assert [share.get("CUDA_VISIBLE_DEVICES") for share in found] == shares


@pytest.mark.parametrize(("ranks", "each"), [(4, 0), (1, 2)])
def test_too_few_gpus_are_said_before_anything_is_started(
    ranks: int, each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert gpus_here() == ["0", "1", "2"]
    config = run_config({"learners": 2, "ranks": ranks, "gpus_per_learner": each, "out": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match=r"need (8|4), and this machine has 3; use fewer"):
        run_command(config, ["python", "train.py"])
    assert not (tmp_path / "run").exists()


def test_no_gpu_is_used_where_none_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus_here() == []


def test_threads_are_shared_out_to_ranks() -> None:
    assert any("3 ranks per learner" in line for line in describe(run_config({"ranks": 3})))
    with pytest.raises(ConfigError, match="ranks must be"):
        run_config({"ranks": 0})


def test_a_rank_dies_with_whoever_started_it(tmp_path: Path) -> None:
    """torchrun gives ranks sessions of their own, so nobody else would end them."""
    told = tmp_path / "pid"
    child = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    argv = [sys.executable, "-m", "atoll.launch.rank", sys.executable, "-c", child]
    starter = f"import subprocess; subprocess.run({argv!r}, start_new_session=True)"
    parent = subprocess.Popen([sys.executable, "-c", starter])
    deadline = time.monotonic() + 60
    while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = int(told.read_text())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
