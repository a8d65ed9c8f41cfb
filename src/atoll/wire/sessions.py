"""The syncer's side of control sessions: one task reads, one writes, and the service hears of the end exactly once."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from atoll.core import (
    PROTOCOL_OLDEST,
    Hello,
    Identity,
    LearnerMessage,
    Progress,
    Published,
    Refusal,
    Refused,
    SyncerMessage,
    Welcome,
)
from atoll.errors import PayloadError, RefusedError, RemoteProtocolError
from atoll.wire import limits
from atoll.wire.checks import cut
from atoll.wire.convert import encode_syncer_message, parse_learner_message
from atoll.wire.limits import (
    FLUSH_S,
    HELLO_BYTES_MAX,
    HELLO_PIECE_BYTES,
    HELLO_S,
    LARGE_HELLOS_MAX,
    SESSION_SILENCE_S,
)
from atoll.wire.seal import seal, unseal
from atoll.wire.service import ServerOptions, SyncerService
from atoll.wire.transport import EOF, PIECES_KEY, grpc
from atoll.wire.versions import since

log = logging.getLogger(__name__)

ENCODED_KEPT = 4
"""Messages whose bytes are kept for the next session: a notice comes in as many forms as learners' own counters differ
and as there are codecs, and neighbours mostly have the same."""


class Session:
    """The outgoing queue of one session and how it ends."""

    def __init__(self, number: int, queue_bytes_max: int, encode: Callable[[SyncerMessage], bytes]) -> None:
        self.number = number
        self._encode = encode
        self._queue: deque[bytes] = deque()
        self._updates: deque[tuple[int, bytes]] = deque()
        """Notices with updates inside, and what must not overtake them: sent when nothing else waits. By fragment."""
        self._queue_bytes = 0
        self._queue_bytes_max = queue_bytes_max
        self._wake = asyncio.Event()
        self._last_queued = False
        self.protocol = PROTOCOL_OLDEST
        """What this session speaks, from the Welcome that went through it on."""
        self.closing_reason = "the syncer closed the session"
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the session is over; the streams are closed as soon as this is set."""

    def send(self, message: SyncerMessage) -> None:
        """Queue a message; never blocks. After the end, or after a Refused, it does nothing. What the session's
        protocol does not know is not sent, loudly: it is a mistake of our own."""
        if self.ended.done() or self._last_queued:
            return
        if isinstance(message, Welcome):
            self.protocol = message.protocol
        if since(message) > self.protocol:
            log.error(
                "session %d speaks protocol %d, so its %s was not sent; please report this bug in the syncer",
                *(self.number, self.protocol, type(message).__name__),
            )
            return
        encoded = self._encode(message)
        self._queue_bytes += len(encoded)
        if self._queue_bytes > self._queue_bytes_max:
            self.end(f"the learner does not read: more than {self._queue_bytes_max} bytes wait for it")
            return
        if isinstance(message, Published) and (message.update or self._has_update(message.fragment)):
            self._updates.append((message.fragment, encoded))
        else:
            self._queue.append(encoded)
        if isinstance(message, Refused):
            self._last_queued = True
            self.closing_reason = f"refused: {message.detail} [{message.code}]"
        self._wake.set()

    def _has_update(self, fragment: int) -> bool:
        return any(waiting == fragment for waiting, _ in self._updates)

    def close_after_flush(self, reason: str) -> None:
        """End when what is queued has gone out, or after FLUSH_S."""
        self.closing_reason = reason
        self._last_queued = True
        self._wake.set()
        asyncio.get_running_loop().call_later(FLUSH_S, self.end, reason)

    def end(self, reason: str) -> None:
        if not self.ended.done():
            self._queue.clear()
            self._updates.clear()
            self.ended.set_result(reason)

    async def write_to(self, context: Any) -> None:
        while True:
            while self._queue or self._updates:
                message = self._queue.popleft() if self._queue else self._updates.popleft()[1]
                await context.write(message)
                self._queue_bytes -= len(message)
            if self._last_queued:
                return
            self._wake.clear()
            await self._wake.wait()


