"""Tickets to the processes that read: one mailbox per DataLoader worker.

Messages are small JSON arrays in a pipe: ["open", key, chunk, start], ["drop", key], ["end"], and ["begin", iteration],
which opens every iteration: a worker that lives through several skips what was meant for the one before. At most a few
tickets are under way per worker, so a pipe's buffer never fills.
"""

from __future__ import annotations

import json
from collections import deque
from multiprocessing.connection import Connection, Pipe
from typing import Any

from atoll.data.cutting import END, End, Ticket


class Mailbox:
    """The main process's end writes, the worker's end is a `cutting.Inbox`. Works across fork and spawn, and within
    one process."""

    def __init__(self, *, local: bool) -> None:
        self._letters: deque[bytes] = deque()
        self._reader: Connection | None = None
        self._writer: Connection | None = None
        if not local:
            self._reader, self._writer = Pipe(duplex=False)
        self._iteration = 0
        self._begun = 0
        """The newest iteration whose beginning was read. Its letters stay unread until this end has got there too."""
        self._tickets: deque[Ticket] = deque()
        self._unwanted: set[int] = set()
        self._ended = False

    # ------------------------------------------------------------ the main process

    def begin(self, iteration: int) -> None:
        self._send(["begin", iteration])

    def open(self, ticket: Ticket) -> None:
        self._send(["open", *ticket])

    def drop(self, key: int) -> None:
        self._send(["drop", key])

    def end(self) -> None:
        self._send(["end"])

    def _send(self, letter: list[Any]) -> None:
        text = json.dumps(letter).encode()
        if self._writer is None:
            self._letters.append(text)
        else:
            self._writer.send_bytes(text)

    def close(self) -> None:
        for end in (self._reader, self._writer):
            if end is not None:
                end.close()

    # ------------------------------------------------------------ the reading process

    def settle_in(self) -> None:
        """A new iteration starts: forget the one before and skip what was sent for it."""
        self._iteration += 1
        self._tickets.clear()
        self._unwanted.clear()
        self._ended = False
        while self._begun < self._iteration:
            match self._receive():
                case ["begin", iteration]:
                    self._begun = iteration

    def next(self) -> Ticket | End | None:
        self._read_all()
        self._unwanted.intersection_update([ticket.key for ticket in self._tickets])
        if self._tickets:
            return self._tickets.popleft()
        return END if self._ended else None

    def dropped(self, key: int) -> bool:
        self._read_all()
        return key in self._unwanted

    def _read_all(self) -> None:
        while self._begun == self._iteration and (self._letters if self._reader is None else self._reader.poll()):
            match self._receive():
                case ["begin", iteration]:
                    self._begun = iteration
                case ["open", key, chunk, start]:
                    self._tickets.append(Ticket(key, chunk, start))
                case ["drop", key]:
                    self._unwanted.add(key)
                case ["end"]:
                    self._ended = True

    def _receive(self) -> list[Any]:
        text = self._letters.popleft() if self._reader is None else self._reader.recv_bytes()
        letter: list[Any] = json.loads(text)
        return letter
