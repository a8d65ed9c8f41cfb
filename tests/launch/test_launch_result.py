"""The result object: its keys are a promise, and its tokens add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import LaunchError
from atoll.launch.config import run_config, train_config
from atoll.launch.folder import RunFolder, create_run_folder, is_finished
from atoll.launch.plan import RunOutcome
from atoll.launch.result import build_result, measure, report_numbers, script_result
from atoll.launch.stored import Attempt
from atoll.observe import EventWriter
from atoll.observe.events import LearnerSteps, ProcessStarted, RunFinished, RunStarted, SyncerStats
from atoll.observe.faults import InjectedFault
from atoll.observe.lines import encode

PROMISED = [
    "method",
    "learners",
    "steps",
    "tokens",
    "eval_loss",
    "goodput",
    "wall_s",
    "bytes_up",
    "bytes_down",
    "dp_bytes_equivalent",
    "commits",
    "contributions_merged",
    "contributions_late",
    "tokens_merged",
    "tokens_pending",
    "tokens_discarded",
    "faults",
    "restarts",
    "syncer_restarts",
    "resumed",
]
OUTCOME = RunOutcome("finished", 1, (), (), (InjectedFault("kill", "learner-0", 1.5),), 0)


def steps(learner: str, tokens: int) -> LearnerSteps:
    return LearnerSteps(
        learner=learner,
        generation=1,
        step=4,
        steps=4,
        tokens=tokens,
        tokens_total=tokens,
        loss=2.0,
        compute_ns=1_000_000,
        stall_ns=0,
        adopt_ns=0,
        snapshot_ns=0,
        overhead_ns=0,
        fragments_behind=0,
    )


def folder_with(path: Path, *events: Any) -> RunFolder:
    folder = create_run_folder(str(path / "run"), name="test")
    add(folder, "all", *events)
    return folder


def add(folder: RunFolder, source: str, *events: Any) -> None:
    with EventWriter(folder.events / f"{source}.jsonl") as writer:
        for event in events:
            writer.emit(event)


def result_of(method: str, folder: RunFolder, *, resumed: int = 0) -> dict[str, Any]:
    config, _ = train_config({"method": method, "learners": 2, "steps": 4, "batch": 2, "seq": 8, "model": "nano"})
    measured = measure(folder.path)
    attempt = Attempt(folder, "token", number=resumed)
    return build_result(config, attempt, measured=measured, outcome=OUTCOME, eval_loss=2.5, total_s=9.0)


def check(result: dict[str, Any]) -> None:
    assert [key for key in PROMISED if key not in result] == []
    discarded = sum(result["tokens_discarded"].values())
    assert result["tokens"] == result["tokens_merged"] + result["tokens_pending"] + discarded
    assert 0.0 <= result["goodput"] <= 1.0


def test_a_synchronised_run_takes_the_last_word_of_the_syncer(tmp_path: Path) -> None:
    early = SyncerStats(1, 2, 1, 0, 2, 0, 10, 10, 64, 32, 32)
    last = SyncerStats(4, 2, 5, 0, 9, 1, 100, 90, 128, 100, 20, {"learner_lost": 8})
    folder = folder_with(tmp_path, early, steps("learner-0", 64), steps("learner-1", 64), last)
    result = result_of("decoupled", folder)
    check(result)
    assert (result["tokens"], result["commits"], result["contributions_late"]) == (128, 5, 1)
    assert result["tokens_discarded"] == {"learner_lost": 8}
    assert result["faults"] == [{"fault": "kill", "target": "learner-0", "t_s": 1.5, "detail": ""}]
    assert result["dp_bytes_equivalent"] > 0


@pytest.mark.parametrize(("method", "learners"), [("dp", 2), ("single", 1)])
def test_without_a_syncer_every_token_is_merged(tmp_path: Path, method: str, learners: int) -> None:
    folder = folder_with(tmp_path, *(steps(f"learner-{rank}", 128 // learners) for rank in range(learners)))
    result = result_of(method, folder)
    check(result)
    assert (result["learners"], result["tokens"], result["tokens_merged"]) == (learners, 128, 128)
    assert (result["bytes_up"] > 0) == (method == "dp")


def test_every_result_has_the_ledger_and_the_steps_of_each_learner(tmp_path: Path) -> None:
    last = SyncerStats(4, 2, 5, 0, 9, 1, 100, 90, 128, 100, 20, {"learner_lost": 8})
    folder = folder_with(tmp_path, steps("learner-10", 64), steps("learner-2", 32), steps("learner-2", 32), last)
    config = run_config({"learners": 2, "minutes": 3})
    attempt, measured = Attempt(folder, "token"), measure(folder.path)
    script = script_result(config, ["train.py"], attempt, measured=measured, outcome=OUTCOME)
    each = measured.steps["learner-10"]
    for result in (script, result_of("decoupled", folder), report_numbers(folder.path)):
        ledger = {"processed": 128, "merged": 100, "pending": 20, "discarded": {"learner_lost": 8}}
        assert result["ledger"] == ledger
        assert list(result["steps_by_learner"].items()) == [("learner-2", 2 * each), ("learner-10", each)]
        assert result["steps_total"] == 3 * each
        assert result["goodput"] <= 1.0 and "compute" in result["goodput_seconds"]
    assert (script["method"], script["minutes"], script["finished"]) == ("decoupled", 3.0, True)


def test_the_numbers_of_a_report_are_those_of_the_result_where_there_is_one(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, steps("learner-0", 64), RunFinished("finished", 2.25, 1.0))
    assert report_numbers(folder.path)["eval_loss"] == 2.25
    folder.result_file.write_text(json.dumps({"eval_loss": 2.5, "total_s": 9.0}))
    numbers = report_numbers(folder.path)
    assert (numbers["eval_loss"], numbers["total_s"], numbers["tokens"]) == (2.5, 9.0, 64)


def test_a_run_that_was_stopped_has_a_result_and_is_not_finished(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, steps("learner-0", 64))
    assert not is_finished(folder)
    for written, finished in [("{}", True), ('{"finished": false}', False), ('{"finished": true}', True), ("", True)]:
        folder.result_file.write_text(written)
        assert is_finished(folder) is finished


def test_a_syncer_that_left_no_word_is_an_error(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, steps("learner-0", 64))
    with pytest.raises(LaunchError, match="left no statistics"):
        result_of("decoupled", folder)


def test_what_each_syncer_counted_for_itself_is_added_up(tmp_path: Path) -> None:
    """Commits and tokens come back with the state; bytes and late contributions are counted from a process's start."""
    folder = folder_with(tmp_path, steps("learner-0", 128))
    first = SyncerStats(4, 2, 5, 0, 9, 1, 100, 90, 64, 60, 4)
    add(folder, "syncer-11", SyncerStats(1, 1, 1, 0, 1, 0, 7, 7, 8, 8, 0), first)
    add(folder, "syncer-12", SyncerStats(6, 2, 8, 0, 15, 2, 30, 40, 128, 120, 8))
    result = result_of("decoupled", folder)
    check(result)
    assert (result["bytes_up"], result["bytes_down"], result["contributions_late"]) == (130, 130, 3)
    assert (result["commits"], result["contributions_merged"], result["tokens"]) == (8, 15, 128)


