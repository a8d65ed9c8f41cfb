"""Who may ask the page for what. A real server on loopback, and a client that can lie about everything."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from synthetic_run import SyntheticRun

from atoll.dash.pieces import ROW
from atoll.errors import ConfigError, LaunchError
from atoll.launch.running import listed
from atoll.observe import LearnerSteps
from atoll.page import PageOptions, serve_page
from atoll.page.status_feed import StatusFeed, _of_member
from atoll.page.watching import WatchedRun
from atoll.wire import ClientOptions

TOKEN = "a-token-of-more-than-16-letters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = SyntheticRun(seconds=30.0).write(tmp_path_factory.mktemp("runs") / "run")
    (path / "logs").mkdir()
    (path / "logs" / "learner-learner-0.log").write_text("hello")
    (path / "token").write_text("secret")
    (path / "logs" / "learner-link.log").symlink_to(path / "token")
    return path


def api(page: Any, what: str, **more: Any) -> httpx.Response:
    return httpx.get(f"{page.address}api/run/run/{what}", **more)


def test_a_page_on_loopback_answers_to_its_own_names_only(folder: Path, serve: Callable[..., Any]) -> None:
    page = serve(folder)
    assert api(page, "whole").status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example:80", ""):
        assert api(page, "whole", headers={"Host": host}).status_code in (400, 421)


def test_a_cookie_of_any_bytes_is_a_wrong_one(folder: Path, serve: Callable[..., Any]) -> None:
    """A comparison that takes ASCII alone answered with an error of the server's own."""
    page = serve(folder, token=TOKEN)
    for value in (b'atoll_page="\xe9"', b'atoll_page="\\351"', b"atoll_page=", b"\xff"):
        assert api(page, "whole", headers={b"Cookie": value}).status_code == 401


def test_every_answer_forbids_what_the_page_does_not_need(folder: Path, serve: Callable[..., Any]) -> None:
    for path in ("", "static/page.js", "api/runs", "api/run/none/whole"):
        headers = httpx.get(serve(folder).address + path).headers
        assert (
            "default-src 'none'" in headers["content-security-policy"]
            and "unsafe" not in headers["content-security-policy"]
        )
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "name",
    ["..%2f..%2ftoken", "../../token", "link", "%2fetc%2fpasswd", "learner-0.log", "learner-0%00", "..", "", "x" * 300],
)
def test_only_logs_of_the_run_folder_are_read(folder: Path, serve: Callable[..., Any], name: str) -> None:
    page = serve(folder)
    answer = api(page, f"log/{name}")
    assert answer.status_code in (400, 404) and "secret" not in answer.text
    assert api(page, "log/learner-0").text == "hello"


def test_no_file_but_the_pages_own_is_served(folder: Path, serve: Callable[..., Any]) -> None:
    page = serve(folder)
    for name in ("vendored.json", "..%2f__init__.py", "..%2f..%2ferrors.py"):
        assert httpx.get(f"{page.address}static/{name}").status_code == 404


