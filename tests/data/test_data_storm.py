"""Seeded storms: learners that step, are cut off, taken for lost, killed, restarted, leave and come back, and a syncer
that is killed. Whatever happens, no sample is left out; and what repeats is what the promises allow."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from data_fakes import FakeLearner, FakeRun, Files, Numbers

import atoll.data
from atoll.data import dry_wait

CHUNK = 6
LENGTHS = (7, 0, 12, 3, 1)


class Seat:
    """One learner id, through all its processes."""

    def __init__(self, storm: Storm, name: str) -> None:
        self.storm = storm
        self.name = name
        self.start()

    def start(self) -> None:
        self.learner = self.storm.run.learner(self.name)
        self.learner.on_warning = self.learner.reconnect  # one that is cut off and out of leases gets its link back
        self.batches: Iterator[Any] = iter(self.storm.make(self.learner))

    def step(self) -> bool:
        """False at the end of the data."""
        batch = next(self.batches, None)
        if batch is None:
            return False
        self.learner.step()
        self.storm.seen.update(batch.tolist())
        return True


class Storm:
    def __init__(self, kind: str, seed: int) -> None:
        self.kind = kind
        self.dice = random.Random(seed)
        self.run = FakeRun()
        self.seen: Counter[int] = Counter()
        self.losses = 0
        self.seats = [Seat(self, name) for name in "abc"]

    def make(self, learner: FakeLearner) -> atoll.data.Loader:
        if self.kind == "map":
            return atoll.data.loader(learner, Numbers(180), batch_size=4, chunk_size=CHUNK, when_dry="wait")
        return atoll.data.stream(learner, Files(LENGTHS), batch_size=4, chunks=40, when_dry="wait")

    def expected(self) -> list[int]:
        return list(range(180)) if self.kind == "map" else Files(LENGTHS).all(40)

    def one_event(self, *, losses: bool) -> None:
        seat = self.dice.choice(self.seats)
        event = self.dice.random()
        if event < 0.75:
            seat.step()
        elif event < 0.80:
            seat.learner.cut_off()
        elif event < 0.87:
            seat.learner.reconnect()
        elif event < 0.92:
            self.run.restart()
        elif event < 0.96 and seat.learner.up:
            seat.learner.leave()
            seat.start()
        elif losses:
            self.losses += 1
            self.run.lose(seat.name)
            if self.dice.random() < 0.5:
                seat.start()

    def heal(self) -> None:
        for seat in self.seats:
            seat.learner.reconnect()
        while sum(seat.step() for seat in self.seats):
            pass
        for seat in self.seats:
            seat.learner.leave()
            seat.start()
            while seat.step():
                pass


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_wait, "DRY_GRACE_S", 0.005)
    monkeypatch.setattr(dry_wait, "SLICE_S", 0.001)
    monkeypatch.setattr(dry_wait, "LINGER_S_MAX", 0.002)


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("seed", range(8))
def test_without_losses_every_sample_is_trained_once(kind: str, seed: int) -> None:
    storm = Storm(kind, seed)
    for _ in range(60):
        storm.one_event(losses=False)
    storm.heal()
    assert sorted(storm.seen.elements()) == sorted(storm.expected())
    status = storm.run.status()
    assert status["done"] == status["chunks"] and status["repeated"] == 0


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("seed", range(100, 112))
def test_with_losses_no_sample_is_left_out(kind: str, seed: int) -> None:
    storm = Storm(kind, seed)
    for _ in range(80):
        storm.one_event(losses=True)
    storm.heal()
    assert set(storm.seen) == set(storm.expected())
    status = storm.run.status()
    assert status["done"] == status["chunks"] and status["in_hand"] == 0
    again = storm.seen.total() - len(storm.expected())
    assert again <= 12 * (status["reissued"] + status["repeated"]), "no more than what was issued again"