class EncodedOnce:
    """A message that goes to many sessions, one after the other, is encoded and sealed for the first of them."""

    def __init__(self) -> None:
        self._last: deque[tuple[SyncerMessage, bytes]] = deque(maxlen=ENCODED_KEPT)

    def bytes_of(self, message: SyncerMessage) -> bytes:
        for known, encoded in self._last:
            if known is message:
                return encoded
        encoded = seal(encode_syncer_message(message))
        self._last.appendleft((message, encoded))
        return encoded


class Sessions:
    """All control sessions of one server."""

    def __init__(self, service: SyncerService, options: ServerOptions) -> None:
        self._service = service
        self._options = options
        self._open: dict[int, Session] = {}
        self._encoded = EncodedOnce()
        self._peers: dict[int, str] = {}
        self._numbers_used = 0
        self._large_hellos = asyncio.Semaphore(LARGE_HELLOS_MAX)
        self._parsing = asyncio.Lock()
        self._bytes_parsing = 0

    def __len__(self) -> int:
        return len(self._open)

    def close(self, number: int, reason: str) -> None:
        if number in self._open:
            self._open[number].close_after_flush(reason)

    def close_all(self, reason: str) -> None:
        for number in list(self._open):
            self.close(number, reason)

    async def serve(self, context: Any, identity: Identity | None = None) -> None:
        """Serve one stream from its Hello to its end."""
        try:
            hello = await self._read_hello(context)
            session = self._admit(hello, context.peer(), identity)
        except RefusedError as error:
            await context.write(seal(encode_syncer_message(Refused(error.code, error.detail))))
            return
        except PayloadError as error:
            log.warning("a Hello was damaged: %s", error)
            return  # a refusal would be final; the learner sees the stream end, and says hello again
        reason = "the connection broke"
        reader = asyncio.create_task(self._read(session, context))
        writer = asyncio.create_task(session.write_to(context))
        try:
            endings: list[asyncio.Future[Any]] = [reader, writer, session.ended]
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            reason = _reason(session, reader, writer)
            if not writer.done() and reader.done() and not session.ended.done():
                # A refusal may have been queued by the last message that was read.
                session.close_after_flush(reason)
                await asyncio.wait(endings[1:], return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.end(reason)
            reader.cancel()
            writer.cancel()
            del self._open[session.number], self._peers[session.number]
            self._service.close_session(session.number, reason)

    async def _read_hello(self, context: Any) -> Hello:
        try:
            async with asyncio.timeout(HELLO_S):
                data = await self._hello_bytes(context)
            message = await self._parse_hello(data)
        except (TimeoutError, RemoteProtocolError) as error:
            raise RefusedError(Refusal.BAD_REQUEST, f"no usable Hello: {error or 'it took too long'}") from None
        if not isinstance(message, Hello):
            raise RefusedError(Refusal.BAD_REQUEST, "a session must start with Hello")
        return message

    async def _hello_bytes(self, context: Any) -> bytes:
        told = dict(context.invocation_metadata() or ()).get(PIECES_KEY, "1")
        if told == "1":
            return await _piece(context)
        if told not in _PIECES:
            raise RemoteProtocolError(f"it comes in {cut(str(told))} pieces; at most {len(_PIECES)} are allowed")
        pieces: list[bytes] = []
        async with self._large_hellos:
            for _ in range(int(told)):
                pieces.append(await _piece(context))
                if len(pieces[-1]) > HELLO_PIECE_BYTES:
                    raise RemoteProtocolError(f"a piece of it has more than {HELLO_PIECE_BYTES} bytes")
            return b"".join(pieces)

    async def _parse_hello(self, data: bytes) -> LearnerMessage:
        """A large one on a thread, one after the other: the loop has sessions to serve meanwhile."""
        if len(data) <= limits.HELLO_INLINE_BYTES_MAX:
            return parse_learner_message(unseal(data))
        if self._bytes_parsing + len(data) > limits.HELLO_BYTES_HELD_MAX:
            raise RefusedError(Refusal.BUSY, "the syncer is reading other large Hellos; try again later")
        self._bytes_parsing += len(data)
        try:
            async with self._parsing:
                return await asyncio.to_thread(lambda: parse_learner_message(unseal(data)))
        finally:
            self._bytes_parsing -= len(data)

    def peer(self, number: int) -> str:
        """The address that a session comes from: 10.0.0.3 for gRPC's ipv4:10.0.0.3:45678. Empty if it is over."""
        return self._peers.get(number, "").partition(":")[2].rpartition(":")[0].replace("%5B", "").replace("%5D", "")

    def _admit(self, hello: Hello, peer: str, identity: Identity | None) -> Session:
        if len(self._open) >= self._options.sessions_max:
            raise RefusedError(Refusal.BUSY, f"the syncer already has {len(self._open)} sessions; try again later")
        self._numbers_used += 1
        session = Session(self._numbers_used, self._options.session_queue_bytes_max, self._encoded.bytes_of)
        self._peers[session.number] = peer
        try:
            self._service.open_session(session.number, hello, session.send, identity)
        except BaseException:
            del self._peers[session.number]
            raise
        self._open[session.number] = session
        return session

    async def _read(self, session: Session, context: Any) -> str:
        """Hand messages over until the stream ends; returns why it did."""
        silence_s: float | None = None  # one that joins or seeds has nothing to say before its first report
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    data = await context.read()
            except TimeoutError:
                return self._start_again(session, f"nothing was heard for {SESSION_SILENCE_S:g} s")
            if data is EOF:
                return "the learner closed its stream"
            try:
                if len(data) > limits.UNWEIGHED_BYTES_MAX:
                    raise RemoteProtocolError(f"a message of {len(data)} bytes; only a Hello may be that large")
                message = parse_learner_message(unseal(data))
                if isinstance(message, Hello):
                    raise RemoteProtocolError("a second Hello in one session")
                if since(message) > session.protocol:
                    name = type(message).__name__
                    raise RemoteProtocolError(f"a {name} in a session of protocol {session.protocol}")
                if isinstance(message, Progress):
                    silence_s = SESSION_SILENCE_S
                self._service.receive(session.number, message)
            except RemoteProtocolError as error:
                session.send(Refused(Refusal.BAD_REQUEST, f"{error}; this learner speaks the protocol wrongly"))
                return str(error)
            except RefusedError as error:
                session.send(Refused(error.code, error.detail))
                return str(error)
            except PayloadError as error:
                return self._start_again(session, str(error))

    def _start_again(self, session: Session, reason: str) -> str:
        """Nobody's fault: the learner reconnects, and its Hello says everything again. It must not take this for the
        orderly end that lets a leaving learner go."""
        session.send(Refused(Refusal.BUSY, f"{reason}; say hello again"))
        return reason


_PIECES = {str(count + 1) for count in range(HELLO_BYTES_MAX // HELLO_PIECE_BYTES)}


async def _piece(context: Any) -> bytes:
    data = await context.read()
    if data is EOF:
        raise RemoteProtocolError("the stream ended before it was whole")
    return bytes(data)


def _reason(session: Session, reader: asyncio.Task[str], writer: asyncio.Task[None]) -> str:
    if session.ended.done():
        return session.ended.result()
    for task in (reader, writer):
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, grpc.aio.BaseError):
                return f"the connection broke ({type(error).__name__})"
            log.error("session %d ends on an error", session.number, exc_info=error)
            return f"an error inside the syncer: {error}"
    return reader.result() if reader.done() else session.closing_reason
