"""The job file: what it means, what is refused, and the processes that it becomes."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import said

from atoll.engines import Places, engine_of, ignored_by, job_from, parse_counts, parts_of, read_job
from atoll.engines.keyring import make_keys
from atoll.engines.protocol import PartState, syncer_must_run
from atoll.engines.ssh import _put
from atoll.errors import ConfigError, LaunchError

EXAMPLE = Path(__file__).parents[2] / "examples" / "jobs" / "two-islands.toml"
MINIMAL: dict[str, Any] = {"run": {"name": "r", "command": "python t.py"}, "islands": [{"name": "east"}]}
PLACES = Places("/run", "/keys", "/settings.json", "s:1")


def changed(**tables: Any) -> dict[str, Any]:
    return {**MINIMAL, **tables}


def test_the_example_is_one_job_for_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE.parents[2])
    job = read_job(EXAMPLE)
    assert job.learners == 2 and job.settings["sync_every"] == 8 and job.settings["learners"] == 2
    assert all((EXAMPLE.parents[2] / file).exists() for file in job.run.files)
    for engine in ("slurm", "ssh", "k8s", "ray"):
        text = engine_of(engine, job).plan()
        assert "east" in text and "train_plain.py" in text and "--end-when-finished" in text, engine
        assert "--title 'python train_plain.py --steps 300'" in text, engine  # a line that a shell would take


@pytest.mark.parametrize(
    "tables, words",
    [
        ({"run": {"name": "r", "comand": "x"}}, "did you mean command"),
        ({"run": {"name": "r", "command": "x", "sync_evry": 3}}, "did you mean sync_every"),
        ({"run": {"name": "r", "command": "x", "sync_every": -3}}, "sync_every"),
        ({"run": {"name": "r"}}, "lacks command"),
        ({"run": {"name": "R", "command": "x"}}, "small letters"),
        ({"run": {"name": "r", "command": "x", "environment": {"ATOLL_TOKEN": "s"}}}, "leave it away"),
        ({"islands": []}, "has no islands"),
        ({"islands": [{"name": "a", "gpu": 1}]}, "did you mean gpus"),
        ({"islands": [{"name": "a"}, {"name": "a"}]}, "names of their own"),
        ({"islands": [{"name": "syncer"}]}, "names of their own"),
        ({"islands": [{"name": "a", "count": "2"}]}, "must be int"),
        ({"islands": [{"name": "a", "ranks": 3, "nodes": 2}]}, "multiple of nodes"),
        ({"syncer": {"keys": "none"}}, "beyond this machine"),
        ({"syncer": {"snapshot": "x"}}, "did you mean snapshots"),
        ({"syncer": {"snapshot_options": '{"secret": "s"}'}}, "credential"),
        ({"slrum": {}}, "did you mean slurm"),
        ({"ssh": {"hosts": "n1"}}, "a list of texts"),
        ({"islands": [{"name": "relay"}]}, "other than syncer, shard and relay"),
        ({"relays": {"sites": ["paris"]}}, "which no island has"),
        ({"relays": {"sites": ["a", "a"]}}, "names a site twice"),
        ({"relays": {"sites": ["a"], "addresses": ["a:1", "b:1"]}}, "give as many"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job_from(changed(**tables))


def test_no_secret_is_in_a_command_or_in_the_environment() -> None:
    syncer, island = parts_of(job_from(MINIMAL), PLACES)
    assert island.environment["ATOLL_TOKEN_FILE"] == "/keys/tokens/east-@INDEX@.token"
    assert island.environment["ATOLL_LEARNER"] == "east-@INDEX@"
    assert "ATOLL_TOKEN" not in {*syncer.environment, *island.environment}
    assert "ca.key" not in (*syncer.keys, *island.keys) and "key.pem" not in island.keys


def test_an_island_of_several_ranks_runs_under_torchrun() -> None:
    def argv(**more: Any) -> str:
        return shlex.join(parts_of(job_from(changed(islands=[{"name": "east", **more}])), PLACES)[1].argv)

    assert argv() == "python t.py"
    assert argv(ranks=4) == "python -m torch.distributed.run --nproc-per-node=4 --standalone t.py"
    both = argv(ranks=8, nodes=2)
    assert "--nproc-per-node=4 --nnodes=2" in both and "@HEAD@:29400" in both and both.endswith(" t.py")


def test_scale_takes_a_number_or_names() -> None:
    one = job_from(MINIMAL)
    assert parse_counts(one, ["3"]) == {"east": 3} == parse_counts(one, ["east=3"])
    two = job_from(changed(islands=[{"name": "east"}, {"name": "west"}]))
    assert parse_counts(two, ["west=0", "east=2"]) == {"west": 0, "east": 2}
    for words, said_of_it in ((["3"], "several kinds"), (["wst=1"], "did you mean west"), (["east=x"], "no number")):
        with pytest.raises(ConfigError, match=said_of_it):
            parse_counts(two, words)


def test_what_would_be_submitted_is_printed_and_nothing_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    done = said.command("launch", "slurm", monkeypatch=monkeypatch, capsys=capsys)(EXAMPLE, "--dry-run")
    assert done.code == 0 and "#SBATCH --array=0,1" in done.stdout and "--requeue" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_hostile_word_in_a_job_stays_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts are run by a shell: what a job says is data to it."""
    monkeypatch.chdir(tmp_path)
    bad = "$(touch broken) `touch broken` ' \" ; touch broken"
    job = job_from(changed(run={"name": "r", "command": shlex.join(["echo", bad]), "environment": {"X": bad}}))
    script = engine_of("slurm", job).script(parts_of(job, PLACES)[1])  # type: ignore[attr-defined]
    lines = [line for line in script.splitlines() if line.startswith(("export", "run_child srun"))]
    quiet = "\n".join(lines).replace("run_child srun", "srun").replace("srun --nodes=1", "echo --nodes=1")
    done = subprocess.run(["sh", "-c", quiet + '\necho "$X"'], capture_output=True, text=True, cwd=tmp_path, timeout=30)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == bad and bad in done.stdout.splitlines()[0]
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize("host", ["-oProxyCommand=touch broken", "-x", "a b", "a\nb", ""])
def test_a_host_is_no_option_of_a_command(host: str) -> None:
    """`ssh -oProxyCommand=... sh -s` would run that here, on the machine of whoever launches."""
    island, ssh = {"name": "east"}, {"hosts": ["a"]}
    for tables in (
        {"syncer": {"hosts": [host]}},
        {"shards": {"count": 1, "hosts": [host]}},
        {"islands": [{**island, "hosts": [host]}]},
    ):
        with pytest.raises(ConfigError, match="cannot be a host"):
            job_from(changed(**{"ssh": ssh, **tables}))
    with pytest.raises(ConfigError, match="hosts"):
        engine_of("ssh", job_from(changed(ssh={"hosts": [host]})))


