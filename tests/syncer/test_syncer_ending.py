"""A syncer by hand, as a real process: what it says, when it ends by itself, and the model that it leaves."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from cluster import WAIT_S, SyncerProcess, TrainingThread
from safetensors.numpy import load_file

from atoll.core.config import SyncConfig
from atoll.core.membership import MemberState
from atoll.core.messages import SYNCER_STOPPED
from atoll.core.syncer_machine import SyncerMachine
from atoll.observe import NullWriter, events
from atoll.syncer.ending import Ending
from atoll.syncer.news import News


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.05)


def test_a_budget_that_is_spent_ends_the_syncer_with_the_model_written(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path, "--learners", "2", "--tokens-budget", "2000", "--fragments", "2")
    learners = [TrainingThread(syncer.address, name, seed=seed) for seed, name in enumerate("ab")]
    assert syncer.wait_dead() == 0
    for learner in learners:
        learner.thread.join(WAIT_S)
        assert learner.error is None
    said = syncer.output()
    for words in (
        r"\d\d:\d\d:\d\d  a joins \(generation 1\) from 127\.0\.0\.1",
        r"a trains, ready at step 0",
        r"first commit: version 1 of fragment \d, by ",
        r"b has left: finished",
        rf"the model is written: {re.escape(str(tmp_path))}/model\.safetensors \(versions \d+ to \d+\)",
        r"ends: the run's budget of 2000 tokens is processed",
    ):
        assert re.search(words, said), (words, said)
    assert said.count("the model is written") == 1
    assert load_file(tmp_path / "model.safetensors").keys() == dict(learners[0].model.named_parameters()).keys()


def test_the_model_is_there_as_soon_as_everybody_has_left_and_the_syncer_stays(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path, "--fragments", "1")
    model = tmp_path / "model.safetensors"
    TrainingThread(syncer.address, "first", steps=30).thread.join(WAIT_S)
    wait_until(model.exists, "the model of the first")
    before = load_file(model)
    assert syncer.status()["model"]["path"] == str(model)
    TrainingThread(syncer.address, "second", steps=30, seed=1).thread.join(WAIT_S)
    wait_until(lambda: any((load_file(model)[name] != before[name]).any() for name in before), "a newer model")
    assert syncer.process.poll() is None and not (tmp_path / "result.json").exists()
    assert syncer.stop() == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert not result["finished"] and result["reason"] == SYNCER_STOPPED
    assert result["steps_by_learner"] == {"first": 30, "second": 30}


def test_with_end_when_left_it_ends_after_the_last_and_not_before_the_first(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path, "--end-when-left", "--fragments", "1")
    time.sleep(2.5)  # nobody was there yet: two of its looks
    assert syncer.process.poll() is None
    TrainingThread(syncer.address, "only", steps=20).thread.join(WAIT_S)
    assert syncer.wait_dead() == 0
    assert "ends: everybody has left" in syncer.output() and (tmp_path / "model.safetensors").exists()
    result = json.loads((tmp_path / "result.json").read_text())
    ledger = result["ledger"]
    assert result["finished"] and result["reason"] == "everybody has left" and result["commits"] > 0
    assert ledger["processed"] == ledger["merged"] + ledger["pending"] + sum(ledger["discarded"].values()) > 0


def test_lost_learners_are_waited_for_as_long_again_and_a_launcher_decides_itself() -> None:
    machine = SyncerMachine(SyncConfig(fragments=1), "r")
    shell = SimpleNamespace(machine=machine, finished=asyncio.Event(), news=SimpleNamespace(ever_active=True))
    endings = [
        Ending(shell, end_when_left=when_left, stay=stay)  # type: ignore[arg-type]
        for when_left, stay in ((True, False), (False, False), (True, True))
    ]
    lost_ns = machine.config.lost_after_ns
    for name in ("a", "b"):
        machine.membership.admit(name, name, 1, 0, 1)
    a, b = machine.membership.members.values()
    machine.membership.mark(a, MemberState.LEFT)
    machine.membership.mark(b, MemberState.AWAY)
    assert [ending.reason(10 * lost_ns) for ending in endings] == ["", "", ""]  # it may come back
    machine.membership.mark(b, MemberState.LOST)
    assert [ending.reason(2 * lost_ns - 1) for ending in endings] == ["", "", ""]
    assert [ending.reason(2 * lost_ns) for ending in endings] == ["everybody has left", "", ""]
    machine.stopping = "the budget is spent"
    shell.finished.set()
    assert [ending.reason(2 * lost_ns) for ending in endings] == ["the budget is spent", "the budget is spent", ""]


def test_on_a_terminal_the_live_view_takes_the_place_of_the_lines(tmp_path: Path) -> None:
    screen, terminal = pty.openpty()
    words = [sys.executable, "-m", "atoll", "syncer", "--listen", "127.0.0.1:0", "--run-folder", str(tmp_path)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(words, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown, told = "", False
    while True:
        try:
            shown += os.read(screen, 65536).decode(errors="replace")
        except OSError:  # the other side is closed
            break
        if "\x1b[" in shown and "listens on" in shown and not told:
            process.terminate()
            told = True
    os.close(screen)
    assert process.wait(WAIT_S) == 0
    assert "events" in shown and not re.search(r"\d\d:\d\d:\d\d  ends", shown)


def test_with_end_when_finished_who_was_preempted_is_waited_for() -> None:
    machine = SyncerMachine(SyncConfig(fragments=1), "r")
    news = News(NullWriter())
    shell = SimpleNamespace(machine=machine, finished=asyncio.Event(), news=news)
    ending = Ending(shell, end_when_left=False, end_when_finished=True, stay=False)  # type: ignore[arg-type]
    for name in ("a", "b"):
        machine.membership.admit(name, name, 1, 0, 1)
        news.emit(events.MemberChanged(name, 1, "active", ""))
    a, b = machine.membership.members.values()
    machine.membership.mark(a, MemberState.LEFT)
    news.emit(events.MemberChanged("a", 1, "left", "finished"))
    assert ending.reason(0) == ""
    machine.membership.mark(b, MemberState.LEFT)
    news.emit(events.MemberChanged("b", 1, "left", "SIGTERM"))
    assert ending.reason(0) == ""  # its machine was taken away
    news.emit(events.MemberChanged("b", 2, "joining", ""))
    news.emit(events.MemberChanged("b", 2, "left", "finished"))
    assert ending.reason(0) == "every learner's script has ended"
