"""Learners of several ranks on one machine: what is started, and who gets which GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.launch import join, near
from atoll.launch.commands import learner_command
from atoll.launch.config import describe, run_config
from atoll.launch.faults import NoFaults
from atoll.launch.folder import RunFolder
from atoll.launch.process import Child, Command
from atoll.launch.ranks import gpu_share, gpu_shares, gpus_here, island_argv
from atoll.launch.run import run_command
from atoll.launch.stored import StoredRun


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


@pytest.mark.parametrize(("ranks", "shares"), [(1, ["0", "1", "2", "3", "0"]), (2, ["0,1", "2,3"])])
def test_one_that_comes_later_gets_the_next_share(
    ranks: int, shares: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert [gpu_share(number, ranks=ranks)["CUDA_VISIBLE_DEVICES"] for number in range(len(shares))] == shares
    with pytest.raises(ConfigError, match="need 6, and this machine has 4"):
        gpu_share(2, ranks=2)


def fake_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, the second near CPU 0 only: every machine of a test has that one."""
    monkeypatch.setattr(near, "DRIVER", folder / "gpus")
    monkeypatch.setattr(near, "PCI", folder / "pci")
    for place, uuid, cpus in (("0000:17:00.0", "GPU-aa", "0-4095"), ("0000:A1:00.0", "GPU-bb", "0")):
        (folder / "gpus" / place).mkdir(parents=True)
        (folder / "gpus" / place / "information").write_text(f"Model: \t H200\nGPU UUID: \t {uuid}\n")
        (folder / "pci" / place.lower()).mkdir(parents=True)
        (folder / "pci" / place.lower() / "local_cpulist").write_text(f"{cpus}\n")


def test_a_learner_runs_on_the_cpus_near_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_machine(tmp_path, monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert near.cpus_near(["1"]) == near.cpus_near(["GPU-bb"]) == {0}
    assert near.cpus_near(["0"]) == near.cpus_near(["0", "1"]) == frozenset(), "all of them are near"
    assert near.cpus_near([]) == near.cpus_near(["7"]) == frozenset(), "nothing is known"
    more = {"CUDA_VISIBLE_DEVICES": "1"}
    place = RunFolder(tmp_path)
    for given, world, cpus in ((more, 2, {0}), (more, 1, set()), ({}, 2, set())):
        started = learner_command(place, ["x"], id="l", rank=0, world=world, threads=1, more=given)
        assert started.cpus == cpus, "who is alone may use all of them"
    assert near.parse_cpus("0-3,8\n") == {0, 1, 2, 3, 8}


def test_what_is_bound_to_cpus_runs_on_them(tmp_path: Path) -> None:
    script = "import os; print(sorted(os.sched_getaffinity(0)))"
    log = tmp_path / "log"
    first = min(os.sched_getaffinity(0))
    child = Child(Command("learner", "l", [sys.executable, "-c", script], {}, cpus=frozenset({first})), log)
    assert child.wait(60.0, hurry=lambda: False) == 0
    assert log.read_text().strip() == str([first])


class Asked(NoFaults):
    """A planner that keeps what it is asked for, and starts nothing."""

    def __init__(self) -> None:
        self.argv: list[str] = []

    def check(self, config: object) -> None: ...

    def injection(self, config: object, attempt: object, argv: Sequence[str]) -> NoFaults:
        self.argv = list(argv)
        raise ConfigError("enough")


def test_a_guest_of_a_run_with_ranks_is_an_island_too(tmp_path: Path) -> None:
    asked = Asked()
    config = run_config({"learners": 1, "ranks": 2, "out": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match="enough"):
        run_command(config, ["python", "train.py"], faults=asked)
    assert asked.argv == island_argv(["python", "train.py"], 2)


def test_a_joiner_of_a_run_gets_the_gpus_after_those_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    config = run_config({"learners": 2, "ranks": 2, "out": str(tmp_path)})
    stored = StoredRun(RunFolder(tmp_path), config, ("python", "train.py"), "")
    command = join._command(stored, join.JoinSeat("late", 2), threads=0, environment={"ATOLL_TOKEN": "t"})
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "4,5" and command.environment["ATOLL_TOKEN"] == "t"
    assert list(command.argv) == island_argv(["python", "train.py"], 2)


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