def test_the_name_of_a_file_is_a_word_to_the_shell(tmp_path: Path) -> None:
    name = "$(touch broken) `touch broken` '\" x"
    script = f"folder=.\n{_put({f'files/{name}': b'text'})}"
    (tmp_path / "files").mkdir()
    subprocess.run(["sh", "-c", script], cwd=tmp_path, check=True, timeout=30)
    assert (tmp_path / "files" / name).read_bytes() == b"text" and not (tmp_path / "broken").exists()


def test_an_option_of_slurm_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="more than one line"):
        engine_of("slurm", job_from(changed(slurm={"options": ["--exclusive\ntouch broken"]}))).plan()


def test_slurm_is_told_what_an_island_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    island = {"name": "east", "gpus": 8, "hardware": "h100", "ranks": 16, "nodes": 2, "memory_gb": 1.5, "spot": True}
    own = {"partition": "gpu", "spot_partition": "cheap", "syncer_partition": "cpu", "time": "1:00:00", "leave_s": 90}
    text = engine_of("slurm", job_from(changed(islands=[island], slurm=own))).plan()
    syncer, east = text.split("# sbatch < east")
    assert "--partition=cpu" in syncer and "--signal=B:USR1@60" in syncer
    for option in ("partition=cheap", "gres=gpu:h100:8", "mem=1536M", "nodes=2", "signal=B:TERM@90", "time=1:00:00"):
        assert f"#SBATCH --{option}\n" in east, option
    assert "srun --nodes=2 --ntasks=2" in east and '--rdzv-endpoint="$head":29400' in east.replace("=''", "=")
    with pytest.raises(ConfigError, match="space in it"):
        engine_of("slurm", job_from(changed(slurm={"account": "my lab"}))).plan()


