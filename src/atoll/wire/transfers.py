"""The syncer's side of pushes: stripes are joined into payloads, and everything that can go wrong gets an answer.

A transfer is one attempt to push one payload. Its streams find each other by key (learner, generation, kind, fragment,
seq); a random attempt id tells a retry from a straggler of the attempt before. States:

    beginning --push_begin accepts--> receiving --all bytes--> completing --push_complete--> answered
        '---------------- refused, broken, idle or replaced --------------------------------> answered (buffer freed)

All streams of a transfer wait for the one answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from atoll.core import Identity, PushHeader, PushReply, Refusal, check_learner
from atoll.errors import PayloadError, RefusedError, RemoteProtocolError
from atoll.wire.assembly import VERIFY_INLINE_BYTES_MAX, Assembly
from atoll.wire.budget import Budget
from atoll.wire.buffers import Buffers
from atoll.wire.checks import raise_refusal
from atoll.wire.limits import TRANSFER_LEARNER_SHARE, TRANSFER_MEMORY_SHARE
from atoll.wire.parts import PushOpen, RawPart, parse_part, parse_push_open
from atoll.wire.resources import memory_bytes
from atoll.wire.service import ServerOptions, SyncerService

Key = tuple[str, int, str, int, int]
ReadMessage = Callable[[], Awaitable[bytes | None]]
"""The next message of a stream, or None at its end."""

log = logging.getLogger(__name__)


def _key(header: PushHeader) -> Key:
    return header.learner, header.generation, header.kind, header.fragment, header.seq


def _code(error: Exception) -> Refusal:
    return Refusal.CHECKSUM if isinstance(error, PayloadError) else Refusal.BAD_REQUEST


class Transfer:
    def __init__(self, opened: PushOpen) -> None:
        self.opened = opened
        self.assembly: Assembly | None = None
        self.bytes_held = 0
        """Of its learner's share."""
        self.begun = asyncio.Event()
        self.answer: asyncio.Future[PushReply] = asyncio.get_running_loop().create_future()
        self.streams_joined = 0
        self.streams_ended = 0
        self.completing = False
        self.arrivals_count = 0

    @property
    def over(self) -> bool:
        return self.answer.done()


