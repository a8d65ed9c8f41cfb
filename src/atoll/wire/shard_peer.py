"""The link between a coordinator and a shard: one stream, through which both sides call each other.

A message is a JSON object and, where it has any, bytes. Calls get one answer or one refusal; notices get none. Messages
arrive in the order in which they were sent, but for large bytes: those go out part by part when nothing else waits, so
that a merge never stands behind a fragment that is being copied. When the stream ends, every call that waits fails:
nobody can know what the other side has done.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.core import messages as m
from atoll.errors import AtollError, PayloadError, RefusedError, RemoteProtocolError, UnreachableError
from atoll.wire import limits
from atoll.wire.channel import ClientOptions, call_error, open_channel
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.records import parse_bytes
from atoll.wire.resources import memory_bytes
from atoll.wire.seal import seal, unseal
from atoll.wire.service import Bytes
from atoll.wire.transport import ATTACH_METHOD, EOF, control_channel_arguments, grpc

log = logging.getLogger(__name__)

Values = Mapping[str, Any]
Reply = tuple[Values, memoryview | bytes]
Answering = Callable[[str, dict[str, Any], Bytes], Coroutine[Any, Any, Reply]]
"""Answers a call or takes a notice: its name, its values and its bytes. A RefusedError goes back to the caller."""
Read = Callable[[], Awaitable[Any]]
Write = Callable[[bytes], Awaitable[Any]]
REASON_WAIT_S = 2.0
"""How long after a failed write the other side's reason is waited for: it is on its way already."""
NOTICE = 0
"""The id of what wants no answer."""


@dataclass(slots=True)
class _Outgoing:
    id: int
    kind: int
    method: str
    json: bytes
    data: memoryview
    at: int = 0

    @property
    def size(self) -> int:
        return len(self.json) + self.data.nbytes

    def next_frame(self) -> bytes:
        first = self.at == 0
        stop = min(self.size, self.at + limits.SHARD_PART_BYTES)
        head, cut = self.json[self.at : stop], max(0, self.at - len(self.json))
        part = head + self.data[cut : max(0, stop - len(self.json))]
        frame = pb.ShardFrame(id=self.id, kind=self.kind, part=part)
        if first:
            frame.method, frame.json_bytes, frame.bytes = self.method, len(self.json), self.size
        self.at = stop
        return bytes(frame.SerializeToString())


@dataclass(slots=True)
class _Incoming:
    method: str
    json_bytes: int
    body: Bytes
    at: int = field(default=0)


