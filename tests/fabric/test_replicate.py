"""A standby that is sent everything before it is published loses nothing, and never makes a second history."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import WAIT_S, Proxy, SyncerProcess, TrainingThread, _remembered, check_books
from ports import quiet_port

from atoll.cli.status_view import status_view
from atoll.store import Loaded, open_store
from atoll.syncer import replica as syncer_replica
from atoll.syncer.begin import epoch_of
from atoll.syncer.log_replay import read_committed

AFTER = ("--standby-after", "4s")
RHYTHM = ("--fragments", "4", "--sync-every", "4", "--overlap", "1", "--learners", "1", *AFTER)


class Replica(SyncerProcess):
    """`atoll syncer --replica`: it serves when it has taken over, and not before."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.address = f"127.0.0.1:{quiet_port()}"
        self.start()

    def start(self, said: str = "stands by at") -> None:
        where = ("--listen", self.address, "--run-folder", str(self.folder), "--replica")
        self.log = (self.folder / "syncer.log").open("w")
        argv = [sys.executable, "-m", "atoll", "syncer", *where, *RHYTHM]
        self.process = _remembered(subprocess.Popen(argv, stdout=self.log, stderr=subprocess.STDOUT))
        self.wait_said(said)

    def wait_said(self, text: str) -> None:
        wait_said(self, text)


