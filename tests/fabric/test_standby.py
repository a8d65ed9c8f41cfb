"""A standby takes the place of a syncer that is gone, and of one that is frozen, which then ends by itself."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import WAIT_S, SyncerProcess, TrainingThread, _remembered, check_books
from ports import quiet_port
from shards import ShardProcess

from atoll.store.epoch import LOCK_FILE
from atoll.syncer.standby import SILENT_S, FolderWatch

RHYTHM = ("--fragments", "2", "--sync-every", "4", "--overlap", "1", "--learners", "1")


class Standby(SyncerProcess):
    """`atoll syncer --standby`: it is not ready before it has taken over."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._options = folder, (*options, "--standby")
        self._listen = f"127.0.0.1:{quiet_port()}"
        self.address = self._listen
        where = ("--listen", self._listen, "--run-folder", str(folder))
        self.log = (folder / "standby.log").open("a")
        argv = [sys.executable, "-m", "atoll", "syncer", *where, *self._options]
        self.process = _remembered(subprocess.Popen(argv, stdout=self.log, stderr=subprocess.STDOUT))
        self.wait_said("stands by for")

    def output(self) -> str:
        return (self.folder / "standby.log").read_text()

    def wait_said(self, text: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while text not in self.output():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.05)


@pytest.mark.parametrize("shared", ["folder", "snapshots"])  # the latter for a coordinator of a shard
def test_it_takes_over_from_one_that_died_and_then_from_one_that_froze(tmp_path: Path, shared: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    kept: tuple[str, ...] = ()
    shard = ShardProcess(tmp_path / "shard") if shared == "snapshots" else None
    if shard is not None:
        kept = ("--snapshots", str(tmp_path / "snapshots"), "--snapshot-every", "1s", "--shards", shard.address)
    own = second if kept else first
    primary = SyncerProcess(first, *RHYTHM, *kept)
    standby = Standby(own, *RHYTHM, *kept)
    third = None
    learner = TrainingThread(f"{primary.address},{standby.address}", "only", step_s=0.02)
    try:
        before = primary.wait_for(lambda s: min(s["versions"], default=0) >= 2, "two versions of every fragment")
        if kept:
            primary.wait_for(lambda s: any((tmp_path / "snapshots").glob("*/manifest.json")), "a finished snapshot")
        assert standby.process.poll() is None
        before = primary.status()
        primary.kill()
        killed_s = time.monotonic()
        floor = max(before["versions"]) + 2  # one merge of each fragment may have been under way
        try:
            after = standby.wait_for(lambda s: min(s["versions"], default=0) > floor, "the run goes on")
        except AssertionError:
            print(standby.output())
            raise
        print(f"{shared}: {time.monotonic() - killed_s:.1f} s from death to commits of every fragment")
        assert after["run"] == before["run"] and after["epoch"] > before["epoch"]
        check_books(after)
        assert "takes over" in standby.output()
        if kept:
            return
        third = Standby(tmp_path / "first", *RHYTHM, "--standby-after", "3s")
        os.kill(standby.process.pid, signal.SIGSTOP)
        third.wait_said("it is frozen, or out of reach")
        third.wait_said("listens on")
        os.kill(standby.process.pid, signal.SIGCONT)
        assert standby.process.wait(WAIT_S) == 3, standby.output()
    finally:
        learner.stopping.set()
        if shard is not None:
            shard.kill()
        for one in (standby, third):
            if one is not None and one.process.poll() is None:
                os.kill(one.process.pid, signal.SIGCONT)
                one.kill()


def test_nobody_takes_the_place_of_one_that_ended_in_order(tmp_path: Path) -> None:
    primary = SyncerProcess(tmp_path, *RHYTHM)
    standby = Standby(tmp_path, *RHYTHM)
    assert primary.stop() == 0
    assert standby.process.wait(WAIT_S) == 0, standby.output()
    assert "ended in order" in standby.output()


def test_a_standby_that_shares_nothing_is_refused() -> None:
    argv = [sys.executable, "-m", "atoll", "syncer", "--standby", "--listen", "127.0.0.1:0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "shares with the primary" in done.stdout + done.stderr


def test_a_primary_that_cannot_be_asked_is_taken_for_alive_while_it_holds_its_lock(tmp_path: Path) -> None:
    """Its certificate is a file of its own host, which a standby elsewhere does not have."""
    (tmp_path / "state").mkdir()
    told = {"address": "0.0.0.0:7077", "host": "127.0.0.1", "certificate": str(tmp_path / "none.pem"), "names": ["a"]}
    (tmp_path / "syncer.json").write_text(json.dumps(told))
    watch = FolderWatch(tmp_path, after_s=0.05)
    with (tmp_path / "state" / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(3):
            assert asyncio.run(watch.look()) == ""
            time.sleep(0.1)
        assert "give --tls-ca" in watch.doubt
    watch._heard_s -= SILENT_S
    assert "its process is gone" in asyncio.run(watch.look())


def test_a_primary_that_listens_everywhere_is_asked_at_its_host(tmp_path: Path) -> None:
    """0.0.0.0 would be the standby's own machine."""
    syncer = SyncerProcess(tmp_path, *RHYTHM)
    try:
        port = syncer.address.rpartition(":")[2]
        told = json.loads((tmp_path / "syncer.json").read_text())
        (tmp_path / "syncer.json").write_text(json.dumps({**told, "address": f"0.0.0.0:{port}", "host": "127.0.0.9"}))
        watch = FolderWatch(tmp_path, after_s=0.0)
        assert asyncio.run(watch.look()) != ""  # nobody listens at that host
        (tmp_path / "syncer.json").write_text(json.dumps({**told, "address": f"0.0.0.0:{port}", "host": "127.0.0.1"}))
        assert asyncio.run(watch.look()) == ""
    finally:
        syncer.stop()
