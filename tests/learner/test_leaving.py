"""What a learner says when it leaves without its work being safe, or without having done any."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import WAIT_S, Proxy, SyncerThread, small_model, spawn

from atoll import Learner
from atoll.core.config import SyncConfig
from atoll.errors import ConfigError
from atoll.learner import EXIT_NOT_HANDED_OVER, leave_deadline
from atoll.learner.leave_deadline import LeaveDeadline
from atoll.observe import events, read_events

PREEMPTED = """
import sys, time
from atoll.learner import leave_deadline
from cluster import small_model
import atoll, torch
leave_deadline.STILL_S = 1.0
model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.Learner(model, optimizer, address=sys.argv[1], learner_id="paris", run_folder=sys.argv[2]) as learner:
    while not learner.done:
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        learner.step(tokens=32)
        print("step", flush=True)
        time.sleep(0.02)
        if learner.step_count == int(sys.argv[3]):
            break
print("after the loop", learner.handed_over, flush=True)
"""
IDLE = """
import atoll, sys, torch
from cluster import small_model
with atoll.Learner(small_model(), address=sys.argv[1], learner_id="paris") as learner:
    pass
print("after the loop", flush=True)
"""


def config(**changes: Any) -> SyncConfig:
    values = {"sync_every": 4, "fragments": 2, "overlap": 2, "quorum": "50%", "learners_expected": 1}
    return SyncConfig.from_dict({**values, **changes})


@pytest.fixture
def parts() -> Iterator[list[Any]]:
    """Things to stop at the end of a test, last first."""
    started: list[Any] = []
    yield started
    for part in reversed(started):
        part.stop()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving gives up after a moment in which nothing moves."""
    monkeypatch.setattr(leave_deadline, "STILL_S", 0.5)
    monkeypatch.setattr(leave_deadline, "RATE_GUESSED", 1e6)


def joined(address: str, name: str, **options: Any) -> Learner:
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Learner(model, optimizer, address=address, learner_id=name, **options).start()


def warnings(folder: Path) -> list[str]:
    return [event.text for _, _, event in read_events(folder) if isinstance(event, events.Warned)]


def last_word(folder: Path) -> events.LearnerFinished:
    return [event for _, _, event in read_events(folder) if isinstance(event, events.LearnerFinished)][-1]


@pytest.mark.parametrize("syncer_dies", [False, True])
def test_a_learner_told_to_leave_says_by_its_status_whether_it_handed_over(
    syncer_dies: bool, parts: list[Any], tmp_path: Path
) -> None:
    syncer = SyncerThread(config())
    parts.append(syncer)
    env = {"ATOLL_SIGTERM_S": "1" if syncer_dies else "60"}
    process = spawn(PREEMPTED, syncer.address, str(tmp_path), "-1", env=env)
    assert process.stdout is not None
    while process.stdout.readline() != "step\n":
        assert process.poll() is None
    if syncer_dies:
        syncer.stop()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == (EXIT_NOT_HANDED_OVER if syncer_dies else 0), out
    said = [line for line in out.splitlines() if "could not hand over" in line]
    assert len(said) == int(syncer_dies), out
    for line in said:
        assert f"the syncer at {syncer.address} cannot be reached since" in line
        assert f"checkpoint is kept in {tmp_path}/learners/paris" in line and "ATOLL_LEARNER=paris again" in line
    assert (last_word(tmp_path).unhanded > 0) == syncer_dies and last_word(tmp_path).reason == "SIGTERM"


def test_a_learner_told_to_leave_over_a_thin_link_says_by_its_status_that_it_could_not(
    parts: list[Any], tmp_path: Path
) -> None:
    syncer = SyncerThread(config(learners_expected=2, quorum="all"))  # nobody else comes: nothing is merged before
    proxy = Proxy(syncer.address)
    parts += [syncer, proxy]
    process = spawn(PREEMPTED, proxy.address, str(tmp_path), "-1", env={"ATOLL_SIGTERM_S": "1"})
    assert process.stdout is not None
    while process.stdout.readline() != "step\n":
        assert process.poll() is None
    proxy.bytes_per_s = 50
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == EXIT_NOT_HANDED_OVER, out
    [line] = [line for line in out.splitlines() if "could not hand over" in line]
    assert "may be lost: the link is too slow, " in line, line
    assert last_word(tmp_path).unhanded > 0 and last_word(tmp_path).reason == "SIGTERM"


