from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import KILLED, ORIGIN_NS, SECOND, SLOWED, SyntheticRun

import atoll.dash
from atoll.core.messages import Discard
from atoll.dash import print_summary, write_report
from atoll.dash.curves import curve, thin
from atoll.dash.page import SCRIPTS, static
from atoll.dash.words import CAUSES
from atoll.errors import LaunchError
from atoll.observe.events import LearnerEvaluated, LearnerSteps, ProcessStarted, RunFinished, RunStarted

PICTURES = (
    "Loss over tokens processed",
    "Loss over time, faults marked",
    "What each learner was doing, its contributions and the faults",
    "Tokens per second of each learner over time",
    "Where the time of each learner went",
    "Bytes sent, against data-parallel training",
    "Contributors per commit over time",
    "Cosine between successive merged gradients",
)
VOID = {"meta", "line", "rect", "circle", "path", "br", "link", "img"}


class Checker(HTMLParser):
    """Every element that is opened is closed, in order; the drawings' labels and any address are collected."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.labels: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: Iterable[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.labels += [values["aria-label"] or ""] if "aria-label" in values else []
        self.addresses += [str(values[name]) for name in ("src", "href", "xlink:href", "action") if name in values]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Iterable[tuple[str, str | None]]) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    return checker


DATA = re.compile(r'<script type="application/json" id="run">(.*?)</script>', re.DOTALL)


def scripts_of(text: str) -> list[str]:
    """What a browser would compare with the page's policy."""
    found = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    return [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found]


def hashes_of(text: str) -> list[str]:
    return re.findall(r"'sha256-([^']+)'", text)


def summary(folder: Path, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    print_summary(folder, console)
    return console.export_text()


def test_the_report_has_its_pictures_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    path = write_report(SyntheticRun().write(tmp_path))
    assert path == tmp_path / "report.html"
    text = path.read_text()
    checker = checked(text)
    assert set(PICTURES) <= set(checker.labels)
    assert checker.addresses == []
    assert not re.search(r"@import|url\(|<link|<img|<iframe|fetch\(", text)
    assert "default-src 'none'" in text and set(scripts_of(text)) <= set(hashes_of(text))
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    json.loads(DATA.search(text)[1], parse_constant=pytest.fail)
    assert f"{KILLED} killed (SIGKILL), at 00:32" in text
    assert f"{SLOWED} slow: every step takes 4x as long" in text
    assert "the 3 others made" in text and "and waited 0.00 s" in text
    assert f"atoll report {tmp_path}" in text


def test_config_result_and_sample_are_shown_and_escaped(tmp_path: Path) -> None:
    SyntheticRun(seconds=30.0).write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"method": "decoupled", "sync": {"quorum": "<50%>"}}))
    (tmp_path / "result.json").write_text("not json")
    (tmp_path / "sample.txt").write_text("if a < b & c:\n    <script>alert(1)</script>")
    text = write_report(tmp_path).read_text()
    checked(text)
    assert "sync.quorum" in text and "&lt;50%&gt;" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "<script>alert" not in text


def test_names_from_a_run_cannot_break_the_page(tmp_path: Path) -> None:
    run = SyntheticRun(seconds=30.0)
    evil = '"><script>x</script>'
    run.events = [
        (t, s, replace(e, title=evil) if isinstance(e, RunStarted) else e)
        if not hasattr(e, "learner") or e.learner != "learner-0"
        else (t, s, replace(e, learner=evil))
        for t, s, e in run.events
    ]
    text = write_report(run.write(tmp_path)).read_text()
    checked(text)
    assert "<script>x" not in text and len(scripts_of(text)) == 3
    assert evil in json.loads(DATA.search(text)[1])["lanes"]


def test_a_run_without_a_syncer(tmp_path: Path) -> None:
    run = SyntheticRun(seconds=40.0, synchronous=True)
    kinds = (RunStarted, ProcessStarted, LearnerSteps, LearnerEvaluated, RunFinished)
    run.events = [
        (t, s, replace(e, method="dp") if isinstance(e, RunStarted) else e)
        for t, s, e in run.events
        if isinstance(e, kinds)
    ]
    text = write_report(run.write(tmp_path)).read_text()
    checker = checked(text)
    assert "Contributors per commit over time" not in checker.labels
    assert "Where the time of each learner went" in checker.labels
    assert "stall" in text
    assert "of gradients by data-parallel" in summary(tmp_path)


@pytest.mark.parametrize("until_s", [0.05, 3.5, 4.35, 37.0])
def test_a_run_that_is_not_finished(tmp_path: Path, until_s: float) -> None:
    run = SyntheticRun()
    run.events = [stamped for stamped in run.events if stamped[0] <= ORIGIN_NS + until_s * SECOND]
    checked(write_report(run.write(tmp_path)).read_text())
    assert "goodput" in summary(tmp_path)


def test_many_learners_and_many_rounds_stay_small(tmp_path: Path) -> None:
    path = write_report(SyntheticRun(learners=24, seconds=120.0).write(tmp_path))
    assert path.stat().st_size < 3_000_000
    assert "and 8 more learners, not drawn" in path.read_text()


def test_the_closing_summary_says_what_a_stranger_wants_to_know(tmp_path: Path) -> None:
    SyntheticRun().write(tmp_path)
    (tmp_path / "sample.txt").write_text("def f(x):\n    return [x]")
    write_report(tmp_path)
    text = summary(tmp_path)
    for words in (
        "loss",
        "nats per token",
        "goodput",
        "data-parallel would have sent",
        "processed =",
        "49.2k discarded",
    ):
        assert words in text
    assert f"{KILLED} killed (SIGKILL), at 00:32" in text
    assert "training again after 5.2 s at step" in text
    assert "    return [x]" in text
    assert "report.html" in text
    assert all(len(line) <= 80 for line in summary(tmp_path, 80).splitlines() if "report.html" not in line)


def test_a_folder_without_events_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    for action in (write_report, print_summary):
        with pytest.raises(LaunchError, match="give the folder"):
            action(tmp_path)
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "x.jsonl").write_text("torn")
    with pytest.raises(LaunchError, match="no readable event"):
        write_report(tmp_path)


def test_the_front_door_is_light() -> None:
    heavy = ("rich", "torch", "numpy", "grpc")
    code = f"import atoll.dash, atoll.observe, sys; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_curve_is_thinned_and_cut_where_nothing_was_reported() -> None:
    assert thin([(0, 0), (1, 2), (2, 4), (3, 6)], 2) == [(0.5, 1), (2.5, 5)]
    assert thin([], 5) == []
    xs, ys = curve([(float(i), 1.0) for i in range(50)] + [(200.0, 1.0)])
    assert ys.count(None) == 1 and 49 < xs[ys.index(None)] < 200
    assert curve([(0.0, float("nan"))]) == ([0.0], [None])


def test_the_chart_library_is_the_one_that_was_written_down() -> None:
    home = Path(atoll.dash.__file__).parent / "static"
    told = json.loads((home / "vendored.json").read_text())["uplot"]
    assert {name: hashlib.sha256((home / name).read_bytes()).hexdigest() for name in told["files"]} == told["files"]
    assert f"(v{told['version']})" in static(SCRIPTS[0])[:100]
    assert "MIT" in static("uPlot.LICENSE")


def test_every_fate_of_a_token_has_a_sentence_and_no_sentence_is_of_a_fate_that_is_gone() -> None:
    assert set(CAUSES) == {cause.value for cause in Discard}
