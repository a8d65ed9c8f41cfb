"""A disk that is full or fails: nothing that was durable is lost, and durability comes back by itself."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_helpers import arrays_of, meta_of, rows_at, rows_batch, slot_files, versions_of

from atoll.errors import ConfigError
from atoll.instruments.chaos import failpoints
from atoll.store import RunStore, files, open_store, read_state

COMMIT_POINTS = [name for name in failpoints.FAILPOINTS if name.startswith("slot.") and name != "slot.older.delete"]
TAPE_POINTS = [name for name in failpoints.FAILPOINTS if name.startswith("tape.") and name != "tape.drop"]


def commit(store: RunStore, fragment: int, version: int, room: int = 0) -> None:
    store.commit(fragment, version, arrays_of(fragment, version), meta_of(fragment, version, room))


@pytest.mark.parametrize("kind", ["enospc", "eio"])
@pytest.mark.parametrize("point", COMMIT_POINTS)
def test_a_failed_commit_leaves_the_version_before_and_can_be_repeated(tmp_path: Path, point: str, kind: str) -> None:
    with open_store(tmp_path) as store:
        for version in range(3):
            commit(store, 0, version)
        hits, version = 0, 3
        for room in (0, 200_000):  # in place, and into a new file because the meta data has grown
            for repeat_same in (True, False):
                with failpoints.arm(f"{point}:1-1:{kind}"):
                    try:
                        commit(store, 0, version, room)
                    except OSError as error:
                        hits += 1
                        assert error.errno == failpoints.ERRORS[kind] and point in str(error)
                        # Not told durable, so either is right; which one the disk shows must be whole.
                        assert versions_of(read_state(tmp_path))[0] in (version - 1, version)
                        version += 0 if repeat_same else 1
                        commit(store, 0, version, room)
                assert versions_of(read_state(tmp_path)) == {0: version}
                version += 1
        assert hits > 0
        assert not list(tmp_path.glob("epoch-*/*.tmp"))
    with open_store(tmp_path) as store:
        loaded = store.load()
        assert versions_of(loaded) == {0: version - 1} and loaded is not None and loaded.problems == []


def test_after_a_failed_sync_the_bytes_are_written_to_a_new_file(tmp_path: Path) -> None:
    """The pages of a failed sync may be marked clean: only new writes count, and not into the file in doubt."""
    with open_store(tmp_path) as store:
        commit(store, 0, 0)
        commit(store, 0, 1)
        (path,) = slot_files(tmp_path)
        before = path.stat().st_ino
        with failpoints.arm("slot.data.sync:1-1:eio"), pytest.raises(OSError):
            commit(store, 0, 2)
        with path.open("rb") as old:  # keeps the number of the old file from being used again
            commit(store, 0, 2)
            assert path.stat().st_ino != before == os.fstat(old.fileno()).st_ino
        before = path.stat().st_ino
        commit(store, 0, 3)
        assert path.stat().st_ino == before


@pytest.mark.parametrize("point", ["tape.append.mid", "tape.append.sync"])
def test_a_tape_that_failed_is_never_written_again(tmp_path: Path, point: str) -> None:
    with open_store(tmp_path) as store:
        store.remember(rows_batch(1))
        store.sync()
        (doubtful,) = (tmp_path / "tape").iterdir()
        store.remember(rows_batch(2))
        with failpoints.arm(f"{point}:1-1:eio"), pytest.raises(OSError):
            store.sync()
        before = doubtful.read_bytes()
        for number in (3, 4):
            store.remember(rows_batch(number))
            store.sync()
        assert doubtful.read_bytes() == before and len(list((tmp_path / "tape").iterdir())) == 2
        assert read_state(tmp_path).rows == rows_at(4)


@pytest.mark.parametrize("point", TAPE_POINTS)
def test_after_a_failed_sync_the_next_one_makes_everything_durable(tmp_path: Path, point: str) -> None:
    with open_store(tmp_path, tape_bytes_max=400) as store:
        number = hits = 0
        for _ in range(12):
            number += 1
            store.remember(rows_batch(number))
            store.sync()
            with failpoints.arm(f"{point}:1-2:eio"):
                for _ in range(2):
                    number += 1
                    store.remember(rows_batch(number))
                    try:
                        store.sync()
                    except OSError:
                        hits += 1
                        found = read_state(tmp_path).rows
                        assert found in [rows_at(n) for n in range(number - 3, number + 1) if n > 0]
            store.sync()
            assert read_state(tmp_path).rows == rows_at(number)
        assert hits > 0
    assert read_state(tmp_path).rows == rows_at(number) and read_state(tmp_path).problems == []


def test_a_failure_to_delete_is_made_up_for(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        commit(store, 0, 0)
    with open_store(tmp_path, tape_bytes_max=10, tape_files_kept=2) as store:
        store.load()
        with failpoints.arm("slot.older.delete:1:eio,tape.drop:1:eio"):
            commit(store, 0, 1)
            for number in range(1, 5):
                store.remember(rows_batch(number))
                store.sync()
            assert len(slot_files(tmp_path)) == 2 and len(list((tmp_path / "tape").iterdir())) > 2
        commit(store, 0, 2)
        for number in range(5, 10):
            store.remember(rows_batch(number))
            store.sync()
        assert len(slot_files(tmp_path)) == 1 and len(list((tmp_path / "tape").iterdir())) == 2


def test_errors_last_until_the_named_file_exists(tmp_path: Path) -> None:
    until = tmp_path / "space"
    with open_store(tmp_path / "state") as store, failpoints.arm("slot.*:2:enospc", until):
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                commit(store, 0, 0)
        until.touch()
        commit(store, 0, 0)
    assert versions_of(read_state(tmp_path / "state")) == {0: 0}


@pytest.mark.parametrize("text", ["nonsense", "slot.data.mid", "no.such:1", "slot.data.mid:0", "slot.data.mid:1:rain"])
def test_a_plan_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ATOLL_FAILPOINT.* unset it"), failpoints.arm(text):
        pass


def test_short_writes_and_files_without_reservation_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:1000], offset))

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no fallocate here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with open_store(tmp_path) as store:
        for version in range(3):
            commit(store, 0, version)
    assert versions_of(read_state(tmp_path)) == {0: 2}
    assert files.WRITE_BYTES_MAX > 1000


# ------------------------------------------------------------ a real full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "atoll-test", str(mount)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_is_noticed_and_commits_go_on_when_there_is_space(small_disk: Path) -> None:
    state, ballast = small_disk / "state", small_disk / "ballast"
    with open_store(state) as store:
        commit(store, 0, 0)
        commit(store, 0, 1)
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        # The slots were reserved: what has a file can still be committed on a full disk.
        commit(store, 0, 2)
        for fragment in (1, 2):
            with pytest.raises(OSError) as caught:
                commit(store, fragment, 0)
            assert caught.value.errno == errno.ENOSPC
        for number in range(1, 40):
            store.remember({**rows_batch(number), "bulk": "x" * 3000})
            try:
                store.sync()
            except OSError as error:
                assert error.errno == errno.ENOSPC
        assert versions_of(read_state(state)) == {0: 2}
        ballast.unlink()
        commit(store, 1, 0)
        commit(store, 0, 3)
        store.sync()
        loaded = read_state(state)
        assert versions_of(loaded) == {0: 3, 1: 0} and loaded.rows == {**rows_at(39), "bulk": "x" * 3000}
        assert not list(small_disk.rglob("*.tmp"))
