"""Learners that are cut off, set aside or behind a thin link, and warnings: in live view, summary and report."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import ORIGIN_NS, SECOND, SyntheticRun, write_events

from atoll.dash import print_summary, write_report
from atoll.dash.frame import frame, status_line
from atoll.observe import RunState
from atoll.observe import events as ev

NOW_S = 60.0
WHY = "has not answered 3 rounds"
ASIDE = [
    (40.0, "syncer", ev.MemberAside("learner-3", 1, True, WHY)),
    (41.0, "syncer", ev.LinkThin("learner-3", "up", 150_000, 6_250)),
    (52.0, "syncer", ev.Warned("syncer", "learner-3 holds nobody up any more")),
]
COUNTS_AGAIN = (90.0, "syncer", ev.MemberAside("learner-3", 1, False, "answered"))
CUT = (48.0, "launcher", ev.FaultInjected("partition", "learner-0", "both ways", ORIGIN_NS + 99 * SECOND))


def events_with(*more: tuple[float, str, ev.Event]) -> list[tuple[int, str, ev.Event]]:
    added = [(ORIGIN_NS + int(t_s * SECOND), source, event) for t_s, source, event in more]
    return sorted([*SyntheticRun().events, *added], key=lambda stamped: stamped[0])


def lines_of(*more: tuple[float, str, ev.Event], width: int = 100) -> list[str]:
    state, now_ns = RunState(), ORIGIN_NS + int(NOW_S * SECOND)
    for t_ns, source, event in events_with(*more):
        if t_ns <= now_ns:
            state.apply(t_ns, event, source)
    console = Console(width=width, height=32, file=io.StringIO(), record=True)
    console.print(frame(state, width=width, height=32, now_ns=now_ns))
    lines = console.export_text().rstrip("\n").split("\n")
    assert len(lines) <= 32 and all(len(line) <= width for line in lines)
    return [*lines, status_line(state, now_ns)]


def row(lines: list[str], learner: str) -> str:
    return next(line for line in lines if line.startswith(f"│ {learner} "))


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_partitioned_learner_trains_on_alone(width: int) -> None:
    lines = lines_of(CUT, width=width)
    assert "cut off" in row(lines, "learner-0") and "for 12 s, trains on alone" in row(lines, "learner-0")
    assert "learner-0 cut off" in lines[-1] and "4/4 learners" in lines[-1]


def test_the_row_of_a_learner_that_is_set_aside_says_why() -> None:
    lines = lines_of(*ASIDE[:1])
    assert "set aside" in row(lines, "learner-3") and WHY in row(lines, "learner-3")
    assert f"learner-3 set aside: {WHY}" in " ".join(lines) and "learner-3 set aside" in lines[-1]


def test_a_thin_link_is_told_in_bits_per_second() -> None:
    lines = lines_of((59.999, *ASIDE[1][1:]), width=140)  # no push in between that would show it to be wide
    assert "link up too thin: needs 1.2 Mbit/s, gets 50 kbit/s" in row(lines, "learner-3")
    assert "active" in row(lines, "learner-3")


def test_a_syncer_without_learners_of_its_own_machine_has_a_view() -> None:
    state = RunState()
    for t_ns, source, event in events_with():
        if source == "syncer" and t_ns <= ORIGIN_NS + NOW_S * SECOND:
            state.apply(t_ns, event, source)
    state.apply(
        ORIGIN_NS + 59 * SECOND, ev.MemberChanged("learner-1", 1, "away", "silent for 15 s", 15 * SECOND), "syncer"
    )
    console = Console(width=100, height=32, file=io.StringIO(), record=True)
    console.print(frame(state, width=100, height=32, now_ns=ORIGIN_NS + 60 * SECOND))
    lines = console.export_text().split("\n")
    assert "active" in row(lines, "learner-0")
    assert "away" in row(lines, "learner-1") and "for 16 s, nothing is heard of it" in row(lines, "learner-1")
    assert "starting" not in "".join(lines) and "0 tokens" not in "".join(lines)


def test_a_run_that_waits_for_learners_says_so() -> None:
    state = RunState()
    state.apply(1, ev.RunStarted("decoupled", 4, 0, 8, 1, "int4", "int4", 0))
    state.apply(2, ev.SyncerStarted("run", "127.0.0.1:1", 1))
    state.apply(3, ev.LearnerJoined("learner-0", 1, 0, 0))
    console = Console(width=100, height=32, file=io.StringIO(), record=True)
    console.print(frame(state, width=100, height=32, now_ns=4))
    assert "waits for learners: 1 of 4 joined" in console.export_text()
    assert "waits for learners: 1 of 4 joined" in status_line(state, 4)


def test_summary_and_report_tell_who_was_not_waited_for(tmp_path: Path) -> None:
    folder = write_events(events_with(*ASIDE, COUNTS_AGAIN), tmp_path)
    text = write_report(folder).read_text()
    section = text[text.index("Learners that rounds did not wait for") : text.index("Loss over tokens")]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", section)
    assert cells[:4] == ["00:36", "learner-3", "50.0 s", WHY] and int(cells[4]) > 100
    assert "learner-3: link up too thin: needs 1.2 Mbit/s, gets 50 kbit/s" in section
    assert "<h2>Warnings</h2>" in section and "learner-3 holds nobody up any more" in section
    out = io.StringIO()
    print_summary(folder, Console(file=out, width=160))
    said = out.getvalue()
    assert f"learner-3: from 00:36 for 50.0 s ({WHY}); {cells[4]} of its contributions were merged all the same" in said
    assert "syncer: learner-3 holds nobody up any more" in said


def test_nothing_is_said_of_a_run_in_which_nobody_was_set_aside(tmp_path: Path) -> None:
    folder = write_events(events_with(), tmp_path)
    out = io.StringIO()
    print_summary(folder, Console(file=out, width=160))
    assert "did not wait" not in out.getvalue() and "warnings" not in out.getvalue()
    assert "did not wait" not in write_report(folder).read_text()
