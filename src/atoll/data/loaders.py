"""The loaders that users iterate over: `loader`, `stream` and `iterable`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, default_collate

from atoll.data.cutting import OpenChunk
from atoll.data.dry_wait import FIRST_LEASE_S, WHEN_DRY, DryWait
from atoll.data.feeds import CHUNKS_PER_WORKER, Collate, Feed, FollowFeed, MapFeed, StreamFeed
from atoll.data.island import END, GO, SKIP, Board, Followed, IslandPlace, find_island
from atoll.data.lease_client import AHEAD_S, HOLD_MIN, LeaseClient, SampleCounts
from atoll.data.order import place, shuffled
from atoll.data.seam import LearnerLike
from atoll.data.skim import Skim, SkimItems
from atoll.errors import ConfigError, LocalProtocolError

CHUNKS_PER_EPOCH = 1024
"""The default chunk_size cuts a data set into this many chunks, or more: enough to share among many learners."""
CHUNK_SIZE_MIN = 16
"""The smallest default chunk_size: below it, leases would cost more than they share out."""
CHUNK_SIZE_MAX = 4096
"""The largest default chunk_size: what a loss repeats is part of a chunk."""
STATE_FORMAT = 1
OPTIONS = (
    "multiprocessing_context",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)
"""What is handed on to torch's DataLoader as it is."""


