"""Chunks of a data set that can only be read from its beginning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from atoll.data.cutting import END, from_sample
from atoll.errors import ConfigError


class SkimItems:
    """The samples of a Skim by (chunk, position), for ranks that take every n-th of them: a data set for a map-style
    feed. Positions that go up are read on; others start their chunk over."""

    def __init__(self, skim: Skim) -> None:
        self._skim = skim
        self._chunk, self._position = -1, 0
        self._reader: Iterator[Any] = iter(())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chunk": -1, "_reader": iter(())}

    def __getitem__(self, place: tuple[int, int]) -> Any:
        chunk, position = place
        if chunk != self._chunk or position < self._position:
            self._chunk, self._position, self._reader = chunk, 0, self._skim(chunk)
        while True:
            sample = next(self._reader, END)
            if sample is END:
                raise ConfigError(
                    f"chunk {chunk} has no sample {position}: the data set is shorter than samples= says; give its "
                    "true length"
                )
            self._position += 1
            if self._position > position:
                return sample


class Skim:
    """`skim(number)` gives the samples of one chunk: it reads on from where it is, past everything in between. Going
    back, or on to another epoch, starts over, with the data's own `skip` where it has one. One reader at a time."""

    def __init__(self, dataset: Iterable[Any], chunk_size: int, samples: int = 0) -> None:
        """`samples` per epoch; 0: not known, and there is one epoch."""
        if isinstance(dataset, Iterator):
            raise ConfigError(
                "atoll.data.iterable got an iterator, which can be read only once; give it an object whose __iter__ "
                "starts from the beginning"
            )
        self._dataset = dataset
        self._chunk_size = chunk_size
        self._samples = samples
        self._reader: Iterator[Any] = iter(())
        self._epoch = -1
        self._position = 0
        self._end: int | None = None
        """Samples of the data set, once its end was seen, where nobody told how many there are."""

    def __getstate__(self) -> dict[str, Any]:
        """A worker process starts its own reader."""
        return {**self.__dict__, "_reader": iter(()), "_epoch": -1}

    def __call__(self, number: int) -> Iterator[Any]:
        chunks = -(-self._samples // self._chunk_size) if self._samples else number + 1
        epoch, index = divmod(number, chunks)
        first = index * self._chunk_size
        end = self._samples or (first + self._chunk_size if self._end is None else self._end)
        return self._read(epoch, first, min(first + self._chunk_size, end))

    def _read(self, epoch: int, first: int, stop: int) -> Iterator[Any]:
        if first >= stop:
            return
        self._seek(epoch, first)
        while self._position < stop:
            sample = next(self._reader, END)
            if sample is END:
                self._end = self._position
                return
            self._position += 1
            yield sample

    def _seek(self, epoch: int, first: int) -> None:
        if epoch != self._epoch or first < self._position:
            set_epoch = getattr(self._dataset, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            self._reader = from_sample(self._dataset, first)
            self._epoch, self._position = epoch, first
        while self._position < first:
            if next(self._reader, END) is END:
                self._end = self._position
                return
            self._position += 1
