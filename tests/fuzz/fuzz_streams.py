"""Streams of messages into the code that reads them: pushes, fetches and both ends of a session.

A stream is one case: its messages, each with its length in front. Some of them are mutated, missing, doubled or
exchanged.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import xxhash
from fuzz_engine import Make, mutated

from atoll.core import messages as m
from atoll.core.config import SyncConfig
from atoll.errors import RefusedError
from atoll.wire import ClientOptions, ServerOptions, control, convert, fetches, parts, sessions, transfers
from atoll.wire.buffers import Buffers
from atoll.wire.direct_client import Lanes
from atoll.wire.limits import PART_BYTES_MIN
from atoll.wire.seal import unseal
from atoll.wire.transport import EOF, grpc


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """One loop for all cases: making one takes longer than most of them."""
    made = asyncio.new_event_loop()
    asyncio.set_event_loop(made)
    return made


def on_loop(work: Callable[[bytes], Awaitable[Any]]) -> Callable[[bytes], Any]:
    return lambda data: loop().run_until_complete(work(data))


def pack_stream(messages: Sequence[bytes]) -> bytes:
    """Several messages as the bytes of one case."""
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


def unpack_stream(data: bytes) -> list[bytes]:
    messages = []
    while len(data) > 4:
        size = int.from_bytes(data[:4], "big")
        messages.append(data[4 : 4 + size])
        data = data[4 + size :]
    return messages


def streams(samples: Sequence[Sequence[bytes]], noises: Sequence[Make] = ()) -> Make:
    """Streams in which one or two messages are mutated, missing, doubled or exchanged."""
    single = mutated([message for stream in samples for message in stream])

    def make(rng: Random) -> bytes:
        messages = list(rng.choice(samples))
        for _ in range(rng.choice((0, 1, 1, 2))):
            index = rng.randrange(len(messages)) if messages else 0
            kind = rng.randrange(6)
            if kind < 2:
                messages[index : index + 1] = [(rng.choice((single, *noises)))(rng)]
            elif kind == 2:
                del messages[index : index + 1]
            elif kind == 3:
                messages[index:index] = messages[index : index + 1] * 2
            elif kind == 4:
                messages.append(rng.choice((single, *noises))(rng))
            else:
                rng.shuffle(messages)
        return pack_stream(messages)

    return make


class OneFragment:
    """A service that welcomes everybody and takes pushes of one size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pushed: list[Any] = []
        self.opened: list[int] = []
        self.closed: list[int] = []

    def open_session(
        self, session: int, hello: m.Hello, send: Callable[[m.SyncerMessage], None], identity: Any = None
    ) -> None:
        if hello.protocol not in (1, 2, 3):
            raise RefusedError(m.Refusal.PROTOCOL, "another protocol")
        self.opened.append(session)
        send(m.Welcome("run", 1, 1, SyncConfig(), "f", False, hello.protocol))

    def receive(self, session: int, message: m.LearnerMessage) -> None:
        if isinstance(message, m.Leave):
            raise RefusedError(m.Refusal.CLOSED, "left")

    def close_session(self, session: int, reason: str) -> None:
        self.closed.append(session)

    def status(self) -> dict[str, object]:
        return {}

    def check_sender(self, header: m.PushHeader) -> None:
        if header.secret:
            raise RefusedError(m.Refusal.SECRET, "it has none")

    async def push_begin(self, header: m.PushHeader) -> int:
        return self.size

    async def push_complete(self, header: m.PushHeader, payload: Any) -> m.PushReply:
        self.pushed.append(payload)
        return m.PushReply(True)

    async def fetch_open(self, request: m.FetchRequest) -> tuple[m.FetchHeader, memoryview]:
        raise RefusedError(m.Refusal.UNKNOWN_VERSION, "none here")


PUSH_SIZE = 2 * PART_BYTES_MIN + 100
CONTENT = np.arange(PUSH_SIZE, dtype=np.uint64).view(np.uint8)[:PUSH_SIZE].copy()