class Loader:
    """Iterate over it once: it goes through all chunks of all epochs that fall to this learner, and ends when nothing
    is left or the run is over. Leaving the loop and starting another goes on where the first one was."""

    def __init__(self, client: LeaseClient, feed: Feed, dry_wait: DryWait, cut: Mapping[str, Any]) -> None:
        self._client = client
        self._feed = feed
        self._dry_wait = dry_wait
        self._cut = dict(cut)
        self._running = False

    def __iter__(self) -> Iterator[Any]:
        if self._running:
            raise LocalProtocolError(
                f"two loops over data stream {self._client.stream!r} at a time; make a second loader with another "
                "stream"
            )
        self._running = True
        self._client.rewind()
        pieces = self._feed.open()
        try:
            yield from self._batches(pieces)
        finally:
            self._running = False
            pieces.close()  # type: ignore[attr-defined]

    def _batches(self, pieces: Iterator[Any]) -> Iterator[Any]:
        client, feed = self._client, self._feed
        empty, dealt, ended = 0, feed.dealt, False
        for piece in pieces:
            if client.over:
                self._tell(END)
                return
            if piece.size:
                self._dry_wait.fed()
                empty = 0
                handed = client.hand(piece.parts)
                self._tell(GO if handed else SKIP)
                if handed:
                    feed.deal()
                    yield piece.data
                    continue
            else:
                client.close(piece.parts)
            feed.deal()
            empty = empty + 1 if feed.dealt == dealt else 0
            dealt = feed.dealt
            if empty >= feed.depth and not ended and not self._dry_wait.idle():
                ended = True
                feed.end()
        client.finish()

    def _tell(self, verdict: str) -> None:
        """The other ranks of an island give their loops a batch when this one does."""
        if self._feed.shared is not None:
            self._feed.shared.decide(verdict)
            if verdict == END:
                self._feed.shared.no_more()

    # ------------------------------------------------------------ what the loop may ask

    @property
    def chunks(self) -> int:
        """Chunks of the stream, over all epochs and learners; 0: no end."""
        return self._client.chunks

    @property
    def chunk_size(self) -> int:
        """Samples per chunk; 0 where the chunks' own readers decide."""
        return int(self._cut.get("chunk_size", 0))

    def stats(self) -> dict[str, int]:
        """Of this process: chunks done, samples handed to the loop, and how many of those were repeats because the
        leases had run out."""
        counts = self._client.counts
        return {"chunks": counts.chunks, "samples": counts.samples, "repeated": counts.repeated}

    def state_dict(self) -> dict[str, Any]:
        """JSON, for a local checkpoint: how the data is cut, the counts, and the chunks in hand with their positions.

        The position of the run is the syncer's; a process that is restarted gets chunks from there. One that it had in
        hand may come back to it or go to another learner, and starts at the beginning of its lease, because nobody
        knows how much of the lost process's progress was merged."""
        return {"format": STATE_FORMAT, "cut": dict(self._cut), **self._client.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the data is cut as it was, and take the counts over."""
        if state.get("format") != STATE_FORMAT:
            text = f"a data state of format {state.get('format')!r}; this build reads {STATE_FORMAT}"
            raise ConfigError(f"{text}; start without the checkpoint")
        now = {"stream": self._client.stream, "chunks": self._client.chunks, **self._cut}
        try:
            before = {"stream": state["stream"], "chunks": state["chunks"], **state["cut"]}
            counts = SampleCounts(*(int(state["counts"][name]) for name in ("chunks", "samples", "repeated")))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"a damaged data state ({error!r}); start without the checkpoint") from error
        for name in sorted({*now, *before}):
            if now.get(name) != before.get(name):
                raise ConfigError(
                    f"the checkpoint's data has {name} {before.get(name)!r}, this loader {now.get(name)!r}; use the "
                    "same data and settings, or start without the checkpoint"
                )
        self._client.counts = counts


class FollowingLoader:
    """The loader of a rank that does not lead its island: the same batches as rank 0's, another share of each."""

    def __init__(self, learner: LearnerLike, feed: FollowFeed, followed: Followed, chunks: int, size: int) -> None:
        self._learner, self._feed, self._followed = learner, feed, followed
        self.chunks, self.chunk_size = chunks, size
        self._samples = 0

    def __iter__(self) -> Iterator[Any]:
        for size, data in self._feed.open():
            if not size:
                continue
            verdict = self._followed.verdict()
            if verdict == END:
                return
            if verdict == GO:
                self._samples += size
                yield data

    def stats(self) -> dict[str, int]:
        """Samples of this rank; chunks and repeats are rank 0's to count."""
        return {"chunks": 0, "samples": self._samples, "repeated": 0}

    def state_dict(self) -> dict[str, Any]:
        """Empty: rank 0 has the leases, and the syncer the position."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to do."""


# ---------------------------------------------------------------- the three ways to make one


def loader(
    learner: LearnerLike,
    dataset: Any,
    *,
    batch_size: int | None = 1,
    chunk_size: int | None = None,
    epochs: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    **settings: Any,
) -> Loader | FollowingLoader:
    """Batches of a map-style data set (`len(dataset)` and `dataset[index]`), each sample once per epoch over all
    learners together.

    Every learner gives the same data set, chunk_size, epochs, seed and shuffle. `epochs` 0: no end. `chunk_size` (by
    default a 1024th of the data, from 16 to 4096) is what one lease holds. `settings`: see `stream`.

    A DataLoader (torch's, or torchdata's StatefulDataLoader) may be given in place of the data set: its data, batch
    size, collate_fn and workers are taken over, and the leases take the place of its sampler."""
    if isinstance(dataset, DataLoader):
        return _like(learner, dataset, {"chunk_size": chunk_size, "epochs": epochs, "seed": seed, **settings})
    samples = len(dataset)
    if samples < 1:
        raise ConfigError("atoll.data.loader got an empty data set; give it one with samples")
    size = chunk_size if chunk_size is not None else _default_size(samples)
    _at_least("chunk_size", size, 1)
    _at_least("epochs", epochs, 0)
    per_epoch = -(-samples // size)

    def chunk_indices(number: int) -> list[int]:
        epoch, index = place(number, per_epoch, seed, shuffle=shuffle)
        first = index * size
        count = min(size, samples - first)
        order = shuffled(count, (seed, epoch, index)) if shuffle else range(count)
        return [first + position for position in order]

    cut = {"chunk_size": size, "samples": samples, "seed": seed, "shuffle": shuffle}
    chunks = per_epoch * epochs
    make = MapMaker(dataset, chunk_indices)
    return _build(learner, make, batch_size=batch_size, chunks=chunks, cut=cut, whole_chunks=False, **settings)


def stream(
    learner: LearnerLike,
    open_chunk: OpenChunk,
    *,
    batch_size: int | None = 1,
    chunks: int = 0,
    **settings: Any,
) -> Loader | FollowingLoader:
    """Batches of anything that can be opened by number: `open_chunk(number)` gives the samples of one chunk (a file, a
    shard, a range), the same ones in the same order every time it is called.

    `chunks` is their number in total, epochs included; 0: no end. `atoll.data.place(number, files, seed)` maps a number
    to (epoch, file) in a shuffled order. With workers, each reads whole chunks, several of them at the same time.

    Settings that all loaders take:
      batch_size       None: no batches, the samples one by one
      stream           the stream's name, "train" unless told; one loader per name
      drop_last        give up the last, short batch of this learner; its chunks count as done
      collate_fn       as in torch
      num_workers      as in torch; also pin_memory, persistent_workers, prefetch_factor, multiprocessing_context,
                       worker_init_fn and timeout
      ahead_s          training time that the leases in hand should last for
      when_dry         "repeat": out of leases, go over the last chunks again; "wait": wait for leases
      lookahead        batches that the loop takes before it has processed the one before (Hugging Face accelerate: 1)
      first_lease_s    how long the first lease may take
      island           (rank, size, store) of a learner of several ranks, where torch.distributed does not say it; a
                       batch of each rank has batch_size samples, and no two ranks have the same"""
    _at_least("chunks", chunks, 0)
    if not find_island(learner, settings.get("island")).alone:
        raise ConfigError(
            "the ranks of an island cannot share chunks of unknown length; use atoll.data.loader for data that is read "
            "by index, or atoll.data.iterable with samples=..."
        )

    def make(client: LeaseClient, **common: Any) -> Feed:
        return StreamFeed(client, open_chunk, **common)

    return _build(learner, make, batch_size=batch_size, chunks=chunks, cut={}, whole_chunks=True, **settings)


def iterable(
    learner: LearnerLike,
    dataset: Iterable[Any],
    *,
    batch_size: int | None = 1,
    chunk_size: int = CHUNK_SIZE_MAX,
    epochs: int = 1,
    samples: int | None = None,
    **settings: Any,
) -> Loader | FollowingLoader:
    """Batches of a data set that can only be iterated over from its beginning.

    Every learner, and every worker of each, reads through all of it and keeps the samples of its own chunks: reading
    costs as much as if one learner had to read everything. Where that is too slow, use `stream`. `samples` (per epoch;
    `len(dataset)` where it has one) is needed for more than one epoch; without it the data ends where it ends, and the
    ledger counts leases past that end as done. A chunk
    that comes back from a lost learner makes the reader start over, with `dataset.skip` where it exists. The data set's
    own order counts, and must be the same on every learner. `settings`: see `stream`."""
    _at_least("chunk_size", chunk_size, 1)
    _at_least("epochs", epochs, 0)
    if samples is None:
        samples = len(dataset) if isinstance(dataset, Sized) else 0
    if epochs != 1 and not samples:
        raise ConfigError("more than one epoch of an iterable data set needs its length; give samples=...")
    chunks = -(-samples // chunk_size) * epochs
    skim = Skim(dataset, chunk_size, samples)
    cut = {"chunk_size": chunk_size, "samples": samples}
    if not find_island(learner, settings.get("island")).alone:
        if not samples:
            raise ConfigError("the ranks of an island must know how long their data is; give samples=...")
        places = MapMaker(SkimItems(skim), _places(samples, chunk_size))
        return _build(learner, places, batch_size=batch_size, chunks=chunks, cut=cut, whole_chunks=False, **settings)

    def make(client: LeaseClient, **common: Any) -> Feed:
        return StreamFeed(client, skim, **common)

    return _build(
        learner,
        make,
        batch_size=batch_size,
        chunks=chunks,
        cut=cut,
        whole_chunks=True,
        open_ended=not samples,
        **settings,
    )


def _places(samples: int, chunk_size: int) -> Callable[[int], list[tuple[int, int]]]:
    """(chunk, position) of every sample of a chunk."""
    per_epoch = -(-samples // chunk_size)

    def of(number: int) -> list[tuple[int, int]]:
        count = min(chunk_size, samples - number % per_epoch * chunk_size)
        return [(number, position) for position in range(count)]

    return of


def _like(learner: LearnerLike, given: DataLoader[Any], settings: dict[str, Any]) -> Loader | FollowingLoader:
    """A loader with the data and settings of a DataLoader."""
    taken = {
        "batch_size": given.batch_size,
        "collate_fn": given.collate_fn,
        "num_workers": given.num_workers,
        "drop_last": given.drop_last,
        "pin_memory": given.pin_memory,
        "timeout": given.timeout,
        "worker_init_fn": given.worker_init_fn,
    }
    if given.num_workers:
        taken |= {"prefetch_factor": given.prefetch_factor, "persistent_workers": given.persistent_workers}
    if given.batch_sampler is not None and given.batch_size is None:
        raise ConfigError("a DataLoader with a batch_sampler of its own cuts batches as leases cannot; give batch_size")
    if isinstance(given.dataset, IterableDataset):
        settings = {name: value for name, value in settings.items() if value is not None and name != "seed"}
        return iterable(learner, given.dataset, **{**taken, **settings})
    shuffle = not isinstance(given.sampler, SequentialSampler)
    return loader(learner, given.dataset, **{"shuffle": shuffle, **taken, **settings})


@dataclass(frozen=True, slots=True)
class MapMaker:
    """Data that is read by index, for a rank that leads or is alone and for one that follows."""

    dataset: Any
    chunk_indices: OpenChunk

    def __call__(self, client: LeaseClient, **common: Any) -> Feed:
        return MapFeed(client, self.dataset, self.chunk_indices, **common)


def _build(
    learner: LearnerLike,
    make: Callable[..., Feed],
    *,
    batch_size: int | None,
    chunks: int,
    cut: Mapping[str, Any],
    whole_chunks: bool,
    open_ended: bool = False,
    stream: str = "train",
    drop_last: bool = False,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    ahead_s: float = AHEAD_S,
    when_dry: str = "repeat",
    lookahead: int = 0,
    first_lease_s: float = FIRST_LEASE_S,
    island: IslandPlace | tuple[Any, ...] | None = None,
    **options: Any,
) -> Loader | FollowingLoader:
    """`whole_chunks`: workers read a chunk each, so that more of them are needed in hand."""
    if batch_size is not None:
        _at_least("batch_size", batch_size, 1)
    _at_least("num_workers", num_workers, 0)
    _at_least("lookahead", lookahead, 0)
    if when_dry not in WHEN_DRY:
        raise ConfigError(f"when_dry must be one of {', '.join(WHEN_DRY)}; not {when_dry!r}")
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ConfigError(f"atoll.data has no setting {unknown[0]!r}; beside its own it takes {', '.join(OPTIONS)}")
    collate = collate_fn if collate_fn is not None else (default_collate if batch_size is not None else _only_one)
    place_here = find_island(learner, island)
    if not place_here.leads:
        assert isinstance(make, MapMaker)
        followed = Followed(place_here, Board(place_here, stream, lambda: bool(learner.done)))
        feed = FollowFeed(followed, make.dataset, collate=collate, workers=num_workers, options=options)
        return FollowingLoader(learner, feed, followed, chunks, int(cut.get("chunk_size", 0)))
    hold_min = max(HOLD_MIN, CHUNKS_PER_WORKER * num_workers if whole_chunks else 0)
    client = LeaseClient(
        learner,
        stream=stream,
        chunks=chunks,
        ahead_s=ahead_s,
        hold_min=hold_min,
        lookahead=lookahead,
        open_ended=open_ended,
    )
    common = {"island": place_here} if isinstance(make, MapMaker) else {}
    reading = make(
        client,
        batch_size=batch_size or 1,
        drop_last=drop_last,
        collate=collate,
        workers=num_workers,
        options=options,
        **common,
    )
    return Loader(client, reading, DryWait(learner, client, when_dry, first_lease_s), cut)


def _default_size(samples: int) -> int:
    return min(CHUNK_SIZE_MAX, max(CHUNK_SIZE_MIN, -(-samples // CHUNKS_PER_EPOCH)))


def _only_one(samples: list[Any]) -> Any:
    return samples[0]


def _at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}; not {value!r}")
