"""A run without a network: learners that carry reports to a real LeaseBook, and data sets of numbers."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.utils.data

from atoll.core.leases import LeaseBook
from atoll.data import DataSource
from atoll.observe import events


class FakeRun:
    """The syncer's side: a book and its rows on the tape."""

    def __init__(self) -> None:
        self.book = LeaseBook()
        self.rows: dict[str, Any] = {}
        self.lock = threading.RLock()
        self.generations: dict[str, int] = {}

    def learner(self, name: str) -> FakeLearner:
        """A new process under this id; an older one is fenced."""
        with self.lock:
            generation = self.generations[name] = self.generations.get(name, 0) + 1
            self.book.release(name, before_generation=generation)
            self.keep()
        return FakeLearner(self, name, generation)

    def keep(self) -> None:
        for key, row in self.book.take_dirty().items():
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = json.loads(json.dumps(row))

    def restart(self) -> None:
        """kill -9 of the syncer, and a new one from the tape."""
        with self.lock:
            self.book = LeaseBook()
            self.book.load(self.rows)

    def lose(self, name: str) -> int:
        with self.lock:
            count = self.book.release(name)
            self.keep()
            return count

    def status(self, stream: str = "train") -> dict[str, int]:
        return dict(self.book.status()[stream])


class FakeLearner:
    """Implements `atoll.data.LearnerLike`. Messages go at once and in the caller's thread."""

    eager = True
    """Every step takes so long that a report is due after it."""

    def __init__(self, run: FakeRun, name: str, generation: int) -> None:
        self.run = run
        self.learner_id = name
        self.generation = generation
        self.done = False
        self.up = True
        self.warnings: list[str] = []
        self.on_warning: Callable[[], None] = lambda: None
        self.events = self
        self.sources: list[DataSource] = []
        self.reports = 0
        self._asked: list[DataSource] = []
        self._busy = False

    def emit(self, event: events.Event) -> None:
        if isinstance(event, events.Warned):
            self.warnings.append(event.text)
            self.on_warning()

    def flush(self, timeout_s: float = 2.0) -> bool:
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        pass

    def attach_data(self, source: DataSource) -> None:
        self.sources.append(source)

    def poke_data(self, source: DataSource) -> None:
        if source not in self._asked:
            self._asked.append(source)
        if self._busy or not self.up:
            return
        self._busy = True
        try:
            while self._asked:
                self.talk(self._asked.pop(0))
        finally:
            self._busy = False

    def talk(self, source: DataSource, *, deaf: bool = False) -> None:
        """One report and, unless `deaf`, its answer."""
        message = source.report()
        self.reports += 1
        with self.run.lock:
            answer = self.run.book.report(self.learner_id, self.generation, message)
            self.run.keep()
        if not deaf:
            source.leases(answer)

    def cut_off(self) -> None:
        self.up = False

    def reconnect(self) -> None:
        self.up = True
        for source in self.sources:
            self.poke_data(source)

    def step(self) -> None:
        for source in self.sources:
            source.stepped()
            if self.eager:
                self.poke_data(source)

    def leave(self) -> None:
        for source in self.sources:
            source.leaving()
        if self.up:
            for source in self.sources:
                self.talk(source)
        self.run.lose(self.learner_id)


def train(learner: FakeLearner, batches: Iterator[Any], steps: int | None = None, per_step: int = 1) -> list[int]:
    """Take up to `steps` steps of `per_step` batches; returns the samples whose step is over."""
    seen: list[int] = []
    pending: list[int] = []
    micro = 0
    while steps is None or steps > 0:
        batch = next(batches, None)
        if batch is None:
            break
        pending += [int(value) for value in (batch if hasattr(batch, "__iter__") else [batch])]
        micro += 1
        if micro == per_step:
            learner.step()
            seen += pending
            pending, micro = [], 0
            steps = None if steps is None else steps - 1
    if pending:
        learner.step()
        seen += pending
    return seen


class Numbers(torch.utils.data.Dataset[int]):
    """Map-style: sample i is i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index


class Table(Numbers):
    """As `datasets.Dataset`: rows are dicts, and many are fetched at once."""

    fetched: list[int]

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.fetched = []

    def __getitem__(self, index: int) -> Any:
        return {"number": super().__getitem__(index)}

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert indices, "a batch of nothing must not reach the data set"
        self.fetched.append(len(indices))
        return [self[index] for index in indices]


class Files:
    """open_chunk of a stream: file n holds n * 1000, n * 1000 + 1, ... ; lengths differ, and some are empty."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.opened: list[int] = []

    def __call__(self, number: int) -> Iterator[int]:
        self.opened.append(number)
        return iter(range(number * 1000, number * 1000 + self.lengths[number % len(self.lengths)]))

    def all(self, chunks: int) -> list[int]:
        return [value for number in range(chunks) for value in self(number)]


class Shy(torch.utils.data.IterableDataset[int]):
    """As torch's documentation recommends: splits itself among DataLoader workers. Inside atoll.data it must not."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        step, first = (info.num_workers, info.id) if info is not None else (1, 0)
        return iter(range(first, self.count, step))


class Skippable:
    """As `datasets.IterableDataset`: has skip and set_epoch. Epoch e yields e * 1000 + i."""

    def __init__(self, count: int, first: int = 0, epoch: int = 0, log: list[Any] | None = None) -> None:
        self.count, self.first, self.epoch = count, first, epoch
        self.log: list[Any] = [] if log is None else log

    def skip(self, count: int) -> Skippable:
        self.log.append(("skip", self.epoch, count))
        return Skippable(self.count, self.first + count, self.epoch, self.log)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.log.append(("open", self.epoch, self.first))
        for index in range(self.first, self.count):
            self.log.append(index)
            yield self.epoch * 1000 + index


def hugging_face_rows(count: int) -> Any:
    """A `datasets.Dataset` of numbers, or skip. Its fingerprint is given, because making one pickles parts of pyarrow,
    which some versions of the two cannot."""
    datasets = pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    table = datasets.table.InMemoryTable(pyarrow.table({"number": list(range(count))}))
    return datasets.Dataset(table, fingerprint="numbers")


class SlowLink(FakeLearner):
    """Messages go over a thread of their own, late, and some of them get lost, which the link then notices."""

    eager = False

    def __init__(self, run: FakeRun, name: str, generation: int, seed: int) -> None:
        super().__init__(run, name, generation)
        self._dice = random.Random(seed)
        self._wake = threading.Condition()
        self._open = True
        self.lost = 0
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def poke_data(self, source: DataSource) -> None:
        with self._wake:
            if source not in self._asked:
                self._asked.append(source)
            self._wake.notify()

    def _carry(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._asked or not self._open)
                if not self._open:
                    return
                source = self._asked.pop(0)
            fate = self._dice.random()
            if fate < 0.1:
                source.report()  # lost on its way up
            elif fate < 0.2:
                self.talk(source, deaf=True)
            else:
                self.talk(source)
            if fate < 0.2:  # a new session begins with a report of every source
                self.lost += 1
                for again in self.sources:
                    self.poke_data(again)

    def leave(self) -> None:
        with self._wake:
            self._open = False
            self._wake.notify()
        self._thread.join(10)
        super().leave()
