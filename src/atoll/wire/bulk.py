"""The learner's side of payloads: push and fetch over one or several connections, with deadlines and retries."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Coroutine, Iterator, Sequence
from itertools import chain, count
from typing import Any, TypeVar

from atoll.core import messages as m
from atoll.errors import (
    AtollError,
    LocalProtocolError,
    PayloadError,
    RefusedError,
    RemoteProtocolError,
    UnreachableError,
)
from atoll.wire import limits, parts
from atoll.wire.assembly import VERIFY_INLINE_BYTES_MAX
from atoll.wire.buffers import Buffers
from atoll.wire.channel import Backoff, ClientOptions, call_error, deadline_s, open_channel
from atoll.wire.direct_client import DirectPush, Lanes
from atoll.wire.fetches import ContentFetch, RangeFetch
from atoll.wire.seal import unseal
from atoll.wire.service import Bytes
from atoll.wire.transport import PUSH_METHOD, bulk_channel_arguments, grpc, keep_heap

T = TypeVar("T")

Buffer = bytes | bytearray | memoryview | Bytes
"""Contiguous bytes; an array must be uint8."""


class BulkClient:
    """Payload transfers of one learner. Bound to the event loop that uses it; transfers may run side by side."""

    def __init__(self, options: ClientOptions) -> None:
        keep_heap()
        self._options = options.places()[0]
        self._channels: list[Any] = self._open_channels()
        self._up_channels: list[Any] = self._open_channels()
        """Pushes have connections of their own: on a thin link their answers would wait behind what is fetched."""
        self._lanes = Lanes(self._options)
        self._sizes: dict[tuple[m.FetchKind, int], int] = {}
        """Of what was fetched last, by kind and fragment: large ones go past gRPC."""
        self._buffers = Buffers()
        self._running: set[asyncio.Task[Any]] = set()
        self.bytes_up = 0
        """Payload bytes sent, repeated ones included."""
        self.bytes_down = 0
        """Payload bytes received whole."""
        self.bytes_past_grpc = 0
        """Of both, what had a socket of its own."""

    @property
    def address(self) -> str:
        return self._options.address

    async def close(self) -> None:
        self._lanes.close()
        await asyncio.gather(*(channel.close() for channel in (*self._channels, *self._up_channels)))

    async def start_again(self) -> None:
        """Give up every transfer that is under way, and connect anew: the other side is gone, or was. Whoever waits for
        one of them hears that it is unreachable."""
        given_up, self._running = self._running, set()
        for task in given_up:
            task.cancel()
        self._lanes.close()
        self._lanes = Lanes(self._options)
        old = (*self._channels, *self._up_channels)
        self._channels, self._up_channels = self._open_channels(), self._open_channels()
        await asyncio.gather(*(channel.close() for channel in old))

    async def move(self, place: ClientOptions) -> None:
        """Use this place from here on: the syncer was found there."""
        if place.address != self._options.address:
            self._options = place
            await self.start_again()

    def _open_channels(self) -> list[Any]:
        return [open_channel(self._options, bulk_channel_arguments()) for _ in range(self._options.stripes)]

    # ------------------------------------------------------------ push

    async def _unless_given_up(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if task not in self._running:
                raise UnreachableError("the session ended, and with it every transfer that was under way") from None
            raise
        finally:
            self._running.discard(task)

    async def push(self, header: m.PushHeader, payload: Buffer) -> m.PushReply:
        """Send one payload and return the syncer's answer. A broken connection and a busy syncer are tried again, from
        the start; raises UnreachableError when that does not help and RefusedError for a wrong token."""
        view = memoryview(payload).cast("B")  # type: ignore[arg-type]  # numpy below 2.2 types no buffer
        if view.nbytes != header.size:
            raise LocalProtocolError(f"the header announces {header.size} bytes but the payload has {view.nbytes}")
        return await self._unless_given_up(self._push(header, view))

    async def _push(self, header: m.PushHeader, view: memoryview) -> m.PushReply:
        backoff = Backoff()
        failure: AtollError | None = None
        reply: m.PushReply | None = None
        for _ in range(limits.BULK_ATTEMPTS_MAX):
            try:
                reply = await self._push_once(header, view)
                if reply.code != m.Refusal.BUSY:
                    return reply
            except (UnreachableError, RemoteProtocolError) as error:
                failure = error
            await asyncio.sleep(backoff.next_s())
        # A busy syncer may have taken an attempt whose answer was lost, so BUSY is never the last word: the caller
        # tries again later and learns from `duplicate` if it was.
        why = failure or (reply.detail if reply is not None else "")
        raise UnreachableError(f"{limits.BULK_ATTEMPTS_MAX} attempts to push fragment {header.fragment} failed: {why}")

    async def _push_once(self, header: m.PushHeader, view: memoryview) -> m.PushReply:
        stripes = self._stripes(view.nbytes)
        opened = parts.PushOpen(header, secrets.randbits(64), stripes, limits.PART_BYTES)
        # All stripes draw from one sequence: a slow connection then carries less, and the parts arrive nearly in order.
        pieces = _Pieces(view)
        firsts = [next(pieces, (0, view[:0])) for _ in range(stripes)]
        tasks = [
            asyncio.create_task(self._push_stripe(channel, opened, chain([first], pieces)))
            for channel, first in zip(self._up_channels, firsts, strict=False)
        ]
        try:
            return (await asyncio.gather(*tasks))[0]
        finally:
            for task in tasks:
                task.cancel()

    async def push_stripe(self, opening: bytes, pieces: Sequence[tuple[int, memoryview]]) -> m.PushReply:
        """One stripe of a payload whose others come over connections of other processes: those of one learner, under
        the same opening. Every one of them hears the answer to the whole. Tried once."""
        opened = parts.parse_push_open(memoryview(opening))
        return await self._unless_given_up(self._push_stripe(self._up_channels[0], opened, iter(pieces)))

    async def _push_stripe(
        self, channel: Any, opened: parts.PushOpen, pieces: Iterator[tuple[int, memoryview]]
    ) -> m.PushReply:
        header = opened.header
        if header.size >= limits.DIRECT_BYTES_MIN and header.kind is not m.PushKind.INNER:
            with self._lanes.one() as lane:
                if lane is not None:
                    push = DirectPush(opened, pieces)
                    try:
                        return await lane.do(push.send, deadline_s(header.size))
                    finally:
                        self.bytes_up += push.bytes_count
                        self.bytes_past_grpc += push.bytes_count
        inner = opened.header.kind is m.PushKind.INNER
        waits = (limits.PUSH_WAIT_S, limits.INNER_RATE_MIN) if inner else ()
        call = channel.stream_unary(PUSH_METHOD)(
            metadata=self._options.metadata, timeout=deadline_s(opened.header.size, *waits), wait_for_ready=False
        )
        opening = parts.encode_push_open(opened)
        try:
            for offset, data in pieces:
                await call.write(parts.encode_part(offset, data, opening))
                self.bytes_up += data.nbytes
                opening = b""
            await call.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass  # The call ended before we were done; its answer or error says why.
        try:
            reply = parts.parse_push_reply(unseal(await call))
            self._lanes.told(await call.trailing_metadata())
            return reply
        except grpc.aio.AioRpcError as error:
            self._lanes.server_was_away()
            raise call_error(self._options, error) from None
        except PayloadError as error:
            raise UnreachableError(str(error)) from None

    def _stripes(self, size: int) -> int:
        return max(1, min(len(self._channels), size // limits.STRIPE_BYTES_MIN))

    # ------------------------------------------------------------ fetch

    async def fetch(self, request: m.FetchRequest) -> tuple[m.FetchHeader, Bytes]:
        """The whole content that `request` names (its offset and length are ignored), checked. Broken connections are
        resumed where they broke. Raises RefusedError, UnreachableError when retries do not help, or PayloadError when
        the whole is not what its header says."""
        return await self._unless_given_up(self._fetch(request))

    async def _fetch(self, request: m.FetchRequest) -> tuple[m.FetchHeader, Bytes]:
        fetch = ContentFetch(
            self._options, dataclasses.replace(request, offset=0, length=0), self._buffers, self._lanes
        )
        known = fetch.large_as(self._sizes.get((request.kind, request.fragment), 0))
        # The first range tells the size. When there are several connections it is kept short, the rest is spread; but
        # what was too small for that last time comes in one go.
        first_stop = limits.STRIPE_BYTES_MIN if self._stripes(known or limits.PUSH_BYTES_MAX) > 1 else None
        await fetch.range(self._channels[0], 0, first_stop)
        header, assembly = fetch.header, fetch.assembly
        assert header is not None and assembly is not None
        if not assembly.complete:
            await self._fetch_rest(fetch, header.size)
        self.bytes_down += header.size
        self.bytes_past_grpc += fetch.bytes_past_grpc
        self._sizes[request.kind, request.fragment] = header.size
        try:
            if assembly.unhashed_bytes <= VERIFY_INLINE_BYTES_MAX:
                return header, assembly.verify(header.checksum)
            return header, await asyncio.to_thread(assembly.verify, header.checksum)
        except RefusedError as error:
            raise PayloadError(f"fragment {request.fragment}, version {header.version}: {error.detail}") from None

    async def fetch_range(self, request: m.FetchRequest) -> tuple[m.FetchHeader, Bytes]:
        """The bytes from the request's offset on, `length` of them. Each part was checked; the whole cannot be."""
        return await self._unless_given_up(self._fetch_range(request))

    async def _fetch_range(self, request: m.FetchRequest) -> tuple[m.FetchHeader, Bytes]:
        fetch = RangeFetch(self._options, request, self._buffers, self._lanes)
        fetch.large_as(request.length)
        await fetch.range(self._channels[0], request.offset, request.offset + request.length)
        assert fetch.header is not None
        self.bytes_down += request.length
        self.bytes_past_grpc += fetch.bytes_past_grpc
        return fetch.header, fetch.bytes

    async def reach(self, patience_s: float) -> bool:
        """Whether there is a connection, or can be one within this time."""
        try:
            await asyncio.wait_for(self._up_channels[0].channel_ready(), patience_s)
        except TimeoutError:
            return False
        return True

    async def _fetch_rest(self, fetch: ContentFetch, size: int) -> None:
        """Split what is left evenly, at part boundaries."""
        parts_count = -(-(size - limits.STRIPE_BYTES_MIN) // limits.PART_BYTES)
        stripes = min(self._stripes(size), parts_count)
        bounds = [limits.STRIPE_BYTES_MIN + parts_count * i // stripes * limits.PART_BYTES for i in range(stripes)] + [
            size
        ]
        tasks = [
            asyncio.create_task(fetch.range(channel, start, stop))
            for channel, start, stop in zip(self._channels, bounds, bounds[1:], strict=False)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


class _Pieces:
    """A payload in parts, for stripes in several threads: each part is drawn once (`count` is one step in C)."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._starts = count(0, limits.PART_BYTES)

    def __iter__(self) -> Iterator[tuple[int, memoryview]]:
        return self

    def __next__(self) -> tuple[int, memoryview]:
        start = next(self._starts)
        if start >= self._view.nbytes:
            raise StopIteration
        return start, self._view[start : start + limits.PART_BYTES]