class Transfers:
    """All pushes under way on one server."""

    def __init__(self, service: SyncerService, options: ServerOptions) -> None:
        self._service = service
        self._options = options
        self._by_key: dict[Key, Transfer] = {}
        bytes_max = options.transfer_bytes_max or int(memory_bytes() * TRANSFER_MEMORY_SHARE)
        self._counts = Budget("pushes", options.transfers_per_learner_max, options.transfers_max)
        self._bytes = Budget("bytes of pushes", int(bytes_max * TRANSFER_LEARNER_SHARE), bytes_max)
        self._buffers = Buffers()
        self._tasks: set[asyncio.Task[None]] = set()
        self.bytes_up = 0

    def __len__(self) -> int:
        return len(self._by_key)

    async def receive(self, read: ReadMessage, identity: Identity | None = None) -> PushReply:
        """Serve one stream: the whole of a payload or one stripe of it."""
        try:
            async with asyncio.timeout(self._options.transfer_idle_s):
                message = await read()
            if message is None:
                raise RemoteProtocolError("a push without any part")
            part = parse_part(message)
            if part.opening is None:
                raise RemoteProtocolError("the first part of a push must say what is pushed")
            transfer = self._admit(parse_push_open(part.opening), identity)
        except (RemoteProtocolError, PayloadError, TimeoutError) as error:
            return PushReply(False, _code(error), str(error) or "a push without any part for too long")
        except RefusedError as error:
            return PushReply(False, error.code, error.detail)
        pump = asyncio.create_task(self._pump(transfer, part, read))
        try:
            # The answer may come before the stream's end: a refusal, or a fault on another stripe.
            endings: list[asyncio.Future[Any]] = [pump, transfer.answer]
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            return await asyncio.shield(transfer.answer)
        except BaseException:
            self._fail(transfer, Refusal.BUSY, "a connection of this transfer broke; send the payload again")
            raise
        finally:
            pump.cancel()

    # ------------------------------------------------------------ stripes that come past gRPC

    async def open_stripe(self, opened: PushOpen, identity: Identity | None) -> Transfer:
        """A stripe that another thread receives once there is a buffer for it, or an answer. Raises RefusedError."""
        transfer = self._admit(opened, identity)
        begun = asyncio.ensure_future(transfer.begun.wait())
        endings: list[asyncio.Future[Any]] = [begun, transfer.answer]
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        return transfer

    def stripe_complete(self, transfer: Transfer) -> None:
        """All bytes are there."""
        self._finish(transfer)

    async def end_stripe(self, transfer: Transfer, bytes_count: int) -> PushReply:
        """A stripe has brought all of its parts, so many bytes; the answer to the whole."""
        self.bytes_up += bytes_count
        self._end_stream(transfer)
        return await asyncio.shield(transfer.answer)

    async def fail_stripe(self, transfer: Transfer, code: str, detail: str) -> PushReply:
        self._fail(transfer, code, detail)
        return await asyncio.shield(transfer.answer)

    def fail_all(self, detail: str) -> None:
        """The server stops: nobody may be left waiting."""
        for transfer in list(self._by_key.values()):
            self._fail(transfer, Refusal.BUSY, detail)

    def fail_learner(self, learner: str, code: str, detail: str) -> None:
        """Nothing more is taken from this learner."""
        for transfer in list(self._by_key.values()):
            if transfer.opened.header.learner == learner:
                self._fail(transfer, code, detail)

    # ------------------------------------------------------------ joining

    def _admit(self, opened: PushOpen, identity: Identity | None) -> Transfer:
        raise_refusal(check_learner(identity, opened.header.learner))
        self._service.check_sender(opened.header)
        return self._join(opened)

    def _join(self, opened: PushOpen) -> Transfer:
        key = _key(opened.header)
        transfer = self._by_key.get(key)
        if transfer is not None and transfer.opened.attempt_id != opened.attempt_id:
            if transfer.completing:
                raise RefusedError(Refusal.BUSY, "an earlier attempt of this push is being completed; ask again soon")
            self._fail(transfer, Refusal.BUSY, "a newer attempt replaced this one")
            transfer = None
        if transfer is None:
            transfer = self._start(key, opened)
        elif transfer.opened != opened or transfer.streams_joined == opened.stripes:
            raise RefusedError(
                Refusal.BAD_REQUEST, "the stripes of a push contradict each other; send the payload again"
            )
        transfer.streams_joined += 1
        return transfer

    def _start(self, key: Key, opened: PushOpen) -> Transfer:
        self._counts.take(opened.header.learner)
        transfer = Transfer(opened)
        self._by_key[key] = transfer
        self._spawn(self._begin(transfer))
        self._watch(transfer, arrivals_seen=-1)
        return transfer

    async def _begin(self, transfer: Transfer) -> None:
        """Ask the service before there is a buffer: the size in the header is only a claim."""
        header = transfer.opened.header
        try:
            size_max = await self._service.push_begin(header)
            if header.size > size_max:
                raise RefusedError(
                    Refusal.SIZE,
                    f"fragment {header.fragment} of learner {header.learner} has {header.size} bytes, {size_max} are "
                    f"the most; check that both sides use the same layout and codec",
                )
            if not transfer.over:
                self._bytes.take(header.learner, header.size)
                transfer.bytes_held = header.size
                transfer.assembly = Assembly(self._buffers.take(header.size), transfer.opened.part_bytes)
                transfer.begun.set()
                if transfer.assembly.complete:
                    self._finish(transfer)
        except Exception as error:
            self._fail_with(transfer, error)

    # ------------------------------------------------------------ receiving

    async def _pump(self, transfer: Transfer, first: RawPart, read: ReadMessage) -> None:
        await transfer.begun.wait()
        part = first
        while not transfer.over:
            if not transfer.completing:
                self._place(transfer, part)
            message = await read()
            if message is None:
                break
            try:
                part = parse_part(message)
            except (RemoteProtocolError, PayloadError) as error:
                self._fail(transfer, _code(error), f"{error}; send the payload again")
        self._end_stream(transfer)

    def _end_stream(self, transfer: Transfer) -> None:
        transfer.streams_ended += 1
        if transfer.streams_ended == transfer.opened.stripes and not transfer.completing:
            self._fail(transfer, Refusal.SIZE, "the streams ended before all bytes were there; send the payload again")

    def _place(self, transfer: Transfer, part: RawPart) -> None:
        assert transfer.assembly is not None
        transfer.arrivals_count += 1
        try:
            self.bytes_up += transfer.assembly.place(part)
        except RefusedError as error:
            self._fail(transfer, error.code, error.detail)
            return
        if transfer.assembly.complete:
            self._finish(transfer)

    def _finish(self, transfer: Transfer) -> None:
        if not transfer.completing and not transfer.over:
            transfer.completing = True
            self._spawn(self._complete(transfer))

    async def _complete(self, transfer: Transfer) -> None:
        header, assembly = transfer.opened.header, transfer.assembly
        assert assembly is not None
        try:
            if assembly.unhashed_bytes <= VERIFY_INLINE_BYTES_MAX:
                payload = assembly.verify(header.checksum)
            else:
                payload = await asyncio.to_thread(assembly.verify, header.checksum)
            transfer.assembly = None
            self._answer(transfer, await self._service.push_complete(header, payload))
        except Exception as error:
            transfer.completing = False
            self._fail_with(transfer, error)

    # ------------------------------------------------------------ ending

    def _fail_with(self, transfer: Transfer, error: Exception) -> None:
        if isinstance(error, RefusedError):
            self._fail(transfer, error.code, error.detail)
        else:
            log.error("push of %s failed inside the syncer", transfer.opened.header, exc_info=error)
            self._fail(transfer, Refusal.BUSY, "the syncer failed to take this push; see its log")

    def _fail(self, transfer: Transfer, code: str, detail: str) -> None:
        """Answer all streams and free the buffer. A transfer that is being completed gets its answer from there."""
        if not transfer.over and not transfer.completing:
            self._answer(transfer, PushReply(False, code, detail))

    def _answer(self, transfer: Transfer, reply: PushReply) -> None:
        transfer.assembly = None
        transfer.answer.set_result(reply)
        header = transfer.opened.header
        del self._by_key[_key(header)]
        self._counts.give_back(header.learner)
        self._bytes.give_back(header.learner, transfer.bytes_held)

    def _watch(self, transfer: Transfer, arrivals_seen: int) -> None:
        """Give up a transfer for which nothing came since the last look."""
        if transfer.over:
            return
        if transfer.arrivals_count == arrivals_seen:
            self._fail(transfer, Refusal.BUSY, "nothing arrived for too long; send the payload again")
        loop = asyncio.get_running_loop()
        loop.call_later(self._options.transfer_idle_s, self._watch, transfer, transfer.arrivals_count)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # The loop itself keeps only weak references to tasks.
        task.add_done_callback(self._tasks.discard)
