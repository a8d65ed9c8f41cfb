from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import KILLED, ORIGIN_NS, SECOND, SyntheticRun

from atoll.dash import LiveView
from atoll.dash.frame import frame, status_line
from atoll.dash.text import bytes_text, clock_text, count_text, duration_text, ratio_text
from atoll.observe import RunState
from atoll.observe.events import LearnerStarted, Warned


def state_until(until_s: float, learners: int = 4) -> RunState:
    state = RunState()
    for t_ns, _, event in SyntheticRun(learners=learners).events:
        if t_ns <= ORIGIN_NS + until_s * SECOND:
            state.apply(t_ns, event)
    return state


def drawn(state: RunState, width: int, height: int, at_s: float) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(frame(state, width=width, height=height, now_ns=ORIGIN_NS + int(at_s * SECOND)))
    return console.export_text().rstrip("\n").split("\n")


@pytest.mark.parametrize(("width", "height"), [(100, 32), (80, 24), (120, 50)])
@pytest.mark.parametrize("at_s", [0.05, 3.5, 37.0, 60.0, 130.0])
def test_it_fits_at_every_moment_of_a_run(width: int, height: int, at_s: float) -> None:
    lines = drawn(state_until(at_s), width, height, at_s)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


def test_it_fits_with_many_learners() -> None:
    lines = drawn(state_until(60, learners=40), 100, 32, 60)
    assert len(lines) <= 32
    assert any("more" in line for line in lines)


@pytest.mark.parametrize("width", [80, 100])
def test_it_shows_what_a_user_looks_for(width: int) -> None:
    text = "\n".join(drawn(state_until(60), width, 32, 60))
    for word in (
        "learner-0",
        "slow",
        "active",
        "goodput",
        "fewer bytes",
        "●○●●",
        f"{KILLED} killed (SIGKILL)",
        "eval loss",
    ):
        assert word in text
    assert f"{KILLED} rejoined at step" in text


def test_a_dead_learner_shows_as_down() -> None:
    lines = drawn(state_until(36.3), 100, 32, 36.3)
    row = next(line for line in lines if f" {KILLED} " in line)
    assert "down" in row


def test_an_empty_run_is_drawn() -> None:
    assert any("waiting for the first events" in line for line in drawn(RunState(), 80, 24, 0))


def test_ids_with_markup_are_shown_as_they_are() -> None:
    state = RunState()
    state.apply(1, LearnerStarted("[red]x", 1))
    state.apply(2, Warned("[bold]me", "text [/nonsense]"))
    text = "\n".join(drawn(state, 100, 32, 0))
    assert "[red]x" in text and "[bold]me: text [/nonsense]" in text


def test_the_status_line_is_one_plain_line() -> None:
    line = status_line(state_until(60), ORIGIN_NS + 60 * SECOND)
    assert "\n" not in line
    assert line.startswith("00:56 | 4/4 learners | ")
    assert "goodput" in line and "commits" in line


def test_without_a_terminal_it_prints_lines(tmp_path: Path) -> None:
    SyntheticRun().write(tmp_path)
    out = io.StringIO()
    with LiveView(tmp_path, console=Console(file=out, force_terminal=False, width=80)) as view:
        view.refresh()
        view.refresh()
    lines = out.getvalue().splitlines()
    assert f"{KILLED} killed (SIGKILL)" in lines
    assert lines.count(f"{KILLED} killed (SIGKILL)") == 1
    assert sum("goodput" in line for line in lines) == 2  # one for the first refresh, one for the end
    assert "\x1b" not in out.getvalue()


def test_in_a_terminal_it_draws_and_leaves_the_last_picture(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=32)
    with LiveView(tmp_path, console=console) as view:
        view.refresh()
        SyntheticRun().write(tmp_path)
        view.refresh(force=True)
    assert "learner-3" in out.getvalue()
    assert out.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_numbers_as_people_read_them() -> None:
    assert [count_text(v) for v in (0, 7, 999, 1234, 1_234_567, 2e9)] == ["0", "7", "999", "1.23k", "1.23M", "2G"]
    assert [bytes_text(v) for v in (0, 999, 48_400_000, 14.2e9)] == ["0 B", "999 B", "48.4 MB", "14.2 GB"]
    assert [clock_text(v) for v in (-3, 0, 75, 3700)] == ["00:00", "00:00", "01:15", "1:01:40"]
    assert [duration_text(v) for v in (0.25, 75, 700, 9000)] == ["0.25 s", "75.0 s", "11.7 min", "2.5 h"]
    assert [ratio_text(v) for v in (71.8, 1.84)] == ["72x", "1.8x"]
    assert count_text(math.nan) == "-"
