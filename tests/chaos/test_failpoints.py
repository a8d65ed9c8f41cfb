"""The failpoints themselves: the environment, the list, and that nothing is paid when it is not set."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import atoll.store
from atoll.instruments.chaos.failpoints import FAILPOINTS, full_disk
from atoll.store import failpoints, open_store, read_state

SCRIPT = """
import sys
import atoll.instruments.chaos.inside
from pathlib import Path
from atoll.store import open_store
with open_store(Path(sys.argv[1])) as store:
    for number in range(1, 6):
        store.remember({"count": number})
        try:
            store.sync()
        except OSError as error:
            print(number, error.errno)
"""


def run(state: Path, plan: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ATOLL_FAILPOINT": plan, **environment}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(state)], env=env, capture_output=True, text=True, timeout=60
    )


def test_the_environment_kills_at_the_hit_it_names(tmp_path: Path) -> None:
    assert run(tmp_path, "tape.append.sync:3").returncode == -signal.SIGKILL
    assert read_state(tmp_path).rows["count"] in (2, 3)


def test_the_environment_makes_a_disk_fail_for_a_while(tmp_path: Path) -> None:
    done = run(tmp_path, "tape.append.*:3-3:enospc")  # each sync of an open file passes two such points
    assert done.returncode == 0 and done.stdout.split() == ["2", "28"], done.stderr
    (tmp_path / "until").touch()
    done = run(tmp_path / "other", "tape.*:1:eio", ATOLL_FAILPOINT_UNTIL=str(tmp_path / "until"))
    assert done.returncode == 0 and done.stdout == ""


def test_a_plan_that_means_nothing_stops_the_process(tmp_path: Path) -> None:
    done = run(tmp_path, "tape.append.sink:1")
    assert done.returncode != 0 and "ATOLL_FAILPOINT='tape.append.sink:1' is not" in done.stderr


def test_the_list_and_the_code_agree() -> None:
    """Each name in the code is in the list; that each in the list is met is what the crash test shows."""
    source = "".join(path.read_text() for path in Path(atoll.store.__file__).parent.glob("*.py"))
    used = set(re.findall(r'hit\("([a-z_.]+)"\)', source)) | set(re.findall(r'"((?:slot|tape)\.[a-z_.]+)"\)', source))
    assert used and used <= set(FAILPOINTS)
    assert len(set(FAILPOINTS)) == len(FAILPOINTS)
    assert {"commit.before_publish", "commit.after_publish"} <= set(FAILPOINTS)


def test_nothing_happens_when_no_plan_is_set() -> None:
    assert not any(failpoints.armed(name) for name in FAILPOINTS)
    for name in FAILPOINTS:
        failpoints.hit(name)


def test_the_store_itself_does_not_look_at_the_environment(tmp_path: Path) -> None:
    plain = SCRIPT.replace("import atoll.instruments.chaos.inside\n", "")
    env = {**os.environ, "ATOLL_FAILPOINT": "tape.append.sync:1", "ATOLL_DISK_FULL_FILE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", plain, str(tmp_path / "state")], env=env, check=True, timeout=60)


def test_trouble_of_ones_own_can_be_installed(tmp_path: Path) -> None:
    class Counting:
        def __init__(self) -> None:
            self.met: list[str] = []

        def hit(self, name: str) -> None:
            self.met.append(name)

        def armed(self, name: str) -> bool:
            return False

    counting = Counting()
    before = failpoints.install(counting)
    try:
        with open_store(tmp_path) as store:
            store.remember({"count": 1})
            store.sync()
    finally:
        assert failpoints.install(before) is counting
    assert "tape.append.sync" in counting.met and set(counting.met) <= set(FAILPOINTS)


def test_a_disk_is_full_while_the_file_exists(tmp_path: Path) -> None:
    state, full = tmp_path / "state", tmp_path / "disk-full"
    arrays = {"theta": np.ones(300, np.float32)}
    with full_disk(full), open_store(state) as store:
        store.commit(0, 1, arrays, {})
        full.touch()
        with pytest.raises(OSError, match="No space left"):
            store.commit(0, 2, arrays, {})
        store.remember({"count": 1})
        with pytest.raises(OSError, match="No space left"):
            store.sync()
        full.unlink()
        store.commit(0, 3, arrays, {})
        store.sync()
    loaded = read_state(state)
    assert loaded.fragments[0].version == 3 and loaded.rows["count"] == 1


def test_the_environment_fills_the_disk_of_a_running_process(tmp_path: Path) -> None:
    (tmp_path / "disk-full").touch()
    done = run(tmp_path / "state", "", ATOLL_DISK_FULL_FILE=str(tmp_path / "disk-full"))
    assert done.returncode != 0 and "No space left on device" in done.stderr
    done = run(tmp_path / "state", "", ATOLL_DISK_FULL_FILE=str(tmp_path / "not-there"))
    assert done.returncode == 0 and done.stdout == "", done.stderr
