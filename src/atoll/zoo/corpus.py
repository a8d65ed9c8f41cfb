"""Corpora as one array of bytes: the Python standard library's source, a file, a folder, or a Hugging Face dataset.

    text  ->  pieces of about 64 KiB  ->  every 50th is held out, the rest is for training
    training bytes  ->  pieces of about 64 KiB, dealt out in turn  ->  disjoint shards, one per learner

Dealing small pieces out in turn gives every learner a bit of everything: a folder sorted by name would otherwise give
one learner all the tests and another all the documentation. Everything is a function of the bytes and the two numbers
(index, count), so every process of a run, and a process that comes back, cuts the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.errors import ConfigError, CorpusError
from atoll.zoo.sources import read_source

PIECE_BYTES = 64 * 1024
"""Some hundred windows of a usual length: joints between pieces are rare, and 30 MB still make 480 pieces."""
HELD_OUT_EVERY = 50
"""One piece in this many is held out: 2%."""

Bytes = NDArray[np.uint8]


def _pieces(data: Bytes, multiple: int) -> list[Bytes]:
    """Cut into equal pieces (to one byte) of about PIECE_BYTES, their number a multiple of `multiple`."""
    count = multiple * max(1, len(data) // (multiple * PIECE_BYTES))
    bounds = [len(data) * i // count for i in range(count + 1)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class Shard:
    """The training bytes of one learner."""

    data: Bytes
    stream: int
    """The learner's own index. Two learners that share a shard differ in it, and so draw different windows."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out bytes, disjoint."""

    train: Bytes
    held_out: Bytes
    source: str
    truncated: bool = False
    """True when the source had more than CORPUS_BYTES_MAX bytes and only the first of them were read."""

    @classmethod
    def from_bytes(cls, data: bytes | Bytes, source: str = "bytes", *, truncated: bool = False) -> Corpus:
        """Cut `data` into the training and the held-out part."""
        array = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
        if len(array) == 0:
            raise CorpusError(f"the corpus {source} is empty; give a file or folder with text, or use --corpus stdlib")
        pieces = _pieces(array, HELD_OUT_EVERY)
        held_out = pieces[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
        train = [p for i, p in enumerate(pieces) if i % HELD_OUT_EVERY != HELD_OUT_EVERY // 2]
        return cls(np.concatenate(train), np.concatenate(held_out), source, truncated)

    def shard(self, index: int, count: int) -> Shard:
        """The part of learner `index` of `count`. A joiner beyond the count shares a shard, with windows of its own."""
        if index < 0 or count < 1:
            raise ConfigError(f"shard {index} of {count} does not exist; the index counts from 0, the count from 1")
        if count == 1:
            return Shard(self.train, index)
        return Shard(np.concatenate(_pieces(self.train, count)[index % count :: count]), index)

    def check(self, shards: int, seq: int) -> None:
        """Raise unless each of `shards` shards and the held-out part hold at least one window of `seq` bytes."""
        smallest = len(self.train) // shards
        if smallest < seq + 1:
            raise CorpusError(
                f"the corpus {self.source} has {len(self.train)} training bytes, {smallest} for each of {shards} "
                f"learners, but a window takes {seq + 1}; use a larger corpus, a smaller --seq or fewer --learners"
            )
        if len(self.held_out) < seq + 1:
            raise CorpusError(
                f"the held-out part of the corpus {self.source} has {len(self.held_out)} bytes, but a window takes "
                f"{seq + 1}; use a corpus of at least {HELD_OUT_EVERY * (seq + 1)} bytes or a smaller --seq"
            )


def load_corpus(spec: str) -> Corpus:
    """`stdlib`, `python`, a file, a folder, or `hf:NAME_OR_PATH[:split[:column]]`."""
    data, truncated = read_source(spec)
    return Corpus.from_bytes(data, spec, truncated=truncated)


class Batches:
    """Endless random windows of a shard: pairs (inputs, targets), each (batch, seq) int64; targets are one byte ahead.

    The batch at a position is a pure function of (seed, stream, position): the same run reads the same data. Where data
    is leased, the stream is the number of the chunk.
    """

    def __init__(self, shard: Shard, *, batch: int, seq: int, seed: int, start: int = 0) -> None:
        if batch < 1 or seq < 1:
            raise ConfigError(f"batch and seq must be at least 1; not {batch} and {seq}")
        if min(seed, start) < 0:
            raise ConfigError(f"seed and start count from 0; not {seed} and {start}")
        if len(shard.data) < seq + 1:
            raise CorpusError(
                f"a shard of {len(shard.data)} bytes holds no window of {seq + 1}; "
                "use a larger corpus, a smaller --seq or fewer --learners"
            )
        self.position = start
        self._data = shard.data
        self._shape = (batch, seq)
        self._key = (seed, shard.stream)

    def at(self, position: int) -> tuple[Tensor, Tensor]:
        """The batch at `position`, without moving there."""
        starts = self.starts(position)
        windows = self._data[starts[:, None] + np.arange(self._shape[1] + 1)]  # (batch, seq + 1)
        tokens = torch.from_numpy(windows.astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def starts(self, position: int) -> NDArray[np.int64]:
        """Where the windows of the batch at `position` begin in the shard."""
        batch, seq = self._shape
        dice = np.random.default_rng([*self._key, position])
        return dice.integers(0, len(self._data) - seq, size=batch)  # the last start leaves seq + 1 bytes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        pair = self.at(self.position)
        self.position += 1
        return pair
