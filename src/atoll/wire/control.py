"""The learner's side of control sessions: one session at a time, and a loop that always wants one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from atoll.core import messages as m
from atoll.errors import (
    AtollError,
    CertificateError,
    LocalProtocolError,
    PayloadError,
    RefusedError,
    RemoteProtocolError,
    UnreachableError,
)
from atoll.wire import checks, limits
from atoll.wire.address import is_told_by_file
from atoll.wire.cause import find_cause
from atoll.wire.channel import Backoff, ClientOptions, call_error, open_channel, refused_error
from atoll.wire.convert import (
    encode_learner_message,
    parse_json_object,
    parse_refused,
    parse_syncer_message,
)
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.records import parse_bytes
from atoll.wire.seal import seal, unseal
from atoll.wire.transport import (
    EOF,
    LEAVE_METHOD,
    PIECES_KEY,
    SESSION_METHOD,
    SHARDS_METHOD,
    SNAPSHOT_METHOD,
    STATUS_METHOD,
    control_channel_arguments,
    grpc,
)
from atoll.wire.versions import hello_in, learner_message_in, may_speak_older, since

log = logging.getLogger(__name__)

SendToSyncer = Callable[[m.LearnerMessage], None]
Found = Callable[[ClientOptions], Awaitable[None]]


class SessionHandler(Protocol):
    """What a learner does with its sessions. Called on the event loop; every method must return at once."""

    def hello(self) -> m.Hello:
        """The first message of a new session, with what the learner holds by now."""

    def on_up(self, send: SendToSyncer, welcome: m.Welcome) -> None:
        """The syncer took us in. `send` never blocks, is for the event loop's thread only, and does nothing once this
        session is down."""

    def on_message(self, message: m.SyncerMessage) -> None:
        """Everything after Welcome, in order. Never a Refused: that one ends `run_sessions`."""

    def on_down(self, reason: str) -> None:
        """A session ended, or an attempt to open one failed (then without an `on_up` before it). Another attempt
        follows after a wait, unless `run_sessions` was asked to stop."""


class ControlClient:
    """One session on a connection of its own: `open` it, then iterate over it for messages. After a refusal it may be
    opened again, with another Hello.

    async with ControlClient(options) as client:
        welcome = await client.open(hello)
        client.send(Ready(...))
        async for message in client: ...
    """

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._channel = open_channel(options, control_channel_arguments())
        self._call: Any = None
        self._writer: asyncio.Task[None] | None = None
        self._queue: deque[m.LearnerMessage] = deque()
        self._payloads: deque[m.LearnerMessage] = deque()
        """Contributions, and the Leave that must come after them: sent when nothing else waits, so that on a thin link
        the syncer goes on hearing of this learner."""
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._closed = False
        self.protocol = m.PROTOCOL_OLDEST
        """What this session speaks, once it is open."""

    async def __aenter__(self) -> ControlClient:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self._closed = True
        if self._writer is not None:
            self._writer.cancel()
        await self._channel.close()

    async def open(self, hello: m.Hello) -> m.Welcome:
        """Connect and say hello. Raises RefusedError, FencedError, UnreachableError or RemoteProtocolError."""
        encoded = seal(encode_learner_message(hello))
        if len(encoded) > limits.HELLO_BYTES_MAX:
            raise LocalProtocolError(f"a Hello of {len(encoded)} bytes; at most {limits.HELLO_BYTES_MAX} are allowed")
        if self._call is not None:
            self._call.cancel()  # the one that was refused
        pieces = [encoded]
        if hello.protocol >= PIECES_SINCE and len(encoded) > limits.MESSAGE_BYTES_MAX:
            size = limits.HELLO_PIECE_BYTES
            pieces = [encoded[start : start + size] for start in range(0, len(encoded), size)]
        metadata = (*self._options.metadata, (PIECES_KEY, str(len(pieces))))
        self._call = self._channel.stream_stream(SESSION_METHOD)(metadata=metadata)
        try:
            async with asyncio.timeout(limits.HELLO_S):
                for piece in pieces:
                    await self._write_one(piece)
                welcome = await self._read()
        except TimeoutError:
            raise UnreachableError(
                f"the syncer at {self._options.address} did not answer within {limits.HELLO_S:g} s; check its log"
            ) from None
        if not isinstance(welcome, m.Welcome):
            raise RemoteProtocolError(f"the syncer answered Hello with {type(welcome).__name__} instead of Welcome")
        if not m.PROTOCOL_OLDEST <= welcome.protocol <= hello.protocol:
            raise RemoteProtocolError(
                f"the syncer wants to speak protocol {welcome.protocol} but this learner offered {m.PROTOCOL_OLDEST} "
                f"to {hello.protocol}; install the same version of atoll on both sides"
            )
        self.protocol = welcome.protocol
        self._writer = asyncio.create_task(self._write())
        return welcome

    @property
    def place(self) -> ClientOptions:
        return self._options

    @property
    def opened(self) -> bool:
        """True once the syncer has said welcome."""
        return self._writer is not None

    @property
    def is_open(self) -> bool:
        return self._writer is not None and not self._closed

    async def finish(self) -> None:
        """Send what is queued and close our half of the stream, within FLUSH_S. The syncer ends its half when it has
        read everything: whoever iterates over this client sees that end."""
        if not self.is_open:
            return
        try:
            async with asyncio.timeout(limits.FLUSH_S):
                await self._drained.wait()
                await self._call.done_writing()
        except (TimeoutError, asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass

    def send(self, message: m.LearnerMessage) -> None:
        """Queue a message; never blocks. Of several unsent Progress only the newest is kept: each says it all. What
        the session's protocol does not know is not sent, loudly: it is a mistake of our own."""
        if self._closed:
            return
        if since(message) > self.protocol:
            log.error(
                "the session with %s speaks protocol %d, so a %s was not sent; please report this bug in the learner",
                *(self._options.address, self.protocol, type(message).__name__),
            )
            return
        message = learner_message_in(message, self.protocol)
        if isinstance(message, m.Progress):
            for queued in self._queue:
                if isinstance(queued, m.Progress):
                    self._queue.remove(queued)
                    break
        if len(self._queue) + len(self._payloads) >= limits.LEARNER_QUEUE_MAX:
            # The link is up but takes nothing. A new session starts from a Hello that says everything.
            self._closed = True
            self._call.cancel()
            return
        (self._payloads if isinstance(message, m.InlinePush | m.Leave) else self._queue).append(message)
        self._drained.clear()
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[m.SyncerMessage]:
        """Messages until the syncer ends the session. Raises UnreachableError when the connection breaks instead, and
        RefusedError or FencedError when the syncer says so."""
        while (message := await self._read()) is not None:
            yield message

    async def _read(self) -> m.SyncerMessage | None:
        try:
            data = await self._call.read()
            if data is EOF:
                status = await self._call.code()
                if status != grpc.StatusCode.OK:
                    raise UnreachableError(f"the session with {self._options.address} broke: {status.name.lower()}")
                return None
        except grpc.aio.AioRpcError as error:
            raise call_error(self._options, error) from None
        except asyncio.CancelledError:
            if self._call.cancelled() and self._closed:
                raise UnreachableError(f"the link to {self._options.address} takes no more messages") from None
            raise
        try:
            message = parse_syncer_message(unseal(data))
        except PayloadError as error:
            raise UnreachableError(str(error)) from None  # the next session begins with a Hello that says everything
        if isinstance(message, m.Refused):
            raise refused_error(message.code, message.detail)
        if since(message) > self.protocol:
            name = type(message).__name__
            raise RemoteProtocolError(f"the syncer sent a {name} in a session of protocol {self.protocol}")
        return message

    async def _write(self) -> None:
        try:
            while True:
                while self._queue or self._payloads:
                    waiting = self._queue or self._payloads
                    await self._write_one(seal(encode_learner_message(waiting.popleft())))
                self._drained.set()
                self._wake.clear()
                await self._wake.wait()
        except UnreachableError:
            # The reader sees the same end and says why.
            self._closed = True
            self._drained.set()

    async def _write_one(self, encoded: bytes) -> None:
        try:
            await self._call.write(encoded)
        except grpc.aio.AioRpcError as error:
            raise call_error(self._options, error) from None
        except asyncio.InvalidStateError:
            # The syncer ended the stream first, perhaps with a refusal that is still to be read.
            raise UnreachableError(f"the syncer at {self._options.address} ended the session") from None


