"""One syncer writes: the lock, the epoch, and a frozen process that wakes up too late."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_child import FENCED
from store_helpers import arrays_of, meta_of, rows_at, rows_batch, slot_files, versions_of

from atoll.errors import FencedSyncerError, StoreError
from atoll.instruments.chaos.failpoints import arm
from atoll.store import RunStore, failpoints, open_store, read_state, recover
from atoll.store.slots import CommitStats

CHILD = Path(__file__).with_name("store_child.py")


def commit(store: RunStore, fragment: int, version: int) -> CommitStats:
    return store.commit(fragment, version, arrays_of(fragment, version), meta_of(fragment, version))


@contextlib.contextmanager
def child(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(CHILD), *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    guard = threading.Timer(60, process.kill)  # a test that waits for a line must not wait for ever
    guard.start()
    try:
        yield process
    finally:
        guard.cancel()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_until_stopped(process: subprocess.Popen[str]) -> None:
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def test_a_second_process_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    with child("hold", tmp_path) as other:
        assert line(other) == "open"
        with pytest.raises(StoreError, match=rf"process {other.pid} .*--take-over"):
            open_store(tmp_path)
        assert read_state(tmp_path).fragments == {}  # reading needs no lock
        other.kill()
        other.wait()
    with open_store(tmp_path) as store:  # the lock died with its process
        assert store.epoch == 2


def test_the_lock_is_let_go_on_close_and_after_a_failed_opening(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    for point in ("epoch.create", "epoch.rename", "tape.sync"):
        with arm(f"{point}:1:eio"), pytest.raises(OSError, match="failpoint"):
            open_store(tmp_path)
    with open_store(tmp_path) as store:
        assert store.epoch == 5
        assert store.load() is None
    assert {path.name for path in tmp_path.glob("epoch-*")} == {"epoch-00005"}


def test_after_a_take_over_the_lock_belongs_to_the_new_process(tmp_path: Path) -> None:
    with child("hold", tmp_path) as other:
        assert line(other) == "open"
        with open_store(tmp_path, take_over=True) as store:
            assert store.epoch == 2
            with pytest.raises(StoreError, match=f"process {os.getpid()} "):
                open_store(tmp_path)
            other.kill()
            other.wait()
            with pytest.raises(StoreError, match=f"process {os.getpid()} "):
                open_store(tmp_path)  # the death of the old holder changes nothing


def test_a_take_over_fences_a_living_store(tmp_path: Path) -> None:
    old = open_store(tmp_path)
    commit(old, 0, 1)
    new = open_store(tmp_path, take_over=True)
    assert versions_of(new.load()) == {0: 1}
    (path,) = slot_files(tmp_path)
    before = path.read_bytes()
    for attempt in (old.check_epoch, old.sync, lambda: commit(old, 0, 2)):
        with pytest.raises(FencedSyncerError, match=r"epoch 2, process \d+ .* has taken over"):
            attempt()
    assert path.read_bytes() == before  # once it knows, it does not even write
    old.close()
    commit(new, 0, 2)
    new.close()
    assert versions_of(read_state(tmp_path)) == {0: 2}


@pytest.mark.parametrize("point", ["slot.data.mid", "slot.header.mid", "slot.header.sync", "slot.flipped"])
def test_a_frozen_syncer_that_wakes_up_publishes_nothing(tmp_path: Path, point: str) -> None:
    with child("freeze", tmp_path, point) as old:
        assert line(old) == "committed"
        wait_until_stopped(old)
        with open_store(tmp_path, take_over=True) as new:
            loaded = new.load()
            # Frozen after the flip its version was there to be found; before, it was not.
            taken = 4 if point == "slot.flipped" else loaded.fragments[0].version
            assert versions_of(loaded) == {0: taken, 1: 3} and taken in (3, 4)
            commit(new, 0, 5)
            new.remember(rows_batch(2))
            new.remember(rows_batch(3))
            os.kill(old.pid, signal.SIGCONT)
            assert line(old).startswith("fenced: a newer syncer (epoch 2")
            assert old.wait(30) == FENCED
            commit(new, 1, 4)
        again = read_state(tmp_path)
        assert versions_of(again) == {0: 5, 1: 4} and again.rows == rows_at(3)


@pytest.mark.parametrize("committed", [False, True])
def test_a_version_that_a_fenced_syncer_finished_never_comes_to_life(tmp_path: Path, committed: bool) -> None:
    """The new syncer dies before it has committed the fragment itself; the next one must not take what the fenced one
    wrote in between: learners were told that those contributions were not merged."""
    with child("freeze", tmp_path, "slot.data.mid") as old:
        assert line(old) == "committed"
        wait_until_stopped(old)
        with open_store(tmp_path, take_over=True) as new:
            assert versions_of(new.load()) == {0: 3, 1: 3}
            if committed:
                commit(new, 1, 4)
            os.kill(old.pid, signal.SIGCONT)
            assert old.wait(30) == FENCED
    for epoch in (3, 4, 5):  # also through further restarts
        with open_store(tmp_path) as store:
            loaded = store.load()
            assert store.epoch == epoch and loaded is not None
            assert versions_of(loaded) == {0: 3, 1: 4 if committed else 3}
            assert any("its syncer was fenced: epoch" in problem for problem in loaded.problems)
    with open_store(tmp_path) as store:
        store.load()
        commit(store, 0, 4)
    assert versions_of(read_state(tmp_path))[0] == 4 and read_state(tmp_path).problems == []


def test_a_file_that_could_not_be_read_once_is_not_lost_for_ever(tmp_path: Path) -> None:
    """A passing read error at one start must not make the next start refuse the file as if a fenced syncer wrote it."""
    with open_store(tmp_path) as store:
        commit(store, 0, 1)
        commit(store, 0, 2)
    (path,) = slot_files(tmp_path)
    whole = path.read_bytes()
    for damaged in (b"", bytes(4096) + whole[4096:], whole[:4096] + bytes(4096) + whole[8192:]):
        path.write_bytes(damaged)
        with open_store(tmp_path) as store:
            store.load()
        path.write_bytes(whole)
        assert versions_of(read_state(tmp_path)) == {0: 2}


def test_files_of_older_epochs_go_after_the_first_commit_of_a_fragment(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for fragment in range(3):
            commit(store, fragment, 1)
    for _ in range(3):  # starts that commit nothing leave no trace
        with open_store(tmp_path) as store:
            assert versions_of(store.load()) == {0: 1, 1: 1, 2: 1}
    with open_store(tmp_path) as store:
        store.load()
        names = {path.name for path in tmp_path.glob("epoch-*")}
        assert names == {"epoch-00001", "epoch-00005"}
        commit(store, 1, 2)
        assert [path.name for path in slot_files(tmp_path)] == [f"fragment-000{i}.slots" for i in (0, 2, 1)]
        assert versions_of(read_state(tmp_path)) == {0: 1, 1: 2, 2: 1}
        commit(store, 0, 2)
        commit(store, 2, 2)
        assert {path.name for path in tmp_path.glob("epoch-*")} == {"epoch-00005"}
    assert versions_of(read_state(tmp_path)) == {0: 2, 1: 2, 2: 2}


def test_a_good_older_epoch_is_used_when_the_newer_file_is_damaged(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        commit(store, 0, 1)
    (older,) = slot_files(tmp_path)
    kept = older.read_bytes()
    with open_store(tmp_path) as store:
        store.load()
        commit(store, 0, 2)
    older.parent.mkdir(exist_ok=True)
    older.write_bytes(kept)
    slot_files(tmp_path)[-1].write_bytes(b"nothing")
    with open_store(tmp_path) as store:
        loaded = store.load()
    assert versions_of(loaded) == {0: 1}
    assert loaded is not None and "version 1 of epoch 1 is used" in loaded.problems[0]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"epoch": "two"}', None])
def test_a_damaged_epoch_file_does_not_let_the_epoch_go_back(tmp_path: Path, content: bytes | None) -> None:
    with open_store(tmp_path) as store:
        commit(store, 0, 1)
    with open_store(tmp_path) as store:
        store.load()
        commit(store, 0, 2)
        path = tmp_path / "epoch.json"
        path.unlink() if content is None else path.write_bytes(content)
        commit(store, 0, 3)  # still the newest, as the folders show
    with open_store(tmp_path) as store:
        loaded = store.load()
        assert store.epoch == 3 and versions_of(loaded) == {0: 3}
        assert loaded is not None and "epoch.json is" in loaded.problems[0]
        (tmp_path / "epoch.json").write_bytes(b"?")
        with open_store(tmp_path, take_over=True), pytest.raises(FencedSyncerError):
            (tmp_path / "epoch.json").write_bytes(b"?")
            commit(store, 0, 4)


@pytest.mark.parametrize("point", ["tape.create", "tape.write.mid", "tape.sync", "tape.rename", "tape.folder.sync"])
def test_an_opening_that_is_overtaken_is_fenced_and_harms_nothing(tmp_path: Path, point: str) -> None:
    with open_store(tmp_path) as store:
        commit(store, 0, 1)
        store.remember(rows_batch(1))
    with child("open", tmp_path, point) as old:
        wait_until_stopped(old)  # in the middle of its opening, with epoch 2
        with open_store(tmp_path, take_over=True) as new:
            assert versions_of(new.load()) == {0: 1} and new.epoch == 3
            commit(new, 0, 2)
            new.remember(rows_batch(2))
            new.sync()
            os.kill(old.pid, signal.SIGCONT)
            assert line(old).startswith("fenced: a newer syncer (epoch 3")
            assert old.wait(30) == FENCED
            new.remember(rows_batch(3))
    again = read_state(tmp_path)
    assert versions_of(again) == {0: 2} and again.rows == rows_at(3) and again.problems == []


def at(monkeypatch: pytest.MonkeyPatch, point: str, do: Callable[[], object]) -> None:
    """Do something at the first passing of a failpoint."""
    real = failpoints.hit

    def hit(name: str) -> None:
        if name == point:
            monkeypatch.setattr(failpoints, "hit", real)
            do()
        real(name)

    monkeypatch.setattr(failpoints, "hit", hit)


@pytest.mark.parametrize("point", ["slot.data.sync", "slot.rename", "tape.sync", "tape.rename"])
def test_a_write_that_a_newer_syncer_has_cleared_away_is_not_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """An OSError would mean: not durable, but publish it."""
    old = open_store(tmp_path, tape_bytes_max=1)
    at(monkeypatch, point, lambda: open_store(tmp_path, take_over=True).close())
    old.remember(rows_batch(1))
    with pytest.raises(FencedSyncerError, match="epoch 2"):
        commit(old, 0, 1) if point.startswith("slot") else old.sync()
    old.close()
    assert read_state(tmp_path).fragments == {}


def test_a_fenced_syncer_stays_so_when_the_disk_cannot_be_read(tmp_path: Path) -> None:
    old = open_store(tmp_path / "state")
    open_store(tmp_path / "state", take_over=True).close()
    for place in ("state", "elsewhere"):
        with pytest.raises(FencedSyncerError, match=r"epoch (2|unknown)"):
            old.check_epoch()
        if place == "state":
            (tmp_path / "state").rename(tmp_path / "elsewhere")
    old.close()


def test_an_opening_that_is_overtaken_before_it_has_loaded_is_fenced(tmp_path: Path) -> None:
    with open_store(tmp_path) as first:
        commit(first, 0, 1)
    with open_store(tmp_path) as old, open_store(tmp_path, take_over=True) as new:
        with pytest.raises(FencedSyncerError):
            old.load()
        assert versions_of(new.load()) == {0: 1}


def test_a_take_over_while_the_older_syncer_tidies_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first commit after a restart deletes the epoch before it, which the newer syncer has just listed."""
    for fragment in range(2):
        with open_store(tmp_path) as store:
            store.load()
            commit(store, fragment, 1)
    old = open_store(tmp_path)
    old.load()
    with arm("slot.older.delete:1:eio,slot.older.delete:2:eio"):
        for fragment in range(2):
            commit(old, fragment, 2)  # and what comes after it, below, has not been done yet
    assert len(slot_files(tmp_path)) == 4
    real_iterdir, real_claims, late = Path.iterdir, recover._read_claims, [0, 1]

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "epoch-00001" and late == [0, 1]:
            old._delete_older(late.pop(0))  # between the listing of the folders and that of this one
        return real_iterdir(path)

    def read_claims(*arguments: Any) -> Any:
        if late == [1]:
            old._delete_older(late.pop())  # between the listing of the files and their opening
        return real_claims(*arguments)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    monkeypatch.setattr(recover, "_read_claims", read_claims)
    with open_store(tmp_path, take_over=True) as new:
        assert versions_of(new.load()) == {0: 2, 1: 2} and late == []


def test_openings_at_the_same_time_get_different_epochs_and_the_last_one_stands(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        openings = [stack.enter_context(child("open", tmp_path)) for _ in range(4)]
        said = [line(process) for process in openings]
        assert {process.wait(30) for process in openings} <= {0, FENCED}
    found = [re.search(r"(?:^open |this one \(epoch )(\d+)", text) for text in said]
    epochs = [int(match[1]) for match in found if match is not None]
    assert sorted(epochs) == [1, 2, 3, 4]
    assert said[epochs.index(4)] == "open 4"  # whoever came last was hindered by none of the others