def test_a_script_that_leaves_by_itself_says_by_its_status_that_it_could_not_hand_over(
    parts: list[Any], tmp_path: Path
) -> None:
    syncer = SyncerThread(config())
    parts.append(syncer)
    process = spawn(PREEMPTED, syncer.address, str(tmp_path), "150")
    assert process.stdout is not None
    while process.stdout.readline() != "step\n":
        assert process.poll() is None
    syncer.stop()
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == EXIT_NOT_HANDED_OVER, out
    assert out.count("could not hand over") == 1 and "after the loop False" in out, "its script goes on all the same"
    assert last_word(tmp_path).unhanded > 0 and last_word(tmp_path).reason == "finished"


def test_a_script_that_never_steps_ends_with_a_status_that_says_so(parts: list[Any]) -> None:
    syncer = SyncerThread(config())
    parts.append(syncer)
    process = spawn(IDLE, syncer.address)
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1 and "learner.step was never called" in out and "after the loop" in out


@pytest.mark.parametrize(("how", "status"), [("", 4), ("sys.exit()", 4), ("sys.exit(3)", 4), ("raise KeyError(1)", 1)])
def test_the_status_is_kept_until_the_script_ends_and_nothing_is_lost_for_it(
    how: str, status: int, tmp_path: Path
) -> None:
    script = (
        "import atexit, sys\nfrom atoll.learner import exit_status\nexit_status.end_with(4)\nexit_status.end_with(5)\n"
        f"file = open({str(tmp_path / 'kept')!r}, 'w')\nfile.write('not flushed')\natexit.register(print, 'at exit')\n"
    )
    process = spawn(script + how)
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == status and "at exit" in out
    assert (tmp_path / "kept").read_text() == "not flushed"