PIECES_SINCE = 3
"""The protocol from which on a syncer takes a large Hello in pieces, and only so."""
SYNCER_ENDED = "the syncer ended the session"
"""Why a session is down that the syncer closed in order."""
RELAY_BACK = "the relay is back"
TOKEN_TRIES = 5
"""A token that was right before and is refused in as many sessions in a row is wrong; less may be damage on the way."""
REFUSED_FOR_NOW = frozenset({m.Refusal.BUSY, m.Refusal.STALE_EPOCH})
"""Refusals after which trying again may help: the syncer is full, or is about to end in favour of a newer one."""


async def run_sessions(
    options: ClientOptions, handler: SessionHandler, stop: asyncio.Event, found: Found | None = None
) -> None:
    """Keep a session open until `stop` is set, reconnecting for ever with growing, jittered waits. What was sent before
    `stop` (a Leave) still goes out, within FLUSH_S.

    Of several addresses each is tried in turn; `found` hears where the syncer answered, before the handler does. A
    session that breaks is first sought again where it was: a syncer is restarted more often than it is moved. Whoever
    had to go past a relay that comes first in the list goes back to it when it answers.

    Each session speaks the newest protocol that both sides know. Raises RefusedError or FencedError when the syncer
    says no (to all protocols, if that is why): trying again would not help.
    """
    backoff = Backoff()
    token_right, refusals, failures = False, 0, 0
    look_s = limits.RELAY_LOOK_S
    places = deque(options.places())
    first = places[0]
    stopped = asyncio.create_task(stop.wait())
    try:
        while not stop.is_set():
            began = time.monotonic()
            past = first in places and places[0] != first
            returns = asyncio.create_task(_relay_is_back(first, look_s) if past else asyncio.Event().wait())
            opened, refused = await _one_session(places[0], handler, stopped, found, returns)
            if returns.done():
                places.rotate(-places.index(first))
                look_s = min(2 * look_s, limits.RELAY_LOOK_S_MAX)
            returns.cancel()
            token_right = token_right or opened
            failures = 0 if opened else failures + 1
            if not opened:
                places.rotate(-1)
                places = _told_anew(options, places)
            refusals = refusals + 1 if refused is not None else 0
            if refused is not None and not (refused.code == m.Refusal.TOKEN and token_right and refusals < TOKEN_TRIES):
                raise refused
            # A session that lived for a while was a good one; one that ended at once must not be retried in a hurry.
            if time.monotonic() - began > limits.BACKOFF_S_MAX:
                backoff.reset()
                look_s = look_s if past else limits.RELAY_LOOK_S
            # Waits grow from one round over all places to the next: a moved syncer is found as soon as a restarted one.
            wait_s = limits.BACKOFF_S_MIN if failures % len(places) else backoff.next_s()
            await asyncio.wait({stopped}, timeout=wait_s)
    finally:
        stopped.cancel()


