"""A syncer small enough to read, and helpers that keep every test from hanging."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import xxhash

from atoll.core import Identity
from atoll.core import messages as m
from atoll.core.config import SyncConfig
from atoll.errors import RefusedError
from atoll.wire import BulkClient, ClientOptions, RunningServer, SendToLearner, ServerOptions, serve

T = TypeVar("T")
TEST_S_MAX = 20.0


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, or fail loudly: nothing on the wire may hang."""

    async def bounded() -> T:
        async with asyncio.timeout(TEST_S_MAX):
            return await work

    return asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def payload_of(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def hello(learner: str = "a", protocol: int = m.PROTOCOL_VERSION) -> m.Hello:
    return m.Hello(learner, f"instance of {learner}", protocol, (m.TensorSpec("w", (2, 3), "float32"),))


def push_header(payload: np.ndarray, **changes: Any) -> m.PushHeader:
    values: dict[str, Any] = {
        "kind": m.PushKind.CONTRIBUTION,
        "learner": "a",
        "generation": 1,
        "fragment": 0,
        "round": 5,
        "attempt": 0,
        "seq": 1,
        "base_version": 3,
        "steps": 10,
        "tokens": 1000,
        "codec": "int4",
        "size": payload.nbytes,
        "checksum": xxhash.xxh3_64_intdigest(payload.data),
    }
    return m.PushHeader(**{**values, **changes})


def fetch_request(**changes: Any) -> m.FetchRequest:
    values: dict[str, Any] = {"kind": m.FetchKind.THETA, "learner": "a", "generation": 1, "fragment": 0, "version": -1}
    return m.FetchRequest(**{**values, **changes})


class FakeSyncer:
    """Welcomes everybody, keeps what is pushed and hands out one content."""

    def __init__(self, content: np.ndarray | None = None, expected: int | None = None) -> None:
        self.content = payload_of(0) if content is None else content
        self.expected = expected
        self.version = 7
        self.protocol = m.PROTOCOL_VERSION
        """The highest that this syncer speaks."""
        self.hellos: list[m.Hello] = []
        self.identities: list[Identity | None] = []
        self.secret = ""
        self.knows_model = True
        self.sends: dict[int, SendToLearner] = {}
        self.received: list[tuple[int, m.LearnerMessage]] = []
        self.closed: list[tuple[int, str]] = []
        self.begun: list[m.PushHeader] = []
        self.pushed: list[np.ndarray] = []
        self.fetches: list[m.FetchRequest] = []
        self.replies: list[m.SyncerMessage] = []
        self.hold_completion: asyncio.Event | None = None
        self.hold_fetch: asyncio.Event | None = None

    def open_session(self, session: int, hello: m.Hello, send: SendToLearner, identity: Identity | None = None) -> None:
        self.identities.append(identity)
        self.hellos.append(hello)
        if not m.PROTOCOL_OLDEST <= hello.protocol <= self.protocol:
            raise RefusedError(m.Refusal.PROTOCOL, f"protocol {hello.protocol}; update the learner")
        if not self.knows_model and not hello.tensors:
            raise RefusedError(m.Refusal.TENSORS, "say hello again with the tensors")
        self.sends[session] = send
        send(m.Welcome("run", 1, 1, SyncConfig(), "f" * 64, False, hello.protocol))

    def receive(self, session: int, message: m.LearnerMessage) -> None:
        self.received.append((session, message))

    def close_session(self, session: int, reason: str) -> None:
        self.closed.append((session, reason))

    def status(self) -> dict[str, object]:
        return {"learners": len(self.sends) - len(self.closed)}

    def check_sender(self, header: m.PushHeader) -> None:
        if header.secret != self.secret:
            raise RefusedError(m.Refusal.SECRET, "without the secret of its session")

    def ask_to_leave(self, learner: str) -> str:
        if learner not in {hello.learner for hello in self.hellos}:
            raise RefusedError(m.Refusal.UNKNOWN_LEARNER, f"no learner {learner!r} here; give another")
        return "active"

    async def take_snapshot(self) -> str:
        return "snapshot 1 is written"

    async def push_begin(self, header: m.PushHeader) -> int:
        self.begun.append(header)
        return header.size if self.expected is None else self.expected

    async def push_complete(self, header: m.PushHeader, payload: np.ndarray) -> m.PushReply:
        if self.hold_completion is not None:
            await self.hold_completion.wait()
        self.pushed.append(payload)
        return m.PushReply(True, late=header.round == 0)

    async def fetch_open(self, request: m.FetchRequest) -> tuple[m.FetchHeader, memoryview]:
        self.fetches.append(request)
        if self.hold_fetch is not None:
            await self.hold_fetch.wait()
        if request.version not in (-1, self.version):
            raise RefusedError(m.Refusal.UNKNOWN_VERSION, f"no version {request.version}; fetch the current one")
        checksum = xxhash.xxh3_64_intdigest(self.content.data)
        return m.FetchHeader(self.version, "fp32", self.content.nbytes, checksum), self.content.data


@asynccontextmanager
async def serving(service: FakeSyncer, **options: Any) -> AsyncIterator[RunningServer]:
    server = await serve(service, ServerOptions(**options))
    try:
        yield server
    finally:
        await server.stop(0.0)


@asynccontextmanager
async def bulk_client(address: str, **options: Any) -> AsyncIterator[BulkClient]:
    client = BulkClient(ClientOptions(address, **options))
    try:
        yield client
    finally:
        await client.close()
