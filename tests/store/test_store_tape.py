"""Rows and notes: the last synced value of every row comes back whatever happens, and nothing grows without bound."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_helpers import rows_at, rows_batch

from atoll.errors import LocalProtocolError, StoreError
from atoll.instruments.chaos import failpoints
from atoll.store import open_store, read_history, read_state
from atoll.store.run_store import RunStore
from atoll.store.tape import PENDING_BYTES_MAX
from atoll.store.tape_record import MARKER, frame

damage = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


def write_batches(state: Path, count: int) -> None:
    with open_store(state) as store:
        for number in range(1, count + 1):
            store.remember(rows_batch(number))
            store.note({"n": number})


def newest_tape(state: Path) -> Path:
    return max((state / "tape").glob("*.log"))


def rows_after_opening(state: Path) -> dict[str, Any]:
    with open_store(state) as store:
        loaded = store.load()
    return loaded.rows if loaded is not None else {}


def test_rows_come_back_and_notes_are_history(tmp_path: Path) -> None:
    write_batches(tmp_path, 12)
    with open_store(tmp_path) as store:
        loaded = store.load()
        assert loaded is not None and loaded.rows == rows_at(12) and loaded.problems == []
        assert store.rows() == rows_at(12)
        store.remember({"count": None, "new": {"deep": [1, None, 2.5]}})
        assert store.rows()["new"] == {"deep": [1, None, 2.5]} and "count" not in store.rows()
    rows = rows_after_opening(tmp_path)
    assert "count" not in rows and rows["new"] == {"deep": [1, None, 2.5]}
    history = list(read_history(tmp_path))
    assert [record["note"]["n"] for record in history if "note" in record] == list(range(1, 13))
    assert sum("rows" in record for record in history) == 13


def test_what_was_not_synced_is_not_there_and_what_was_is(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.remember(rows_batch(1))
    store.sync()
    store.remember(rows_batch(2))
    assert read_state(tmp_path).rows == rows_at(1)
    store.sync()
    assert read_state(tmp_path).rows == rows_at(2)
    store.close()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_tape_is_a_dictionary_that_survives(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any mix of batches, syncs, rotations and restarts, against a plain dictionary."""
    state = tmp_path_factory.mktemp("model")
    model: dict[str, Any] = {}
    batches = st.dictionaries(st.sampled_from(["a", "b", "ä/ö", 'q"', ""]), st.one_of(st.none(), VALUES), max_size=3)
    store = open_store(state, tape_bytes_max=300, tape_files_kept=2)
    for action in data.draw(st.lists(st.one_of(batches, st.sampled_from(["sync", "restart"])), max_size=25)):
        if action == "sync":
            store.sync()
        elif action == "restart":
            store.close()
            store = open_store(state, tape_bytes_max=300, tape_files_kept=2)
        else:
            assert isinstance(action, dict)
            store.remember(action)
            model.update(action)
            model = {key: value for key, value in model.items() if value is not None}
        assert store.rows() == model
    store.close()
    assert rows_after_opening(state) == model


def test_rotation_bounds_the_disk(tmp_path: Path) -> None:
    with open_store(tmp_path, tape_bytes_max=2000, tape_files_kept=3) as store:
        for number in range(1, 400):
            store.remember(rows_batch(number))
            store.note({"why": "x" * 50})
            store.sync()
            files = list((tmp_path / "tape").iterdir())
            assert len(files) <= 3 and sum(file.stat().st_size for file in files) < 3 * 3000
        assert int(newest_tape(tmp_path).stem.rpartition("-")[2]) > 10  # it did rotate
    assert rows_after_opening(tmp_path) == rows_at(399)


def test_large_rows_do_not_make_every_sync_a_rotation(tmp_path: Path) -> None:
    with open_store(tmp_path, tape_bytes_max=1000) as store:
        store.remember({"large": "x" * 50_000})
        for number in range(1, 40):
            store.remember(rows_batch(number))
            store.sync()
        assert len(list((tmp_path / "tape").iterdir())) <= 3


def test_threads_that_sync_together_share_the_work(tmp_path: Path) -> None:
    """Every caller's rows are durable when its own sync returns, whoever did it."""
    with open_store(tmp_path, tape_bytes_max=3000) as store:
        failures: list[str] = []
        turn = threading.Lock()
        appended = 0

        def work() -> None:
            nonlocal appended
            for _ in range(25):
                with turn:
                    appended += 1
                    mine = appended
                    store.remember(rows_batch(mine))
                store.sync()
                if read_state(tmp_path).rows["count"] < mine:
                    failures.append(f"batch {mine} was not durable")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
    assert rows_after_opening(tmp_path) == rows_at(100)


