"""`atoll.data.chunks`, and what `import atoll.data` offers."""

from __future__ import annotations

import subprocess
import sys

import pytest
from data_fakes import FakeRun

import atoll.data
from atoll.errors import ConfigError


def test_the_numbers_come_in_order_and_are_done_with_the_step_after(run: FakeRun) -> None:
    learner = run.learner("a")
    numbers = []
    done = []
    for chunk in atoll.data.chunks(learner, chunks=5, ahead_s=0):
        numbers.append((chunk.number, chunk.start, chunk.repeated))
        learner.step()
        done.append(run.status()["done"])
        learner.step()
    assert numbers == [(number, 0, False) for number in range(5)]
    assert done[:4] == [0, 1, 2, 3]
    assert run.status()["done"] == 5, "the end of the loop is the end of the last one"


def test_a_clean_leave_hands_back_from_where_the_loop_said_it_was(run: FakeRun) -> None:
    first, second = run.learner("a"), run.learner("b")
    chunks = atoll.data.chunks(first, chunks=5, ahead_s=0)
    next(chunks)
    first.step()
    chunk = next(chunks)
    chunk.reached(40)
    first.step()
    chunk.reached(50)  # its step does not happen
    first.leave()
    assert next(chunks, None) is None
    rest = [(chunk.number, chunk.start) for chunk in atoll.data.chunks(second, chunks=5, ahead_s=0)]
    assert rest == [(1, 40), (2, 0), (3, 0), (4, 0)]
    assert run.status() | {"done": 5, "reissued": 0, "repeated": 0} == run.status()


def test_one_that_was_read_to_its_end_is_not_handed_back(run: FakeRun) -> None:
    learner = run.learner("a")
    chunks = atoll.data.chunks(learner, chunks=5, ahead_s=0)
    next(chunks)
    learner.step()
    next(chunks)
    learner.leave()
    assert run.book.fate("train", 0)[0] == "done" and run.book.fate("train", 1)[0] == "pool"


def test_a_revoked_chunk_says_so(run: FakeRun) -> None:
    first, second = run.learner("a"), run.learner("b")
    chunk = next(atoll.data.chunks(first, chunks=5, ahead_s=0))
    first.cut_off()
    run.lose("a")
    other = next(atoll.data.chunks(second, chunks=5, ahead_s=0))
    assert other.number == chunk.number and not chunk.revoked
    first.reconnect()
    assert chunk.revoked and not other.revoked


def test_out_of_leases_a_chunk_comes_again_and_says_so(run: FakeRun) -> None:
    learner = run.learner("a")
    chunks = atoll.data.chunks(learner, chunks=9, ahead_s=0)
    learner.cut_off()
    seen = []
    for _ in range(5):
        chunk = next(chunks)
        learner.step()
        seen.append((chunk.number, chunk.repeated))
    assert seen == [(0, False), (1, False), (0, True), (1, True), (0, True)]
    learner.reconnect()
    assert chunk.revoked, "there is something new"
    assert [chunk.number for chunk in chunks] == [2, 3, 4, 5, 6, 7, 8]


def test_after_the_end_there_is_nothing(run: FakeRun) -> None:
    chunks = atoll.data.chunks(run.learner("a"), chunks=2)
    assert [chunk.number for chunk in chunks] == [0, 1]
    assert next(chunks, None) is None and run.status()["done"] == 2


def test_settings_that_cannot_work(run: FakeRun) -> None:
    for wrong, match in (
        ({"chunks": -1}, "chunks must be a whole number"),
        ({"when_dry": "no"}, "when_dry must be one of"),
        ({"stream": "a/b"}, "cannot be called"),
    ):
        with pytest.raises(ConfigError, match=match):
            atoll.data.chunks(run.learner("a"), **wrong)  # type: ignore[arg-type]


def test_the_exported_names() -> None:
    names = {
        "Chunk",
        "Chunks",
        "DataSource",
        "FollowingLoader",
        "IslandPlace",
        "LearnerLike",
        "Loader",
        "Shards",
        "chunks",
        "iterable",
        "loader",
        "place",
        "shards",
        "stream",
    }
    assert set(atoll.data.__all__) == names
    assert all(getattr(atoll.data, name) is not None for name in names)
    with pytest.raises(AttributeError, match="attribute lodaer"):
        _ = atoll.data.lodaer


def test_importing_it_is_light_and_chunks_need_no_torch() -> None:
    script = "import sys, atoll.data; atoll.data.chunks; atoll.data.place; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
