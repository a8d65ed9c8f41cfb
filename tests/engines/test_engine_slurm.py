"""Slurm: a real slurmctld and slurmd on loopback; a run, more islands, preemption, the end, and `stop`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import said
from engine_runs import SCRIPT, changes, commits, contributors, happenings, processes
from ports import quiet_port
from slurm_cluster import WIDE, SlurmCluster, missing, wait_until

from atoll.observe import EventWriter, LearnerStarted, SyncerStopped
from atoll.page import PageOptions, serve_page

EXAMPLES = Path(__file__).parents[2] / "examples"
DDP = (EXAMPLES / "train_ddp.py", EXAMPLES / "train_plain.py")
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
    monkeypatch.setenv("PATH", os.defpath + ":/usr/sbin")  # no environment is active: `python` is the machine's
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    return said.command("launch", "slurm", monkeypatch=monkeypatch, capsys=capsys)


def states(launch: said.Command, job: Path) -> dict[str, str]:
    return {one["name"]: one["state"] for one in launch("status", job, "--json").last["processes"]}


def test_islands_come_go_and_come_back_and_the_run_comes_to_its_end(
    slurm: SlurmCluster,
    launch: said.Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
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

    # Whoever looks at the run finds what a run of this machine has: its name, its end, and every log.
    read = said.command("logs", monkeypatch=monkeypatch, capsys=capsys)
    told = read(run, "--follow")
    assert told.code == 0 and "run finished: every learner's script has ended" in told.stdout.splitlines()[-1]
    assert told.stdout.count("run finished") == 1 and "run resumed" not in told.stdout
    assert "the script has ended" in read(run, "--learner", "east-0", "--follow").stdout
    assert "listens on" in read(run, "--learner", "syncer").stdout
    assert "those of east-0, east-1, east-2, syncer" in read(run, "--learner", "nobody").stderr
    assert json.loads((run / "result.json").read_text())["finished"]
    seen = shown(run)
    assert seen["head"]["title"] == f"python train.py {tmp_path}/finish"
    assert seen["head"]["over"] == "every learner's script has ended" and seen["log"].status_code == 200
    assert "the script has ended" in seen["log"].text
    time.sleep(1.5)
    assert shown(run)["head"]["elapsed_s"] == seen["head"]["elapsed_s"]


def shown(run: Path) -> dict[str, Any]:
    page = serve_page(str(run), PageOptions())
    page.start()
    try:
        of_run = f"{page.address}api/run/run"
        return {"head": httpx.get(f"{of_run}/whole").json()["head"], "log": httpx.get(f"{of_run}/log/east-0")}
    finally:
        page.stop()


def test_the_example_job_runs_as_it_is(
    slurm: SlurmCluster, launch: said.Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`atoll launch slurm examples/jobs/two-islands.toml` in a checkout, word for word."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.setenv("SBATCH_PARTITION", "wide")  # it asks for more CPUs than the small nodes say they have
    job, run = Path("examples/jobs/two-islands.toml"), Path("runs/two-islands")
    done = launch(job)
    assert done.code == 0, done.stderr

    def logs() -> str:
        return slurm.ask("squeue", "-a", "-t", "all") + "".join(
            f"\n== {path.name}\n{path.read_text()[-1500:]}" for path in run.glob("logs/*.log")
        )

    wait_until(lambda: set(states(launch, job).values()) == {"ended"}, "the end of all", logs)
    assert "None" not in launch("status", job).stdout  # squeue's word for nothing to say
    assert contributors(run) == {"east-0", "east-1"} and (run / "model.safetensors").exists()
    assert "held-out loss" in launch("logs", job, "--island", "east-1").stdout


def test_islands_whose_syncer_cannot_start_end_and_say_why(
    slurm: SlurmCluster, launch: said.Command, tmp_path: Path
) -> None:
    job = tmp_path / "job.toml"
    text = JOB.format(name="never", folder=tmp_path)
    job.write_text(text.replace("[run]\n", '[run]\npython = "/nowhere/python"\n'))
    assert launch(job).code == 0
    wait_until(lambda: set(states(launch, job).values()) == {"failed"}, "the end of all", slurm.logs)
    assert "its syncer ended with status 127; see syncer.log" in launch("logs", job, "--island", "east-1").stdout
    rows = {one["name"]: one for one in launch("status", job, "--json").last["processes"]}
    assert "logs/syncer.log" in rows["syncer"]["detail"]


def test_islands_take_their_nodes_in_turn_and_have_torchrun_ranks(
    slurm: SlurmCluster, launch: said.Command, tmp_path: Path
) -> None:
    job, run = tmp_path / "job.toml", tmp_path / "run"
    text = JOB.format(name="turn", folder=tmp_path).replace('"train.py"]', f'"{DDP[0]}", "{DDP[1]}"]')
    text = text.replace(f"train.py {tmp_path}/finish", "train_ddp.py --steps 200")
    job.write_text(text.replace("cpus = 2\n", 'cpus = 2\nranks = 2\nhosts = ["n2", "n3"]\n'))
    done = launch(job)
    assert done.code == 0, done.stderr

    def logs() -> str:
        return slurm.ask("squeue", "-a", "-t", "all") + "".join(
            f"\n== {path.name}\n{path.read_text()[-1500:]}" for path in run.glob("logs/*.log")
        )

    wait_until(lambda: set(states(launch, job).values()) == {"ended"}, "the end of all", logs)
    assert contributors(run) == {"east-0", "east-1"}, logs()
    where = {one["name"]: one["where"] for one in launch("status", job, "--json").last["processes"]}
    assert (where["east-0"], where["east-1"]) == ("n2", "n3")
    assert "held-out loss" in launch("logs", job, "--island", "east-0").stdout
    started = [e for e in happenings(run, LearnerStarted) if e.learner == "east-0"]  # type: ignore[attr-defined]
    assert len(started) == 1 and changes(run, "east-0")[-1][0] == "left"

    # What failed before is not what `status` tells of an island that was started again and ended well.
    slurm.ask("sbatch", "--job-name=atoll-turn-east", "--array=0", "--output=/dev/null", "--wrap=exit 3")
    wait_until(lambda: states(launch, job)["east-0"] == "failed", "a later failure", slurm.logs)
    slurm.ask("sbatch", "--job-name=atoll-turn-east", "--array=0", "--output=/dev/null", "--wrap=true")
    wait_until(lambda: states(launch, job)["east-0"] == "ended", "the latest end", slurm.logs)


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


def test_a_syncer_that_waits_in_the_queue_is_taken_from_it_and_slurm_may_forget_a_run_that_has_ended(
    slurm: SlurmCluster, launch: said.Command, tmp_path: Path
) -> None:
    job, run = tmp_path / "job.toml", tmp_path / "run"
    job.write_text(JOB.format(name="wait", folder=tmp_path))
    assert "nothing of job wait was running" in launch("stop", job).stdout
    assert "slurm knows nothing of this job" in launch("status", job).stdout
    slurm.ask("scontrol", "update", "partition=main", "state=down")  # jobs are taken, and wait
    try:
        assert launch(job).code == 0 and states(launch, job)["syncer"] == "waiting"
        done = launch("stop", job)
    finally:
        slurm.ask("scontrol", "update", "partition=main", "state=up")
    assert done.code == 0 and "did not end in order" not in done.stdout and "atoll export" in done.stdout
    late = launch("scale", job, "3")
    assert late.code == 2 and "the syncer of job wait does not run (ended)" in late.stderr
    # Five minutes later Slurm has forgotten them. What is in the run folder has not.
    job.write_text(JOB.format(name="forgotten", folder=tmp_path))
    assert set(states(launch, job).values()) == {"missing"}
    (run / "events").mkdir(exist_ok=True)
    with EventWriter(run / "events" / "syncer-1.jsonl") as writer:
        writer.emit(SyncerStopped("every learner's script has ended", 174))
    assert set(states(launch, job).values()) == {"ended"}
    assert "run: every learner's script has ended" in launch("status", job).stdout


def test_shards_and_relays_keep_their_nodes_and_end_after_the_syncer(
    slurm: SlurmCluster, launch: said.Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "wide")
    job, run = tmp_path / "job.toml", tmp_path / "run"
    shards = f'\n[shards]\ncount = 1\ncpus = 1\nport = {quiet_port()}\nhosts = ["{WIDE}"]\n'
    relays = f'\n[relays]\nsites = ["here"]\nport = {quiet_port()}\nhosts = ["{WIDE}"]\n'
    text = JOB.format(name="parts", folder=tmp_path).replace("cpus = 2\n", 'cpus = 2\nsite = "here"\n')
    job.write_text(text + shards + relays)
    done = launch(job)
    assert done.code == 0, done.stderr

    def logs() -> str:
        return slurm.ask("squeue", "-a", "-t", "all") + "".join(
            f"\n== {path.name}\n{path.read_text()[-1500:]}" for path in run.glob("logs/*.log")
        )

    wait_until(lambda: contributors(run) == {"east-0", "east-1"}, "both islands in commits", logs)
    assert states(launch, job)["shard-0"] == "running" and (run / "shard-0" / "state").is_dir()
    assert states(launch, job)["relay-0"] == "running" and "listens on" in launch("logs", job, "--island", "relay-0")[1]
    seen = commits(run)
    number = slurm.ask("squeue", "-h", "--name=atoll-parts-shard", "-o", "%i")
    slurm.ask("scontrol", "requeue", number)  # as if its node had been taken

    def again() -> bool:
        slurm.ask("scontrol", "update", f"job={number}", "StartTime=now")  # Slurm would wait two minutes
        return commits(run) > seen + 4 and states(launch, job)["shard-0"] == "running"

    wait_until(again, "commits on the shard that came back", logs)
    (tmp_path / "finish").touch()
    wait_until(lambda: set(states(launch, job).values()) == {"ended"}, "the end of all", logs)
    assert (run / "model.safetensors").exists()
    wait_until(lambda: processes("parts") == [], "no process to stay")
