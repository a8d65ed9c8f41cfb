"""Slurm: a real slurmctld and slurmd on loopback; a run, more islands, preemption, the end, and `stop`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import said
from engine_runs import SCRIPT, changes, commits, contributors, processes
from slurm_cluster import SlurmCluster, missing, wait_until

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no Slurm here: {missing()}")

JOB = """
[run]
name = "{name}"
command = "python train.py {folder}/finish"
files = ["train.py"]
folder = "{folder}/run"
sync_every = 4
fragments = 2

[[islands]]
name = "east"
count = 2
cpus = 2

[syncer]
listen = "127.0.0.1:0"
keys = "{folder}/keys"
cpus = 1
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=4)
    yield cluster
    cluster.close()


@pytest.fixture
def launch(
    slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> said.Command:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    return said.command("launch", "slurm", monkeypatch=monkeypatch, capsys=capsys)


def states(launch: said.Command, job: Path) -> dict[str, str]:
    return {one["name"]: one["state"] for one in launch("status", job, "--json").last["processes"]}


def test_islands_come_go_and_come_back_and_the_run_comes_to_its_end(
    slurm: SlurmCluster, launch: said.Command, tmp_path: Path
) -> None:
    job, run = tmp_path / "job.toml", tmp_path / "run"
    job.write_text(JOB.format(name="end", folder=tmp_path))

    def logs() -> str:
        return slurm.ask("squeue", "-a", "-t", "all") + "".join(
            f"\n== {path.name}\n{path.read_text()[-1500:]}" for path in run.glob("logs/*.log")
        )

    done = launch(job)
    assert done.code == 0, done.stderr
    wait_until(lambda: contributors(run) >= {"east-0", "east-1"}, "both islands in commits", logs)
    assert states(launch, job) == {"syncer": "running", "east-0": "running", "east-1": "running"}
    again = launch(job)
    assert again.code != 0 and "already" in again.stderr

    assert launch("scale", job, "3").code == 0
    wait_until(lambda: "east-2" in contributors(run), "the third island in a commit", logs)

    # Somebody more important takes the node of east-1: it hands over and leaves, and comes back afterwards.
    node = next(one["where"] for one in launch("status", job, "--json").last["processes"] if one["name"] == "east-1")
    seen = commits(run)
    slurm.ask(
        "sbatch", "--partition=urgent", f"--nodelist={node}", "--cpus-per-task=2", "--output=/dev/null", "--wrap=true"
    )
    wait_until(lambda: ("left", "SIGTERM") in changes(run, "east-1"), "east-1 to leave in order", logs)
    wait_until(lambda: states(launch, job)["east-1"] == "waiting", "east-1 to be in the queue again", logs)
    assert contributors(run, seen) >= {"east-0"}

    time.sleep(3)  # a node refuses what has its job's old number in the second in which it gave that up

    def back() -> bool:
        for line in slurm.ask("squeue", "-h", "-r", "-t", "pending", "--name=atoll-end-east", "-o", "%A").split():
            slurm.ask("scontrol", "update", f"job={line}", "StartTime=now")  # Slurm would wait two minutes
        left_at = changes(run, "east-1").index(("left", "SIGTERM"))
        return "active" in [state for state, _ in changes(run, "east-1")[left_at:]]

    wait_until(back, "east-1 to come back", logs)
    assert "left" not in [state for name in ("east-0", "east-2") for state, _ in changes(run, name)], logs()
    seen = commits(run)
    wait_until(lambda: contributors(run, seen) == {"east-0", "east-1", "east-2"}, "all three in commits", logs)

    (tmp_path / "finish").touch()
    wait_until(lambda: set(states(launch, job).values()) == {"ended"}, "the end of all", logs)
    assert (run / "model.safetensors").exists() and "the script has ended" in launch(
        "logs", job, "--island", "east-1"
    ).stdout
    assert launch("status", job).code == 1
    wait_until(lambda: processes("end") == [], "no process to stay")


def test_stop_leaves_nothing_and_writes_the_model(slurm: SlurmCluster, launch: said.Command, tmp_path: Path) -> None:
    job, run = tmp_path / "job.toml", tmp_path / "run"
    job.write_text(JOB.format(name="stop", folder=tmp_path))
    assert launch(job).code == 0
    wait_until(lambda: contributors(run) == {"east-0", "east-1"}, "both islands in commits", slurm.logs)
    assert launch("scale", job, "east=1").code == 0
    wait_until(lambda: ("left", "SIGTERM") in changes(run, "east-1"), "east-1 to leave in order", slurm.logs)
    seen = commits(run)
    wait_until(lambda: commits(run) >= seen + 4, "east-0 to go on alone", slurm.logs)
    assert "left" not in [state for state, _ in changes(run, "east-0")]
    done = launch("stop", job)
    assert done.code == 0, done.stderr
    assert slurm.ask("squeue", "-h", "--name=atoll-stop-east,atoll-stop-syncer") == ""
    assert processes("stop") == []
    assert (run / "model.safetensors").exists()
    assert ("left", "SIGTERM") in changes(run, "east-0")
    assert "did not end in order" not in done.stdout