def test_leaving_goes_on_as_long_as_something_moves(
    parts: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fixed bound lost 2% of a run's tokens at the end, over a link that needed 12 s more (docs/results/hosts.md)."""
    monkeypatch.setattr(leave_deadline, "STILL_S", 0.5)
    monkeypatch.setattr(leave_deadline, "SAY_S", 0.5)
    monkeypatch.setattr(leave_deadline, "RATE_GUESSED", 50.0)  # its few bytes take too little to be measured
    monkeypatch.setenv("ATOLL_SIGTERM_S", "1")
    syncer = SyncerThread(config(learners_expected=2, quorum="all"))
    proxy = Proxy(syncer.address)
    parts += [syncer, proxy]
    learner = joined(proxy.address, "thin", run_folder=tmp_path)
    proxy.bytes_per_s = 400
    learner.step(tokens=100)
    began_s = time.monotonic()
    learner.close()
    assert learner.handed_over and warnings(tmp_path) == []
    assert time.monotonic() - began_s > 1.5, "the link was not thin"
    said = capsys.readouterr().err
    assert "learner thin leaves and hands over: " in said and " bytes are to go out" in said


def test_sigterm_while_a_script_leaves_by_itself_shortens_its_patience(parts: list[Any], tmp_path: Path) -> None:
    syncer = SyncerThread(config(learners_expected=2, quorum="all"))
    proxy = Proxy(syncer.address)
    parts += [syncer, proxy]
    process = spawn(PREEMPTED, proxy.address, str(tmp_path), "3", env={"ATOLL_SIGTERM_S": "1"})
    assert process.stdout is not None
    while process.stdout.readline() != "step\n":
        assert process.poll() is None
    proxy.bytes_per_s = 20  # RATE_GUESSED and SAY_S are what they are: it would go on for minutes
    for _ in range(2):
        process.stdout.readline()
    time.sleep(2.0)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    began_s = time.monotonic()
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == EXIT_NOT_HANDED_OVER and "the link is too slow" in out, out
    assert time.monotonic() - began_s < 60


def moving(deadline: LeaveDeadline, now_s: float, moved: int, **changes: Any) -> bool:
    values: dict[str, Any] = {"told": False, "bytes_left": 60_000, "rate": 6_000.0, **changes}
    return deadline.is_over(now_s, moved=moved, **values)


def test_the_patience_of_leaving_follows_the_rate_and_ends_at_its_bound() -> None:
    deadline = LeaveDeadline("l", 0.0)
    assert not moving(deadline, 49.0, 0), "20 s, and 10 s at a third of the rate"
    assert moving(LeaveDeadline("l", 0.0), 0.0, 0) is False
    assert not moving(deadline, 60.0, 1) and not moving(deadline, 109.0, 1) and moving(deadline, 111.0, 1)
    assert moving(deadline, 181.0, 2), "3 minutes, however well it moves"
    still = LeaveDeadline("l", 0.0)
    assert not moving(still, 19.0, 0, bytes_left=0) and moving(still, 40.0, 0, bytes_left=0)


def test_the_patience_after_sigterm_is_short_and_counts_from_it() -> None:
    deadline = LeaveDeadline("l", 0.0, sigterm_s=8.0)
    assert not moving(deadline, 100.0, 100) and not moving(deadline, 101.0, 100, told=True)
    assert not moving(deadline, 106.9, 101, told=True) and moving(deadline, 107.1, 101, told=True)
    assert not moving(deadline, 108.0, 101, told=True, left=True), "a quarter of it is for the syncer's word"
    assert moving(deadline, 109.1, 101, told=True, left=True)


def test_bounds_of_leaving_that_are_no_seconds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_SIGTERM_S", "soon")
    with pytest.raises(ConfigError, match="ATOLL_SIGTERM_S must be a whole number from 1 on, not 'soon'"):
        Learner(small_model(), address="127.0.0.1:1")


@pytest.mark.usefixtures("hurried")
def test_a_link_that_is_too_slow_to_hand_over_is_named_with_its_bytes(
    parts: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    syncer = SyncerThread(config(learners_expected=2, quorum="all"))  # nobody else comes: nothing is merged before
    proxy = Proxy(syncer.address)
    parts += [syncer, proxy]
    learner = joined(proxy.address, "thin", run_folder=tmp_path)
    proxy.bytes_per_s = 50
    for _ in range(3):
        learner.step(tokens=100)
    learner.close()
    assert not learner.handed_over
    [text] = warnings(tmp_path)
    assert "'thin' could not hand over 300 tokens" in text and "the link is too slow, 0 of " in text
    assert text in capsys.readouterr().err
    assert last_word(tmp_path).unhanded == 300


def test_what_a_run_that_was_over_did_not_take_is_told(parts: list[Any], tmp_path: Path) -> None:
    syncer = SyncerThread(config(learners_expected=2, quorum="all"))  # nobody else comes: nothing is merged before
    parts.append(syncer)
    learner = joined(syncer.address, "late", run_folder=tmp_path)
    for _ in range(3):
        learner.step(tokens=100)
    learner._shell.fail("run_closed", "the run is over")  # the answer to its hello, when its link was back
    learner.close()
    [text] = warnings(tmp_path)
    assert "'late' could not hand over 300 tokens" in text and "the run is over" in text
    assert not learner.handed_over and last_word(tmp_path).unhanded == 300


def test_a_learner_that_handed_over_says_nothing(
    parts: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    syncer = SyncerThread(config(learners_expected=2, quorum="all"))
    parts.append(syncer)
    learner = joined(syncer.address, "fine", run_folder=tmp_path)
    learner.step(tokens=100)
    learner.close()
    assert learner.handed_over and warnings(tmp_path) == [] and capsys.readouterr().err == ""


def test_a_learner_that_never_stepped_says_so(
    parts: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    syncer = SyncerThread(config())
    parts.append(syncer)
    joined(syncer.address, "idle", run_folder=tmp_path).close()
    [text] = warnings(tmp_path)
    assert text.startswith("learner.step was never called") and "once per optimizer step" in text
    assert text in capsys.readouterr().err


def test_whoever_had_nothing_to_do_is_not_blamed_for_doing_nothing(
    parts: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    syncer = SyncerThread(config(tokens_budget=100))
    parts.append(syncer)
    works = joined(syncer.address, "works", run_folder=tmp_path)
    late = joined(syncer.address, "late", run_folder=tmp_path)
    works.step(tokens=1)
    works.close(reason="SIGTERM")
    again = joined(syncer.address, "works", run_folder=tmp_path)  # its loop over the steps finds none that is left
    again.close()
    told = joined(syncer.address, "told", run_folder=tmp_path)
    told.close(reason="SIGTERM")
    last = joined(syncer.address, "last", run_folder=tmp_path)
    last.step(tokens=100)
    syncer.wait_for(lambda shell: bool(shell.machine.stopping), "the budget is spent")
    late.close()  # the run ended while it was still looking for its data
    last.close()
    assert warnings(tmp_path) == [] and capsys.readouterr().err == ""