def test_a_token_is_asked_for_and_kept_in_a_cookie(folder: Path, serve: Callable[..., Any]) -> None:
    page = serve(folder, token=TOKEN)
    assert api(page, "whole").status_code == 401
    assert api(page, "whole", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert api(page, "whole", headers={"Authorization": "Bearer wrong"}).status_code == 401
    with httpx.Client() as browser:
        shown = browser.get(page.address_with_token)
        assert shown.status_code == 303 and shown.headers["location"] == "/"
        cookie = shown.headers["set-cookie"]
        assert TOKEN not in cookie and "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert browser.get(page.address).status_code == 200
    assert httpx.get(page.address + "?token=wrong").status_code == 401
    assert httpx.get(f"{page.address[:-1]}//evil.example?token={TOKEN}").headers["location"] == "/evil.example"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"listen": "0.0.0.0:0"}, "give it a token"),
        ({"listen": "0.0.0.0:0", "token": TOKEN}, "in clear"),
        ({"token": "short"}, "at least 16"),
        ({"tls_certificate": "x"}, "both files"),
    ],
)
def test_a_page_that_would_be_open_is_refused(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        serve_page(str(folder), PageOptions(**options))


def test_without_starlette_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.page.options.NEEDED", ("no_such_module",))
    with pytest.raises(ConfigError, match=r"pip install 'atoll\[dash\]'"):
        serve_page(str(folder), PageOptions())


def test_a_port_that_is_taken_is_said(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(LaunchError, match="--listen"):
        serve_page(str(folder), PageOptions(listen=f"127.0.0.1:{taken.getsockname()[1]}"))


# ---------------------------------------------------------------- control


def act(page: Any, body: Any, **headers: str) -> httpx.Response:
    own = {"Origin": page.address.rstrip("/"), "Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    return httpx.post(f"{page.address}api/run/run/control", content=json.dumps(body), headers={**own, **headers})


def test_a_page_only_shows_unless_it_was_told_otherwise(folder: Path, serve: Callable[..., Any]) -> None:
    page = serve(folder, token=TOKEN)
    assert act(page, {"action": "stop"}).status_code == 403
    assert httpx.get(page.address + "api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).json()["control"] == []


def test_control_has_a_token_whether_or_not_one_was_given(folder: Path, serve: Callable[..., Any]) -> None:
    page = serve(folder, control=True)
    assert len(page.options.token) >= 16 and httpx.get(page.address).status_code == 401


@pytest.mark.parametrize("origin", ["https://evil.example", "null", ""])
def test_no_other_page_can_ask_for_control(folder: Path, serve: Callable[..., Any], origin: str) -> None:
    page = serve(folder, token=TOKEN, control=True)
    assert act(page, {"action": "kill", "learner": "learner-0"}, Origin=origin).status_code == 403
    assert act(page, {"action": "stop"}, **{"Content-Type": "text/plain"}).status_code == 415
    assert act(page, {"action": "x" * 5000}).status_code == 413
    assert act(page, ["stop"]).status_code == 400


def test_what_cannot_be_done_is_said_with_a_remedy(folder: Path, serve: Callable[..., Any]) -> None:
    page = serve(folder, token=TOKEN, control=True)
    httpx.get(f"{page.address}api/run/run/whole", headers={"Authorization": f"Bearer {TOKEN}"})
    for body, words in (
        ({"action": "dance"}, "it can drain, add, kill, snapshot, stop"),
        ({"action": "kill", "learner": "nobody"}, "choose one of its rows"),
        ({"action": "kill", "learner": "learner-0"}, "does not run on this machine"),
        ({"action": "stop"}, "stop it where it was started"),
    ):
        answer = act(page, body)
        assert answer.status_code == 409 and words in answer.json()["error"]


def test_a_learner_is_killed_for_a_drill_and_that_is_written_down(folder: Path, serve: Callable[..., Any]) -> None:
    page = serve(folder, token=TOKEN, control=True)
    httpx.get(f"{page.address}api/run/run/whole", headers={"Authorization": f"Bearer {TOKEN}"})
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (folder / "processes.json").write_text(json.dumps([listed("learner", "learner-1", sleeper.pid).entry()]))
    try:
        answer = act(page, {"action": "kill", "learner": "learner-1"})
        assert answer.status_code == 200, answer.text
        assert sleeper.wait(60) == -signal.SIGKILL
    finally:
        sleeper.kill()
        (folder / "processes.json").unlink()
    assert "a drill, from the page" in (folder / "events" / f"page-{os.getpid()}.jsonl").read_text()


# ---------------------------------------------------------------- only an address


def member(tokens: int, state: str = "active") -> dict[str, Any]:
    return {
        "learner": "a",
        "generation": 1,
        "state": state,
        "step": tokens,
        "tokens": tokens,
        "loss": 2.5,
        "behind": 1,
        "up_bytes": 8 * tokens,
        "down_bytes": tokens * 3 // 5,
    } | {"from": "10.0.0.7:4711"}


COMMIT = {"fragment": 0, "version": 5, "round": 7, "time_s": 1, "contributors": ["a"], "tokens": 64}
COMMIT |= {"closed": "all answered", "bytes": 10}


def test_a_run_that_is_known_by_its_address_is_told_by_its_statuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.page.status_feed.ASK_S", 0.0)
    answers = [
        {"run": "r", "epoch": 1, "members": [member(0)], "tokens_processed": 0, "commits": 1, "versions": [1, 0]},
        {"run": "r", "epoch": 1, "members": [member(500)], "tokens_processed": 500, "commits": 9, "versions": [5, 4]}
        | {"rounds": [COMMIT | {"version": 1}, COMMIT], "bytes_up": 7000, "bytes_down": 900},
        {"run": "r", "epoch": 2, "members": [member(500, "away")], "tokens_processed": 500, "commits": 9},
    ]
    run = WatchedRun("r", StatusFeed(ClientOptions("10.0.0.1:1"), ask=lambda options: answers.pop(0)))
    run.look()
    run.close()
    while answers:
        run._take_in()
    whole = json.loads(run.whole())
    assert whole["head"]["epoch"] == 2 and whole["head"]["tokens"] == 500
    assert whole["rows"][0][1] in ("away", "cut off") and whole["places"] == {"a": "10.0.0.7"}
    assert ["9", "versions committed"] in whole["tiles"]
    assert {(fragment, version) for fragment, version, _ in whole["versions"]} == {(0, 5), (1, 4)}
    assert ["a"] in [one["merged"] for one in whole["rounds"]]
    assert whole["closed"] == {"all answered": 1} and whole["bytes"]["up"] == 7000
    row = whole["rows"][0]
    assert [row[ROW.index("up")], row[ROW.index("down")]] == [4000, 300]
    assert ["2.500", "training loss, mean of learners"] in whole["tiles"]
    [steps] = _of_member(member(500) | {"step_ms": 2.0}, member(0), 4 * 10**9)
    assert isinstance(steps, LearnerSteps) and steps.compute_ns == 10**9  # a part of the time, by its own word
    assert any("counts as away" in what for _, what, _ in whole["decisions"])


# ---------------------------------------------------------------- the end of a page


def test_a_page_that_ends_while_somebody_waits_for_an_answer_says_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C with an open browser; the end of a run with --dash."""
    asked, enough = threading.Event(), threading.Event()

    def slow(run: WatchedRun) -> str:
        asked.set()
        enough.wait(60)
        return "{}"

    monkeypatch.setattr(WatchedRun, "whole", slow)
    page = serve_page(str(folder), PageOptions())
    page.start()
    viewer = threading.Thread(target=lambda: _nothing(lambda: api(page, "whole", timeout=60)))
    viewer.start()
    assert asked.wait(60)
    page.stop()
    assert page._thread is not None
    page._thread.join(2)  # by then the request was cut off
    enough.set()
    page._thread.join(60)
    viewer.join(60)
    assert "Traceback" not in capfd.readouterr().err


def _nothing(ask: Callable[[], object]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        ask()
