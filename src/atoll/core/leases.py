"""Who has which chunk of the run's data: the coordinator's book. Pure: no clock, no IO, no randomness.

A stream of data is cut into numbered chunks. At every moment each issued number is in exactly one place:

    not issued --grant--> in one learner's hand --done--> done, for ever
                            ^        |
                            |        +--handed back, or its learner is lost--> pool (first in, first out)
                            +--------------------------------grant--------------+

Only what is in a hand or in the pool is written down, so the book grows with neither the data nor the time:
done = issued - in hand - pool. Grants take the pool first, then the next number that nobody ever had.

A report says all that a learner has to say about a stream and replaces its earlier ones, so reports and answers may be
lost or repeated at will. What becomes of a chunk that a report names, by where the book has it:

                 in this hand         in the pool (+)        in another hand (+)      done         unknown (*)
    done         done                 done, out of the pool  done, `repeated`;        stays done   done
                                                             the other is revoked
    holding      stays                back into this hand    revoked                  revoked      into this hand
    returned     pool, at its start   the larger start       ignored                  ignored      pool
    not named    granted again        -                      -                        -            -

(+) If it was in this hand before, and its learner was taken for lost. What a learner says of chunks that were never
leased to it is passed over: nobody takes data out of the run that it was not given.

(*) A number that this book never issued: an earlier syncer did, and its newest rows were lost. The learner knows
better. The number is kept in `ahead` until fresh grants reach it, and is not issued a second time. A book that has
never been read from disk has issued all that there is, and passes over such numbers, too.

A hand belongs to one generation. A newer generation's report, or `release`, puts the older one's chunks into the pool;
a report of an older generation is ignored and answered with nothing. A learner that was taken for lost and comes back
under the same generation keeps whatever was not issued to somebody else meanwhile.

Rows for the tape: `take_dirty` gives those that changed, `load` rebuilds the book from all of them.

    data/<stream>                  chunks, next, pool, ahead, and the two counters
    data/<stream>/again            the last re-issued numbers and how often
    data/<stream>/hand/<learner>   generation, serial, leases as [chunk, start], and the newest report's done chunks
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from atoll.core.lease_table import (
    HAND_MAX,
    NUMBER_MAX,
    REISSUED_KEPT,
    Hand,
    StreamTable,
    demand,
    load_table,
    whole,
)
from atoll.core.messages import CHUNKS_MAX, DataLeases, DataReport, Lease
from atoll.errors import ConfigError, RemoteProtocolError, StoreError

__all__ = ["HAND_MAX", "PREFIX", "REISSUED_KEPT", "STREAMS_MAX", "LeaseBook", "check_report", "check_stream_name"]

STREAMS_MAX = 64
"""Data streams of one run. A mixture of corpora needs one each; more would be a mistake in naming."""
LEARNER_CHARS_MAX = 200
"""As on the wire."""
STREAM_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Stream names are part of row keys, so they hold no slash."""
PREFIX = "data/"
"""What the keys of all rows start with."""


