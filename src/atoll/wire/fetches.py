"""The learner's side of one fetch: what the first answer said about it, the bytes so far, and how it goes on after a
fault, through gRPC or past it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from atoll.core import messages as m
from atoll.errors import AtollError, PayloadError, RefusedError, RemoteProtocolError, UnreachableError
from atoll.wire import checks, direct, limits, parts
from atoll.wire.assembly import Assembly
from atoll.wire.buffers import Buffers
from atoll.wire.channel import Backoff, ClientOptions, call_error, deadline_s, refused_error
from atoll.wire.direct import Wire
from atoll.wire.direct_client import Lane, Lanes
from atoll.wire.seal import seal
from atoll.wire.service import Bytes
from atoll.wire.transport import FETCH_METHOD, grpc


class ContentFetch:
    """One content being fetched: what the first answer said about it, and the bytes so far."""

    def __init__(self, options: ClientOptions, request: m.FetchRequest, buffers: Buffers, lanes: Lanes) -> None:
        self._options = options
        self._lanes, self._large = lanes, False
        self.bytes_past_grpc = 0
        self._buffers = buffers
        self._request = request
        inner = request.kind is m.FetchKind.INNER
        self._size_max = m.INNER_PIECE_BYTES if inner else limits.PUSH_BYTES_MAX
        self._waits = (limits.FETCH_WAIT_S, limits.INNER_RATE_MIN) if inner else ()
        self.header: m.FetchHeader | None = None
        self.assembly: Assembly | None = None

    def large_as(self, size: int) -> int:
        """What is fetched will most likely have this size; returns it."""
        self._large = size >= limits.DIRECT_BYTES_MIN and self._request.kind is not m.FetchKind.INNER
        return size

    async def range(self, channel: Any, start: int, stop: int | None) -> None:
        """Fetch [start, stop) (None: to the end), resuming after faults until BULK_ATTEMPTS_MAX in a row brought
        nothing."""
        backoff = Backoff()
        position, attempts = start, 0
        while True:
            before = position
            try:
                async for length in self._stream(channel, position, stop):
                    position += length
                if self.header is not None and position >= min(stop or self.header.size, self.header.size):
                    return
                failure: AtollError = RemoteProtocolError("the syncer ended a fetch early")
            except (UnreachableError, RemoteProtocolError, PayloadError) as error:
                failure = error
            attempts = 1 if position > before else attempts + 1
            if position > before:
                backoff.reset()
            if attempts >= limits.BULK_ATTEMPTS_MAX:
                raise UnreachableError(
                    f"{attempts} attempts to fetch fragment {self._request.fragment} from byte {position} on failed: "
                    f"{failure}"
                )
            await asyncio.sleep(backoff.next_s())

    async def _stream(self, channel: Any, position: int, stop: int | None) -> AsyncIterator[int]:
        """One call; yields the length of each part that was placed."""
        length = 0 if stop is None else stop - position
        request = dataclasses.replace(self._request, offset=position, length=length)
        # Before the first header the size is not known, only its bound.
        size = length or (self.header.size - position if self.header else self._size_max)
        timeout = deadline_s(size, *self._waits)
        if self._large:
            with self._lanes.one() as lane:
                if lane is not None:
                    async for placed in self._stream_past_grpc(lane, request, timeout):
                        self.bytes_past_grpc += placed
                        yield placed
                    return
        call = channel.unary_stream(FETCH_METHOD)(
            seal(parts.encode_fetch_request(request)), metadata=self._options.metadata, timeout=timeout
        )
        first = True
        try:
            async for message in call:
                part = parts.parse_part(message)
                if first:
                    self._open(part)
                    first = False
                if part.offset != position:
                    raise RemoteProtocolError(f"a fetch jumped to byte {part.offset}, {position} was next")
                placed = self._place(part)
                position += placed
                yield placed
            self._lanes.told(await call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            self._lanes.server_was_away()
            raise call_error(self._options, error) from None
        finally:
            call.cancel()

    async def _stream_past_grpc(self, lane: Lane, request: m.FetchRequest, timeout_s: float) -> AsyncIterator[int]:
        """The same in the thread of a connection of its own; yields once, also for what came before a fault."""
        come = [request.offset]
        try:
            refused = await lane.do(lambda wire: self._receive(wire, request, come), timeout_s)
        except (UnreachableError, RemoteProtocolError, PayloadError):
            yield come[0] - request.offset
            raise
        yield come[0] - request.offset
        if refused is not None:
            raise refused_error(refused.code, refused.detail)

    def _receive(self, wire: Wire, request: m.FetchRequest, come: list[int]) -> m.Refused | None:
        """Receive straight into the payload. `come` follows: up to where everything is there."""
        wire.send_message(direct.FETCH, parts.encode_fetch_request(request))
        _, message = wire.receive_message(direct.HEADER + direct.REFUSED)
        if isinstance(message, m.Refused):
            return message
        header = self._opened(parts.parse_fetch_header(memoryview(message)))
        stop = min(header.size, request.offset + (request.length or header.size))
        while come[0] < stop:
            end = min(stop, (come[0] // limits.PART_BYTES + 1) * limits.PART_BYTES)
            offset, length, checksum = wire.receive_head()
            if offset != come[0] or length != end - offset:
                raise RemoteProtocolError(
                    f"a part of {length} bytes at {offset}, {end - come[0]} at {come[0]} were next"
                )
            with self._room(offset, length) as room:
                wire.receive_data(room, offset, checksum)
            come[0] = end
        return None

    def _open(self, part: parts.RawPart) -> None:
        """Look at the first part of a stream. The first stream of all pins the version for the others."""
        if part.refused is not None:
            refused = parts.parse_fetch_refused(part.refused)
            raise refused_error(refused.code, refused.detail)
        if part.opening is None:
            raise RemoteProtocolError("the first part of a fetch must carry its header")
        self._opened(parts.parse_fetch_header(part.opening))

    def _opened(self, header: m.FetchHeader) -> m.FetchHeader:
        checks.count("FetchHeader.size", header.size, high=self._size_max)
        if self.header is None:
            self.header = header
            self._begin(header)
            self._request = dataclasses.replace(self._request, version=header.version)
        elif header != self.header:
            # Versions are immutable: the same version with other bytes must never be adopted.
            raise RefusedError(
                m.Refusal.CHECKSUM,
                f"version {header.version} of fragment {self._request.fragment} changed while it was fetched; restart "
                f"this learner, and look at the syncer's log",
            )
        return header

    def _begin(self, header: m.FetchHeader) -> None:
        self.assembly = Assembly(self._buffers.take(header.size), limits.PART_BYTES)

    def _place(self, part: parts.RawPart) -> int:
        assert self.assembly is not None
        try:
            return self.assembly.place(part)
        except RefusedError as error:
            # Not what was asked for: the stream is dropped and resumed here.
            raise RemoteProtocolError(error.detail) from None

    @contextmanager
    def _room(self, offset: int, length: int) -> Iterator[memoryview]:
        """Where a part is received straight into."""
        assert self.assembly is not None
        try:
            room = self.assembly.reserve(offset, length)
        except RefusedError as error:
            raise RemoteProtocolError(error.detail) from None
        try:
            yield room
        except BaseException:
            self.assembly.give_up(offset)
            raise
        self.assembly.arrived(offset)


class RangeFetch(ContentFetch):
    """Some bytes of a content. Its parts come in order, so there is nothing to put together."""

    bytes: Bytes

    def _begin(self, header: m.FetchHeader) -> None:
        if self._request.offset + self._request.length > header.size:
            raise RefusedError(
                m.Refusal.SIZE,
                f"fragment {self._request.fragment} has {header.size} bytes, fewer than were asked for; check that "
                "both sides use the same layout and codec",
            )
        self.bytes = np.empty(self._request.length, np.uint8)

    def _place(self, part: parts.RawPart) -> int:
        start = part.offset - self._request.offset
        if start + part.data.nbytes > self.bytes.size:
            raise RemoteProtocolError(f"a part of {part.data.nbytes} bytes at {part.offset} was not asked for")
        self.bytes[start : start + part.data.nbytes] = np.frombuffer(part.data, np.uint8)
        return part.data.nbytes

    @contextmanager
    def _room(self, offset: int, length: int) -> Iterator[memoryview]:
        start = offset - self._request.offset
        yield self.bytes[start : start + length].data
