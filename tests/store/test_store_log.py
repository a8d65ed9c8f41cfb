"""The commit log: what follows a slot is found, what was never committed or is of a fenced syncer is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_helpers import arrays_of, commit_any, follow, meta_of, versions_of

from atoll.errors import FencedSyncerError
from atoll.store import RunStore, open_store, read_state


def write(store: RunStore, fragment: int, versions: range, *, slots: tuple[int, ...] = ()) -> None:
    for version in versions:
        commit_any(store, fragment, version, meta_of(fragment, version), log=version not in slots)


def segments(state: Path) -> list[str]:
    return sorted(path.name for path in state.glob("epoch-*/log-*.log"))


def found(state: Path) -> dict[int, int]:
    return versions_of(follow(read_state(state)))


def test_slot_and_log_together_are_the_last_commit(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.load()
        write(store, 0, range(6), slots=(0,))
        write(store, 1, range(4), slots=(0, 3))
    assert found(tmp_path) == {0: 5, 1: 3}
    with open_store(tmp_path) as store:
        loaded = store.load()
        assert loaded is not None and loaded.problems == [] and versions_of(follow(loaded)) == {0: 5, 1: 3}


def test_the_next_epoch_begins_with_a_slot_and_forgets_the_log_before_it(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.load()
        write(store, 0, range(4), slots=(0,))
    with open_store(tmp_path) as store:
        store.load()
        write(store, 0, range(4, 6), slots=(4,))
        assert segments(tmp_path) == ["log-00002-00000001.log"]
    assert found(tmp_path) == {0: 5}


def test_what_a_fenced_syncer_still_appends_never_comes_to_life(tmp_path: Path) -> None:
    old = open_store(tmp_path)
    old.load()
    write(old, 0, range(3), slots=(0,))
    new = open_store(tmp_path, take_over=True)
    loaded = new.load()
    assert loaded is not None and versions_of(follow(loaded)) == {0: 2}
    places = old.log_payloads(0, 3, [("int4", arrays_of(0, 3)["theta"].view("uint8"))])
    with pytest.raises(FencedSyncerError):
        old.log_commit(0, 3, meta_of(0, 3), [1.0], places)
    old._log.commit(0, 3, meta_of(0, 3), [1.0], places)  # it had looked at the epoch a moment before
    new.close()
    assert found(tmp_path) == {0: 2}
    with open_store(tmp_path) as third:
        loaded = third.load()
        assert loaded is not None and versions_of(follow(loaded)) == {0: 2}


def test_segments_go_when_slots_have_all_that_is_in_them(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store._log._segments._bytes_max = 1
        store.load()
        write(store, 0, range(4), slots=(0,))
        write(store, 1, range(2), slots=(0,))
        before = segments(tmp_path)
        write(store, 0, range(4, 5), slots=(4,))
        assert len(segments(tmp_path)) < len(before)
        assert found(tmp_path) == {0: 4, 1: 1}
        write(store, 1, range(2, 3), slots=(2,))
        assert len(segments(tmp_path)) == 1


def test_a_version_that_is_missing_in_between_ends_the_log(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.load()
        write(store, 0, range(2), slots=(0,))
        write(store, 0, range(3, 5))
    assert found(tmp_path) == {0: 1}
