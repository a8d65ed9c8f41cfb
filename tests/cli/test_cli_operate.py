"""`atoll logs` and `atoll doctor`: what happened, and what is wrong."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import pytest
from certificates import certificate
from cluster import SyncerProcess, SyncerThread
from typer.testing import CliRunner, Result

from atoll.app import app
from atoll.cli.terminal import JsonLines, logged_as
from atoll.core.config import SyncConfig
from atoll.errors import AtollError, ConfigError, UnreachableError
from atoll.launch.checkup import check_syncer, disk_speed
from atoll.observe import EventWriter, bound_logs
from atoll.observe import events as ev
from atoll.wire import ClientOptions, LinkSpeed

sys.path.insert(0, str(Path(__file__).parent.parent / "observe"))
from synthetic_run import SyntheticRun


def atoll(*argv: str) -> Result:
    return CliRunner().invoke(app, list(argv))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = SyntheticRun(seconds=60.0).write(tmp_path_factory.mktemp("run"))
    (path / "logs").mkdir()
    (path / "logs" / "learner-learner-2.log").write_text("one\ntwo\n--- restart 1 ---\nthree")
    return path


# ---------------------------------------------------------------- logs


def test_every_happening_is_one_line_with_a_time_and_a_level(folder: Path) -> None:
    lines = atoll("logs", str(folder)).stdout.splitlines()
    assert any(line.endswith("warning  learner-2 killed (SIGKILL)") for line in lines)
    assert lines[-1].endswith("info     run finished: token budget reached")
    assert lines == sorted(lines), "in the order of time"


def test_the_same_as_json_and_only_what_should_be_looked_at(folder: Path) -> None:
    done = atoll("logs", str(folder), "--log-format", "json", "--level", "warning")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["level"] for one in found} == {"warning"} and len(found) >= 2
    assert found[0]["text"] == "learner-2 killed (SIGKILL)" and found[0]["time"].endswith("Z")


def test_what_a_learner_printed_over_its_restarts(folder: Path) -> None:
    assert atoll("logs", str(folder), "--learner", "learner-2").stdout == "one\ntwo\n--- restart 1 ---\nthree\n"
    missing = atoll("logs", str(folder), "--learner", "learner-9")
    assert isinstance(missing.exception, AtollError) and "it has those of learner-2" in str(missing.exception)
    escaping = atoll("logs", str(folder), "--learner", "../../events/x")
    assert isinstance(escaping.exception, AtollError)


def test_following_ends_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "events" / "launcher.jsonl"
    with EventWriter(path) as writer:
        writer.emit(ev.LearnerJoined("a", 1, 0, 0))
        assert writer.flush()
        ending = threading.Timer(1.0, lambda: writer.emit(ev.RunFinished("finished", 1.0, 1.0)))
        ending.start()
        lines = atoll("logs", str(tmp_path), "--follow").stdout.splitlines()
        ending.join()
    assert [line.split("  ")[-1].strip() for line in lines] == ["a joined at step 0", "run finished: finished"]


def test_what_a_syncer_prints_can_be_json() -> None:
    out = io.StringIO()
    stream = JsonLines(out, "info")
    print("12:00:01  learner-1 joined", file=stream)
    print("12:00:02  warning: the disk is ", end="", file=stream)
    print("full", file=stream)
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["level"], first["text"]) == ("info", "learner-1 joined")
    assert (second["level"], second["text"]) == ("warning", "warning: the disk is full")
    with pytest.raises(ConfigError, match="text or json"), logged_as("yaml"):
        pass


def test_what_a_run_prints_can_be_json_and_its_numbers_stay_last(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello from the script')\n")
    argv = [sys.executable, "-m", "atoll", "run", "--learners", "1", "--log-format", "json", "--json"]
    argv += ["--out", str(tmp_path / "run"), "--", sys.executable, str(script)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"time", "level", "text"} == set(told[0]) and {one["level"] for one in told} <= {"info", "warning"}
    assert "hello from the script" in [one["text"] for one in told]
    assert json.loads(done.stdout)["run_folder"] == str(tmp_path / "run")


def test_logs_of_months_stay_within_their_bound(tmp_path: Path) -> None:
    log = tmp_path / "east-0.log"
    with log.open("ab") as writing:  # as a launcher opens it for its process
        for turn in range(3):
            writing.write(f"turn {turn} ".encode() * 1000)
            writing.flush()
            assert bound_logs(tmp_path, bytes_max=5000) == [log]
        writing.write(b"after all that\n")
    assert log.read_bytes() == b"after all that\n"
    assert (tmp_path / "east-0.log.1").read_bytes() == b"turn 2 " * 1000
    assert {path.name for path in tmp_path.iterdir()} == {"east-0.log", "east-0.log.1"}


# ---------------------------------------------------------------- doctor


def test_a_machine_is_looked_at_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = atoll("doctor", "--json")
    found = {one["check"]: one for one in json.loads(done.stdout.splitlines()[-1])["findings"]}
    assert {"descriptors", "disk space", "disk speed", "GPUs", "NUMA", "clock"} <= set(found)
    assert list(tmp_path.iterdir()) == []
    assert all(one["remedy"] for one in found.values() if one["level"] != "good")


def test_a_disk_that_takes_nothing_is_bad() -> None:
    with pytest.raises(OSError):
        disk_speed(Path("/proc"))


def test_a_port_that_nobody_listens_on_has_a_remedy_and_an_exit_status() -> None:
    done = atoll("doctor", "127.0.0.1:1")
    assert done.exit_code == 1 and "connection refused" in done.stdout and "→ start it with" in done.stdout


def test_a_real_syncer_is_asked_and_its_run_told() -> None:
    syncer = SyncerThread(SyncConfig(learners_expected=3), token="right")
    try:
        found = {one.check: one for one in check_syncer(ClientOptions(syncer.address, token="right"))}
        assert found["port"].level == found["clocks"].level == "good"
        assert "bit/s up" in found["link"].text and "bit/s down" in found["link"].text
        assert "e+" not in found["link"].text  # a quick link in Gbit/s, and not as 1.5e+03 of something
        assert found["build"].level == "good" and f"this is {version_of('atoll')}" in found["build"].text
        assert found["learners"].level == "warn" and "0 of 3 learners" in found["learners"].text
        wrong = list(check_syncer(ClientOptions(syncer.address, token="wrong")))
        assert wrong[-1].level == "bad" and wrong[-1].check == "status"
    finally:
        syncer.stop()


def test_what_a_run_suffers_from_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.launch.checkup.find_cause", lambda options: None)

    def member(**more: Any) -> dict[str, Any]:
        return {"learner": "a", "state": "active", "protocol": 3, **more}

    answer = {
        "time_s": time.time() + 3600, "expected": 2, "degraded": "No space left on device", "commits": 5,
        "build": {"version": "9.0", "protocols": [90, 91]},
        "shards": [{"name": "s0", "address": "y:1", "away": True}, {"name": "s1", "address": "y:2", "away": False}],
        "members": [member(thin=["up: needs 9 bytes/s, gets 1"]), member(learner="b", protocol=4, up_bytes_s=5e4)],
    }  # fmt: skip

    def ask(options: ClientOptions) -> dict[str, Any]:
        if options.address == "y:2":
            raise UnreachableError("connection refused at y:2; open the port")
        return answer

    checked = check_syncer(ClientOptions("x:1"), ask, lambda _: LinkSpeed(0.1, 1e5, 0.0))
    found = {one.check: one for one in checked}
    assert found["build"].level == "bad" and "the syncer 9.0" in found["build"].text and found["build"].remedy
    assert found["shard s0"].level == found["shard s1"].level == "bad"
    assert "lost it (y:1)" in found["shard s0"].text and found["shard s1"].remedy == "open the port"
    assert found["link"].level == "warn" and "800 kbit/s up, down not told" in found["link"].text
    assert found["clocks"].level == "warn" and "ahead" in found["clocks"].text
    assert found["durability"].level == "bad" and found["versions"].level == "warn"
    assert found["link of a"].level == "warn" and "50 kB/s up" in found["link of b"].text


def test_a_certificate_that_ends_soon_is_said_while_there_is_time(tmp_path: Path) -> None:
    for days, level in ((100, "good"), (3, "warn")):
        pair = certificate(tmp_path, "127.0.0.1", days=(-1, days), stem=f"for-{days}")
        (tmp_path / str(days)).mkdir()
        syncer = SyncerProcess(tmp_path / str(days), "--tls-certificate", pair[0], "--tls-key", pair[1])
        try:
            found = {one.check: one for one in check_syncer(ClientOptions(syncer.address, tls_ca=pair[0]))}
        finally:
            syncer.stop()
        assert found["certificate"].level == level and bool(found["certificate"].remedy) == (level == "warn")
