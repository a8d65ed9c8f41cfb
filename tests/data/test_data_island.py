"""Ranks of one island share their learner's leases: every sample is read once, by one rank, and all keep step."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from data_fakes import FakeRun, Files, Numbers, Skippable
from hypothesis import given
from hypothesis import strategies as st
from ports import quiet_port

import atoll.data
from atoll.data import IslandPlace
from atoll.errors import ConfigError, UnreachableError

RANK = str(Path(__file__).parent / "island_rank.py")
WAIT_S = 120.0


@given(st.lists(st.integers(), max_size=40, unique=True), st.integers(1, 8))
def test_shares_are_all_of_a_batch_and_none_twice(batch: list[int], size: int) -> None:
    shares = [IslandPlace(rank, size, dist.HashStore()).share(batch) for rank in range(size)]
    assert sorted(chain(*shares)) == sorted(batch)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("kind", "workers", "size"), [("map", 0, 2), ("map", 2, 2), ("iterable", 0, 3)])
def test_processes_with_torch_distributed_read_each_sample_once(kind: str, workers: int, size: int) -> None:
    port = quiet_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, RANK, str(rank), str(size), str(port), kind, str(workers)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for rank in range(size)
    ]
    try:
        told = [json.loads(rank.communicate(timeout=WAIT_S)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    seen = [[number for batch in one["batches"] for number in batch] for one in told]
    second = [1000 + number for number in range(95)] if kind == "iterable" else list(range(95))
    lost = 190 % (4 * size) if 190 % (4 * size) < size else 0  # of a last batch with less than one sample each
    everything = sorted([*range(95), *second])
    assert len(list(chain(*seen))) == 190 - lost
    assert set(map(len, (one["batches"] for one in told))) == {len(told[0]["batches"])}
    if not lost:
        assert sorted(chain(*seen)) == everything
    assert told[0]["status"]["done"] == 20 and told[0]["status"]["in_hand"] == 0


def environment() -> dict[str, str]:
    import os

    here = Path(__file__).parent
    paths = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


class Ranks:
    """Two ranks as threads, with a store between them."""

    def __init__(self, run: FakeRun) -> None:
        self.store = dist.HashStore()
        self.leader = run.learner("a")
        self.other = SimpleNamespace(done=False)
        self.read: list[int] = []
        self.error: BaseException | None = None

    def loader(self, rank: int, dataset: Any, **settings: Any) -> Any:
        learner = self.leader if rank == 0 else self.other
        given = {"batch_size": 2, "chunk_size": 10, "ahead_s": 0, **settings}
        return atoll.data.loader(learner, dataset, island=(rank, 2, self.store), **given)

    def follow(self, loader: Any) -> threading.Thread:
        def read() -> None:
            try:
                for batch in loader:
                    self.read += batch.tolist()
            except BaseException as error:
                self.error = error

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread


def test_a_batch_that_was_revoked_reaches_no_rank(run: FakeRun) -> None:
    """Rank 0 alone knows that a chunk went to somebody else; the others must not train on it either."""
    ranks = Ranks(run)
    thread = ranks.follow(ranks.loader(1, Numbers(40), shuffle=False))
    own: list[int] = []
    for number, batch in enumerate(ranks.loader(0, Numbers(40), shuffle=False)):
        own += batch.tolist()
        ranks.leader.step()
        if number == 0:  # the syncer takes the learner for lost, and gives its chunk to another
            run.lose("a")
            taken = run.learner("b")
            other = iter(atoll.data.loader(taken, Numbers(40), shuffle=False, batch_size=10, chunk_size=10, ahead_s=0))
            elsewhere = next(other).tolist()
            ranks.leader.reconnect()
    thread.join(WAIT_S)
    assert ranks.error is None and not thread.is_alive()
    assert not set(own) & set(ranks.read), "no sample twice within the island"
    assert len(own) == len(ranks.read)
    both = sorted(own + ranks.read)
    assert both[:4] == [0, 1, 2, 3] and not set(elsewhere[4:]) & set(both)


def test_islands_that_share_a_store_read_only_their_own_plans(run: FakeRun) -> None:
    """Two learners of one torch.distributed world, and one that comes after another."""
    first, read = Ranks(run), []
    for name in ("one", "two"):
        ranks = Ranks(run)
        ranks.store = first.store
        ranks.leader = run.learner(name)
        ranks.leader.island_name = ranks.other.island_name = name  # type: ignore[attr-defined]
        thread = ranks.follow(ranks.loader(1, Numbers(40), shuffle=False, stream="train", epochs=1))
        own: list[int] = []
        for number, batch in enumerate(ranks.loader(0, Numbers(40), shuffle=False, epochs=1)):
            own += batch.tolist()
            ranks.leader.step()
            if name == "one" and number == 3:
                break
        for source in ranks.leader.sources:
            source.leaving()
            source.dropped()
        ranks.other.done = True
        thread.join(WAIT_S)
        assert ranks.error is None and not thread.is_alive()
        assert not set(own) & set(ranks.read), "no sample twice within the island"
        assert len(own) == len(ranks.read) > 0
        read.append({*own, *ranks.read})
    assert not read[0] & read[1], "what the first island had in hand is not the second's"


def test_the_end_of_the_run_ends_every_rank(run: FakeRun) -> None:
    ranks = Ranks(run)
    thread = ranks.follow(ranks.loader(1, Numbers(1000), epochs=0))
    for number, _ in enumerate(ranks.loader(0, Numbers(1000), epochs=0)):
        ranks.leader.step()
        if number == 5:
            for source in ranks.leader.sources:
                source.dropped()
    thread.join(WAIT_S)
    assert not thread.is_alive() and ranks.error is None
    assert len(ranks.read) in (12, 14)


def test_a_rank_that_is_alone_with_the_board_hears_why(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.data.island.ISLAND_WAIT_S", 1.0)
    ranks = Ranks(run)
    with pytest.raises(UnreachableError, match="rank 0 of this island has said nothing"):
        next(iter(ranks.loader(1, Numbers(10))))
    ranks.other.done = True
    assert list(ranks.loader(1, Numbers(10))) == []


def test_the_learner_says_which_rank_it_is(run: FakeRun) -> None:
    learner = run.learner("a")
    learner.island_rank, learner.island_size = 0, 1
    assert type(atoll.data.loader(learner, Numbers(10))).__name__ == "Loader"
    learner.island_size = 2
    with pytest.raises(ConfigError, match="init_process_group"):
        atoll.data.loader(learner, Numbers(10))


def test_what_an_island_cannot_share_is_refused(run: FakeRun) -> None:
    learner, island = run.learner("a"), (0, 2, dist.HashStore())
    with pytest.raises(ConfigError, match="unknown length"):
        atoll.data.stream(learner, Files((3,)), chunks=2, island=island)
    with pytest.raises(ConfigError, match="samples="):
        atoll.data.iterable(learner, Skippable(10), island=island)
    with pytest.raises(ConfigError, match="ranks count from 0"):
        atoll.data.loader(learner, Numbers(10), island=(2, 2, dist.HashStore()))