def test_restarts_are_counted_over_all_launches_and_a_resumed_run_says_so(tmp_path: Path) -> None:
    started = [ProcessStarted("syncer", "syncer", 1), *(ProcessStarted("learner", f"learner-{i}", 2) for i in (0, 1))]
    folder = folder_with(tmp_path, steps("learner-0", 64), SyncerStats(1, 2, 1, 0, 2, 0, 10, 10, 64, 32, 32))
    add(folder, "launcher", *started, ProcessStarted("learner", "learner-1", 3))
    add(folder, "launcher-1", *started, ProcessStarted("syncer", "syncer", 4), ProcessStarted("syncer", "syncer", 5))
    add(folder, "join-99", ProcessStarted("learner", "learner-2", 6))
    result = result_of("decoupled", folder, resumed=1)
    assert (result["restarts"], result["syncer_restarts"], result["resumed"]) == (1, 2, 1)


def test_the_pause_before_a_resume_is_nobodys_time(tmp_path: Path) -> None:
    """Four steps of a millisecond, a day's pause, four more: goodput and wall time are those of the training."""
    folder = create_run_folder(str(tmp_path / "run"), name="test")
    run = RunStarted("decoupled", 1, 0, 24, 0, "int4", "int4", 0)
    lines, day_ns, begin_ns = [], 24 * 3600 * 10**9, 10**18
    for launch in range(2):
        at_ns = begin_ns + launch * day_ns
        for offset_ns, event in [(0, run), (10**9 + 10**6, steps("learner-0", 64))]:
            lines.append(encode(at_ns + offset_ns, event))
        lines.append(encode(at_ns + 2 * 10**9, RunFinished("SIGINT" if launch == 0 else "finished", float("nan"), 0.0)))
    (folder.events / "launcher.jsonl").write_bytes(b"".join(lines))
    measured = measure(folder.path)
    assert measured.wall_s == pytest.approx(0.002)
    assert measured.goodput == pytest.approx(1.0)
