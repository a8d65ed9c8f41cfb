"""A run that was interrupted goes on in its folder; what cannot go on says why. The syncer only pretends."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_fakes import InThread, command, wait_for

from atoll.core.config import SyncConfig
from atoll.errors import ConfigError, LaunchError
from atoll.instruments.storms.files import FaultFiles
from atoll.instruments.storms.injection import PlannedFaults, StormFaults
from atoll.launch import run as run_module
from atoll.launch import train as train_module
from atoll.launch.config import resolved, run_config, train_config
from atoll.launch.durability import DurabilityConfig
from atoll.launch.folder import RunFolder, create_run_folder, without_nan, write_json
from atoll.launch.process import Command
from atoll.launch.resume import can_resume, resume_run
from atoll.launch.running import Listed, listed
from atoll.launch.stored import read_run
from atoll.observe import EventWriter, read_events
from atoll.observe.events import FaultInjected, ProcessExited, ProcessStarted, RunFinished, RunStarted

SCRIPT = """
import json, os, pathlib
run, me = pathlib.Path(os.environ["ATOLL_RUN_FOLDER"]), os.environ["ATOLL_LEARNER"]
(run / f"told-{me}.json").write_text(json.dumps({**os.environ, "cwd": os.getcwd()}))
print("hello again from", me)
"""


@pytest.fixture(autouse=True)
def fake_syncer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(folder: RunFolder, sync: SyncConfig, durability: DurabilityConfig, **more: object) -> Command:
        return command(folder, "syncer", "serve()")

    monkeypatch.setattr(run_module, "syncer_command", fake)
    monkeypatch.setattr(train_module, "syncer_command", fake)


def interrupted(path: Path, *argv: str, **settings: Any) -> RunFolder:
    """What a run of a script leaves behind when it is stopped: settings, events, logs, token and state."""
    folder = create_run_folder(str(path / "run"), name="run")
    config = run_config({"learners": 2, "threads": 1, **settings})
    told = {**resolved(config), "command": [*argv] or ["python", "-c", SCRIPT], "started_in": str(path)}
    folder.write_config(config.options(), told)
    folder.write_token("the same secret")
    folder.state.mkdir()
    (folder.state / "slots").touch()
    (folder.logs / "learner-learner-0.log").write_text("what it said before\n")
    with EventWriter(folder.events / "launcher.jsonl") as writer:
        writer.emit(RunStarted("run", 2, 0, 24, 0, "int4", "int4", 0))
        for rank in range(2):
            writer.emit(ProcessStarted("learner", f"learner-{rank}", 90 + rank))
        writer.emit(RunFinished("SIGINT", float("nan"), 0.0))
    return folder


def test_a_script_goes_on_with_the_same_names_token_and_place(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    said, heard = list[str](), list[bytes]()
    stored, finished = resume_run(folder.path, say=said.append, say_raw=heard.append)
    assert stored.command[0] == "python"
    assert finished.outcome.reason == "finished"
    assert b"".join(heard) == b"hello again from learner-0\n"  # and not what it said before
    told = json.loads((folder.path / "told-learner-1.json").read_text())
    assert (told["ATOLL_RANK"], told["ATOLL_WORLD"], told["ATOLL_TOKEN"]) == ("1", "2", "the same secret")
    assert told["cwd"] == str(tmp_path) != str(Path.cwd())
    result = json.loads(folder.result_file.read_text())
    assert (result["resumed"], result["restarts"], result["run_folder"]) == (1, 0, str(folder.path))
    assert result == without_nan(finished.result)
    assert any("first time" in line for line in said)


def test_a_token_that_others_could_read_is_said_and_the_file_closed(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    said = list[str]()
    folder.token_file.chmod(0o644)
    folder.warn_of_open_token(said.append)
    assert len(said) == 1 and "chmod 600" in said[0] and "the same secret" not in said[0]
    folder.write_token("another")
    folder.warn_of_open_token(said.append)
    assert len(said) == 1 and folder.read_token() == "another"


def test_every_launch_has_events_of_its_own(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    before = (folder.events / "launcher.jsonl").read_bytes()
    (folder.events / "launcher-1.jsonl").write_bytes(before)  # it was resumed, and stopped again
    _, finished = resume_run(folder.path)
    assert finished.result is not None and finished.result["resumed"] == 2
    assert (folder.events / "launcher.jsonl").read_bytes() == before
    sources = {source for _, source, event in read_events(folder.path) if isinstance(event, RunStarted)}
    assert sources == {"launcher", "launcher-1", "launcher-2"}
    ended = [event for _, source, event in read_events(folder.path) if isinstance(event, ProcessExited)]
    assert sorted(event.id for event in ended) == ["learner-0", "learner-1", "syncer"]


def test_a_learner_that_a_join_keeps_going_is_not_started_twice(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    folder.write_processes([listed("learner", "learner-1", os.getpid()).entry()], folder.path / "processes-7.json")
    said = list[str]()
    resume_run(folder.path, say=said.append)
    assert (folder.path / "told-learner-0.json").exists()
    assert not (folder.path / "told-learner-1.json").exists()
    assert any("learner-1 runs already" in line for line in said)


def test_requests_to_dead_processes_are_cleared_away(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    folder.leave_file("learner-1").write_text("1")
    resume_run(folder.path)
    assert list(folder.path.glob("leave-*")) == []


def test_a_folder_that_is_gone_is_said_and_not_fatal(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    config = json.loads(folder.config_file.read_text())
    write_json(folder.config_file, {**config, "started_in": str(tmp_path / "gone")})
    said = list[str]()
    resume_run(folder.path, say=said.append)
    assert any("is gone" in line for line in said)


# ---------------------------------------------------------------- what cannot go on


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    folder.result_file.write_text("{}")
    with pytest.raises(LaunchError, match=r"is finished.*atoll report.*atoll export"):
        resume_run(folder.path)


def test_a_run_without_state_says_how_to_begin_again(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    (folder.state / "slots").unlink()
    with pytest.raises(LaunchError, match=r"before its first commit.*atoll run --config .*config.toml -- python -c"):
        resume_run(folder.path)
    assert not can_resume(folder.path)
    folder = interrupted(tmp_path / "snapshots", durability="none", snapshots="memory://somewhere")
    (folder.state / "slots").unlink()
    assert can_resume(folder.path)
    folder = interrupted(tmp_path / "none", durability="none")
    folder.state.joinpath("slots").unlink()
    with pytest.raises(LaunchError, match="--durability none"):
        resume_run(folder.path)


def test_folders_without_such_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="holds no run"):
        resume_run(tmp_path)
    assert not can_resume(tmp_path)
    config, _ = train_config({"method": "single"})
    RunFolder(tmp_path).write_config(config.options(), resolved(config))
    with pytest.raises(LaunchError, match=r"method single.*atoll train --config"):
        resume_run(tmp_path)


def test_a_run_whose_launcher_is_alive_is_refused_by_its_pid(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    holds = "import sys, time; from pathlib import Path; from atoll.launch.folder import RunFolder\n"
    holds += "with RunFolder(Path(sys.argv[1])).hold(): print('held', flush=True); time.sleep(600)\n"
    argv = [sys.executable, "-c", holds, str(folder.path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == "held\n"
        with pytest.raises(LaunchError, match=rf"still going on.*pid {launcher.pid}\).*kill {launcher.pid}"):
            resume_run(folder.path)
        launcher.kill()
    # The kernel has taken the lock back, though the file is still there.
    assert folder.lock_file.exists()
    resume_run(folder.path)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_syncer_that_does_not_end_is_named(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    folder = interrupted(tmp_path)
    folder.write_processes([listed("syncer", "syncer", sleeper.pid).entry()])
    with pytest.raises(LaunchError, match=rf"still going on \(syncer has pid {sleeper.pid}\).*kill {sleeper.pid}"):
        resume_run(folder.path, wait_s=0.2)
    with folder.lock_file.open("r+") as lock:  # A refused resume has let go of the folder.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_syncer_that_is_still_ending_is_waited_for(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    folder, said = interrupted(tmp_path), list[str]()
    folder.write_processes([listed("syncer", "syncer", sleeper.pid).entry()])
    resumed = InThread(lambda: resume_run(folder.path, say=said.append))
    wait_for(lambda: any(f"syncer has pid {sleeper.pid}" in line for line in said))
    sleeper.kill()
    _, finished = resumed.result()
    assert finished.outcome.reason == "finished"


def test_a_pid_that_another_process_has_by_now_is_no_obstacle(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    folder = interrupted(tmp_path)
    folder.write_processes([Listed("syncer", "syncer", sleeper.pid, "12").entry()])  # as after a reboot
    _, finished = resume_run(folder.path, wait_s=0.0)
    assert finished.outcome.reason == "finished"


# ---------------------------------------------------------------- atoll train


def test_the_settings_of_a_training_run_come_back_as_they_were(tmp_path: Path) -> None:
    values = {"learners": 3, "model": "nano", "quorum": 2, "durability": "interval", "durability_interval": "2m"}
    config, _ = train_config({**values, "out": str(tmp_path)})
    RunFolder(tmp_path).write_config(config.options(), resolved(config))
    stored = read_run(tmp_path)
    assert (stored.config, stored.command) == (config, ())


def test_a_fault_that_has_happened_does_not_happen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = train_config({"learners": 4, "model": "nano", "chaos": "demo", "out": str(tmp_path / "run")})
    folder = create_run_folder(str(tmp_path / "run"), name="train")
    folder.write_config(config.options(), resolved(config))
    folder.state.mkdir()
    (folder.state / "slots").touch()
    with EventWriter(folder.events / "launcher.jsonl") as writer:
        writer.emit(FaultInjected("kill", "learner-2", "", 0))
    seen: list[Any] = []
    monkeypatch.setattr("atoll.launch.resume.resume_train", lambda config, attempt, **_: seen.append(attempt))
    FaultFiles(folder.path).slow("learner-0").write_text("{}")
    with pytest.raises(ConfigError, match="this launcher carries out no faults"):
        resume_run(folder.path)
    storm = StormFaults()
    resume_run(folder.path, faults=storm)
    faults = storm.injection(config, seen[0], ())
    assert isinstance(faults, PlannedFaults)
    assert [(f.kind, f.target) for f in faults.faults] == [("slow", "learner-1"), ("kill", "syncer")]
    assert not FaultFiles(folder.path).slow("learner-0").exists(), "it was one of a process that is gone"
    assert [(fault.fault, fault.target) for fault in seen[0].faults] == [("kill", "learner-2")]