def push_stream() -> list[bytes]:
    checksum = xxhash.xxh3_64_intdigest(CONTENT.data)
    header = m.PushHeader(m.PushKind.SEED, "a", 1, 0, 0, 0, 0, -1, 0, 0, "fp32", PUSH_SIZE, checksum)
    opening = parts.encode_push_open(parts.PushOpen(header, 1, 1, PART_BYTES_MIN))
    cut = [(at, CONTENT.data[at : at + PART_BYTES_MIN]) for at in range(0, PUSH_SIZE, PART_BYTES_MIN)]
    return [parts.encode_part(at, data, b"" if at else opening) for at, data in cut]


async def receive_push(data: bytes) -> Any:
    service = OneFragment(PUSH_SIZE)
    table = transfers.Transfers(service, ServerOptions(transfer_idle_s=0.02))
    rest = iter(unpack_stream(data))

    async def read() -> bytes | None:
        await asyncio.sleep(0)
        return next(rest, None)

    reply = await table.receive(read)
    return reply, len(table), service.pushed


def check_push(result: Any) -> None:
    reply, left, pushed = result
    assert left == 0, "a transfer was answered and is still there"
    assert reply.accepted == bool(pushed)
    for payload in pushed:
        assert payload.tobytes() == CONTENT.tobytes(), "a payload came in that nobody sent"


class FakeCall:
    """A gRPC call that brings the given messages, then ends well."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        self._rest = iter(messages)
        self.written: list[bytes] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return next(self._rest, EOF)

    async def write(self, data: bytes) -> None:
        self.written.append(data)

    async def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def code(self) -> Any:
        return grpc.StatusCode.OK

    def cancel(self) -> None: ...
    def cancelled(self) -> bool:
        return False

    async def __aiter__(self) -> Any:
        while (message := await self.read()) is not EOF:
            yield message


class FakeChannel:
    def __init__(self, messages: Sequence[bytes]) -> None:
        self._call = FakeCall(messages)

    def stream_stream(self, method: str) -> Callable[..., FakeCall]:
        return lambda *_, **__: self._call

    unary_stream = stream_stream

    async def close(self) -> None: ...


def fetch_stream() -> list[bytes]:
    header = m.FetchHeader(7, "fp32", PUSH_SIZE, xxhash.xxh3_64_intdigest(CONTENT.data))
    opening = parts.encode_fetch_header(header)
    return [parts.encode_part(0, CONTENT.data, opening)]


async def receive_fetch(data: bytes) -> Any:
    request = m.FetchRequest(m.FetchKind.INNER, "a", 1, 0, 0)
    options = ClientOptions("127.0.0.1:1")
    fetch = fetches.ContentFetch(options, request, Buffers(), Lanes(options))
    async for _ in fetch._stream(FakeChannel(unpack_stream(data)), 0, None):
        pass
    if fetch.assembly is not None and fetch.assembly.complete and fetch.header is not None:
        return fetch.header, fetch.assembly.verify(fetch.header.checksum)
    return None


async def serve_session(data: bytes) -> Any:
    service, call = OneFragment(0), FakeCall(unpack_stream(data))
    table = sessions.Sessions(service, ServerOptions())
    await table.serve(call)
    return service, len(table), call.written


def check_session(result: Any) -> None:
    service, left, written = result
    assert left == 0 and service.opened == service.closed, "a session ended and the service did not hear of it, once"
    answers = [convert.parse_syncer_message(unseal(data)) for data in written]
    if not answers:
        assert not service.opened, "welcomed without a word"
        return  # a damaged Hello: the learner sees the stream end, and says hello again
    assert isinstance(answers[0], m.Welcome if service.opened else m.Refused)
    assert not any(isinstance(answer, m.Refused) for answer in answers[:-1])


async def follow_session(data: bytes) -> Any:
    client = control.ControlClient(ClientOptions("127.0.0.1:1"))
    await client._channel.close()
    client._channel = FakeChannel(unpack_stream(data))
    async with client:
        await client.open(m.Hello("a", "i", 2, (m.TensorSpec("w", (2, 3), "float32"),)))
        return [message async for message in client]
