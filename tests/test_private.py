"""What only its owner may read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.core import SyncConfig
from atoll.launch.folder import RunFolder
from atoll.launch.process import Child, Command
from atoll.launch.stored import Attempt
from atoll.learner.environment import find_place
from atoll.private import private_umask, redacted, users_umask
from atoll.syncer import SyncerOptions
from atoll.wire import ClientOptions, ServerOptions

SECRET = "7c1e5b0d44"


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_what_a_launcher_makes_is_private_and_what_it_starts_has_the_users_umask(tmp_path: Path) -> None:
    with private_umask():
        (tmp_path / "ours").touch()
        with private_umask():
            assert users_umask() == 0o022
            code = f"import pathlib; pathlib.Path({str(tmp_path / 'theirs')!r}).touch()"
            child = Child(Command("learner", "one", [sys.executable, "-c", code], {}), tmp_path / "log")
            assert child.wait(60, hurry=lambda: False) == 0
    assert (mode(tmp_path / "ours"), mode(tmp_path / "log"), mode(tmp_path / "theirs")) == (0o600, 0o600, 0o644)
    assert users_umask() == -1
    subprocess.run(["touch", tmp_path / "later"], check=True)
    assert mode(tmp_path / "later") == 0o644


def test_a_learner_that_makes_its_own_run_folder_makes_it_private(tmp_path: Path) -> None:
    place = find_place(address="a:1", learner="one", token=SECRET, tls_ca=None, run_folder=tmp_path / "runs" / "big")
    place.writer().close()
    assert mode(tmp_path / "runs" / "big") == 0o700
    assert [mode(path) for path in (tmp_path / "runs" / "big" / "events").iterdir()] in ([], [0o600])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://someone:pass@host:9/x", "http://***@host:9/x"),
        ('"https://key@host/a" and s3://u:p@b/c', '"https://***@host/a" and s3://***@b/c'),
        ("http://host/a@b and mail me@home: nothing", "http://host/a@b and mail me@home: nothing"),
    ],
)
def test_users_and_passwords_of_addresses_are_left_out(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_no_object_shows_its_token_in_a_traceback(tmp_path: Path) -> None:
    shown = [
        SyncerOptions("127.0.0.1:0", SyncConfig(), token=SECRET, snapshot_options=SECRET),
        ServerOptions(token=SECRET),
        ClientOptions(address="127.0.0.1:1", token=SECRET),
        Command("learner", "one", ["x"], {"ATOLL_TOKEN": SECRET}),
        Attempt(RunFolder(tmp_path), SECRET),
        find_place(address="a:1", learner="one", token=SECRET, tls_ca=None, run_folder=None),
    ]
    assert not [one for one in shown if SECRET in repr(one)]
