"""The store of results: every line is kept, torn ends are mended, damage is refused with its place."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lab_fakes import fake_result

from atoll.errors import ConfigError, StoreError
from atoll.instruments.lab import store as lab_store
from atoll.instruments.lab.store import LINE_BYTES_MAX, ResultStore, RunRecord
from atoll.instruments.lab.study import make_spec

APPENDER = """
import sys
sys.path.insert(0, sys.argv[1])
from lab_fakes import fake_result
from atoll.instruments.lab.store import ResultStore, RunRecord
from atoll.instruments.lab.study import make_spec

store = ResultStore(sys.argv[2])
for seed in range(int(sys.argv[3]), int(sys.argv[3]) + 40):
    store.append(RunRecord.of(fake_result(make_spec({"model": "nano", "seed": seed}))))
"""


def record(seed: int = 0, loss: float | None = None) -> RunRecord:
    return RunRecord.of(fake_result(make_spec({"model": "nano", "seed": seed}), loss), study="s", label="a")


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path / "folder" / "results.jsonl")


def test_what_is_appended_is_read(store: ResultStore) -> None:
    assert store.records() == {}, "there is no file yet"
    kept = [record(0), record(1)]
    for one in kept:
        store.append(one)
    read = store.records()
    assert list(read) == [one.key for one in kept]
    for one in kept:
        assert read[one.key] == replace(one, spec=read[one.key].spec)
        assert make_spec(read[one.key].spec).key == one.key, "a line is enough to run it again"


def test_every_line_is_json_of_its_own(store: ResultStore) -> None:
    store.append(record())
    (line,) = store.path.read_text().splitlines()
    assert json.loads(line)["run"]["loss"] == 1.872 and json.loads(line)["format"] == 1


def test_the_newest_of_a_key_counts(store: ResultStore) -> None:
    for loss in (3.0, 2.5):
        store.append(record(0, loss))
    assert [one.loss for one in store.records().values()] == [2.5]
    assert len(store.path.read_text().splitlines()) == 2


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_that_diverged_is_a_result(store: ResultStore, loss: float) -> None:
    store.append(record(0, loss))
    assert "NaN" not in store.path.read_text() and "Infinity" not in store.path.read_text()
    (read,) = store.records().values()
    assert math.isnan(read.loss) and math.isnan(read.curve[-1][1])


def test_facts_are_found_by_path() -> None:
    one = record()
    assert one.fact("rho") == 0.5 and one.fact("steps.learner-0") == one.facts["steps"]["learner-0"]
    assert all(math.isnan(one.fact(name)) for name in ("none", "steps", "steps.none", "rho.more", "device"))


# ---------------------------------------------------------------- crashes and damage


def test_a_torn_last_line_is_passed_over_and_replaced(store: ResultStore) -> None:
    store.append(record(0))
    whole = store.path.read_bytes()
    store.append(record(1))
    both = store.path.read_bytes()
    for end in range(len(whole) + 1, len(both) - 1, 37):
        store.path.write_bytes(both[:end])
        assert list(store.records()) == [record(0).key]
        store.append(record(2))
        assert list(store.records()) == [record(0).key, record(2).key]
        assert store.path.read_bytes().startswith(whole) and store.path.read_bytes().count(b"\n") == 2


def test_a_last_line_that_only_lacks_its_end_is_kept(store: ResultStore) -> None:
    store.append(record(0))
    store.path.write_bytes(store.path.read_bytes().rstrip())
    assert list(store.records()) == [record(0).key]
    store.append(record(1))
    assert list(store.records()) == [record(0).key, record(1).key]


def test_a_store_of_one_torn_line(store: ResultStore) -> None:
    store.append(record(0))
    for end in (1, 5, 30, 200):
        store.path.write_bytes(store.path.read_bytes()[:end])
        assert store.records() == {}
        store.append(record(0))
        assert list(store.records()) == [record(0).key]


def test_every_flipped_digit_in_the_middle_is_found(store: ResultStore) -> None:
    for seed in range(3):
        store.append(record(seed))
    lines = store.path.read_bytes().splitlines(keepends=True)
    for place in range(0, len(lines[1]) - 1, 53):
        broken = bytearray(lines[1])
        broken[place] ^= 1
        store.path.write_bytes(lines[0] + bytes(broken) + lines[2])
        with pytest.raises(StoreError, match=r"results.jsonl, line 2 is damaged .*; delete it, and"):
            store.records()


@pytest.mark.parametrize(
    "line",
    [b"\n", b"{}\n", b"[]\n", b"null\n", b'{"format": 2}\n', b'{"format": 1}\n', b"\x00\x00\n", b"[" * 100_000 + b"\n"],
    ids=lambda line: repr(line[:20]),
)
def test_lines_that_are_no_results(store: ResultStore, line: bytes) -> None:
    store.append(record())
    store.path.write_bytes(line + store.path.read_bytes())
    with pytest.raises(StoreError, match="line 1 is damaged"):
        store.records()


@pytest.mark.parametrize(
    "text", ["notes\n", "notes\nwithout an end", '{"format": 1}\nnotes', "x" * (LINE_BYTES_MAX + 9)]
)
def test_a_file_of_some_other_kind_is_refused_before_and_after(tmp_path: Path, text: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(text)
    for use in (ResultStore(file).check, lambda: ResultStore(file).append(record())):
        with pytest.raises(StoreError, match="give another --store"):
            use()
        assert file.read_text() == text


def test_zeros_at_the_end_are_of_a_machine_that_lost_power(store: ResultStore) -> None:
    store.append(record())
    with store.path.open("ab") as file:
        file.write(bytes(300))
    store.check()
    store.append(record(seed=1))
    assert len(store.records()) == 2 and b"\0" not in store.path.read_bytes()


def test_checking_a_store_makes_none(tmp_path: Path) -> None:
    ResultStore(tmp_path / "new" / "store.jsonl").check()
    assert not (tmp_path / "new" / "store.jsonl").exists()
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=r"cannot be written .*--store"):
            ResultStore(place).check()


def test_some_other_file_is_not_touched(tmp_path: Path) -> None:
    for text in ("my notes", "x" * (LINE_BYTES_MAX + 10)):
        file = tmp_path / "notes.txt"
        file.write_text(text)
        with pytest.raises(StoreError, match="give another --store"):
            ResultStore(file).append(record())
        assert file.read_text() == text


def test_a_line_that_is_too_long(store: ResultStore) -> None:
    big = replace(record(), facts={"text": "x" * LINE_BYTES_MAX})
    with pytest.raises(StoreError, match="evaluate less often"):
        store.append(big)
    store.append(record())
    store.path.write_bytes(store.path.read_bytes() + b"x" * (LINE_BYTES_MAX + 10))
    with pytest.raises(StoreError, match="line 2 is damaged"):
        store.records()


def test_a_store_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .*--store"):
        ResultStore(tmp_path).records()
    with pytest.raises(ConfigError, match=r"cannot be written .*--store"):
        ResultStore(tmp_path).append(record())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written .*--store"):
        ResultStore(tmp_path / "file" / "store").append(record())


def test_a_claim_that_was_let_go_between_opening_and_locking_is_taken_anew(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the lock is on a file without a name, and a third process can have the same claim."""
    first = store.claim("k")
    assert first.__enter__()
    real = lab_store._try_lock

    def late(descriptor: int) -> bool:
        monkeypatch.setattr(lab_store, "_try_lock", real)
        first.__exit__(None, None, None)
        return real(descriptor)

    monkeypatch.setattr(lab_store, "_try_lock", late)
    with store.claim("k") as mine, store.claim("k") as third:
        assert mine and not third


def test_several_processes_append_at_once(tmp_path: Path) -> None:
    file, here = tmp_path / "results.jsonl", str(Path(__file__).parent)
    command = [sys.executable, "-c", APPENDER, here, str(file)]
    children = [subprocess.Popen([*command, str(first)], env=dict(os.environ)) for first in (0, 1000)]
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    seeds = {one.spec["seed"] for one in ResultStore(file).records().values()}
    assert seeds == {*range(40), *range(1000, 1040)} and file.read_bytes().count(b"\n") == 80
