"""Chunks in, batches out, with a note of which samples of which chunk each batch holds.

    inbox --Ticket--> open the chunk, skip to its start --samples--> batches --Piece--> the loop

Batches go across chunk borders, so they all have `batch_size` samples but the very last. A Piece without samples means
that there was nothing to read just now; the half-filled batch is kept until there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

OpenChunk = Callable[[int], Iterable[Any]]
"""Gives the samples of a chunk, by its number, the same ones in the same order every time."""


class Ticket(NamedTuple):
    """Read `chunk` from its sample `start`. `key` names this reading; it is negative if the chunk is only gone over
    again because nothing else is there."""

    key: int
    chunk: int
    start: int


class End:
    """There will be no more tickets: give out the half-filled batch and stop."""


END = End()


class Part(NamedTuple):
    """What one batch holds of one reading: `size` samples, the last of them just before sample `upto`."""

    key: int
    upto: int
    size: int
    last: bool
    """True if the chunk ends here."""


class Piece(NamedTuple):
    """A batch and its parts. `data` is a list of samples, or what became of it further on."""

    parts: Sequence[Part]
    size: int
    data: Any
    worker: int = 0


class Inbox(Protocol):
    """Where tickets come from. Neither method waits."""

    def next(self) -> Ticket | End | None:
        """The next ticket, None if there is none just now."""

    def dropped(self, key: int) -> bool:
        """Whether what is left of this reading is not wanted any more."""


def cut(inbox: Inbox, open_chunk: OpenChunk, batch_size: int, drop_last: bool) -> Iterator[Piece]:
    """Pieces without end, until the inbox says End. With `drop_last` the last, short batch is given up: its parts are
    told, so that its chunks still count as done, but its samples are not handed out."""
    samples: list[Any] = []
    parts: list[Part] = []
    closed: list[Part] = []  # chunks that ended without a sample in the batch that is being filled
    while True:
        ticket = inbox.next()
        if ticket is None:
            yield Piece(tuple(closed), 0, [])
            closed = []
            continue
        if isinstance(ticket, End):
            samples = [] if drop_last else samples
            yield Piece((*parts, *closed), len(samples), samples)
            return
        key, upto = ticket.key, ticket.start
        reader = _Peeking(from_sample(open_chunk(ticket.chunk), upto))
        more = True
        while more:
            taken = [] if inbox.dropped(key) else reader.take(batch_size - len(samples))
            more = bool(taken) and reader.more
            upto += len(taken)
            samples += taken
            (parts if taken else closed).append(Part(key, upto, len(taken), not more))
            if len(samples) == batch_size:
                yield Piece((*parts, *closed), batch_size, samples)
                samples, parts, closed = [], [], []


class _Peeking:
    """Reads one sample ahead, so that the last sample of a chunk is known as the last when it is handed out and the
    chunk is done with the very step that processes it."""

    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples = samples
        self._ahead = next(samples, END)

    @property
    def more(self) -> bool:
        return self._ahead is not END

    def take(self, count: int) -> list[Any]:
        if self._ahead is END:
            return []
        taken = [self._ahead, *islice(self._samples, count - 1)]
        self._ahead = next(self._samples, END)
        return taken


def from_sample(samples: Iterable[Any], start: int) -> Iterator[Any]:
    """The samples from number `start` on: a slice if that is possible, else the data's own `skip`, else read past."""
    if start == 0:
        return iter(samples)
    if isinstance(samples, Sequence):
        return iter(samples[start:])
    skip = getattr(samples, "skip", None)
    if callable(skip):
        return iter(skip(start))
    return islice(samples, start, None)
