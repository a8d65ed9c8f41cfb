"""The learner's connections past gRPC to one server, where that offers a port for them.

A transfer uses one if it is there and nobody else has it, and gRPC if not: it never waits for a connection. The first
one is made when a call of gRPC has told of the port, the others when they are missed. If one cannot be had, or two
transfers in a row broke, gRPC carries everything until the next session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from atoll.core import messages as m
from atoll.errors import AtollError, PayloadError, RemoteProtocolError, UnreachableError
from atoll.wire import direct, limits, parts
from atoll.wire.address import split_address
from atoll.wire.cause import trusting
from atoll.wire.channel import ClientOptions
from atoll.wire.direct import Wire

T = TypeVar("T")
Job = Callable[[Wire], Any]
log = logging.getLogger(__name__)


class Lane:
    """One connection and the thread that blocks in it."""

    def __init__(self, options: ClientOptions, place: tuple[str, int]) -> None:
        self._options, self._place = options, place
        self._wire: Wire | None = None
        self._jobs: SimpleQueue[tuple[asyncio.Future[Any], Job] | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self.broken = self.stalled = False
        threading.Thread(target=self._work, name="atoll-bulk", daemon=True).start()

    @property
    def usable(self) -> bool:
        """Free lanes only: nobody has cut it, neither here nor there."""
        return not self.broken and self._wire is not None and self._wire.is_quiet

    async def do(self, job: Callable[[Wire], T], timeout_s: float) -> T:
        """Run this in the lane's thread. Whatever it raises, the connection is not used again: nobody knows where in
        the stream it stands. Raises UnreachableError, or what the job raises of ours."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((future, job))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._while_it_moves(future)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):  # a TimeoutError, too
                text = str(error) or f"nothing within {timeout_s:g} s"
                where = f"{self._options.address} over port {self._place[1]}"
                raise UnreachableError(f"payloads to {where}: {text}") from None
            raise

    async def _while_it_moves(self, future: asyncio.Future[T]) -> T:
        """Something on the way may swallow what is sent: nobody then says that the connection is over."""
        moved = self._wire.moved if self._wire is not None else ()
        try:
            while not (await asyncio.wait([future], timeout=limits.DIRECT_STALL_S))[0]:
                before, moved = moved, self._wire.moved if self._wire is not None else ()
                if moved and moved == before:
                    self.stalled = True
                    raise TimeoutError(f"nothing moved for {limits.DIRECT_STALL_S:g} s; a firewall may swallow it")
            return future.result()
        finally:
            future.cancel()  # whoever waited has gone: what comes of it then is nobody's, and no news

    def close(self) -> None:
        self.broken = True
        if self._wire is not None:
            self._wire.cut()
        self._jobs.put(None)

    def _work(self) -> None:
        while self._did(self._jobs.get()):
            pass  # and holds nothing of a payload meanwhile
        if self._wire is not None:
            self._wire.close()

    def _did(self, entry: tuple[asyncio.Future[Any], Job] | None) -> bool:
        if entry is None:
            return False
        future, job = entry
        try:
            if self._wire is None:
                self._wire = _connected(self._options, self._place)
            if self.broken:
                raise ConnectionError("this connection was given up")
            self._settle(future.set_result, future, job(self._wire))
        except BaseException as error:
            self._settle(future.set_exception, future, error)
        return True

    def _settle(self, settle: Callable[[Any], None], future: asyncio.Future[Any], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: None if future.done() else settle(value))


def _connected(options: ClientOptions, place: tuple[str, int]) -> Wire:
    connection = direct.tuned(socket.create_connection(place, limits.CONNECT_S))
    try:
        if options.tls_ca:
            connection = trusting(options.tls_ca).wrap_socket(connection, server_hostname=options.tls_name or place[0])
        wire = Wire(connection)
        wire.send(direct.MAGIC)
        wire.send_frame(direct.TOKEN, options.token.encode())
        if wire.receive_frame(direct.WELCOME + direct.REFUSED)[0] != direct.WELCOME:
            raise RemoteProtocolError("the server takes no payloads there")
        connection.settimeout(None)
        return wire
    except BaseException:
        connection.close()
        raise


class Lanes:
    """All of one learner to one server."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._place: tuple[str, int] | None = None
        """Where they go; None: not offered, or not to be had."""
        self._given_up = False
        self._free: list[Lane] = []
        self._all: set[Lane] = set()
        self._opening: asyncio.Task[None] | None = None
        self._faults = 0

    def told(self, metadata: object) -> None:
        """What the metadata of an answer says."""
        place = direct.offered(metadata, split_address(self._options.address), in_clear=not self._options.tls_ca)
        if place and not self._given_up and place != self._place:
            self._place = place
            self._open_another()

    @contextmanager
    def one(self) -> Iterator[Lane | None]:
        """A connection that nobody else uses, or None: then take gRPC."""
        while self._free and not self._free[-1].usable:
            self._all.discard(lane := self._free.pop())
            lane.close()
        if not self._free:
            self._open_another()
            yield None
            return
        lane = self._free.pop()
        try:
            yield lane
        except (UnreachableError, RemoteProtocolError, PayloadError) as error:
            self._faults += limits.DIRECT_FAULTS_MAX if lane.stalled else 1
            if self._faults >= limits.DIRECT_FAULTS_MAX:
                self._give_up(str(error))
            raise
        else:
            self._faults = 0
        finally:
            if lane.broken:
                self._all.discard(lane)
            else:
                self._free.append(lane)

    def server_was_away(self) -> None:
        """gRPC did not reach it either: what is offered next is tried, whatever was given up before."""
        if not self._all:
            self._given_up, self._faults, self._place = False, 0, None

    def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        for lane in self._all:
            lane.close()
        self._all.clear()
        self._free.clear()
        self._place = None

    def _open_another(self) -> None:
        opening = self._opening is not None and not self._opening.done()
        if self._place and not opening and len(self._all) < limits.DIRECT_PER_CLIENT_MAX:
            self._opening = asyncio.get_running_loop().create_task(self._open(self._place))

    async def _open(self, place: tuple[str, int]) -> None:
        lane = Lane(self._options, place)
        self._all.add(lane)
        try:
            await lane.do(lambda wire: None, 2 * limits.CONNECT_S)
            self._free.append(lane)
        except (AtollError, ValueError) as error:
            self._all.discard(lane)
            if not self._all:
                self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        if not self._given_up:
            log.warning(
                "large payloads go through gRPC, which costs more of this process (%s); open port %d of the syncer, "
                "which it can be told with --bulk-port, or start it with --bulk-port off",
                *(why, self._place[1] if self._place else 0),
            )
        self._given_up = True
        self.close()


class DirectPush:
    """One stripe that is sent past gRPC."""

    def __init__(self, opened: parts.PushOpen, pieces: Iterator[tuple[int, memoryview]]) -> None:
        self._opened, self._pieces = opened, pieces
        self.bytes_count = 0

    def send(self, wire: Wire) -> m.PushReply:
        wire.send_message(direct.PUSH, parts.encode_push_open(self._opened))
        _, said = wire.receive_message(direct.GO + direct.REFUSED)
        if isinstance(said, m.Refused):
            return m.PushReply(False, said.code, said.detail)
        try:
            for offset, data in self._pieces:
                wire.send_part(offset, data)
                self.bytes_count += data.nbytes
            wire.send_part(0, memoryview(b""))
        except OSError:
            pass  # the server has closed it; its answer, if it comes, says why
        _, answer = wire.receive_message(direct.ANSWER)
        assert isinstance(answer, bytes)
        return parts.parse_push_reply(answer)