class LeaseBook:
    """All streams of a run. A report that is refused changes nothing."""

    def __init__(self, *, lost_rows: bool = False) -> None:
        self._streams: dict[str, StreamTable] = {}
        self._lost_rows = lost_rows
        """An earlier syncer issued numbers that this book does not know."""

    # ------------------------------------------------------------ learners

    def report(self, learner: str, generation: int, message: DataReport) -> DataLeases:
        """Take a learner's report and answer it. Raises RemoteProtocolError for a message that cannot be true, and
        ConfigError where the learner and the run disagree about the stream."""
        if not 1 <= len(learner) <= LEARNER_CHARS_MAX:
            raise RemoteProtocolError(f"a learner id has 1 to {LEARNER_CHARS_MAX} characters; not {len(learner)}")
        check_report(message)
        table = self._table(learner, message)
        hand = table.hands.get(learner)
        if hand is not None and (generation, message.serial) < (hand.generation, hand.serial):
            return DataLeases(message.stream, message.serial)
        if hand is None or hand.generation < generation:
            hand = table.open_hand(learner, generation)
        return _answer(table, learner, hand, message)

    def _table(self, learner: str, message: DataReport) -> StreamTable:
        table = self._streams.get(message.stream)
        if table is None:
            if len(self._streams) >= STREAMS_MAX:
                raise ConfigError(
                    f"learner {learner!r} asks for data stream {message.stream!r}, but the run has {STREAMS_MAX} "
                    "already; use one of those, or start a new run"
                )
            table = self._streams[message.stream] = StreamTable(message.chunks, changed={""}, lost_rows=self._lost_rows)
        if table.chunks != message.chunks:
            raise ConfigError(
                f"data stream {message.stream!r} of this run has {_size(table.chunks)}, learner {learner!r} says "
                f"{_size(message.chunks)}; give every learner the same dataset, chunk_size and epochs, or give the "
                "new data a stream name of its own"
            )
        return table

    def release(self, learner: str, before_generation: int | None = None) -> int:
        """The learner is lost, has left or was fenced (`before_generation`: only what older generations held): its
        unfinished chunks go into the pool, each with the start of its lease. Returns how many."""
        count = 0
        for table in self._streams.values():
            hand = table.hands.get(learner)
            if hand is None or (before_generation is not None and hand.generation >= before_generation):
                continue
            count += table.drop_hand(learner)
            if before_generation is not None:  # what the old process may still say is out of date from now on
                table.open_hand(learner, before_generation)
        return count

    # ------------------------------------------------------------ what people ask

    def status(self) -> dict[str, Any]:
        """Per stream: chunks, issued, done, in_hand, pool, reissued, repeated; issued = done + in_hand + pool."""
        return {name: table.status() for name, table in sorted(self._streams.items())}

    def lost(self, stream: str) -> int:
        """Chunks of the pool whose learner was lost with them; the others were leased ahead and handed back."""
        return sum(pooled.lost for pooled in self._streams[stream].pool.values())

    def fate(self, stream: str, chunk: int) -> tuple[str, int]:
        """Where a chunk is ("not issued", "done", "pool", or "in hand of <learner>") and how often it was re-issued, as
        far as it is among the last REISSUED_KEPT."""
        table = self._streams[stream]
        if chunk in table.owner:
            place = f"in hand of {table.owner[chunk]}"
        elif chunk in table.pool:
            place = "pool"
        else:
            place = "done" if table.knows(chunk) else "not issued"
        return place, table.again.get(chunk, 0)

    def reissued(self, stream: str) -> dict[int, int]:
        """The last re-issued chunks and how often each was."""
        return dict(self._streams[stream].again)

    # ------------------------------------------------------------ the tape

    def take_dirty(self) -> dict[str, Any | None]:
        """The rows that changed since the last call: JSON values, None for a row that is no more."""
        rows: dict[str, Any | None] = {}
        if not self._streams:  # asked after every input
            return rows
        for name, table in sorted(self._streams.items()):
            rows |= {f"{PREFIX}{name}{key}": table.row(key) for key in sorted(table.changed)}
            table.changed.clear()
        return rows

    def load(self, rows: Mapping[str, Any], *, lost_rows: bool = True) -> None:
        """Rebuild the book from its rows; rows and fields that this version does not know are passed over. `lost_rows`:
        some may be missing, so that learners may know more. Raises StoreError, and leaves the book as it was, if they
        contradict each other."""
        streams: dict[str, StreamTable] = {}
        for key, row in sorted(rows.items()):  # a stream's own row sorts before those below it
            if not key.startswith(PREFIX) or row is None:
                continue
            name, slash, rest = key.removeprefix(PREFIX).partition("/")
            try:
                if slash:
                    streams[name].load_row(slash + rest, row)
                else:
                    demand(STREAM_NAME.fullmatch(name) is not None and len(streams) < STREAMS_MAX, "stream name")
                    streams[name] = load_table(row, lost_rows=lost_rows)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                text = f"row {key!r} of the data ledger makes no sense ({error!r}); recover from an older snapshot"
                raise StoreError(text) from error
        self._streams = streams


def _answer(table: StreamTable, learner: str, hand: Hand, message: DataReport) -> DataLeases:
    for chunk in message.done:
        table.done(learner, chunk)
    for lease in message.returned:
        table.returned(learner, lease)
    revoked = tuple(chunk for chunk in message.holding if not table.holds(learner, chunk))
    holding = frozenset(message.holding)
    granted = [Lease(chunk, start) for chunk, start in hand.leases.items() if chunk not in holding]
    granted += table.grant(learner, min(message.want - len(granted), HAND_MAX - len(hand.leases)))
    hand.serial = message.serial
    told = frozenset(message.done)
    if hand.told != told:
        hand.told = told
        table.changed.add(f"/hand/{learner}")
    return DataLeases(message.stream, message.serial, tuple(granted), revoked, table.exhausted)


# ---------------------------------------------------------------- checks


def check_stream_name(name: str) -> None:
    if STREAM_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"a data stream cannot be called {name[:80]!r}; use 1 to 64 letters, digits, dots, dashes or underscores"
        )


def check_report(message: DataReport) -> None:
    """Raise unless the message can be true."""
    check_stream_name(message.stream)
    numbers = [*message.done, *message.holding, *(lease.chunk for lease in message.returned)]
    where = f"the report on data stream {message.stream!r}"
    if len(numbers) > CHUNKS_MAX:
        raise RemoteProtocolError(f"{where} names {len(numbers)} chunks, more than {CHUNKS_MAX}; use larger chunks")
    if not whole([message.serial, message.chunks, message.want, *(lease.start for lease in message.returned)]):
        raise RemoteProtocolError(f"{where} has a number outside of 0 to 2^62; use the same build on both sides")
    if not whole(numbers, (message.chunks or NUMBER_MAX) - 1):
        raise RemoteProtocolError(
            f"{where} names a chunk that the stream does not have ({_size(message.chunks)}); use the same build on "
            "both sides"
        )
    if len(set(numbers)) != len(numbers):
        raise RemoteProtocolError(f"{where} names a chunk twice; each may be done, held or returned")


def _size(chunks: int) -> str:
    return f"{chunks} chunks" if chunks else "no end"
