"""Recovery as a person sees it: the live view, the closing summary and the report's section on what was lost."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.segment import Segment
from synthetic_recovery import DAMAGED, RecoveryRun
from synthetic_run import SyntheticRun

from atoll.dash import LiveView, print_summary, recovery, write_report
from atoll.dash.frame import frame, status_line
from atoll.dash.syncer_line import LOUD, data_line, syncer_line
from atoll.observe import RunState
from atoll.observe import events as ev

RUN = RecoveryRun()
"""Made once: building it costs more than looking at it."""
TITLE = "What was lost, and what was not"


def state_until(at_s: float) -> tuple[RunState, int]:
    state, now_ns = RunState(), RUN.t_ns(at_s)
    for t_ns, source, event in RUN.events:
        if t_ns <= now_ns:
            state.apply(t_ns, event, source)
    return state, now_ns


def drawn(at_s: float, width: int, height: int) -> list[str]:
    state, now_ns = state_until(at_s)
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(frame(state, width=width, height=height, now_ns=now_ns))
    return console.export_text().rstrip("\n").split("\n")


def summary(folder: Path, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    print_summary(folder, console)
    return console.export_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RUN.write(tmp_path_factory.mktemp("recovery"))


# ---------------------------------------------------------------- live


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (120, 50)])
@pytest.mark.parametrize("at_s", [1.5, 42.0, 92.0, 110.0, 164.0, 183.0, 230.0])
def test_it_fits_whatever_breaks(width: int, height: int, at_s: float) -> None:
    lines = drawn(at_s, width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


def test_a_syncer_that_is_gone_shows_and_so_does_its_return() -> None:
    text = "\n".join(drawn(92.0, 110, 32))
    assert "syncer down for 1.9 s, learners train on" in text
    assert "● active" in text and "◌ away" not in text
    back = "\n".join(drawn(96.0, 110, 32))
    assert "● syncer epoch 2 · recovered from its disk · durable: commit" in back
    state, now_ns = state_until(92.0)
    assert "SYNCER GONE, learners train on" in status_line(state, now_ns)


def test_degraded_durability_is_loud_and_stops_being_so() -> None:
    state, now_ns = state_until(110.0)
    line = syncer_line(state, now_ns)
    assert line is not None
    assert any(str(span.style) == LOUD for span in line.spans)
    assert "DURABILITY DEGRADED: No space left on device" in line.plain
    assert "DURABILITY DEGRADED" in status_line(state, now_ns)
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    loud = [s for s in console.render(line) if isinstance(s, Segment) and s.style and s.style.bgcolor]
    assert loud and all(s.style and s.style.bgcolor and s.style.bgcolor.name == "red" for s in loud)
    after = syncer_line(*state_until(130.0))
    assert after is not None and "DURABILITY" not in after.plain


def test_what_a_learner_went_on_with_is_beside_its_restarts() -> None:
    text = "\n".join(drawn(85.0, 110, 32))
    for words in ("1 · checkpoint", "1 · peer", "1 · parameters"):
        assert words in text


def test_an_older_state_shows_how_much_was_healed() -> None:
    line = syncer_line(*state_until(166.0))
    assert line is not None and "recovered from snapshot step-150 · 3 fragments healed" in line.plain


def test_the_data_ledger_has_a_line() -> None:
    line = data_line(state_until(85.0)[0])
    assert line is not None
    assert line.plain == "data train: 249 of 5,000 chunks done, 10 in hand, 6 re-issued, 1 done twice"
    state = RunState()
    state.apply(1, ev.DataLedger("x", 0, 9, 5, 3, 1, 0, 0))
    state.apply(2, ev.DataLedger("y", 100, 10, 5, 3, 2, 0, 0, lost=1))
    line = data_line(state)
    assert line is not None
    assert line.plain == "data 2 streams: 10 chunks done, 6 in hand, 2 handed back, 1 to be issued again"


def test_chunks_that_were_leased_ahead_are_not_called_lost() -> None:
    back = ev.DataLedger("train", 0, 389, 63, 0, 326, 45, 0)
    assert "63 done + 0 in hand + 326 leased ahead and handed back; 45 issued again" in recovery.data_sentence(back)
    lost = recovery.data_sentence(replace(back, lost=6))
    assert "+ 320 leased ahead and handed back + 6 lost with a learner, to be issued again" in lost


def test_a_run_without_a_syncer_or_leased_data_has_neither_line() -> None:
    assert syncer_line(RunState(), 0) is None and data_line(RunState()) is None


def test_lines_of_the_same_moment_are_all_printed(folder: Path) -> None:
    out = io.StringIO()
    with LiveView(folder, console=Console(file=out, force_terminal=False, width=80)) as view:
        view.refresh()
    lines = out.getvalue().splitlines()
    # The three fragments were healed at one time.
    assert sum("healed by learner-0" in line for line in lines) == 3
    assert f"syncer found: {DAMAGED}" in lines
    assert lines.count("run stopped by SIGINT") == 1


# ---------------------------------------------------------------- the report and the summary


def test_the_report_says_what_was_lost_and_what_was_not(folder: Path) -> None:
    text = write_report(folder).read_text()
    section = text[text.index(TITLE) : text.index("Loss over tokens")]
    for words in (
        "111k tokens (0.7%) with learners that ended",
        "16.4k tokens (0.1%) in versions that nobody could bring back",
        "went on from its very last commit 2 times",
        "learners brought back 3 fragments",
        "stopped and resumed once; the 3.0 h",
        "gone 2 times while the run went on, 7.2 s in all",
        "665 of 731 commits were written: 1.6 MB and",
        "from 01:41 for 20.0 s: No space left on device",
        "5 written to memory://runs/demo",
        "1 failed",
        "25.7 MB each; copying one out held training up for 2.4 ms",
        "721 of 5,000 chunks issued = 711 done + 10 in hand; 6 issued again",
        "its own checkpoint (of step 96, generation 1)",
        "the optimizer state of a peer (of learner learner-0 at its step 180)",
        "the published parameters alone (no checkpoint",
        "their own checkpoints",
        "5 learners, without a syncer",
    ):
        assert words in section, words
    assert DAMAGED in section
    row = re.search(r"<tr><td[^>]*>02:32</td>.*?</tr>", section)
    assert row is not None and re.sub("<[^>]+>", " ", row[0]).split() == [
        "02:32",
        "learner-4",
        "30.0",
        "s",
        "145",
        "0.60",
        "0.20",
    ]


def pictured(folder: Path) -> dict[str, Any]:
    """What the pictures of the report are made of."""
    text = write_report(folder).read_text()
    found = re.search(r'<script type="application/json" id="run">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_lanes_show_when_there_was_no_syncer_and_no_link(folder: Path) -> None:
    data = pictured(folder)
    assert [round(b - a, 1) for a, b in data["syncer"]["away"]] == [4.2, 3.0]
    [(start_s, end_s, why)] = data["syncer"]["lapses"]
    assert (int(start_s), int(end_s)) == (101, 121) and "degraded: No space left on device" in why
    assert [116, 146] in [[int(a), int(b)] for a, b in data["lanes"]["learner-4"]["cuts"]]
    assert [away for _, away in data["pauses"]] == ["3.0 h"]
    flags = [text for lane in data["lanes"].values() for _, text in lane["flags"]]
    assert "killed, training again after 6.0 s (peer)" in flags


def test_the_hours_in_which_it_was_stopped_take_no_room(folder: Path) -> None:
    assert "3.8 min" in write_report(folder).read_text()
    assert 200 < pictured(folder)["seconds"] < 300


def test_the_summary_says_the_same(folder: Path) -> None:
    text = summary(folder)
    for words in (
        "what was lost, and what was not",
        "serving again after 4.2 s (epoch 2), from its disk",
        "with the optimizer state of a peer",
        "the 5 learners made",
        "5 learners: run resumed; state from their own checkpoints",
        "learner-4: cut off for 30.0 s, came back with 145 steps in one contribution, weight 0.60",
        DAMAGED,
    ):
        assert words in " ".join(text.split()), words
    assert "trained  15.5M tokens in 3.8 min by 5 learners" in text
    assert all(len(line) <= 80 for line in summary(folder, 80).splitlines() if "report.html" not in line)


def test_nothing_is_said_about_what_did_not_happen(tmp_path: Path) -> None:
    # One learner was killed; nobody said that anything was kept, or recovered.
    run = SyntheticRun(seconds=40.0)
    text = write_report(run.write(tmp_path)).read_text()
    assert TITLE not in text
    data = pictured(tmp_path)
    assert data["syncer"] == {"away": [], "lapses": []} and data["pauses"] == []
    assert not any(lane["cuts"] for lane in data["lanes"].values())
    assert "what was lost" not in summary(tmp_path)


def test_a_quiet_durable_run_says_only_what_is_on_disk() -> None:
    state = RunState()
    state.apply(1, ev.SyncerStarted("run", "127.0.0.1:1", 1, 1, "interval"))
    assert recovery.facts(state) == [("durability", "level interval: the state is written to disk from time to time")]
    assert recovery.lead(state) == "" and recovery.restarts(state) == [] and recovery.returns(state) == []


def test_a_state_in_memory_only_is_said_when_it_was_lost() -> None:
    state = RunState()
    for t_s, event in (
        (1, ev.SyncerStarted("run", "127.0.0.1:1", 1)),
        (5, ev.LearnerSteps("a", 1, 1, 1, 1, 1, 1.0, 4_000_000_000, 0, 0, 0, 0, 0)),
        (6, ev.ProcessExited("syncer", "syncer", 1, -9)),
        (7, ev.ProcessStarted("syncer", "syncer", 2)),
        (8, ev.SyncerStarted("run", "127.0.0.1:1", 2, 2)),
    ):
        state.apply(t_s * 1_000_000_000, event)
    (row,) = recovery.restarts(state)
    assert row == ("00:05", "syncer, epoch 2", "killed (SIGKILL)", "nothing: its state was in memory only", "2.0 s")


def test_passwords_in_addresses_are_not_shown() -> None:
    state = RunState()
    state.apply(1, ev.SnapshotWritten("s3://key:secret@bucket/run", 1, 10, 10, [1]))
    ((_, text),) = recovery.facts(state)
    assert "secret" not in text and "s3://bucket/run" in text


def test_names_from_a_recovery_cannot_break_the_page(tmp_path: Path) -> None:
    evil = '"><script>x</script>'
    run = SyntheticRun(seconds=30.0)
    last_ns = run.events[-1][0]
    for event in (
        ev.SyncerStarted("run", "127.0.0.1:1", 7, 2, evil),
        ev.SyncerRecovered(evil, False, [1], 1, 1, [evil]),
        ev.DataLedger(evil, 0, 1, 1, 0, 0, 0, 0),
        ev.SnapshotWritten(evil, 1, 1, 1, [1]),
        ev.LearnerRecovered("x", 2, 1, evil, evil, 1),
    ):
        run.events.append((last_ns + 1, "syncer", event))
    text = write_report(run.write(tmp_path)).read_text()
    assert "<script>x" not in text
    assert text.count("&lt;script&gt;") >= 6
