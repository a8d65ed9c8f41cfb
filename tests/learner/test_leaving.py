"""What a learner says when it leaves without its work being safe, or without having done any."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import WAIT_S, Proxy, SyncerThread, small_model, spawn

from atoll import Learner
from atoll.core.config import SyncConfig
from atoll.learner import EXIT_NOT_HANDED_OVER, leaving
from atoll.observe import events, read_events

PREEMPTED = """
import sys, time
from atoll.learner import leaving as module
from cluster import small_model
import atoll, torch
module.CLOSE_TIMEOUT_S, module.LET_GO_S = float(sys.argv[3]), 0.5
model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.Learner(model, optimizer, address=sys.argv[1], learner_id="paris", run_folder=sys.argv[2]) as learner:
    while True:
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        learner.step(tokens=32)
        print("step", flush=True)
        time.sleep(0.02)
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
    """Leaving gives up after a moment."""
    monkeypatch.setattr(leaving, "CLOSE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(leaving, "LET_GO_S", 0.5)


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
    process = spawn(PREEMPTED, syncer.address, str(tmp_path), "0.5" if syncer_dies else "60")
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
    process = spawn(PREEMPTED, proxy.address, str(tmp_path), "0.5")
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
