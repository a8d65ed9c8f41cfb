"""A port that a learner takes for a syncer's. What comes in goes to an `Audience`, what goes out is written by hand.

Nothing is checked here, and nothing is answered by itself: whoever plays the syncer decides what to believe.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from atoll.wire import raw

grpc, pb = raw.grpc, raw.pb

CONNECTIONS_MAX = 256
"""Of the one or two learners that are examined: five each, and what they leave behind when a link breaks."""


class PlayedSession:
    """One control stream, from its first message to its end."""

    def __init__(self, context: Any, number: int) -> None:
        self.number = number
        self.metadata = dict(context.invocation_metadata() or ())
        self.messages = 0
        """Heard so far."""
        self.protocol = 0
        """What it speaks, once it was welcomed."""
        self.over = False
        self._context = context
        self._writing = asyncio.Lock()
        """gRPC takes one message at a time, and answers are written while a scene speaks."""
        self._end = asyncio.get_running_loop().create_future()

    async def say(self, *, damaged: bool = False, **message: Any) -> None:
        """One message, as a field of SyncerMessage. Damaged: with the seal of other bytes."""
        sealed = raw.seal(pb.SyncerMessage(**message).SerializeToString())
        if damaged:
            sealed = sealed[:-1] + bytes((sealed[-1] ^ 1,))
        async with self._writing:
            if not self.over:
                await self._context.write(sealed)

    async def refuse(self, code: str, detail: str) -> None:
        await self.say(refused=pb.Refused(code=code, detail=detail))
        self.end(orderly=True)

    def end(self, *, orderly: bool = False) -> None:
        """Close the stream, or break it as a lost connection does."""
        self.over = True
        if not self._end.done():
            self._end.set_result(orderly)

    async def serve(self, heard: Callable[[PlayedSession, bytes], None]) -> None:
        reading = asyncio.ensure_future(self._read(heard))
        try:
            await asyncio.wait({reading, self._end}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.over = True
            reading.cancel()
        if self._end.done() and not self._end.result():
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, "the conformance kit broke this session")

    async def _read(self, heard: Callable[[PlayedSession, bytes], None]) -> None:
        while (data := await self._context.read()) is not raw.EOF:
            self.messages += 1
            heard(self, bytes(data))


class Audience(Protocol):
    """Whoever plays the syncer."""

    def session_heard(self, session: PlayedSession, data: bytes) -> None:
        """One message of a session, as it came."""

    def session_over(self, session: PlayedSession) -> None:
        """No more messages of this session."""

    async def push(self, parts: AsyncIterator[bytes], metadata: dict[str, str]) -> Any:
        """One stream of a push; returns the PushReply."""

    def fetch(self, request: bytes, metadata: dict[str, str]) -> AsyncIterator[bytes]:
        """The encoded parts of one fetch."""


class PlayedSyncer:
    def __init__(self, audience: Audience) -> None:
        self._audience = audience
        self._server = grpc.aio.server(options=raw.server_arguments(CONNECTIONS_MAX))
        self._sessions = 0
        self.address = ""

    async def start(self, listen: str) -> None:
        handlers = {raw.SESSION_METHOD: self._session, raw.PUSH_METHOD: self._push, raw.FETCH_METHOD: self._fetch}
        self._server.add_generic_rpc_handlers((_Methods(handlers),))
        host = listen.rpartition(":")[0]
        self.address = f"{host}:{self._server.add_insecure_port(listen)}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0.0)

    async def _session(self, _requests: Any, context: Any) -> None:
        self._sessions += 1
        session = PlayedSession(context, self._sessions)
        try:
            await session.serve(self._audience.session_heard)
        finally:
            self._audience.session_over(session)

    async def _push(self, _requests: Any, context: Any) -> None:
        reply = await self._audience.push(_stream(context), dict(context.invocation_metadata() or ()))
        await context.write(raw.seal(reply.SerializeToString()))

    async def _fetch(self, _requests: Any, context: Any) -> None:
        request = await context.read()
        if request is not raw.EOF:
            async for part in self._audience.fetch(bytes(request), dict(context.invocation_metadata() or ())):
                await context.write(part)


async def _stream(context: Any) -> AsyncIterator[bytes]:
    while (data := await context.read()) is not raw.EOF:
        yield bytes(data)


class _Methods(raw.grpc.GenericRpcHandler):  # type: ignore[misc]  # gRPC has no types
    def __init__(self, handlers: dict[str, Any]) -> None:
        self._handlers = {name: grpc.stream_stream_rpc_method_handler(serve) for name, serve in handlers.items()}

    def service(self, details: Any) -> Any:
        return self._handlers.get(details.method)
