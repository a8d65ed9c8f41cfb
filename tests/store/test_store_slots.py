"""Commits and what comes back: whole versions, the newest good one, and a word about anything that is damaged."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_helpers import SIZE, arrays_of, assert_fragment, commit_any, follow, meta_of, slot_files, versions_of

from atoll.errors import LocalProtocolError, StoreError
from atoll.store import open_store, read_state

damage = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def commit(store, fragment: int, version: int, **meta) -> None:
    store.commit(fragment, version, arrays_of(fragment, version), meta_of(fragment, version, **meta))


def test_a_new_folder_is_empty_and_what_is_committed_comes_back(tmp_path: Path) -> None:
    with open_store(tmp_path / "state") as store:
        assert store.epoch == 1 and store.load() is None
        stats = store.commit(3, 0, arrays_of(3, 0), meta_of(3, 0))
        assert stats.bytes > 3 * 4 * SIZE and stats.write_ns > 0 and stats.sync_ns > 0
        commit(store, 0, 7)
        commit(store, 3, 1)
    with open_store(tmp_path / "state") as store:
        loaded = store.load()
        assert store.epoch == 2 and loaded is not None and loaded.problems == []
        assert versions_of(loaded) == {0: 7, 3: 1}
        assert loaded.fragments[3].epoch == 1


def test_disk_use_is_two_slots_however_many_commits(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        commit(store, 0, 0)
        (path,) = slot_files(tmp_path)
        size = path.stat().st_size
        for version in range(1, 9):
            commit(store, 0, version)
            assert path.stat().st_size == size
        assert size < 2 * (3 * 4 * SIZE + (72 << 10)) + 3 * 8192
    assert versions_of(read_state(tmp_path)) == {0: 8}


def test_meta_data_may_outgrow_its_room(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for version, room in enumerate([0, 100, 90_000, 10, 400_000, 400_000, 5]):
            commit(store, 0, version, room=room)
            found = read_state(tmp_path).fragments[0]
            assert_fragment(found, 0, version)
            assert len(found.meta["room"]) == room


def test_committing_a_version_again_replaces_it_and_older_ones_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        commit(store, 0, 5)
        commit(store, 0, 5, room=3)
        with pytest.raises(LocalProtocolError, match="only go up"):
            commit(store, 0, 4)
    found = read_state(tmp_path).fragments[0]
    assert_fragment(found, 0, 5)
    assert found.meta["room"] == "xxx"


def test_empty_arrays_and_other_types_come_back(tmp_path: Path) -> None:
    arrays = {"none": np.zeros(0, np.float32), "counts": np.arange(5, dtype=np.int64), "flags": np.ones(3, np.uint8)}
    with open_store(tmp_path) as store:
        store.commit(0, 0, arrays, {})
    found = read_state(tmp_path).fragments[0].arrays
    assert all(found[name].dtype == array.dtype and (found[name] == array).all() for name, array in arrays.items())
    assert read_state(tmp_path, only=["flags"]).fragments[0].arrays.keys() == {"flags"}


@pytest.mark.parametrize(
    "array", [np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2], np.zeros(2, np.complex64)]
)
def test_arrays_that_cannot_be_written_in_place_are_refused(tmp_path: Path, array: np.ndarray) -> None:
    with open_store(tmp_path) as store, pytest.raises(LocalProtocolError, match="flat contiguous"):
        store.commit(0, 0, {"theta": array}, {})


def test_fragments_commit_at_the_same_time(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:

        def work(fragment: int) -> None:
            for version in range(10):
                commit(store, fragment, version)

        threads = [threading.Thread(target=work, args=(fragment,)) for fragment in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert versions_of(read_state(tmp_path)) == dict.fromkeys(range(4), 9)


def test_a_living_state_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    """`atoll export` of a run that goes on: every read is a whole version, and versions do not go back."""
    size, stop = 1 << 17, threading.Event()
    with open_store(tmp_path) as store:
        store.commit(0, 0, arrays_of(0, 0, size), meta_of(0, 0))
        prepared = [arrays_of(0, version, size) for version in range(40)]

        def work() -> None:
            version = 0
            while not stop.wait(0.02):
                version += 1
                store.commit(0, version, prepared[version % 40], meta_of(0, version))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            last = reads = 0
            deadline = time.monotonic() + 60.0
            while reads < 15 or (not last and time.monotonic() < deadline):  # a busy disk takes its time for a commit
                reads += 1
                loaded = read_state(tmp_path)
                found = loaded.fragments[0]
                assert found.version >= last
                assert found.arrays["theta"].tobytes() == prepared[found.version % 40]["theta"].tobytes()
                last = found.version
        finally:
            stop.set()
            thread.join()
    assert last > 0


def test_reading_a_folder_that_is_no_state_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no state in"):
        read_state(tmp_path / "nothing")


# ------------------------------------------------------------ damage


@pytest.fixture
def two_versions(tmp_path: Path) -> Path:
    with open_store(tmp_path / "state") as store:
        commit(store, 0, 1)
        commit(store, 0, 2)
    (path,) = slot_files(tmp_path / "state")
    (tmp_path / "whole").write_bytes(path.read_bytes())
    return path


def whole_of(path: Path) -> bytes:
    return (path.parent.parent.parent / "whole").read_bytes()


def check_damaged(path: Path, data: bytes) -> None:
    """Whatever is wrong with the file: a whole version or none, and never the older one without a word."""
    path.write_bytes(data)
    loaded = read_state(path.parent.parent)
    if 0 in loaded.fragments:
        assert_fragment(loaded.fragments[0], 0, loaded.fragments[0].version)
        assert loaded.fragments[0].version == 2 or any(path.name in problem for problem in loaded.problems)
        assert all("is used" in problem for problem in loaded.problems)
    else:
        assert any("no good copy of fragment 0 is left" in problem for problem in loaded.problems)


@damage
@given(data=st.data())
def test_a_flipped_bit_anywhere_costs_at_most_one_version(two_versions: Path, data: st.DataObject) -> None:
    path, whole = two_versions, whole_of(two_versions)
    used = 2 * 4096 + 2 * (3 * 8192 + 4096)
    place = data.draw(st.one_of(st.integers(0, 600), st.integers(4096, 4700), st.integers(0, used)))
    torn = bytearray(whole)
    torn[place] ^= 1 << data.draw(st.integers(0, 7))
    check_damaged(path, bytes(torn))
    assert 0 in read_state(path.parent.parent).fragments  # the other slot is always there


@damage
@given(data=st.data())
def test_a_torn_file_is_a_whole_version_or_none(two_versions: Path, data: st.DataObject) -> None:
    path, whole = two_versions, whole_of(two_versions)
    kind = data.draw(st.sampled_from(["cut", "zeros", "noise"]))
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start, min(len(whole), start + 50_000)))
    if kind == "cut":
        check_damaged(path, whole[:start])
    else:
        filler = bytes(stop - start) if kind == "zeros" else np.random.default_rng(start).bytes(stop - start)
        check_damaged(path, whole[:start] + filler + whole[stop:])


def test_a_damaged_slot_is_named_and_the_other_one_is_used(two_versions: Path) -> None:
    path, whole = two_versions, whole_of(two_versions)
    at = whole.index(arrays_of(0, 2)["momentum"].tobytes())
    path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    with open_store(path.parent.parent) as store:
        loaded = store.load()
    assert versions_of(loaded) == {0: 1}
    assert loaded is not None and loaded.problems == [
        "epoch-00001/fragment-0000.slots: slot 1 (version 2): array 'momentum' does not match its checksum; "
        "version 1 of epoch 1 is used"
    ]


def test_files_that_were_mixed_up_are_not_believed(tmp_path: Path) -> None:
    """A copy under another fragment's name, or in another epoch's folder, is whole but wrong."""
    with open_store(tmp_path) as store:
        commit(store, 0, 1)
    (path,) = slot_files(tmp_path)
    (path.parent / "fragment-0001.slots").write_bytes(path.read_bytes())
    with open_store(tmp_path) as store:
        (tmp_path / "epoch-00002" / path.name).write_bytes(path.read_bytes())
        loaded = store.load()
    assert versions_of(loaded) == {0: 1}
    assert loaded is not None and "it is of epoch 1" in loaded.problems[0]
    assert "it belongs to another fragment" in loaded.problems[1]


def test_a_fragment_that_is_dropped_is_gone_for_good_and_may_come_back_newer(tmp_path: Path) -> None:
    """Of this epoch or an older one; the merges that the log has of it are nobody's."""
    with open_store(tmp_path) as store:
        store.load()
        for version in range(3):
            commit_any(store, 0, version, meta_of(0, version), log=version > 0)
        commit(store, 1, 0)
        store.drop(0)
    assert versions_of(follow(read_state(tmp_path))) == {1: 0}
    with open_store(tmp_path) as store:
        loaded = store.load()
        assert loaded is not None and loaded.problems == [] and versions_of(follow(loaded)) == {1: 0}
        commit(store, 0, 9)
        store.drop(1)  # the older epoch has it
        store.drop(5)  # nobody has
        assert versions_of(read_state(tmp_path)) == {0: 9}
        store.drop(0)
        commit(store, 0, 7)
    assert versions_of(read_state(tmp_path)) == {0: 7}
