from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import ORIGIN_NS, SECOND, SyntheticRun, write_events

from atoll.launch.folder import RunFolder
from atoll.launch.running import main_processes
from atoll.observe import events as ev

WAIT_S = 240.0


def shown(page: Any) -> list[str]:
    """The learners that have a row in the document, from top to bottom."""
    return page.evaluate(
        "[...document.querySelectorAll('#rows .row[data-learner]')]"
        ".sort((a, b) => parseFloat(a.style.top) - parseFloat(b.style.top)).map((row) => row.dataset.learner)"
    )


def until(page: Any, condition: str) -> None:
    """Asked from here, again and again: the page's policy lets nobody evaluate text inside it."""
    deadline_s = time.monotonic() + WAIT_S
    while not page.evaluate(condition):
        assert time.monotonic() < deadline_s, f"never true: {condition}"
        time.sleep(0.05)


# ---------------------------------------------------------------- a run that is over


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = SyntheticRun().write(tmp_path_factory.mktemp("runs") / "first")
    (folder / "logs").mkdir()
    (folder / "logs" / "learner-learner-1.log").write_text("step 1 <b>loss</b> 3.2\n")
    return folder


def test_a_run_that_is_over_is_shown_whole(finished: Path, serve: Callable[..., Any], open_page: Any) -> None:
    page = open_page(serve(finished).address)
    page.wait_for_selector(".row[data-learner='learner-2']")
    until(page, "document.querySelector('#tiles b').textContent === '1.353'")
    assert "run over: token budget reached" in page.inner_text("#syncer")
    assert "96.2%" in page.inner_text("#tiles") and "382" in page.inner_text("#tiles")
    assert "learner-2 killed (SIGKILL)" in page.inner_text("#log")
    assert "closed: quorum and grace" in page.inner_text("#rounds-note")
    assert page.locator("#versions > div").count() == 24
    assert "discarded: lost with a learner that died" in page.inner_text("[data-piece=ledger]")
    assert page.locator("[data-piece=rates] canvas").count() == 1
    # Something is drawn on the lanes: those who see less than a picture are told what it is.
    until(
        page,
        "[...document.querySelectorAll('#rows canvas')].every((c) => c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data.some((v) => v > 0))",
    )
    assert page.get_attribute(".row[data-learner='learner-2'] canvas", "aria-label") == "what learner-2 was doing"


def test_each_learner_links_to_its_log(finished: Path, serve: Callable[..., Any], open_page: Any) -> None:
    page = open_page(serve(finished).address)
    link = page.locator(".row[data-learner='learner-1'] a")
    link.wait_for()
    with page.expect_popup() as opened:
        link.click()
    assert opened.value.inner_text("body").strip() == "step 1 <b>loss</b> 3.2"


def test_rows_are_filtered_sorted_and_grouped(finished: Path, serve: Callable[..., Any], open_page: Any) -> None:
    page = open_page(serve(finished).address)
    page.wait_for_selector(".row[data-learner='learner-3']")
    assert shown(page) == [f"learner-{i}" for i in range(4)]
    page.fill("#filter", "NER-2")
    assert shown(page) == ["learner-2"]
    page.fill("#filter", "")
    page.select_option("#sort", "restarts")
    assert shown(page)[0] == "learner-2"
    page.select_option("#sort", "loss")
    assert shown(page)[0] == "learner-3"
    page.click("#chips button[data-state=left]")
    assert shown(page) == []
    page.click("#chips button[data-state=left]")
    page.select_option("#group", "island")
    assert "4 left" in page.inner_text(".row.fold")
    page.click(".row.fold")
    assert shown(page) == []


