"""`atoll.data.loader`: a map-style data set shared among learners that come, go and fail."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

import pytest
from data_fakes import FakeLearner, FakeRun, Numbers, Table, hugging_face_rows, train

import atoll.data
from atoll.data.order import place, shuffled
from atoll.errors import ConfigError, FencedError, LocalProtocolError, UnreachableError

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def make(learner: FakeLearner, count: int = 100, **settings: Any) -> atoll.data.Loader:
    given = {"batch_size": 4, "chunk_size": 10, "ahead_s": 0, **settings}
    return atoll.data.loader(learner, Numbers(count), **given)


def once(count: int, epochs: int = 1) -> list[int]:
    return sorted(list(range(count)) * epochs)


# ---------------------------------------------------------------- one learner


@WORKERS
def test_every_sample_once_per_epoch(run: FakeRun, num_workers: int) -> None:
    learner = run.learner("a")
    loader = make(learner, 95, epochs=2, num_workers=num_workers)
    assert loader.chunks == 20 and loader.chunk_size == 10
    seen = train(learner, iter(loader))
    assert sorted(seen) == once(95, 2)
    assert sorted(seen[:95]) == once(95), "the first epoch is over before the second begins"
    assert seen[:95] != seen[95:] and seen[:95] != once(95)
    status = run.status()
    assert (status["done"], status["in_hand"], status["pool"], status["repeated"]) == (20, 0, 0, 0)
    assert loader.stats() == {"chunks": 20, "samples": 190, "repeated": 0}
    assert learner.warnings == []


def test_batches_are_full_but_the_last(run: FakeRun) -> None:
    learner = run.learner("a")
    sizes = []
    for batch in make(learner, 95):
        sizes.append(len(batch))
        learner.step()
    assert sizes == [4] * 23 + [3]


def test_drop_last_gives_up_the_short_batch_and_its_chunk_is_done(run: FakeRun) -> None:
    learner = run.learner("a")
    seen = train(learner, iter(make(learner, 95, drop_last=True)))
    assert len(seen) == 92 == len(set(seen)) and run.status()["done"] == 10


def test_without_batches_and_without_shuffling(run: FakeRun) -> None:
    learner = run.learner("a")
    assert train(learner, iter(make(learner, 25, batch_size=None, shuffle=False, epochs=2))) == list(range(25)) * 2


def test_the_order_is_the_same_for_the_same_seed_and_known_in_advance(run: FakeRun) -> None:
    orders = [train(learner := FakeRun().learner("a"), iter(make(learner, seed=seed))) for seed in (5, 5, 6)]
    assert orders[0] == orders[1] != orders[2]
    epoch, index = place(0, 10, 5)
    assert orders[0][:10] == [index * 10 + position for position in shuffled(10, (5, epoch, index))]


def test_a_chunk_is_done_only_after_the_step_of_its_last_sample(run: FakeRun) -> None:
    learner = run.learner("a")
    batches = iter(make(learner, chunk_size=8, num_workers=0))
    for done in (0, 0, 1, 1, 2, 2):
        next(batches)
        assert run.status()["done"] == done
        learner.step()
    assert run.status()["done"] == 3


def test_gradient_accumulation_counts_at_the_step(run: FakeRun) -> None:
    learner = run.learner("a")
    batches = iter(make(learner, chunk_size=4))
    next(batches)
    next(batches)
    assert run.status()["done"] == 0
    learner.step()
    assert run.status()["done"] == 2
    assert len(train(learner, batches, per_step=2)) == 92 and run.status()["done"] == 25


def test_a_loop_that_takes_batches_ahead_says_so(run: FakeRun) -> None:
    learner = run.learner("a")
    batches = iter(make(learner, chunk_size=4, lookahead=1))
    first, second = next(batches), next(batches)
    learner.step()
    assert run.status()["done"] == 1, "the second batch is only in the loop's hands"
    assert len(first) == len(second) == 4
    steps = 1
    for _ in batches:
        learner.step()
        steps += 1
    assert (steps, run.status()["done"]) == (24, 24)
    learner.step()
    assert run.status()["done"] == 25


def test_leaving_the_loop_and_starting_over_goes_on(run: FakeRun) -> None:
    learner = run.learner("a")
    loader = make(learner, num_workers=0)
    seen: list[int] = []
    for _ in range(10):
        for _, batch in zip(range(3), loader, strict=False):
            learner.step()
            seen += batch.tolist()
    # zip asks the range first, so that no batch is taken and thrown away
    assert sorted(seen) == once(100)


@pytest.mark.parametrize("persistent", [True, False])
def test_starting_over_with_workers_drops_what_they_had_fetched(run: FakeRun, persistent: bool) -> None:
    learner = run.learner("a")
    loader = make(learner, num_workers=2, persistent_workers=persistent)
    seen = train(learner, iter(loader), steps=3)
    seen += train(learner, iter(loader))
    assert sorted(seen) == once(100)


def test_two_loops_at_a_time_are_an_error(run: FakeRun) -> None:
    loader = make(run.learner("a"))
    batches = iter(loader)
    next(batches)
    with pytest.raises(LocalProtocolError, match="make a second loader with another stream"):
        next(iter(loader))


def test_two_streams_side_by_side(run: FakeRun) -> None:
    learner = run.learner("a")
    text, code = iter(make(learner, stream="text")), iter(make(learner, 50, stream="code"))
    assert sorted(train(learner, text)) == once(100) and sorted(train(learner, code)) == once(50)


def test_the_run_ends_in_the_middle(run: FakeRun) -> None:
    learner = run.learner("a")
    batches = iter(make(learner))
    train(learner, batches, steps=2)
    learner.done = True
    assert next(batches, None) is None


def test_settings_that_cannot_work_are_refused(run: FakeRun) -> None:
    learner = run.learner("a")
    for wrong, match in (
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1; not 0"),
        ({"chunk_size": 0}, "chunk_size must be"),
        ({"epochs": -1}, "epochs must be"),
        ({"num_workers": -1}, "num_workers must be"),
        ({"when_dry": "panic"}, "when_dry must be one of repeat, wait; not 'panic'"),
        ({"sampler": None}, "atoll.data has no setting 'sampler'; beside its own it takes"),
    ):
        with pytest.raises(ConfigError, match=match):
            make(learner, **wrong)
    with pytest.raises(ConfigError, match="empty data set"):
        make(learner, 0)


def test_the_default_chunk_size_shares_small_data_and_bounds_large(run: FakeRun) -> None:
    sizes = {}
    for count in (10, 1024, 100_000, 10**9):
        sizes[count] = atoll.data.loader(run.learner("a"), Numbers(count), stream=f"s{count}").chunk_size
    assert sizes == {10: 16, 1024: 16, 100_000: 98, 10**9: 4096}


# ---------------------------------------------------------------- several learners


@WORKERS
def test_a_clean_leave_in_the_middle_of_a_chunk_is_exact_to_the_sample(run: FakeRun, num_workers: int) -> None:
    first, second = run.learner("a"), run.learner("b")
    batches = iter(make(first, epochs=2, num_workers=num_workers))
    seen = train(first, batches, steps=7)
    next(batches)  # taken, and no step follows
    first.leave()
    assert next(batches, None) is None
    assert len(seen) == 28
    others = train(second, iter(make(second, epochs=2, num_workers=num_workers)))
    assert sorted(seen + others) == once(100, 2)
    assert run.status() | {"done": 20, "reissued": 0, "repeated": 0} == run.status()


@WORKERS
def test_a_loss_repeats_the_unfinished_chunks_and_nothing_else(run: FakeRun, num_workers: int) -> None:
    first, second = run.learner("a"), run.learner("b")
    seen = train(first, iter(make(first, num_workers=num_workers)), steps=6)  # 24 samples: 2 chunks and 4 samples
    assert run.status()["done"] == 2
    lost = run.lose("a")
    assert lost >= 2
    others = train(second, iter(make(second, num_workers=num_workers)))
    counts = Counter(seen + others)
    assert set(counts) == set(range(100))
    assert {value for value, times in counts.items() if times == 2} == set(seen[20:])
    assert max(counts.values()) == 2 and run.status()["done"] == 10 and run.status()["reissued"] == lost


def test_a_restarted_process_gets_the_chunks_of_its_old_one(run: FakeRun) -> None:
    seen = train(first := run.learner("a"), iter(make(first)), steps=6)
    again = run.learner("a")
    assert again.generation == 2
    rest = train(again, iter(make(again)))
    assert set(seen[:20]).isdisjoint(rest) and sorted(seen[:20] + rest) == once(100)


def test_learners_of_different_speed_at_the_same_time(run: FakeRun) -> None:
    seen: dict[str, list[int]] = {}

    def work(name: str, batch_size: int, leaves_after: int | None) -> None:
        learner = run.learner(name)
        batches = iter(make(learner, 600, batch_size=batch_size, epochs=2, ahead_s=0.05))
        seen[name] = train(learner, batches, steps=leaves_after)
        learner.leave()

    threads = [
        threading.Thread(target=work, args=arguments)
        for arguments in (("a", 4, None), ("b", 7, 20), ("c", 3, 50), ("d", 16, None))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    late = run.learner("late")  # what was handed back when the others had already found nothing left
    rest = train(late, iter(make(late, 600, epochs=2)))
    assert sorted(sum(seen.values(), rest)) == once(600, 2)
    assert run.status() | {"done": 120, "in_hand": 0, "pool": 0, "reissued": 0, "repeated": 0} == run.status()


def test_the_syncer_is_killed_and_comes_back_from_its_tape(run: FakeRun) -> None:
    learner = run.learner("a")
    batches = iter(make(learner))
    seen = train(learner, batches, steps=4)
    learner.cut_off()
    seen += train(learner, batches, steps=1)
    run.restart()
    learner.reconnect()
    seen += train(learner, batches)
    assert sorted(seen) == once(100)
    assert run.status() | {"done": 10, "reissued": 0, "repeated": 0} == run.status()


@WORKERS
def test_revoked_chunks_are_dropped(run: FakeRun, num_workers: int) -> None:
    """A learner is taken for lost, another one gets its chunks, and it comes back."""
    first, second = run.learner("a"), run.learner("b")
    batches = iter(make(first, batch_size=5, num_workers=num_workers))
    mine = train(first, batches, steps=3)  # one chunk and a half
    first.cut_off()
    run.lose("a")
    other = iter(make(second, batch_size=5))
    theirs = train(second, other, steps=2)
    assert set(mine[10:]) < set(theirs), "the unfinished chunk, again"
    first.reconnect()  # b has the rest of a's chunks in hand
    assert run.status()["done"] == 2
    mine += train(first, batches)
    theirs += train(second, other)
    counts = Counter(mine + theirs)
    assert set(counts) == set(range(100))
    assert sum(counts.values()) - 100 <= 10, "half a chunk before the loss, and one batch that was under way"
    assert run.status()["done"] == 10


def test_chunks_finished_while_nobody_could_hear_are_not_issued_again(run: FakeRun) -> None:
    learner = run.learner("a")
    batches = iter(make(learner))
    seen = train(learner, batches, steps=2)
    learner.cut_off()
    seen += train(learner, batches, steps=3)  # 20 samples: two chunks, both known to it only
    run.lose("a")
    learner.reconnect()
    assert run.status()["done"] == 2 and run.status()["reissued"] == 0
    assert sorted(seen + train(learner, batches)) == once(100)


# ---------------------------------------------------------------- the link is down


@WORKERS
def test_training_goes_on_from_what_is_in_hand(run: FakeRun, num_workers: int) -> None:
    learner = run.learner("a")
    batches = iter(make(learner, 1000, ahead_s=1e6, num_workers=num_workers))
    seen = train(learner, batches, steps=5)
    learner.cut_off()
    seen += train(learner, batches, steps=20)
    assert len(seen) == len(set(seen)) == 100 and learner.warnings == []
    learner.reconnect()
    assert sorted(seen + train(learner, batches)) == once(1000)


@WORKERS
def test_out_of_leases_the_last_chunks_are_gone_over_again_with_a_warning(run: FakeRun, num_workers: int) -> None:
    learner = run.learner("a")
    loader = make(learner, num_workers=num_workers, batch_size=5)
    batches = iter(loader)
    seen = train(learner, batches, steps=2)
    learner.cut_off()
    seen += train(learner, batches, steps=30)
    assert len(seen) == 160 and len(set(seen)) <= 40, "what was in hand, over and over"
    assert loader.stats()["repeated"] > 100
    assert len(learner.warnings) == 1 and "ran out of leases" in learner.warnings[0]
    learner.reconnect()
    seen += train(learner, batches)
    assert set(seen) == set(range(100))
    assert "has leases again" in learner.warnings[1]
    status = run.status()
    assert (status["done"], status["reissued"], status["repeated"]) == (10, 0, 0), "repeats are not leased"


def test_or_the_loop_waits_if_it_was_told_to(run: FakeRun) -> None:
    learner = run.learner("a")
    loader = make(learner, when_dry="wait")
    batches = iter(loader)
    seen = train(learner, batches, steps=2)
    learner.cut_off()
    learner.on_warning = learner.reconnect
    seen += train(learner, batches)
    assert sorted(seen) == once(100) and loader.stats()["repeated"] == 0
    assert ["waiting" in text for text in learner.warnings] == [True, False]


def test_a_waiting_loop_notices_that_the_run_is_over(run: FakeRun) -> None:
    learner = run.learner("a")
    batches = iter(make(learner, when_dry="wait"))
    learner.cut_off()
    learner.on_warning = lambda: setattr(learner, "done", True)
    assert len(train(learner, batches)) == 20, "the two chunks in hand"


def test_a_waiting_loop_gets_what_ended_its_session(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = run.learner("a")
    batches = iter(make(learner, when_dry="wait"))
    learner.cut_off()

    def fenced(_: FakeLearner) -> bool:
        raise FencedError("fenced", "another process joined as learner 'a'")

    learner.on_warning = lambda: monkeypatch.setattr(FakeLearner, "done", property(fenced), raising=False)
    del learner.done
    monkeypatch.setattr(FakeLearner, "done", False, raising=False)
    with pytest.raises(FencedError, match="another process joined"):
        train(learner, batches)


def test_the_first_lease_is_waited_for_with_a_bound(run: FakeRun) -> None:
    learner = run.learner("a")
    learner.cut_off()
    loader = make(learner, first_lease_s=0.1)
    with pytest.raises(UnreachableError, match=r"no lease of data stream 'train' came within 0.1 s; see that the"):
        next(iter(loader))


def test_the_first_lease_may_be_late(run: FakeRun) -> None:
    learner = run.learner("a")
    learner.cut_off()
    loader = make(learner)
    back = threading.Timer(0.3, learner.reconnect)
    back.start()
    assert sorted(train(learner, iter(loader))) == once(100)
    back.join()


# ---------------------------------------------------------------- data sets of others, and checkpoints


@WORKERS
def test_a_table_that_fetches_many_rows_at_once(run: FakeRun, num_workers: int) -> None:
    learner = run.learner("a")
    table = Table(50)
    seen = []
    for batch in atoll.data.loader(learner, table, batch_size=4, chunk_size=10, num_workers=num_workers):
        seen += batch["number"].tolist()
        learner.step()
    assert sorted(seen) == once(50)
    assert num_workers or table.fetched == [4] * 12 + [2]


def test_a_real_hugging_face_data_set(run: FakeRun) -> None:
    rows = hugging_face_rows(50).with_format("torch")
    learner = run.learner("a")
    seen = []
    for batch in atoll.data.loader(learner, rows, batch_size=4, chunk_size=10):
        seen += batch["number"].tolist()
        learner.step()
    assert sorted(seen) == once(50)


def test_the_state_is_json_and_says_what_is_in_hand(run: FakeRun) -> None:
    learner = run.learner("a")
    loader = make(learner)
    train(learner, iter(loader), steps=4)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["in_hand"] == [[1, 6]] and state["counts"] == {"chunks": 1, "samples": 16, "repeated": 0}
    again = run.learner("a")
    second = make(again)
    second.load_state_dict(state)
    assert second.stats()["samples"] == 16
    rest = train(again, iter(second))
    assert len(rest) == 90 and second.stats()["samples"] == 106, "the chunk in hand begins at its beginning"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 1}, "has seed 0, this loader 1"),
        ({"chunk_size": 5}, "has chunk_size 10, this loader 5"),
        ({"epochs": 2}, "has chunks 10, this loader 20"),
        ({"stream": "other"}, "has stream 'train', this loader 'other'"),
    ],
)
def test_a_state_of_other_data_is_refused(run: FakeRun, change: dict[str, Any], match: str) -> None:
    state = make(run.learner("a")).state_dict()
    with pytest.raises(ConfigError, match=match):
        make(FakeRun().learner("a"), **change).load_state_dict(state)


def test_a_state_that_cannot_be_read_is_refused(run: FakeRun) -> None:
    loader = make(run.learner("a"))
    with pytest.raises(ConfigError, match="format 9; this build reads 1"):
        loader.load_state_dict({"format": 9})
    with pytest.raises(ConfigError, match=r"damaged data state \(KeyError\('counts'\)\); start without"):
        loader.load_state_dict({key: value for key, value in loader.state_dict().items() if key != "counts"})