def wait_said(syncer: SyncerProcess, text: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while text not in syncer.output():
        assert time.monotonic() < deadline, syncer.output()
        time.sleep(0.05)


def told(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [line for path in (folder / "events").glob("syncer-*.jsonl") for line in path.read_text().splitlines()]
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["kind"] == kind]


def published(folder: Path) -> dict[int, int]:
    newest: dict[int, int] = {}
    for event in told(folder, "committed"):
        newest[event["fragment"]] = max(newest.get(event["fragment"], 0), event["version"])
    return newest


def one_history(first: Path, second: Path) -> None:
    """Whatever the older one published, the newer one went on from there: no version was made twice."""
    older = published(first)
    for event in told(second, "committed"):
        assert event["version"] > older[event["fragment"]], (event, older)


def trained(syncer: SyncerProcess, versions: int = 3) -> dict[str, Any]:
    return syncer.wait_for(
        lambda s: min(s["versions"], default=0) >= versions, f"{versions} versions of every fragment"
    )


def goes_on(syncer: SyncerProcess) -> dict[str, Any]:
    floor = max(syncer.wait_for(lambda s: bool(s["versions"]), "versions")["versions"]) + 2
    return trained(syncer, floor)


def same_state(first: Loaded, second: Loaded) -> list[int]:
    """Fragments with the same version, all of whose arrays are then the same, momentum and residual included."""
    same = [f for f, one in first.fragments.items() if second.fragments[f].version == one.version]
    for fragment in same:
        one, other = first.fragments[fragment].arrays, second.fragments[fragment].arrays
        assert one.keys() == other.keys() >= {"theta", "momentum"}
        assert all(np.array_equal(one[name], other[name]) for name in one)
        assert any(one["momentum"])
    return same


def test_a_primary_whose_host_is_lost_loses_nothing(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    standby = Replica(second)
    primary = SyncerProcess(first, *RHYTHM, "--replicate", standby.address)
    learner = TrainingThread(f"{primary.address},{standby.address}", "only", step_s=0.02)
    try:
        before = trained(primary)
        assert "has everything; heard its primary" in str(status_view(standby.status(), time.time()))
        sent = primary.status()["standby"]
        parameters = told(first, "layout_fixed")[0]["parameters"]
        primary.kill()
        killed_s = time.monotonic()
        held, kept = published(first), read_committed(first / "state")
        copy = read_committed(second / "state")
        assert all(copy.fragments[f].version >= version for f, version in held.items())
        assert same_state(kept, copy)
        shutil.rmtree(first)
        after = trained(standby, max(held.values()) + 2)
        print(f"{time.monotonic() - killed_s:.1f} s from death to commits of every fragment (--standby-after 4 s)")
        print(f"{sent['bytes'] / sent['commits']:.0f} bytes per commit of {parameters / 4:.0f} parameters")
        assert after["run"] == before["run"] and after["epoch"] > before["epoch"]
        check_books(after)
        deadline = time.monotonic() + WAIT_S  # events are written a moment after what they tell
        while not any(one["version"] > held[one["fragment"]] for one in told(second, "committed")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert not told(second, "fragment_healed")  # no learner had anything that the standby had not
        assert told(second, "syncer_recovered")[0]["exact"]
        standby.kill()
        standby.start("has taken over before, and goes on")  # the same command again
        assert goes_on(standby)["run"] == before["run"]
    finally:
        learner.stopping.set()
        standby.kill()


def test_a_standby_that_is_away_is_waited_for_and_one_that_left_is_not(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    standby = Replica(tmp_path / "second")
    primary = SyncerProcess(first, *RHYTHM, "--replicate", standby.address)
    learner = TrainingThread(primary.address, "only", step_s=0.02)
    try:
        trained(primary)
        standby.kill()
        status = primary.wait_for(lambda s: "may have taken over" in s["degraded"], "degraded")
        time.sleep(0.5)
        still = primary.status()["versions"]
        learner.wait_steps(50)
        assert primary.status()["versions"] == still and max(published(first).values()) <= max(status["versions"]) + 1
        standby.start()
        standby.wait_said("has everything")
        primary.wait_for(lambda s: not s["degraded"], "the standby is back")
        check_books(goes_on(primary))
        assert [event["level"] for event in told(first, "durability_changed")] == ["degraded", "commit"]
        assert "may have taken over" in primary.output()

        assert standby.stop() == 0
        primary.wait_for(lambda s: "will not take over" in s["degraded"], "degraded again")
        goes_on(primary)
        standby.start()
        standby.wait_said("has everything")
        learner.stop()
        assert primary.stop() == 0
        assert standby.process.wait(WAIT_S) == 0 and "ended in order" in standby.output()
        assert len(same_state(read_committed(first / "state"), read_committed(tmp_path / "second" / "state"))) == 4
    finally:
        learner.stopping.set()
        for one in (primary, standby):
            if one.process.poll() is None:
                one.kill()


def test_a_primary_whose_standby_is_away_can_be_ended(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    standby = Replica(tmp_path / "second")
    kept = ("--snapshots", str(tmp_path / "snapshots"), "--snapshot-every", "1s")
    primary = SyncerProcess(first, *RHYTHM, *kept, "--replicate", standby.address)
    learner = TrainingThread(primary.address, "only", step_s=0.02)
    try:
        trained(primary)
        standby.kill()
        primary.wait_for(lambda s: "may have taken over" in s["degraded"], "degraded")
        learner.wait_steps(20)
        assert primary.stop() == 0, primary.output()
        state = read_committed(first / "state")
        assert all(state.fragments[f].version >= version for f, version in published(first).items())
    finally:
        learner.stopping.set()


@pytest.mark.parametrize("why", ["frozen", "cut off"])
def test_a_primary_that_was_overtaken_ends_and_has_published_nothing(tmp_path: Path, why: str) -> None:
    """The link between both is cut, and learners reach both; or the primary is frozen."""
    first = tmp_path / "first"
    first.mkdir()
    standby = Replica(tmp_path / "second")
    link = Proxy(standby.address)
    primary = SyncerProcess(first, *RHYTHM, "--replicate", link.address)
    learner = TrainingThread(f"{primary.address},{standby.address}", "only", step_s=0.02)
    try:
        trained(primary)
        if why == "frozen":
            os.kill(primary.process.pid, signal.SIGSTOP)
        else:
            link.cut()
        standby.wait_said("listens on")
        if why == "cut off":
            assert "nothing is published until it is back" in primary.output()
            learner.wait_steps(50)
        link.mend()
        os.kill(primary.process.pid, signal.SIGCONT)
        assert primary.wait_dead() == 3, primary.output()
        assert "has taken over this run" in primary.output()
        check_books(goes_on(standby))
        one_history(first, tmp_path / "second")
    finally:
        learner.stopping.set()
        link.stop()
        for one in (primary, standby):
            if one.process.poll() is None:
                os.kill(one.process.pid, signal.SIGCONT)
                one.kill()


def test_a_primary_that_may_go_on_does_and_ends_when_it_sees_its_standby_again(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    standby = Replica(tmp_path / "second")
    link = Proxy(standby.address)
    primary = SyncerProcess(first, *RHYTHM, "--replicate", link.address, "--replicate-or-go-on")
    learner = TrainingThread(primary.address, "only", step_s=0.02)
    try:
        trained(primary)
        link.cut()
        primary.wait_for(lambda s: "as it was told to" in s["degraded"], "it goes on")
        goes_on(primary)
        standby.wait_said("listens on")
        link.mend()
        assert primary.wait_dead() == 3, primary.output()
    finally:
        learner.stopping.set()
        link.stop()
        standby.kill()


def test_a_standby_of_another_run_refuses(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "other").mkdir()
    standby = Replica(tmp_path / "second")
    primary = SyncerProcess(tmp_path / "first", *RHYTHM, "--replicate", standby.address)
    learner = TrainingThread(primary.address, "only", step_s=0.02)
    try:
        run = trained(primary, 1)["run"]
        primary.kill()
        where = ("--listen", f"127.0.0.1:{quiet_port()}", "--run-folder", str(tmp_path / "other"))
        argv = [sys.executable, "-m", "atoll", "syncer", *where, *RHYTHM, "--replicate", standby.address]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode not in (0, 3), done.stdout
        assert f"holds run {run}" in done.stdout + done.stderr or f"syncer of run {run}" in done.stdout + done.stderr
    finally:
        learner.stopping.set()
        standby.kill()


def test_a_standby_that_took_over_before_the_run_began_never_follows_again(tmp_path: Path) -> None:
    """It forgot that it leads with all else of a run without versions, and followed the older primary after a restart:
    both served (draw 7, seed 455)."""
    (tmp_path / "first").mkdir()
    standby = Replica(tmp_path / "second")
    try:
        primary = SyncerProcess(tmp_path / "first", *RHYTHM, "--replicate", standby.address)
        standby.wait_said("has everything")
        primary.kill()
        standby.wait_said("listens on")
        standby.stop()
        standby.start("has taken over before, and goes on")
    finally:
        standby.kill()


def test_the_epoch_of_a_run_that_never_began_is_above_that_of_the_primary_whose_place_is_taken(tmp_path: Path) -> None:
    """Learners must never see an epoch twice (draw 7, seed 865)."""

    async def take_over() -> None:
        with open_store(tmp_path) as store:
            replica = syncer_replica.StandbyReplica(store, after_s=4.0, say=print)
            await replica._keep_row(epoch=9, ready=True)
            assert not await replica.take_over()

    asyncio.run(take_over())
    epochs = [9]
    for _ in range(3):
        with open_store(tmp_path) as store:
            syncer_replica.mark_led(store)
            syncer_replica.forget_unbegun(store)
            epochs.append(epoch_of(store, None, None, take_over=False))
    assert epochs == sorted({*epochs}), "each above the one before"


def test_a_standby_that_was_frozen_itself_does_not_take_its_primary_for_gone(tmp_path: Path) -> None:
    async def look() -> None:
        with open_store(tmp_path) as store:
            replica = syncer_replica.StandbyReplica(store, after_s=4.0, say=print)
            replica._heard_s -= 5.0
            assert replica.gone() == ""  # it does not have everything
            replica.row["ready"] = True
            assert "not been heard for 5 s" in replica.gone()
            replica._looked_s -= 5.0
            assert replica.gone() == "" and replica.gone() == ""

    asyncio.run(look())


def test_a_standby_whose_disk_is_full_takes_over_when_there_is_room(tmp_path: Path) -> None:
    """It ended with a traceback, and nobody served. (Draw 6, seed 15.)"""

    async def take_over() -> list[str]:
        said: list[str] = []
        with open_store(tmp_path) as store:
            replica = syncer_replica.StandbyReplica(store, after_s=0.0, say=said.append)
            replica.row["ready"] = True
            full, sync = [OSError(28, "No space left on device")] * 2, store.sync

            def write() -> None:
                if full:
                    raise full.pop()
                sync()

            store.sync = write  # type: ignore[method-assign]
            assert await syncer_replica.watch_primary(replica, asyncio.Event(), said.append)
            assert replica.row["led"] and not full
        return said

    said = asyncio.run(take_over())
    assert len(said) == 2 and "takes over" in said[0] and "look at its disk" in said[1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--replica",), "give --run-folder"),
        (("--replicate", "127.0.0.1:1", "--run-folder", "run", "--durability", "interval"), "--durability commit"),
        (("--replica", "--replicate", "127.0.0.1:1", "--run-folder", "run"), "nothing to send"),
        (("--replica", "--shards", "127.0.0.1:1", "--run-folder", "run"), "fragments are elsewhere"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, options: tuple[str, ...], why: str) -> None:
    argv = [sys.executable, "-m", "atoll", "syncer", "--listen", "127.0.0.1:0", *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path)
    assert done.returncode == 2 and why in done.stdout + done.stderr
