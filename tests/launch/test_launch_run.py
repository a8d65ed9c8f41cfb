"""`atoll run` around a syncer that only pretends: what the user's script is told, and what the user sees of it."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
import typer
from launch_fakes import command
from rich.console import Console

from atoll.cli.run_script import finish_script
from atoll.core.config import SyncConfig
from atoll.errors import ConfigError, LaunchError
from atoll.launch import run as run_module
from atoll.launch import train as train_module
from atoll.launch.commands import syncer_command
from atoll.launch.config import run_config, train_config
from atoll.launch.durability import DurabilityConfig, durability_config, durability_names
from atoll.launch.folder import RunFolder, create_run_folder, is_finished
from atoll.launch.options import read_config_file, split_values, sync_config
from atoll.launch.plan import FinishedRun, RunOutcome
from atoll.launch.process import Command

SCRIPT = """
import json, os, pathlib, shutil
names = [n for n in os.environ if n.startswith("ATOLL_") or n == "OMP_NUM_THREADS"]
told = {n: os.environ[n] for n in names} | {"python": shutil.which("python")}
me = os.environ["ATOLL_LEARNER"]
pathlib.Path(os.environ["ATOLL_RUN_FOLDER"], f"told-{me}.json").write_text(json.dumps(told))
print("hello from", me)
"""


@pytest.fixture
def fake_syncer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(folder: RunFolder, sync: SyncConfig, durability: DurabilityConfig, **more: object) -> Command:
        return command(folder, "syncer", "serve()")

    monkeypatch.setattr(run_module, "syncer_command", fake)


@pytest.mark.usefixtures("fake_syncer")
def test_every_learner_is_told_who_it_is_and_the_first_is_heard(tmp_path: Path) -> None:
    said, heard = list[str](), list[bytes]()
    config = run_config({"learners": 2, "threads": 3, "out": str(tmp_path / "run")})
    finished = run_module.run_command(config, ["python", "-c", SCRIPT], say=said.append, say_raw=heard.append)
    folder = finished.folder
    assert finished.outcome.reason == "finished"
    assert b"".join(heard) == b"hello from learner-0\n"
    assert (folder / "logs" / "learner-learner-1.log").read_text() == "hello from learner-1\n"
    told = [json.loads((folder / f"told-learner-{rank}.json").read_text()) for rank in range(2)]
    assert [t["ATOLL_RANK"] for t in told] == ["0", "1"]
    assert told[0]["ATOLL_TOKEN"] == told[1]["ATOLL_TOKEN"] != ""
    for t in told:
        assert (t["ATOLL_WORLD"], t["ATOLL_SYNCER"], t["OMP_NUM_THREADS"]) == ("2", "127.0.0.1:1", "3")
        assert t["ATOLL_RUN_FOLDER"] == str(folder)
        # `python` in the user's command is the one that Atoll is installed in, activated or not.
        assert Path(t["python"]).parent == Path(sys.executable).parent
    assert any(str(folder) in line for line in said)
    assert json.loads((folder / "config.json").read_text())["command"][0] == "python"


@pytest.mark.usefixtures("fake_syncer")
def test_scripts_that_never_join_are_noticed(tmp_path: Path) -> None:
    finished = run_module.run_command(run_config({"learners": 2, "out": str(tmp_path / "run")}), ["true"])
    assert finished.outcome.silent == finished.outcome.stayed_out == ("learner-0", "learner-1")


@pytest.mark.parametrize("stays_out", [True, False])
def test_one_that_ended_without_joining_is_a_failure_also_where_others_trained(tmp_path: Path, stays_out: bool) -> None:
    silent = ("learner-1",)
    outcome = RunOutcome("finished", 0, (), silent, (), 0, stayed_out=silent if stays_out else (), learners=2)
    said = io.StringIO()
    console = Console(file=said)
    with pytest.raises(typer.Exit) if stays_out else contextlib.nullcontext() as ended:
        finish_script(FinishedRun(tmp_path, outcome, None), console=console, json_wanted=False)
    assert ended is None or ended.value.exit_code == 1
    assert "learner-1 never joined the run" in said.getvalue()


@pytest.mark.usefixtures("fake_syncer")
def test_a_run_that_fails_leaves_its_numbers_and_is_not_finished(tmp_path: Path) -> None:
    config = run_config({"learners": 1, "out": str(tmp_path / "run")})
    with pytest.raises(LaunchError, match="no such data"):
        run_module.run_command(config, ["python", "-c", "raise SystemExit('no such data')"])
    folder = RunFolder(tmp_path / "run")
    result = json.loads(folder.result_file.read_text())
    assert (result["finished"], result["reason"]) == (False, "failed") and not is_finished(folder)
    assert result["ledger"] == {"processed": 0, "merged": 0, "pending": 0, "discarded": {}}
    assert (result["steps_total"], result["restarts"]) == (0, 1)


def test_so_does_a_training_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "worker_argv", lambda folder: ["python", "-c", "raise SystemExit('no room')"])
    text = tmp_path / "text"
    text.write_text("to be or not to be\n" * 1000)
    config, _ = train_config({"method": "single", "corpus": str(text), "out": str(tmp_path / "run")})
    with pytest.raises(LaunchError, match="no room"):
        train_module.run_train(config)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["finished"], result["reason"], result["ledger"]["processed"]) == (False, "failed", 0)


def test_a_command_is_needed() -> None:
    with pytest.raises(ConfigError, match="after --"):
        run_module.run_command(run_config({}), [])


def test_the_syncer_reads_back_the_settings_that_it_is_given(tmp_path: Path) -> None:
    folder = create_run_folder(str(tmp_path / "run"), name="run")
    config = SyncConfig(learners_expected=4, quorum="3", grace_cap_steps=0.5, tokens_budget=77)
    kept = DurabilityConfig(durability="interval", durability_interval=7.5, snapshots="memory://run", keep=9)
    argv = list(syncer_command(folder, config, kept, token="secret", first_start=True).argv)
    assert "secret" not in argv and "--first-start" in argv
    assert "--first-start" not in syncer_command(folder, config, kept, token="secret", first_start=False).argv
    path = Path(argv[argv.index("--config") + 1])
    names = ("learners", "tokens_budget", *durability_names())
    own, sync = split_values(read_config_file(path), names, where=str(path))
    assert sync_config(sync, learners=own["learners"], tokens_budget=own["tokens_budget"]) == config
    assert durability_config({name: own[name] for name in durability_names()}) == kept
