"""Between the client and torch's DataLoader: who reads which chunk, and where.

MapFeed     indices are cut into batches here, in the main process; DataLoader workers fetch the samples of a batch
StreamFeed  every DataLoader worker reads whole chunks, whose numbers it gets through its mailbox, and cuts them itself

Both give pieces in the order in which they are to be handed out, and never wait for a lease: a piece without samples
says that there is nothing to read just now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch.utils.data as torch_data
from torch.utils.data._utils import worker as torch_worker

from atoll.data.cutting import END, End, OpenChunk, Part, Piece, Ticket, cut
from atoll.data.island import Board, Followed, IslandPlace, Shared
from atoll.data.lease_client import LeaseClient
from atoll.data.mail import Mailbox

PREFETCH = 2
"""torch's own prefetch_factor: batches under way per worker."""
CHUNKS_PER_WORKER = 2
"""One that it reads and the next, so that it never waits for the training loop to deal it another."""

Collate = Callable[[list[Any]], Any]


class Feed(Protocol):
    depth: int
    """Pieces that may be under way: after this many without a sample, and no new chunk, nothing is left to come."""

    @property
    def dealt(self) -> int:
        """Chunks given to be read so far."""

    def open(self) -> Iterator[Piece]: ...

    def deal(self) -> None:
        """Give out chunks to be read, and take back what is not wanted any more."""

    def end(self) -> None:
        """No more chunks: what is half done is given out, then the pieces end."""

    @property
    def shared(self) -> Shared | None:
        """Where the other ranks of an island hear of batches."""


class MapFeed:
    """A data set with __len__ and __getitem__. `chunk_indices` gives the indices of a chunk, in order."""

    def __init__(
        self,
        client: LeaseClient,
        dataset: Any,
        chunk_indices: OpenChunk,
        *,
        batch_size: int,
        drop_last: bool,
        collate: Collate,
        workers: int,
        options: Mapping[str, Any],
        island: IslandPlace | None = None,
    ) -> None:
        self.depth = depth(workers, options)
        island = island or IslandPlace()
        self.shared = None if island.alone else Shared(island, Board(island, client.stream))
        """Where other ranks read what is in a batch."""
        cutting = (chunk_indices, batch_size * island.size, drop_last)
        self._batches = _Batches(client, cutting, self.shared, island.size)
        self._loader: torch_data.DataLoader[Any] = torch_data.DataLoader(
            _WithEmptyBatches(dataset),
            batch_sampler=self._batches,
            collate_fn=_CollateSome(collate),
            num_workers=workers,
            **options,
        )

    @property
    def dealt(self) -> int:
        return self._batches.dealt

    def open(self) -> Iterator[Piece]:
        under_way = self._batches.under_way
        for data in self._loader:  # in the order of the batch sampler
            yield under_way.popleft()._replace(data=data)

    def deal(self) -> None:
        """Nothing to do: the sampler takes chunks from the client itself."""

    def end(self) -> None:
        self._batches.ended = True


class _Batches(torch_data.Sampler[list[int]]):
    """The batch sampler: lists of indices, empty ones where there is nothing to read just now. The DataLoader holds it,
    so it must not lead back there: workers that are left to the cycle collector take long to end."""

    def __init__(
        self, client: LeaseClient, cutting: tuple[OpenChunk, int, bool], shared: Shared | None, ranks: int
    ) -> None:
        self.dealt = 0
        self.ended = False
        self.under_way: deque[Piece] = deque()
        self._client = client
        self._cutting = cutting
        self._shared = shared
        self._ranks = ranks

    def __iter__(self) -> Iterator[list[int]]:
        self.under_way.clear()
        self.ended = False
        if self._shared is not None:
            self._shared.begin()
        for piece in cut(self, *self._cutting):
            if piece.size < self._ranks:  # of the last samples not every rank would get one: they are given up
                piece = piece._replace(size=0, data=[])
            self.under_way.append(piece)
            yield piece.data if self._shared is None else self._shared.plan(piece.data)
        if self._shared is not None:
            self._shared.no_more()

    def next(self) -> Ticket | End | None:
        ticket = self._client.take()
        if ticket is None:
            return END if self.ended else None
        self.dealt += 1
        return ticket

    def dropped(self, key: int) -> bool:
        return self._client.unwanted(key)


class FollowFeed:
    """What a rank that does not lead reads: its share of the batches on the board."""

    def __init__(
        self,
        followed: Followed,
        dataset: Any,
        *,
        collate: Collate,
        workers: int,
        options: Mapping[str, Any],
    ) -> None:
        self._batches = _Shares(followed)
        self._loader: torch_data.DataLoader[Any] = torch_data.DataLoader(
            _WithEmptyBatches(dataset),
            batch_sampler=self._batches,
            collate_fn=_CollateSome(collate),
            num_workers=workers,
            **options,
        )

    def open(self) -> Iterator[tuple[int, Any]]:
        """Samples and data of each batch, empty ones included."""
        for data in self._loader:
            yield self._batches.under_way.popleft(), data


