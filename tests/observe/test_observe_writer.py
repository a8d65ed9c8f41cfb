from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from synthetic_run import SyntheticRun

from atoll.observe import EventWriter, NullWriter, RunState, Tail, read_events, summarize
from atoll.observe import writer as writer_module
from atoll.observe.events import Committed, LearnerDiscarded, LearnerSteps, RunStarted, Warned
from atoll.observe.folding import fold, is_folded
from atoll.observe.thin import THIN_PERIOD_NS, Thinner, add_steps


def steps(**changes: object) -> LearnerSteps:
    values: dict[str, object] = {
        "learner": "a", "generation": 1, "step": 1, "steps": 1, "tokens": 10, "tokens_total": 10, "loss": 2.0,
        "compute_ns": 100, "stall_ns": 0, "adopt_ns": 0, "snapshot_ns": 0, "overhead_ns": 0, "fragments_behind": 0,
    }  # fmt: skip
    return LearnerSteps(**{**values, **changes})  # type: ignore[arg-type]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_come_back_as_they_were(tmp_path: Path) -> None:
    started = RunStarted("decoupled", 4, 7, 24, 24, "int4", "int4", 100, 'a title with "quotes" and ☂')
    with EventWriter(tmp_path / "events" / "launcher.jsonl") as writer:
        writer.emit(started)
        writer.emit(steps())
    back = [(source, event) for _, source, event in read_events(tmp_path)]
    assert back == [("launcher", started), ("launcher", steps())]


def test_a_line_has_time_kind_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with EventWriter(path) as writer:
        writer.emit(Warned("me", "careful"))
    (line,) = lines(path)
    assert line.pop("t_ns") > 0  # type: ignore[operator]
    assert line == {"kind": "warned", "source": "me", "text": "careful"}


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "events" / "x.jsonl"
    with EventWriter(path) as writer:
        writer.emit(steps(loss=math.nan))
        writer.emit(steps(loss=math.inf))
    assert [line["loss"] for line in lines(path)] == [None, None]
    assert all(math.isnan(event.loss) for _, _, event in read_events(tmp_path))  # type: ignore[union-attr]