class ShardPeer:
    """One end of the link. `run` pumps it until it ends; everything happens on one event loop."""

    def __init__(self, read: Read, write: Write, answer: Answering) -> None:
        self._read, self._write, self._answer = read, write, answer
        self._bytes_max = int(limits.TRANSFER_MEMORY_SHARE * memory_bytes())
        """What may be under way to this side at a time, as for all pushes together."""
        self._now_s = asyncio.get_running_loop().time
        self._quick: deque[_Outgoing] = deque()
        self._large: deque[_Outgoing] = deque()
        self._wake = asyncio.Event()
        self._calls: dict[int, asyncio.Future[tuple[dict[str, Any], Bytes]]] = {}
        self._incoming: dict[tuple[int, int], _Incoming] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last = NOTICE
        self.may_not_lead = ""
        """Why the other side may be a relay here, and no more than that; empty: it may lead."""
        self.origin = ""
        """From where the other side came, if it was the one that opened the link."""
        self.closed = ""
        """Why nothing more goes through; empty while the link is up."""
        self.closed_s = 0.0
        """Since when, by the loop's clock."""
        self._refusal: RefusedError | None = None
        """Why the other side would have none of it: trying again does not help."""

    # ------------------------------------------------------------ saying something

    async def call(self, method: str, values: Values, data: Any = b"") -> tuple[dict[str, Any], Bytes]:
        """Ask, and wait for the answer. Raises RefusedError with what the other side says, or UnreachableError."""
        if self.closed:
            raise self._broken()
        self._last += 1
        answer: asyncio.Future[tuple[dict[str, Any], Bytes]] = asyncio.get_running_loop().create_future()
        self._calls[self._last] = answer
        self._send(_Outgoing(self._last, pb.SHARD_CALL, method, _encoded(values), memoryview(data).cast("B")))
        return await answer

    def tell(self, method: str, values: Values) -> None:
        """Say something that wants no answer."""
        if not self.closed:
            self._send(_Outgoing(NOTICE, pb.SHARD_CALL, method, _encoded(values), memoryview(b"")))

    def _send(self, message: _Outgoing) -> None:
        if len(self._quick) + len(self._large) >= limits.SHARD_MESSAGES_MAX:
            self.close("the other side of the link takes no more messages; look at its log")
            return
        (self._large if message.data.nbytes > limits.SHARD_PART_BYTES else self._quick).append(message)
        self._wake.set()

    # ------------------------------------------------------------ the pumps

    async def run(self) -> str:
        """Until the other side ends or breaks off; returns why."""
        writing = asyncio.create_task(self._pump_out())
        reading = asyncio.create_task(self._pump_in())
        try:
            done, _ = await asyncio.wait({writing, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading not in done:  # a write only says that it is over; what is read says why
                await asyncio.wait({reading}, timeout=REASON_WAIT_S)
            for task in (reading, writing):
                if task.done() and not task.cancelled():
                    error = task.exception()
                    self._refusal = self._refusal or (error if isinstance(error, RefusedError) else None)
                    self.close(str(error or "the link has ended"))
        finally:
            self.close("the link was given up")
            for task in (writing, reading, *self._tasks):
                task.cancel()
            await asyncio.gather(writing, reading, *self._tasks, return_exceptions=True)
        return self.closed

    def close(self, reason: str) -> None:
        """Nothing more goes through; whoever waits for an answer hears why."""
        if self.closed:
            return
        self.closed, self.closed_s = reason, self._now_s()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(self._broken())
                answer.exception()  # nobody may be waiting any more
        self._calls.clear()
        self._wake.set()

    def _broken(self) -> AtollError:
        if self._refusal is not None:
            return RefusedError(self._refusal.code, self._refusal.detail)
        return UnreachableError(self.closed)

    async def _pump_out(self) -> None:
        while not self.closed:
            while (waiting := self._quick or self._large) and not self.closed:
                message = waiting[0]
                await self._write(seal(message.next_frame()))
                if message.at >= message.size:
                    waiting.remove(message)
            self._wake.clear()
            if not self.closed and not self._quick and not self._large:
                await self._wake.wait()

    async def _pump_in(self) -> None:
        while not self.closed:
            data = await self._read()
            if data is EOF:
                return
            try:
                self._take(parse_bytes(pb.ShardFrame, unseal(data)))
            except PayloadError as error:
                raise RemoteProtocolError(str(error)) from None

    def _take(self, frame: Any) -> None:
        key = (frame.kind, frame.id)
        message = self._incoming.get(key)
        if message is None:
            if not 0 <= frame.json_bytes <= min(frame.bytes, limits.SHARD_JSON_BYTES_MAX):
                raise RemoteProtocolError(f"a message of {frame.bytes} bytes with {frame.json_bytes} of JSON")
            if frame.bytes > limits.PUSH_BYTES_MAX:
                raise RemoteProtocolError(f"a message of {frame.bytes} bytes; at most {limits.PUSH_BYTES_MAX} are sent")
            self._check_room(frame.bytes)
            message = _Incoming(frame.method, frame.json_bytes, np.empty(frame.bytes, np.uint8))
            self._incoming[key] = message
        stop = message.at + len(frame.part)
        if stop > message.body.nbytes:
            raise RemoteProtocolError("a message is longer than it says")
        message.body[message.at : stop] = np.frombuffer(frame.part, np.uint8)
        message.at = stop
        if stop == message.body.nbytes:
            del self._incoming[key]
            self._complete(frame.kind, frame.id, message)

    def _check_room(self, size: int) -> None:
        """Whoever may open a link may not fill this process by it."""
        count = len(self._incoming) + len(self._tasks)
        held = sum(one.body.nbytes for one in self._incoming.values()) + size
        if count >= limits.SHARD_CALLS_MAX or held > self._bytes_max:
            raise RemoteProtocolError(f"{count} messages at once, of {held} bytes; the other side must send less")

    def _complete(self, kind: int, id: int, message: _Incoming) -> None:
        values, data = _decoded(message.body[: message.json_bytes]), message.body[message.json_bytes :]
        if kind == pb.SHARD_CALL:
            task = asyncio.get_running_loop().create_task(self._serve(id, message.method, values, data))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        answer = self._calls.pop(id, None)
        if answer is None or answer.done():
            return
        if kind == pb.SHARD_REFUSAL:
            answer.set_exception(RefusedError(str(values.get("code", "")), str(values.get("detail", ""))))
        else:
            answer.set_result((values, data))

    async def _serve(self, id: int, method: str, values: dict[str, Any], data: Bytes) -> None:
        try:
            answer, content = await self._answer(method, values, data)
            outgoing = _Outgoing(id, pb.SHARD_ANSWER, "", _encoded(answer), memoryview(content).cast("B"))
        except RefusedError as error:
            refusal = {"code": error.code, "detail": error.detail}
            outgoing = _Outgoing(id, pb.SHARD_REFUSAL, "", _encoded(refusal), memoryview(b""))
        except Exception as error:  # nobody would answer the caller: it must not wait for ever
            log.exception("%s failed here", method)
            self.close(f"{method} failed ({error!r}); see the log, and run the same version of atoll on both sides")
            return
        if id != NOTICE and not self.closed:
            self._send(outgoing)


def _encoded(values: Values) -> bytes:
    return json.dumps(dict(values), separators=(",", ":")).encode()


def _decoded(data: Bytes) -> dict[str, Any]:
    try:
        values = json.loads(data.tobytes() or b"{}")
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a message of a shard's link is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise RemoteProtocolError("a message of a shard's link must be a JSON object")
    return values


class ShardConnection:
    """The coordinator's end: opens the stream, and is a `ShardPeer` while it is up.

    async with ShardConnection(options, answer) as peer:
        await peer.call(...)
    """

    def __init__(self, options: ClientOptions, answer: Answering) -> None:
        self._options = options
        self._channel = open_channel(options, control_channel_arguments())
        self._call = self._channel.stream_stream(ATTACH_METHOD)(metadata=options.metadata)
        self.peer = ShardPeer(self._receive, self._call.write, answer)
        self.running: asyncio.Task[str] | None = None

    async def __aenter__(self) -> ShardConnection:
        self.running = asyncio.create_task(self.peer.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.peer.close("the link was closed")
        self._call.cancel()
        if self.running is not None:
            await asyncio.gather(self.running, return_exceptions=True)
        await self._channel.close()

    async def _receive(self) -> Any:
        try:
            data = await self._call.read()
            if data is EOF and await self._call.code() != grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(await self._call.code(), None, None, await self._call.details())
            return data
        except grpc.aio.AioRpcError as error:
            raise _shard_error(self._options, error) from None


def _shard_error(options: ClientOptions, error: Any) -> AtollError:
    if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED):
        return RefusedError(m.Refusal.NOT_ALLOWED, f"{options.address}: {error.details()}")
    return call_error(options, error)


def attach_handler(
    answering: Callable[[ShardPeer], Answering], *, relays: bool = False
) -> Callable[..., Awaitable[None]]:
    """The shard's end, for `serve(attach=...)`: `answering` is told of each link before it says anything. With `relays`
    also of those who may not lead; it looks at `may_not_lead`."""

    async def attached(context: Any, may_not_lead: str = "") -> None:
        if may_not_lead and not relays:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, may_not_lead)

        async def answer(method: str, values: dict[str, Any], data: Bytes) -> Reply:
            return await answers(method, values, data)

        peer = ShardPeer(context.read, context.write, answer)
        peer.may_not_lead = may_not_lead
        peer.origin = context.peer().partition(":")[2]
        answers = answering(peer)
        await peer.run()

    return attached
