"""`atoll status` and `atoll leave` as somebody with several machines uses them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from certificates import authority, certificate
from cluster import WAIT_S, SyncerProcess, TrainingThread
from rich.console import Console
from said import Command, command

from atoll.cli import status
from atoll.cli.status_view import state_words, status_view
from atoll.errors import UnreachableError
from atoll.observe import EventWriter
from atoll.observe.events import RunFinished, SyncerStarted, SyncerStopped


@pytest.fixture
def atoll(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    for name in ("ATOLL_TOKEN", "ATOLL_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    return command(monkeypatch=monkeypatch, capsys=capsys)


def test_a_syncer_on_all_interfaces_with_tls_is_seen_and_its_learners_leave_when_asked(
    atoll: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, signer = authority(tmp_path)
    pem, key = certificate(tmp_path, "syncer.example", "127.0.0.1", signer=signer)
    run = tmp_path / "run"
    run.mkdir()
    tls = ("--tls-certificate", pem, "--tls-key", key, "--learners", "3", "--end-when-left")
    syncer = SyncerProcess(run, *tls, host="0.0.0.0", ATOLL_TOKEN="secret")
    address = syncer.address.replace("0.0.0.0", "127.0.0.1")
    learners = [TrainingThread(address, name, token="secret", tls_ca=ca[0]) for name in ("one", "two")]
    for learner in learners:
        learner.wait_steps(10)

    refused = atoll("status", run)
    assert refused.code == 2 and "ATOLL_TOKEN" in refused.stderr
    monkeypatch.setenv("ATOLL_TOKEN", "secret")
    seen = atoll("status", run)  # the folder knows where, which certificate and under which name
    assert seen.code == 0 and "2 of 3 learners train" in seen.stdout and "127.0.0.1" in seen.stdout
    assert seen.stdout.count("training") == 2 and "disk: durability commit" in seen.stdout
    assert "--tls-ca" in atoll("status", address).stderr  # an address knows nothing
    monkeypatch.setenv("ATOLL_TLS_CA", ca[0])
    told = json.loads(atoll("status", address, "--json").stdout)
    one = told["members"][0]
    assert (one["learner"], one["state"], one["from"], one["protocol"]) == ("one", "active", "127.0.0.1", 3)
    assert one["heard_s"] < WAIT_S and one["up_bytes_s"] > 0 and one["down_bytes_s"] > 0 and one["aside"] == ""

    assert "no learner 'three' in this run (one, two)" in atoll("leave", address, "three").stderr
    assert atoll("leave", address, "one").stdout.endswith("one has left\n")
    assert atoll("leave", run, "one").stdout.endswith("one was gone already (left)\n")
    last = atoll("leave", run, "two").stdout  # the syncer ends with the last one
    assert last.endswith("two has left\n") or "the syncer has ended since" in last
    deadline_s = time.monotonic() + WAIT_S  # the syncer knows that it left before its own thread has ended
    while any(learner.error is None for learner in learners) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert [isinstance(learner.error, SystemExit) for learner in learners] == [True, True]
    assert syncer.wait_dead() == 0
    over = atoll("status", run)
    assert over.code == 0 and "everybody has left" in over.stdout and f"{run}/model.safetensors" in over.stdout
    assert json.loads(atoll("status", run, "--json").stdout)["reason"] == "everybody has left"


def write_events(folder: Path, name: str, *events: Any) -> None:
    with EventWriter(folder / "events" / name) as writer:
        for event in events:
            writer.emit(event)


def test_a_run_that_is_over_says_when_and_how(atoll: Command, tmp_path: Path) -> None:
    (tmp_path / "syncer.json").write_text('{"address": "127.0.0.1:1", "pid": 1, "run": "r"}')
    write_events(tmp_path, "syncer-1.jsonl", SyncerStarted("r", "127.0.0.1:1", 1), SyncerStopped("budget spent", 7))
    over = atoll("status", tmp_path)
    assert over.code == 0 and "after 7 commits: budget spent" in over.stdout and "atoll export" in over.stdout
    assert time.strftime("%Y-%m-%d") in over.stdout
    write_events(tmp_path, "launcher.jsonl", RunFinished("finished", 2.0, 3.0))
    assert "after 7 commits: finished" in atoll("status", tmp_path).stdout
    assert "ended" in atoll("status", tmp_path, "--watch").stdout  # nothing to watch


def test_a_run_without_a_syncer_of_its_own_is_over_when_it_has_a_result(atoll: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "no syncer has started" in atoll("status", tmp_path).stderr
    (tmp_path / "result.json").write_text("{}")
    assert "ended" in atoll("status", tmp_path).stdout


def test_a_syncer_that_died_is_told_from_one_that_ended(atoll: Command, tmp_path: Path) -> None:
    (tmp_path / "syncer.json").write_text('{"address": "127.0.0.1:1", "pid": 1, "run": "r"}')
    stopped, started = SyncerStopped("stopped", 7), SyncerStarted("r", "127.0.0.1:1", 2, epoch=2)
    write_events(tmp_path, "syncer-1.jsonl", stopped, started)
    died = atoll("status", tmp_path)
    assert died.code == 2 and "connection refused" in died.stderr and "start it again there" in died.stderr
    (tmp_path / "config.json").write_text("{}")
    assert f"`atoll resume {tmp_path}`" in atoll("status", tmp_path).stderr


def test_another_runs_syncer_at_the_same_port_is_not_taken_for_this_one(atoll: Command, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    write_events(first, "syncer-1.jsonl", SyncerStopped("long ago", 3))
    syncer = SyncerProcess(second)
    (first / "syncer.json").write_text(json.dumps({"address": syncer.address, "pid": os.getpid(), "run": "older"}))
    assert "long ago" in atoll("status", first).stdout
    assert "0 of 1 learners train" in atoll("status", second).stdout
    assert "lost after ns" in atoll("status", second, "--all").stdout.replace("_", " ")
    syncer.stop()


@pytest.mark.parametrize(
    ("member", "words"),
    [
        ({"state": "active", "heard_s": 1.0}, "training"),
        ({"state": "active", "heard_s": 12.4}, "silent for 12 s"),
        ({"state": "active", "heard_s": 1.0, "aside": "missed 4 rounds"}, "set aside: missed 4 rounds"),
        ({"state": "joining"}, "joining"),
        ({"state": "away", "heard_s": 20.0, "dismissed": "asked to leave"}, "away, asked to leave"),
        ({"state": "left", "dismissed": "asked to leave"}, "left"),
        ({"state": "lost"}, "lost"),
    ],
)
def test_the_state_of_a_learner_is_in_words(member: dict[str, Any], words: str) -> None:
    assert state_words(member) == words


def test_what_went_wrong_is_said_and_an_older_syncers_answer_is_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=120)
    member = {"learner": "a", "generation": 2, "state": "active", "heard_s": 0.1, "thin": ["up: needs 5, gets 1"]}
    now_s = 1000.0
    answer = {
        "members": [member],
        "warnings": [{"time_s": 940, "text": f"warning {number}"} for number in range(9)],
        "degraded": "No space left",
        "snapshots": {"failed": "snapshot to s3://b failed", "failed_time_s": 990},
    }
    console.print(status_view(answer, now_s))
    shown = capsys.readouterr().out
    for words in ("a (2)", "too thin, up: needs 5", "NOT durable now (No space left)", "s3://b failed (10 s ago)"):
        assert words in shown
    assert shown.count("warning, 60 s ago") == 5 and "warning 8" in shown
    console.print(status_view({"run": "old", "members": [{"learner": "b", "state": "away", "loss": None}]}, now_s))
    assert "run old" in capsys.readouterr().out


def test_what_is_watched_without_a_terminal_is_printed_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a file or through ssh, --watch said nothing before the end of the run."""
    seen: list[str] = []

    def look() -> dict[str, Any]:
        seen.append(capsys.readouterr().out)
        if len(seen) == 3:
            raise UnreachableError("no answer")
        if len(seen) > 4:
            raise KeyboardInterrupt
        return {"run": f"number {len(seen)}", "members": []}

    monkeypatch.setattr(status, "WATCH_S", 0.0)
    status._watch(look, title="here")
    assert "number 1" in seen[1] and "number 2" in seen[2] and "number 4" in seen[4]
    assert "looking again" in seen[3] and "number" not in seen[3]


def test_a_shard_and_a_relay_say_what_they_are() -> None:
    shard = {"shard": "ab12", "run": "r1", "led": True, "versions": {"0": 3, "2": 3}}
    assert str(status_view(shard, 0.0)) == "shard ab12 of run r1: 2 fragments; led by a syncer"
    relay = {"relay": True, "upstream": "a:1", "learners": ["x", "y"], "bytes_served": 2000, "bytes_fetched": 1000}
    assert str(status_view(relay, 0.0)).startswith("relay for a:1: 2 learners; ")