def test_sizes_are_bounded(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(LocalProtocolError, match="Delete rows that are no longer needed"):
            store.remember({"huge": "x" * (65 << 20)})
        with pytest.raises(LocalProtocolError, match="a note of"):
            store.note({"huge": "x" * (9 << 20)})
        assert store.rows() == {}


def test_a_disk_that_takes_nothing_costs_old_notes_but_no_rows(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        with failpoints.arm("tape.*:1:enospc"):
            for number in range(1, 60):
                store.remember({**rows_batch(number), "bulk": "y" * 100_000})
                store.note({"n": number, "bulk": "x" * 300_000})
                with pytest.raises(OSError, match="No space left"):
                    store.sync()
                assert store._tape._pending_bytes <= PENDING_BYTES_MAX
        store.sync()
        assert read_state(tmp_path).rows == {**rows_at(59), "bulk": "y" * 100_000}
        kept = [record["note"]["n"] for record in read_history(tmp_path) if "note" in record]
        assert kept == list(range(kept[0], 60)) and len(kept) > 5
        base = json.loads(newest_tape(tmp_path).read_bytes()[16:].partition(MARKER)[0])
        assert base["lost_notes"] == kept[0] - 1 > 0


def test_notes_alone_are_bounded_when_nobody_ever_syncs(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for number in range(1, 500):
            store.remember(rows_batch(number))
            store.note({"bulk": "x" * 50_000})
            assert store._tape._pending_bytes <= PENDING_BYTES_MAX
    assert rows_after_opening(tmp_path) == rows_at(499)


# ------------------------------------------------------------ damage


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    write_batches(tmp_path / "state", 9)
    path = newest_tape(tmp_path / "state")
    (tmp_path / "whole").write_bytes(path.read_bytes())
    return path


def whole_of(path: Path) -> bytes:
    return (path.parent.parent.parent / "whole").read_bytes()


def states() -> list[dict[str, Any]]:
    return [rows_at(number) if number else {} for number in range(10)]


@damage
@given(data=st.data())
def test_a_torn_tail_is_cut_off_and_told(tape: Path, data: st.DataObject) -> None:
    whole = whole_of(tape)
    cut = data.draw(st.integers(0, len(whole) - 1))
    tape.write_bytes(whole[:cut] + bytes(data.draw(st.integers(0, 40))))
    loaded = read_state(tape.parent.parent)
    assert loaded.rows in states()
    edges = {0, *(at for at in range(len(whole)) if whole.startswith(MARKER, at))}
    if tape.stat().st_size not in edges:
        assert any("was never finished" in problem for problem in loaded.problems)
        assert any(tape.name in problem for problem in loaded.problems)


@damage
@given(data=st.data())
def test_a_flipped_bit_anywhere_gives_a_state_that_was(tape: Path, data: st.DataObject) -> None:
    torn = bytearray(whole_of(tape))
    torn[data.draw(st.integers(0, len(torn) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    tape.write_bytes(bytes(torn))
    loaded = read_state(tape.parent.parent)
    assert loaded.rows in states()
    assert loaded.problems and all(tape.parent.name in problem for problem in loaded.problems)


def test_a_bad_record_in_the_middle_is_named_and_the_rest_is_not_trusted(tape: Path) -> None:
    whole = whole_of(tape)
    at = whole.index(b'"twin":[5')
    tape.write_bytes(whole[:at] + b"X" + whole[at + 1 :])
    loaded = read_state(tape.parent.parent)
    assert loaded.rows == rows_at(4)
    (problem,) = loaded.problems
    assert tape.name in problem and "is damaged" in problem and "bytes are not trusted" in problem


def test_a_lost_base_falls_back_to_the_file_before(tmp_path: Path) -> None:
    write_batches(tmp_path, 9)
    with open_store(tmp_path):
        pass
    path = newest_tape(tmp_path)
    path.write_bytes(b"\0" * path.stat().st_size)
    with open_store(tmp_path) as store:
        loaded = store.load()
        assert loaded is not None and loaded.rows == rows_at(9)
        assert any("an older file is used" in problem for problem in loaded.problems)
    assert rows_after_opening(tmp_path) == rows_at(9)


def test_when_every_file_is_lost_that_is_said(tmp_path: Path) -> None:
    write_batches(tmp_path, 3)
    for path in (tmp_path / "tape").iterdir():
        path.write_bytes(random.Random(0).randbytes(200))
    loaded = read_state(tmp_path)
    assert loaded.rows == {} and "the rows are lost" in loaded.problems[-1]


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    write_batches(tmp_path, 3)
    newest_tape(tmp_path).write_bytes(frame(b'{"tape":9,"rows":{}}'))
    with pytest.raises(StoreError, match="install a newer atoll"):
        read_state(tmp_path)


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    write_batches(tmp_path, 3)
    left = tmp_path / "tape" / "tape-00001-00000002.log.tmp"
    left.write_bytes(b"half")
    assert rows_after_opening(tmp_path) == rows_at(3)
    assert not left.exists()


def test_the_store_is_a_context_manager_that_syncs(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert isinstance(store, RunStore)
        store.remember({"a": 1})
    assert read_state(tmp_path).rows == {"a": 1}