class _Shares(torch_data.Sampler[list[int]]):
    def __init__(self, followed: Followed) -> None:
        self.under_way: deque[int] = deque()
        self._followed = followed

    def __iter__(self) -> Iterator[list[int]]:
        self.under_way.clear()
        for share in self._followed.plans():
            self.under_way.append(len(share))
            yield share


class _WithEmptyBatches(torch_data.Dataset[Any]):
    """The user's data set, with batches that may be empty."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: list[int]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        if indices and callable(many):
            samples: list[Any] = many(indices)
            return samples
        return [self.dataset[index] for index in indices]


class _CollateSome:
    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate(samples) if samples else None


class StreamFeed:
    """Anything that opens chunks by number."""

    def __init__(
        self,
        client: LeaseClient,
        open_chunk: OpenChunk,
        *,
        batch_size: int,
        drop_last: bool,
        collate: Collate,
        workers: int,
        options: Mapping[str, Any],
    ) -> None:
        self.depth = depth(workers, options)
        self.shared = None
        self.dealt = 0
        self._client = client
        self._cutting = (open_chunk, batch_size, drop_last)
        self._collate = collate
        self._workers = workers
        self._options = dict(options)
        self._iteration = 0
        self._ended = False
        self._mail: list[Mailbox] = []
        self._reading: list[set[int]] = []
        """Keys of what each worker has to read."""
        self._hungry: set[int] = set()
        """Workers that have read all of theirs, and keep the rest for the next batch."""
        self._stopped: set[int] = set()
        """Keys of what a worker was told to read no further."""
        self._loader: torch_data.DataLoader[Any] | None = None

    def open(self) -> Iterator[Piece]:
        loader = self._prepare()
        self._ended = False
        self._reading = [set() for _ in self._mail]
        self._hungry.clear()
        self._stopped.clear()
        for box in self._mail:
            box.begin(self._iteration)
        self.deal()
        try:
            for piece in loader:
                if not piece.size:
                    self._hungry.add(piece.worker)
                closed = {part.key for part in piece.parts if part.last}
                self._reading[piece.worker] -= closed
                self._stopped -= closed
                # What was pinned comes back as lists.
                yield piece._replace(parts=tuple(Part(*part) for part in piece.parts))
        finally:
            self._reading = []
            if not self._options.get("persistent_workers"):
                self._loader = None
                del loader
                for box in self._mail:
                    box.close()

    def _prepare(self) -> torch_data.DataLoader[Any]:
        """Workers that live through several iterations keep their mailboxes."""
        self._iteration += 1
        if self._loader is None:
            self._iteration = 1
            self._mail = [Mailbox(local=self._workers == 0) for _ in range(max(1, self._workers))]
            dataset = _ChunkReader(self._mail, self._cutting, self._collate)
            self._loader = torch_data.DataLoader(
                dataset, batch_size=None, collate_fn=_as_it_is, num_workers=self._workers, **self._options
            )
        return self._loader

    def deal(self) -> None:
        if self._ended or not self._reading:
            return
        for worker, keys in enumerate(self._reading):
            for key in keys - self._stopped:
                if self._client.unwanted(key):
                    self._stopped.add(key)
                    self._mail[worker].drop(key)
        for per_worker in range(1, CHUNKS_PER_WORKER + 1 if self._workers else 2):
            for worker, keys in enumerate(self._reading):
                if len(keys) < per_worker or worker in self._hungry:
                    self._deal_to(worker)

    def _deal_to(self, worker: int) -> None:
        ticket = self._client.take()
        if ticket is not None:
            self.dealt += 1
            self._reading[worker].add(ticket.key)
            self._hungry.discard(worker)
            self._mail[worker].open(ticket)

    def end(self) -> None:
        self._ended = True
        for box in self._mail:
            box.end()


class _ChunkReader(torch_data.IterableDataset[Piece]):
    """What runs in a worker process: chunks out of its mailbox, cut and collated."""

    def __init__(self, mail: list[Mailbox], cutting: tuple[OpenChunk, int, bool], collate: Collate) -> None:
        self._mail = mail
        self._cutting = cutting
        self._collate = collate

    def __iter__(self) -> Iterator[Piece]:
        info = torch_data.get_worker_info()
        worker = info.id if info is not None else 0
        inbox = self._mail[worker]
        inbox.settle_in()
        pieces = cut(inbox, *self._cutting)
        while True:
            with _alone():
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece._replace(data=self._collate(piece.data) if piece.size else None, worker=worker)


@contextmanager
def _alone() -> Iterator[None]:
    """Data sets that split themselves among DataLoader workers must not do so inside a chunk, which one worker reads
    whole: in here `get_worker_info` says that there are none."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def _as_it_is(piece: Any) -> Any:
    return piece


def depth(workers: int, options: Mapping[str, Any]) -> int:
    return max(1, workers * (options.get("prefetch_factor") or PREFETCH))
