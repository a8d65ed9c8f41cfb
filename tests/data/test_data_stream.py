"""`atoll.data.stream` and `atoll.data.iterable`: chunks that are read whole, here or in DataLoader workers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from data_fakes import FakeLearner, FakeRun, Files, Shy, Skippable, hugging_face_rows, train

import atoll.data
from atoll.errors import ConfigError

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
LENGTHS = (7, 0, 12, 3, 1)


def make(learner: FakeLearner, files: Any = None, **settings: Any) -> atoll.data.Loader:
    given = {"batch_size": 4, "chunks": 15, "ahead_s": 0, **settings}
    return atoll.data.stream(learner, files if files is not None else Files(LENGTHS), **given)


ALL = sorted(Files(LENGTHS).all(15))


# ---------------------------------------------------------------- streams


@WORKERS
def test_every_sample_of_every_chunk_once(run: FakeRun, num_workers: int) -> None:
    learner = run.learner("a")
    sizes = []
    seen = []
    for batch in make(learner, num_workers=num_workers):
        sizes.append(len(batch))
        seen += batch.tolist()
        learner.step()
    assert sorted(seen) == ALL
    assert run.status() | {"done": 15, "in_hand": 0, "pool": 0, "reissued": 0} == run.status()
    assert sum(size < 4 for size in sizes) <= max(1, num_workers), "short ones only at the end of each reader"


def test_a_batch_may_need_many_chunks(run: FakeRun) -> None:
    for num_workers in (0, 2):
        learner = run.learner("a")
        files = Files((1,))
        loader = make(learner, files, chunks=40, batch_size=10, num_workers=num_workers, stream=f"s{num_workers}")
        assert sorted(train(learner, iter(loader))) == sorted(files.all(40))
        assert loader.stats()["repeated"] == 0


@WORKERS
def test_without_an_end_it_goes_on_until_the_run_is_over(run: FakeRun, num_workers: int) -> None:
    learner = run.learner("a")
    batches = iter(make(learner, chunks=0, num_workers=num_workers))
    seen = train(learner, batches, steps=100)
    learner.done = True
    assert next(batches, None) is None
    assert len(seen) == len(set(seen)) == 400


@WORKERS
def test_a_clean_leave_is_exact_to_the_sample(run: FakeRun, num_workers: int) -> None:
    first, second = run.learner("a"), run.learner("b")
    batches = iter(make(first, num_workers=num_workers))
    seen = train(first, batches, steps=6, per_step=2)
    next(batches)
    first.leave()
    others = train(second, iter(make(second)))
    assert sorted(seen + others) == ALL
    assert run.status() | {"done": 15, "reissued": 0, "repeated": 0} == run.status()


@WORKERS
def test_a_loss_repeats_only_what_was_not_finished(run: FakeRun, num_workers: int) -> None:
    first, second = run.learner("a"), run.learner("b")
    seen = train(first, iter(make(first, num_workers=num_workers)), steps=8)
    finished = run.status()["done"]
    run.lose("a")
    others = train(second, iter(make(second, num_workers=num_workers)))
    counts = Counter(seen + others)
    assert sorted(counts) == ALL and max(counts.values()) <= 2
    again = {value // 1000 for value, times in counts.items() if times == 2}
    assert finished > 0 and all(run.book.fate("train", chunk)[1] == 1 for chunk in again)
    assert run.status() | {"done": 15, "repeated": 0} == run.status()


@WORKERS
def test_revoked_chunks_are_not_read_further(run: FakeRun, num_workers: int) -> None:
    first, second = run.learner("a"), run.learner("b")
    files = Files((200,))
    batches = iter(make(first, files, chunks=4, num_workers=num_workers))
    train(first, batches, steps=3)
    first.cut_off()
    run.lose("a")
    others = iter(make(second, files, chunks=4))
    theirs = train(second, others, steps=1)  # holds chunks 0 and 1
    first.reconnect()
    mine = train(first, batches)
    theirs += train(second, others)
    assert sorted(mine) == list(files(2)) + list(files(3)), "nothing more of 0 and 1"
    assert sorted(theirs) == list(files(0)) + list(files(1))
    assert run.status() | {"done": 4, "reissued": 2, "repeated": 0} == run.status()


@WORKERS
def test_out_of_leases_chunks_are_opened_again(run: FakeRun, num_workers: int) -> None:
    learner = run.learner("a")
    loader = make(learner, num_workers=num_workers)
    batches = iter(loader)
    seen = train(learner, batches, steps=2)
    learner.cut_off()
    seen += train(learner, batches, steps=30)
    assert loader.stats()["repeated"] > 0 and "ran out of leases" in learner.warnings[0]
    learner.reconnect()
    seen += train(learner, batches)
    assert sorted(set(seen)) == ALL and run.status() | {"done": 15, "repeated": 0} == run.status()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_second_loop_goes_on_where_the_first_one_was(run: FakeRun, persistent: bool) -> None:
    learner = run.learner("a")
    loader = make(learner, num_workers=2, persistent_workers=persistent)
    seen = train(learner, iter(loader), steps=2)
    seen += train(learner, iter(loader), steps=3)
    seen += train(learner, iter(loader))
    assert sorted(seen) == ALL


def test_workers_that_are_spawned(run: FakeRun) -> None:
    learner = run.learner("a")
    loader = make(learner, num_workers=1, multiprocessing_context="spawn")
    assert sorted(train(learner, iter(loader))) == ALL


def test_an_error_in_a_reader_reaches_the_loop(run: FakeRun) -> None:
    learner = run.learner("a")
    with pytest.raises(TypeError):
        list(make(learner, len))


def test_the_samples_themselves_and_a_collate_of_ones_own(run: FakeRun) -> None:
    learner = run.learner("a")
    assert train(learner, iter(make(learner, chunks=3, batch_size=None))) == Files(LENGTHS).all(3)
    loader = make(learner, chunks=3, batch_size=3, stream="b", collate_fn=lambda samples: torch.tensor(samples) * 2)
    assert [batch.tolist() for batch in loader][:2] == [[0, 2, 4], [6, 8, 10]]


def test_drop_last_counts_the_chunks_as_done(run: FakeRun) -> None:
    learner = run.learner("a")
    assert len(train(learner, iter(make(learner, drop_last=True)))) == len(ALL) // 4 * 4
    assert run.status()["done"] == 15


# ---------------------------------------------------------------- data that can only be read from its beginning


def keep(learner: FakeLearner, dataset: Any, **settings: Any) -> atoll.data.Loader:
    given = {"batch_size": 4, "chunk_size": 10, "ahead_s": 0, **settings}
    return atoll.data.iterable(learner, dataset, **given)


@WORKERS
def test_an_iterable_of_unknown_length_ends_where_it_ends(run: FakeRun, num_workers: int) -> None:
    learner = run.learner("a")
    loader = keep(learner, Shy(95), num_workers=num_workers)
    assert loader.chunks == 0
    assert sorted(train(learner, iter(loader))) == list(range(95)), "though it splits itself among workers"
    status = run.status()
    assert status["in_hand"] == 0 and status["pool"] == 0 and status["done"] >= 10


@WORKERS
def test_two_learners_share_an_iterable(run: FakeRun, num_workers: int) -> None:
    first, second = run.learner("a"), run.learner("b")
    mine = iter(keep(first, Shy(195), num_workers=num_workers))
    theirs = iter(keep(second, Shy(195), num_workers=num_workers))
    seen = train(first, mine, steps=10)
    seen += train(second, theirs, steps=12)
    first.leave()
    seen += train(second, theirs)
    assert sorted(seen) == list(range(195))
    assert run.status() | {"in_hand": 0, "reissued": 0, "repeated": 0} == run.status()


def test_epochs_of_an_iterable_of_known_length(run: FakeRun) -> None:
    learner = run.learner("a")
    source = Skippable(25)
    loader = keep(learner, source, epochs=2, samples=25)
    assert loader.chunks == 6
    assert train(learner, iter(loader)) == list(range(25)) + list(range(1000, 1025))
    assert [entry for entry in source.log if isinstance(entry, tuple)] == [("open", 0, 0), ("open", 1, 0)]


def test_a_chunk_that_comes_back_uses_the_datas_own_skip(run: FakeRun) -> None:
    first, second = run.learner("a"), run.learner("b")
    other = train(first, iter(keep(first, Skippable(60), samples=60)), steps=1)
    source = Skippable(60)
    batches = iter(keep(second, source, samples=60))
    seen = train(second, batches, steps=3)
    first.leave()
    seen += train(second, batches)
    assert sorted(other + seen) == list(range(60))
    assert any(entry[0] == "skip" for entry in source.log if isinstance(entry, tuple))


def test_a_real_hugging_face_iterable(run: FakeRun) -> None:
    rows = hugging_face_rows(50).to_iterable_dataset(num_shards=3)
    learner = run.learner("a")
    seen = []
    for batch in keep(learner, rows, num_workers=2):
        seen += batch["number"].tolist()
        learner.step()
    assert sorted(seen) == list(range(50))


def test_iterable_settings_that_cannot_work(run: FakeRun) -> None:
    learner = run.learner("a")
    with pytest.raises(ConfigError, match="needs its length; give samples="):
        keep(learner, Shy(95), epochs=2)
    with pytest.raises(ConfigError, match="can be read only once"):
        keep(learner, (number for number in range(5)))
