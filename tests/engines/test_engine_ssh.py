"""Hosts with ssh: a real sshd on loopback under two names; a run, more islands, a crash, the end, and `stop`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import said
from engine_runs import SCRIPT, changes, commits, contributors, processes
from ports import quiet_port
from slurm_cluster import wait_until
from ssh_hosts import SshHosts, missing

import atoll
from atoll.wire import ClientOptions, fetch_status

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no sshd here: {missing()}")

JOB = """
[run]
name = "{name}"
command = "python train.py {folder}/finish"
files = ["train.py"]
setup = "export PATH={path}:$PATH PYTHONPATH={source}"
sync_every = 4
fragments = 2

[[islands]]
name = "east"
count = 2

[syncer]
listen = "127.0.0.1:{port}"
address = "127.0.0.1:{port}"
keys = "{folder}/keys"

[ssh]
hosts_file = "hosts"
config = "{config}"
folder = "{folder}/there"
"""


def job_text(folder: Path, hosts: SshHosts) -> str:
    places = {"path": Path(sys.executable).parent, "source": Path(atoll.__file__).parents[1]}
    return JOB.format(name="far", folder=folder, port=quiet_port(), config=hosts.config, **places)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    hosts = SshHosts(tmp_path_factory.mktemp("sshd"))
    yield hosts
    hosts.close()


@pytest.fixture
def launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[said.Command]:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("hosts").write_text("# both are this machine\nparis\ntokyo  # the second\n")
    command = said.command("launch", "ssh", monkeypatch=monkeypatch, capsys=capsys)
    yield command
    if processes("far"):
        command("stop", tmp_path / "job.toml")


def states(launch: said.Command, job: Path) -> dict[str, tuple[str, str]]:
    rows = launch("status", job, "--json").last["processes"]
    return {one["name"]: (one["state"], one["where"]) for one in rows}


def test_a_run_on_two_hosts_outlives_the_connection_and_stop_leaves_nothing(
    hosts: SshHosts, launch: said.Command, tmp_path: Path
) -> None:
    job, run = tmp_path / "job.toml", tmp_path / "there" / "run"
    job.write_text(job_text(tmp_path, hosts))

    def logs() -> str:
        return "".join(
            f"\n== {path.name}\n{path.read_text()[-1500:]}" for path in tmp_path.glob("there/run/logs/*.log")
        )

    done = launch(job)
    assert done.code == 0, done.stderr
    wait_until(lambda: contributors(run) == {"east-0", "east-1"}, "both islands in commits", logs)
    # No connection is open any more, and nothing of theirs hangs on sshd.
    assert states(launch, job) == {
        "syncer": ("running", "paris"),
        "east-0": ("running", "paris"),
        "east-1": ("running", "tokyo"),
    }
    tokens = [path.read_text().strip() for path in tmp_path.glob("keys/tokens/*.token")]
    lines = processes("far")
    assert len(tokens) == 3 and not any(token.rpartition(".")[2] in line for token in tokens for line in lines)

    assert launch("scale", job, "east=3").code == 0
    wait_until(lambda: "east-2" in contributors(run), "the third island in a commit", logs)

    # A process that dies is started again by the shell that keeps it.
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            marked = b"ATOLL_PART=far/east-1\0" in environ.read_bytes()
            if marked and b"train.py" in (environ.parent / "cmdline").read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)
        except OSError:
            continue
    wait_until(lambda: "starts again" in launch("logs", job, "--island", "east-1").stdout, "a restart", logs)
    seen = commits(run)
    wait_until(lambda: contributors(run, seen) == {"east-0", "east-1", "east-2"}, "all three in commits", logs)

    assert launch("scale", job, "east=2").code == 0
    assert ("left", "SIGTERM") in changes(run, "east-2") and states(launch, job)["east-2"][0] == "ended"
    done = launch("stop", job)
    assert done.code == 0 and "was killed" not in done.stdout, done
    assert processes("far") == []
    assert {state for state, _ in states(launch, job).values()} == {"ended"}
    assert (run / "model.safetensors").exists()
    assert launch("status", job).code == 1


def test_a_relay_carries_its_site_and_stop_leaves_another_job_of_the_same_name_alone(
    hosts: SshHosts, launch: said.Command, tmp_path: Path
) -> None:
    job, run, port = tmp_path / "job.toml", tmp_path / "there" / "run", quiet_port()
    text = job_text(tmp_path, hosts).replace("count = 2\n", 'count = 2\nsite = "here"\n')
    relays = f'[relays]\nsites = ["here"]\nhosts = ["tokyo"]\naddresses = ["127.0.0.1:{port}"]\nport = {port}\n'
    job.write_text(text + relays)
    # The same words in another folder: another job, whatever it is called.
    stranger = subprocess.Popen(["sleep", "600"], env={"ATOLL_PART": "far/east-0", "ATOLL_PART_FOLDER": "/elsewhere"})

    def logs() -> str:
        return "".join(f"\n== {path.name}\n{path.read_text()[-1500:]}" for path in run.glob("logs/*.log"))

    try:
        done = launch(job)
        assert done.code == 0 and "has a run already" not in done.stdout, done.stderr
        wait_until(lambda: contributors(run) == {"east-0", "east-1"}, "both islands in commits", logs)
        assert states(launch, job)["relay-0"] == ("running", "tokyo")
        token = (tmp_path / "keys" / "tokens" / "run.token").read_text().strip()
        reached = {"token": token, "tls_ca": str(tmp_path / "keys" / "ca.pem"), "tls_name": "syncer.atoll"}

        def carried() -> list[str]:
            learners: list[str] = asyncio.run(fetch_status(ClientOptions(f"127.0.0.1:{port}", **reached)))["learners"]
            return learners

        wait_until(lambda: carried() == ["east-0", "east-1"], "both islands at the relay", logs)
        assert launch("stop", job).code == 0 and (run / "model.safetensors").exists()
        assert stranger.poll() is None
        late = launch("scale", job, "3")
        assert late.code == 2 and "the syncer of job far does not run (ended)" in late.stderr
        assert "nothing of job far was running" in launch("stop", job).stdout
        again = launch(job)
        assert again.code == 0 and f"{tmp_path}/there/run on paris has a run already" in again.stdout
    finally:
        stranger.kill()
        stranger.wait()


def test_islands_of_one_host_have_devices_of_their_own_and_torchrun_ranks(
    hosts: SshHosts, launch: said.Command, tmp_path: Path
) -> None:
    job, run = tmp_path / "job.toml", tmp_path / "there" / "run"
    text = job_text(tmp_path, hosts).replace('"train.py"]', f'"{EXAMPLES}/train_ddp.py", "{EXAMPLES}/train_plain.py"]')
    text = text.replace(f"train.py {tmp_path}/finish", "train_ddp.py --steps 150").replace("export PATH=", "export X=")
    job.write_text(
        text.replace('name = "east"\n', 'name = "east"\ngpus = 2\nranks = 2\nspot = true\nhosts = ["paris"]\n')
    )
    done = launch(job)
    assert done.code == 0 and "ssh does not use spot of islands east" in done.stderr, done.stderr

    def devices() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                own = dict(line.split("=", 1) for line in environ.read_text().split("\0") if "=" in line)
            except (OSError, ValueError):
                continue
            if own.get("ATOLL_PART", "").startswith("far/east") and "LOCAL_RANK" in own:
                found.setdefault(own["ATOLL_PART"], set()).add(f"{own['LOCAL_RANK']} of {own['CUDA_VISIBLE_DEVICES']}")
        return found

    both = {"far/east-0": {"0 of 0,1", "1 of 0,1"}, "far/east-1": {"0 of 2,3", "1 of 2,3"}}
    wait_until(lambda: devices() == both, "two ranks of each island")
    wait_until(lambda: {state for state, _ in states(launch, job).values()} == {"ended"}, "the end of all")
    assert contributors(run) == {"east-0", "east-1"}
    # What they printed is where `atoll logs` and the page look for it.
    assert "held-out loss" in (run / "logs" / "east-1.log").read_text()


def test_a_host_that_does_not_answer_is_named_with_what_to_do(
    hosts: SshHosts, launch: said.Command, tmp_path: Path
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(job_text(tmp_path, hosts))
    Path("hosts").write_text("nowhere.invalid\n")
    done = launch(job)
    assert done.code == 2 and "check that `ssh nowhere.invalid true` works" in done.stderr
    # Beside one that answers it hides nothing.
    Path("hosts").write_text("nowhere.invalid\nparis\n")
    rows = {one["name"]: one for one in launch("status", job, "--json").last["processes"]}
    assert rows["syncer"]["detail"] == "the host does not answer" and rows["east-1"]["detail"] == ""
    stopped = launch("stop", job)
    assert stopped.code == 2 and "nowhere.invalid does not answer, and may still run its part" in stopped.stderr