def test_a_full_queue_drops_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The disk refuses until it is let go, so that the queue must fill up.
    gate = threading.Event()
    real_open = os.open

    def stuck(*arguments: object, **named: object) -> int:
        if not gate.is_set():
            raise OSError(28, "No space left on device")
        return real_open(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(writer_module.os, "open", stuck)
    path = tmp_path / "x.jsonl"
    writer = EventWriter(path, queue_events_max=5)
    for i in range(12):
        writer.emit(steps(step=i))
    assert writer.dropped == 7
    assert not writer.flush(0.05)
    gate.set()
    assert writer.flush(5.0)
    writer.close()
    assert writer.disk_errors > 0
    written = lines(path)
    assert [line["step"] for line in written if line["kind"] == "learner_steps"] == [0, 1, 2, 3, 4]
    (warned,) = [line for line in written if line["kind"] == "warned"]
    assert str(warned["text"]).startswith("7 events were dropped")


def test_a_disk_error_in_the_middle_of_a_write_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, calls = os.write, []

    def flaky(descriptor: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, bytes(data[:40]))

    monkeypatch.setattr(writer_module.os, "write", flaky)
    path = tmp_path / "x.jsonl"
    with EventWriter(path) as writer:
        for i in range(20):
            writer.emit(steps(step=i))
        assert writer.flush(5.0)
    assert [line["step"] for line in lines(path)] == list(range(20))
    assert writer.disk_errors == 1


def test_emit_after_close_and_an_event_that_cannot_be_encoded_do_not_raise(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "x.jsonl")
    writer.emit(Warned("me", object()))  # type: ignore[arg-type]
    writer.close()
    writer.close()
    writer.emit(Warned("me", "too late"))
    assert writer.dropped == 2
    NullWriter().emit(Warned("me", "nowhere"))


def test_an_unwritable_place_never_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = EventWriter(tmp_path / "file" / "x.jsonl")
    writer.emit(steps())
    assert not writer.flush(0.05)
    writer.close(1.0)
    assert writer.disk_errors > 0


def test_a_sigkill_loses_only_what_was_not_flushed(tmp_path: Path) -> None:
    path = tmp_path / "events" / "x.jsonl"
    code = (
        "import sys, time; from atoll.observe import EventWriter; from atoll.observe.events import Warned\n"
        f"w = EventWriter({str(path)!r})\n"
        "[w.emit(Warned('a', str(i))) for i in range(100)]\n"
        "assert w.flush(30); print('ok', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ok\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert len(list(read_events(tmp_path))) == 100


def test_the_end_of_the_interpreter_flushes(tmp_path: Path) -> None:
    code = (
        "from atoll.observe import EventWriter; from atoll.observe.events import Warned\n"
        f"EventWriter({str(tmp_path / 'events' / 'x.jsonl')!r}).emit(Warned('a', 'last words'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(list(read_events(tmp_path))) == 1


def test_a_successor_does_not_glue_its_first_line_to_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "events" / "x.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"t_ns":1,"kind":"war')
    with EventWriter(path) as writer:
        writer.emit(Warned("me", "whole"))
    assert [event for _, _, event in read_events(tmp_path)] == [Warned("me", "whole")]


def test_a_file_is_cut_into_parts_and_old_ones_are_folded_with_exact_sums(tmp_path: Path) -> None:
    path = tmp_path / "events" / "learner-a-7.jsonl"
    committed = Committed(0, 1, 0, ["a"], 10, 1, 1, 1.0, 0.5, 1)
    follower, followed = Tail(tmp_path), RunState()
    with EventWriter(path, part_bytes_max=4000) as writer:
        for i in range(1000):
            writer.emit(steps(step=i, loss=float(i % 2)))
            writer.emit(committed)
            writer.emit(LearnerDiscarded("a", i % 2, 3, "overwritten"))
            if i % 10 == 0:
                assert writer.flush()
                for t_ns, source, event in follower.poll():
                    followed.apply(t_ns, event, source)
        writer.emit(Warned("me", "kept"))
    for t_ns, source, event in follower.poll():
        followed.apply(t_ns, event, source)
    files = sorted(path.parent.glob("*.jsonl"))
    assert len(files) > 5 and is_folded(path) and not is_folded(files[-2]), "the first is old, the last is whole"
    assert sum(file.stat().st_size for file in files if not is_folded(file)) < 60_000
    stamped = list(read_events(tmp_path))
    assert {source for _, source, _ in stamped} == {"learner-a-7"}, "parts are of one process"
    events = [event for _, _, event in stamped]
    reported = [event for event in events if isinstance(event, LearnerSteps)]
    assert sum(event.tokens for event in reported) == 10_000
    assert sum(event.compute_ns for event in reported) == 100_000
    assert max(event.step for event in reported) == 999
    assert sum(event.tokens for event in events if isinstance(event, LearnerDiscarded)) == 3000
    assert Warned("me", "kept") in events
    state = summarize(tmp_path)
    assert state.rounds.commits == followed.rounds.commits == 1000, "whoever follows counts nothing twice"
    assert state.tokens == followed.tokens == 10_000 and not follower.missed


def test_who_did_not_look_for_so_long_that_a_part_was_folded_half_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "events" / "x.jsonl"
    tail = Tail(tmp_path)
    with EventWriter(path) as writer:
        writer.emit(steps())
        writer.emit(Committed(0, 1, 0, ["a"], 10, 1, 1, 1.0, 0.5, 1))
        writer.emit(Committed(0, 2, 0, ["a"], 10, 1, 1, 1.0, 0.5, 1))
        assert writer.flush() and len(list(tail.poll())) == 3
        writer.emit(Committed(0, 3, 0, ["a"], 10, 1, 1, 1.0, 0.5, 1))
    fold(path)
    assert list(tail.poll()) == [] and tail.missed
    assert summarize(tmp_path).rounds.commits == 3


def test_the_report_is_right_after_everything_was_folded(tmp_path: Path) -> None:
    def figures() -> tuple[object, ...]:
        state = summarize(tmp_path)
        rounds = (state.rounds.commits, state.rounds.merged, state.rounds.late, state.rounds.aborted)
        spent = {name: round(s, 3) for name, s in state.goodput().seconds.items()}
        restarts = [(one.learner, one.step, one.restarts) for one in state.learners.values()]
        bytes_by = [(one.bytes_up, one.bytes_down) for one in state.learners.values()]
        told = (state.ledger, state.tokens, state.learner_steps, state.bytes_up, state.bytes_down, state.eval_loss)
        return (rounds, spent, restarts, bytes_by, told, dict(state.decisions.closed), len(state.faults))

    SyntheticRun().write(tmp_path)
    before, size = figures(), sum(file.stat().st_size for file in (tmp_path / "events").glob("*.jsonl"))
    for _ in range(2):  # what is folded can be folded again
        for file in (tmp_path / "events").glob("*.jsonl"):
            fold(file)
        assert figures() == before
    assert sum(file.stat().st_size for file in (tmp_path / "events").glob("*.jsonl")) < size / 10


def test_what_earlier_processes_of_a_name_left_is_folded_too(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    for pid in range(8):
        with EventWriter(folder / f"learner-a-{pid}.jsonl", part_bytes_max=4000) as writer:
            for i in range(20):
                writer.emit(steps(step=i))
    with EventWriter(folder / "learner-a-b-9.jsonl", part_bytes_max=100) as writer:
        writer.emit(Warned("a-b", "another learner"))
    folded = {file.stem for file in folder.glob("*.jsonl") if is_folded(file)}
    assert "learner-a-0" in folded and "learner-a-7" not in folded
    assert summarize(tmp_path).tokens == 8 * 20 * 10


def test_thinning_lets_held_sums_go_each_minute() -> None:
    thinner = Thinner()
    assert thinner.take(0, steps()) == []
    assert thinner.take(THIN_PERIOD_NS - 1, steps()) == []
    ((t_ns, one),) = thinner.take(THIN_PERIOD_NS, steps())
    assert t_ns == THIN_PERIOD_NS
    assert isinstance(one, LearnerSteps) and one.steps == 3
    assert thinner.rest() == []


def test_two_reports_make_one() -> None:
    both = add_steps(steps(steps=1, loss=1.0), steps(steps=3, loss=2.0, step=4, stall_ns=7))
    assert (both.steps, both.step, both.tokens, both.stall_ns) == (4, 4, 20, 7)
    assert both.loss == pytest.approx(1.75)
    assert add_steps(steps(loss=math.nan), steps(loss=3.0)).loss == 3.0