def test_what_an_engine_cannot_start_is_refused() -> None:
    two = changed(islands=[{"name": "east", "nodes": 2, "ranks": 2}], ssh={"hosts": ["a"]})
    for engine in ("ssh", "ray"):
        with pytest.raises(ConfigError, match="several nodes"):
            engine_of(engine, job_from(two))
    for engine in ("slurm", "ray"):
        with pytest.raises(ConfigError, match="shards"):
            engine_of(engine, job_from(changed(shards={"count": 1})))
        with pytest.raises(ConfigError, match="relays"):
            engine_of(engine, job_from(RELAYED | {"relays": {"sites": ["paris"]}}))
    with pytest.raises(ConfigError, match="names 0 hosts"):
        engine_of("ssh", job_from(MINIMAL))


def test_shards_get_their_places_from_the_engine() -> None:
    job = job_from(changed(shards={"count": 2, "hosts": ["s1", "s2"]}, ssh={"hosts": ["a"]}))
    text = engine_of("ssh", job).plan()
    assert "--shards s1:7177,s2:7177" in text and "# shard-1 on s2" in text


RELAYED = changed(
    islands=[{"name": "east", "site": "paris"}, {"name": "west"}],
    relays={"sites": ["paris"], "hosts": ["p1"]},
    ssh={"hosts": ["a"]},
)


def test_islands_of_a_site_go_through_its_relay_and_all_share_one_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    job = job_from(RELAYED)
    syncer, relay, east, west = parts_of(job, replace(PLACES, relays=("p1:7079",)))
    assert [part.named(0) for part in (syncer, relay, east)] == ["syncer", "relay-0", "east-0"]
    assert east.environment["ATOLL_SYNCER"] == "p1:7079,s:1" and west.environment["ATOLL_SYNCER"] == "s:1"
    assert shlex.join(relay.argv).startswith("python -m atoll relay --upstream s:1 --listen 0.0.0.0:7079 ")
    for part in (syncer, relay, east, west):
        assert part.environment["ATOLL_TOKEN_FILE"] == "/keys/tokens/run.token" and "--keys" not in part.argv
        assert "tokens/run.token" in part.keys and "keys.json" not in part.keys
    make_keys(job, ["east-0"])
    assert [path.name for path in (tmp_path / "keys" / "tokens").iterdir()] == ["run.token"]
    shown = {engine: engine_of(engine, job).plan() for engine in ("slurm", "ssh", "k8s")}
    assert "ATOLL_SYNCER=p1:7079,@" in shown["slurm"] and "#SBATCH --nodelist=p1\n" in shown["slurm"]
    assert "# relay-0 on p1" in shown["ssh"] and "value: r-relay-0:7079,r-syncer:7077" in shown["k8s"]


def test_no_island_is_started_that_nobody_waits_for() -> None:
    job = job_from(MINIMAL)
    syncer_must_run([PartState("syncer", "waiting"), PartState("east-0", "running")], job)
    for states in ([], [PartState("syncer", "ended")], [PartState("syncer", "failed"), PartState("east-0", "running")]):
        with pytest.raises(LaunchError, match="stop the job and submit it again"):
            syncer_must_run(states, job)


def test_what_an_engine_cannot_give_is_named() -> None:
    asks = {"name": "east", "spot": True, "memory_gb": 4.0, "hosts": ["n1"], "site": "x"}
    job = job_from(changed(islands=[asks, {"name": "west"}], run={**MINIMAL["run"], "setup": "module load x"}))
    told = {engine: " ".join(ignored_by(engine, job)) for engine in ("slurm", "k8s", "ray", "ssh")}
    assert told["slurm"] == "" and told["k8s"] == "k8s does not use hosts of islands east"
    assert told["ray"].startswith("ray does not use hosts, site, spot of islands east") and "setup" in told["ray"]
    assert told["ssh"] == "ssh does not use memory_gb, spot of islands east"