def test_runs_of_one_folder_are_compared(finished: Path, serve: Callable[..., Any], open_page: Any) -> None:
    SyntheticRun(seconds=60.0, seed=2).write(finished.parent / "second")
    page = open_page(serve(finished.parent).address)
    page.wait_for_selector("#compare-table tbody tr:nth-child(2)")
    assert "first" in page.inner_text("#compare-table") and "1.353" in page.inner_text("#compare-table")
    assert page.locator("#compare-tokens canvas").count() == 1
    # A run that measured no published loss and committed nothing has other figures: each stays under its own name.
    steps = [
        (ORIGIN_NS + s * SECOND, "l", ev.LearnerSteps("l", 1, s, 1, 9, 9 * s, 3.0, SECOND, 0, 0, 0, 0, 0))
        for s in (1, 2)
    ]
    begin = (ORIGIN_NS, "launcher", ev.RunStarted("decoupled", 1, 10, 8, 1, "int4", "int4", 0))
    write_events([begin, *steps], finished.parent / "third")
    page.reload()
    page.wait_for_selector("#compare-table tbody tr:nth-child(3)")
    heads = page.locator("#compare-table th").all_inner_texts()
    third = dict(zip(heads, page.locator("#compare-table tr:has-text('third') td").all_inner_texts(), strict=True))
    assert third["versions committed"] == "-" and third["steps, over all learners"] == "2"
    assert third["training loss, mean of learners"] == "3.000" and third["loss of the published model"] == "-"
    page.click("#compare-table a:text-is('second')")
    page.wait_for_selector(".row[data-learner='learner-3']")


def test_the_report_opens_in_a_browser_without_anything_from_outside(finished: Path, open_page: Any) -> None:
    from atoll.dash import write_report

    page = open_page(write_report(finished).as_uri())
    assert page.locator("[data-piece=loss-tokens] canvas").count() == 1
    assert page.locator("[data-piece=lanes] canvas").count() == 4


def test_an_operator_acts_after_a_second_thought(finished: Path, serve: Callable[..., Any], open_page: Any) -> None:
    page = open_page(serve(finished, control=True).address_with_token)
    row = page.locator(".row[data-learner='learner-1']")
    row.hover()
    row.locator("button:text-is('kill')").click()
    page.click("#sure button:text-is('no')")
    row.hover()
    row.locator("button:text-is('kill')").click()
    assert "learner-1 is killed with SIGKILL, for a drill" in page.inner_text("#sure-text")
    page.click("#sure button:text-is('yes')")
    until(page, "document.querySelector('#log').textContent.includes('learner-1 does not run on this machine')")
    assert page.locator("#log li:has-text('does not run on this machine')").count() == 1


# ---------------------------------------------------------------- form


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1400, "dark")])
def test_it_fits_a_phone_and_follows_the_dark(
    finished: Path, serve: Callable[..., Any], open_page: Any, width: int, scheme: str
) -> None:
    page = open_page(serve(finished).address, viewport={"width": width, "height": 844}, color_scheme=scheme)
    page.wait_for_selector(".row[data-learner='learner-3']")
    page.wait_for_selector("[data-piece=rates] canvas")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page must not scroll sideways"
    red, green, blue = map(
        int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
    )
    assert (red + green + blue < 200) is (scheme == "dark")


def test_hostile_names_stay_names(tmp_path: Path, serve: Callable[..., Any], open_page: Any) -> None:
    evil = '"><img src=x onerror=alert(1)>/../..'
    run = SyntheticRun(seconds=30.0)
    run.events = [
        (t, s, replace(e, title=evil) if isinstance(e, ev.RunStarted) else e)
        if getattr(e, "learner", "") != "learner-0"
        else (t, s, replace(e, learner=evil))
        for t, s, e in run.events
    ]
    run.events.append((run.events[-1][0] + 1, "syncer", ev.Warned(evil, evil)))
    page = open_page(serve(run.write(tmp_path)).address)
    until(page, "document.querySelectorAll('#rows .row[data-learner]').length === 5")
    assert evil in shown(page) and page.inner_text("#title") == evil
    assert evil in page.inner_text("#log")
    assert page.locator("img").count() == 0
    href = page.get_attribute("#rows .row:has(a:has-text('onerror')) a", "href")
    assert page.evaluate("(href) => fetch(href).then((answer) => answer.status)", href) == 404