def _told_anew(options: ClientOptions, places: deque[ClientOptions]) -> deque[ClientOptions]:
    """Where the file says that the syncer is now. While it says nothing of use, what it said before holds."""
    if not is_told_by_file(options.address):
        return places
    try:
        now = options.places()
    except AtollError:
        return places
    return places if set(now) == set(places) else deque(now)


async def _relay_is_back(first: ClientOptions, look_s: float) -> bool:
    """Returns when the relay that comes first in the list answers. If it is a syncer, nobody goes back to it: whoever
    serves the run by then is the newer one."""
    answer: dict[str, Any] = {}
    while not answer:
        await asyncio.sleep(look_s)
        with contextlib.suppress(AtollError):
            answer = await fetch_status(first)
    if not answer.get("relay"):
        await asyncio.Event().wait()
    return True


async def _one_session(
    options: ClientOptions,
    handler: SessionHandler,
    stopped: asyncio.Task[bool],
    found: Found | None,
    returns: asyncio.Task[bool],
) -> tuple[bool, RefusedError | None]:
    """One attempt to connect and, if it succeeds, the session until it ends, we are asked to stop, or there is a better
    place. Gives whether it succeeded, and a refusal that trying again would not help."""
    reason, refused = "asked to stop", None
    async with ControlClient(options) as client:
        listening = asyncio.create_task(_listen(client, handler, found))
        try:
            await asyncio.wait({listening, stopped, returns}, return_when=asyncio.FIRST_COMPLETED)
            reason = RELAY_BACK if returns.done() else reason
            if not listening.done() and client.is_open:
                await client.finish()
                await asyncio.wait({listening}, timeout=limits.FLUSH_S)
            elif listening.done():
                listening.result()
                reason = SYNCER_ENDED
        except (UnreachableError, RemoteProtocolError) as error:
            reason = str(error)
        except RefusedError as error:
            reason = str(error)
            refused = error if error.code not in REFUSED_FOR_NOW else None
        finally:
            listening.cancel()
            handler.on_down(reason)
        return client.opened, refused