def test_a_thousand_learners(tmp_path: Path, serve: Callable[..., Any], open_page: Any) -> None:
    events: list[tuple[int, str, ev.Event]] = [
        (ORIGIN_NS, "launcher", ev.RunStarted("decoupled", 1000, 10**6, 8, 4, "int4", "int4", 0))
    ]
    for i in range(1000):
        for second in range(1, 6):
            step = ev.LearnerSteps(f"paris-{i}", 1, second, 1, 100, 100 * second, 3.0, SECOND, 0, 0, 0, 0, 0)
            events.append((ORIGIN_NS + second * SECOND + i, f"learner-{i % 8}", step))
    gone = [(ORIGIN_NS + 6 * SECOND, "syncer", ev.MemberChanged("paris-777", 1, "left", "asked to leave"))]
    page = open_page(serve(write_events([*events, *gone], tmp_path)).address)
    until(page, "document.querySelector('#counts').textContent.startsWith('1,000')")
    assert len(shown(page)) < 60, "only what is in sight is in the document"
    page.evaluate("document.getElementById('rows').scrollTop = 1e6")
    page.wait_for_selector(".row[data-learner='paris-999']")
    page.fill("#filter", "paris-777")
    assert shown(page) == ["paris-777"]
    until(page, "document.querySelector('.row[data-learner=\"paris-777\"] canvas').width > 0")


# ---------------------------------------------------------------- a real run


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], RunFolder, str]]:
    """`atoll train --dash`: a real syncer and two real learners, and the address that was printed."""
    folder = RunFolder(tmp_path / "run")
    argv = ["train", "--learners", "2", "--steps", "100000", "--model", "nano", "--batch", "2", "--seq", "32"]
    argv += [
        "--step-ms",
        "30",
        "--eval-every",
        "50",
        "--threads",
        "1",
        "--out",
        str(folder.path),
        "--dash",
        "127.0.0.1:0",
    ]
    log = (tmp_path / "out").open("w")
    process = subprocess.Popen([sys.executable, "-m", "atoll", *argv], stdout=log, stderr=log, text=True)
    deadline_s = time.monotonic() + WAIT_S
    while (found := re.search(r"live page: (\S+)", (tmp_path / "out").read_text())) is None:
        assert process.poll() is None and time.monotonic() < deadline_s, (tmp_path / "out").read_text()
        time.sleep(0.1)
    try:
        yield process, folder, found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def pid_of(folder: RunFolder, id: str) -> int:
    return next(one.pid for one in main_processes(folder) if one.id == id and one.alive)


def test_a_real_run_is_followed_through_the_death_of_a_learner_and_of_the_syncer(
    running: tuple[subprocess.Popen[str], RunFolder, str], open_page: Any
) -> None:
    process, folder, address = running
    page = open_page(address)
    for learner in ("learner-0", "learner-1"):
        page.wait_for_selector(f'.row[data-learner="{learner}"] .state.training', timeout=WAIT_S * 1000)
    os.kill(pid_of(folder, "learner-1"), signal.SIGKILL)
    page.wait_for_selector('.row[data-learner="learner-1"] .state:is(.down, .restarting)', timeout=WAIT_S * 1000)
    until(page, "document.querySelector('#log').textContent.includes('learner-1 killed (SIGKILL)')")
    page.wait_for_selector('.row[data-learner="learner-1"] .state.training', timeout=WAIT_S * 1000)
    assert page.inner_text('.row[data-learner="learner-1"] span:nth-child(7)') == "1"
    os.kill(pid_of(folder, "syncer"), signal.SIGKILL)
    until(page, "document.querySelector('#syncer').textContent.includes('epoch 2')")
    page.wait_for_selector("#syncer-row .row")
    before = int(page.inner_text('.row[data-learner="learner-0"] span:nth-child(3)').replace(",", ""))
    cell = """document.querySelector('.row[data-learner="learner-0"] span:nth-child(3)')"""
    step = f"Number({cell}.textContent.replaceAll(',', ''))"
    until(page, f"{step} > {before}")
    process.send_signal(signal.SIGTERM)
    until(page, "document.querySelector('#link').textContent !== 'live'")
    assert process.wait(WAIT_S) == 128 + signal.SIGTERM, "the page keeps no run from ending"
    assert json.loads(folder.result_file.read_text())["learners"] == 2