async def _greet(client: ControlClient, hello: m.Hello) -> m.Welcome:
    """Say hello in the newest protocol that both sides speak, and with the list of tensors only if the syncer asks for
    it. Nothing is remembered from one session to the next: the syncer that we reconnect to may be another one, and
    asking costs one round trip."""
    said = hello_in(hello, hello.protocol)
    while True:
        try:
            return await client.open(said)
        except RefusedError as error:
            if error.code == m.Refusal.TENSORS and said is not hello:
                said = hello
            elif may_speak_older(error, said.protocol):
                log.info("%s does not speak protocol %d; trying an older one", client.place.address, said.protocol)
                said = hello_in(hello, said.protocol - 1)
            else:
                raise


async def _listen(client: ControlClient, handler: SessionHandler, found: Found | None) -> None:
    welcome = await _greet(client, handler.hello())
    if found is not None:
        await found(client.place)
    handler.on_up(client.send, welcome)
    async for message in client:
        handler.on_message(message)


async def fetch_status(options: ClientOptions) -> dict[str, Any]:
    """The syncer's live state, once. Raises RefusedError, UnreachableError or RemoteProtocolError."""
    reply = await _ask(options, STATUS_METHOD, pb.StatusRequest())
    return parse_json_object("StatusReply.json", parse_bytes(pb.StatusReply, reply).json)


async def ask_to_leave(options: ClientOptions, learner: str) -> str:
    """Have the syncer ask one learner to leave; returns the learner's state. Raises as `fetch_status` does."""
    data = await _ask(options, LEAVE_METHOD, pb.AskToLeaveRequest(learner=learner))
    reply = parse_bytes(pb.AskToLeaveReply, data)
    if reply.HasField("refused"):
        refused = parse_refused(reply.refused)
        raise refused_error(refused.code, refused.detail)
    return checks.identifier("AskToLeaveReply.state", reply.state)


async def take_snapshot(options: ClientOptions) -> str:
    """Have the syncer write a snapshot of the run; says in words what came of it. Raises as `fetch_status` does."""
    reply = parse_bytes(pb.TakeSnapshotReply, await _ask(options, SNAPSHOT_METHOD, pb.TakeSnapshotRequest()))
    if reply.HasField("refused"):
        refused = parse_refused(reply.refused)
        raise refused_error(refused.code, refused.detail)
    return checks.text("TakeSnapshotReply.said", reply.said)


async def change_shards(
    options: ClientOptions, action: str, shard: str, fragments: Sequence[int] = ()
) -> tuple[str, int]:
    """Have the syncer move fragments, add a shard or take one out; says what has begun, and under which number the
    status tells of it. Raises as `fetch_status` does."""
    request = pb.ChangeShardsRequest(action=action, shard=shard, fragments=fragments)
    reply = parse_bytes(pb.ChangeShardsReply, await _ask(options, SHARDS_METHOD, request))
    if reply.HasField("refused"):
        refused = parse_refused(reply.refused)
        raise refused_error(refused.code, refused.detail)
    return checks.text("ChangeShardsReply.said", reply.said), checks.count("ChangeShardsReply.number", reply.number)


async def _ask(options: ClientOptions, method: str, request: Any) -> bytes:
    """One question to the first of the syncer's addresses that answers."""
    *others, last = options.places()
    for place in others:
        try:
            return await _ask_at(place, method, request)
        except UnreachableError:
            continue
    return await _ask_at(last, method, request)


async def _ask_at(options: ClientOptions, method: str, request: Any) -> bytes:
    """One question, one answer, on a connection of its own."""
    channel = open_channel(options, control_channel_arguments())
    try:
        call = channel.unary_unary(method)
        return bytes(await call(bytes(request.SerializeToString()), metadata=options.metadata, timeout=limits.STATUS_S))
    except grpc.aio.AioRpcError as error:
        raise await _explained(options, error) from None
    finally:
        await channel.close()


async def _explained(options: ClientOptions, error: grpc.aio.AioRpcError) -> AtollError:
    """What a failed call means, with the true cause where gRPC hides it."""
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        cause = await asyncio.to_thread(find_cause, options)
        if cause is not None:
            return CertificateError(cause.text) if cause.final else UnreachableError(cause.text)
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return RemoteProtocolError(f"the syncer at {options.address} is older than this command; update it there")
    return call_error(options, error)
