"""The server's second port: payloads past gRPC (`direct.py` has the frames), under the same rules as through it.

Each connection has a thread, which blocks in the kernel. Whatever is decided is decided on the event loop, where the
services live: whose token it is, whether bytes may come in and how many, what becomes of them. Nothing is read of a
payload before there is a buffer for it. One watcher cuts connections that keep their thread waiting for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, TypeVar

from atoll.core import FetchHeader, FetchRequest, Identity, PushReply, Refusal
from atoll.errors import AtollError, LaunchError, PayloadError, RefusedError, RemoteProtocolError
from atoll.wire import direct, limits, parts
from atoll.wire.assembly import Assembly
from atoll.wire.direct import Wire
from atoll.wire.transfers import Transfer, Transfers

T = TypeVar("T")
log = logging.getLogger(__name__)

BACKLOG = 128
"""Connections that wait to be taken: as asyncio has it."""
WATCH_S = 1.0
"""How often connections are looked at."""
ACCEPT_PAUSE_S = 1.0
"""After a connection could not be taken: most likely there is no descriptor left."""


@dataclass(frozen=True)
class Given:
    """An open fetch: bytes from `start` to `stop` of a content. `close` tells how many went out."""

    header: FetchHeader
    content: memoryview
    start: int
    stop: int
    close: Callable[[int], None]


@dataclass(frozen=True)
class Decisions:
    """What the port asks on the event loop."""

    identify: Callable[[str], Identity | str | None]
    """Whose token this is (None: everybody's), or why it is nobody's."""
    transfers: Transfers
    open_fetch: Callable[[FetchRequest, Identity | None], Coroutine[Any, Any, Given]]
    """May raise RefusedError."""


class DirectPort:
    """Made by `serve`, on its event loop."""

    def __init__(self, decisions: Decisions, tls: ssl.SSLContext | None, idle_s: float, connections_max: int) -> None:
        self._decisions = decisions
        self._tls, self._idle_s, self._connections_max = tls, idle_s, connections_max
        self._loop = asyncio.get_running_loop()
        self._visitors: dict[Visitor, None] = {}
        """Open connections, the oldest first."""
        self._listener: socket.socket | None = None
        self._watch: asyncio.Task[None] | None = None

    def open(self, host: str, port: int) -> tuple[str, int]:
        """Start to listen; returns where. Raises LaunchError."""
        self._listener = listening(host, port)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)
        self._watch = self._loop.create_task(self._look_after())
        address, bound = self._listener.getsockname()[:2]
        return str(address), int(bound)

    def close(self) -> None:
        if self._listener is not None and self._watch is not None:
            self._watch.cancel()
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for visitor in list(self._visitors):
            visitor.cut()

    def cut_owner(self, name: str) -> None:
        """Whatever this key's owner has under way is over."""
        for visitor in list(self._visitors):
            if visitor.owner == name:
                visitor.cut()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError | ConnectionError):
                log.warning("cannot take a connection for payloads (%s); learners use gRPC meanwhile", error)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(ACCEPT_PAUSE_S, self._listen_again)
            return
        strangers = [visitor for visitor in self._visitors if visitor.token is None and not visitor.leaving]
        if len(strangers) >= limits.DIRECT_STRANGERS_MAX:
            strangers[0].cut()
        if len(self._visitors) >= self._connections_max:
            connection.close()
            return
        visitor = Visitor(connection, self._decisions, self._loop, self._idle_s)
        try:
            visitor.start(self._tls, lambda: self._loop.call_soon_threadsafe(self._visitors.pop, visitor, None))
        except RuntimeError as error:  # no thread is to be had
            log.warning("cannot take a connection for payloads (%s); learners use gRPC meanwhile", error)
            connection.close()
            return
        self._visitors[visitor] = None

    def _listen_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            now_s = time.monotonic()
            for visitor in list(self._visitors):
                if now_s > visitor.due_s:
                    visitor.cut()


class Visitor:
    """One connection and its thread."""

    def __init__(
        self, connection: socket.socket, decisions: Decisions, loop: asyncio.AbstractEventLoop, idle_s: float
    ) -> None:
        self._connection = connection
        self._decisions, self._loop, self._idle_s = decisions, loop, idle_s
        self._wire = Wire(connection)
        self._wire.expect(limits.STRANGER_S)
        self._receiving: Transfer | None = None
        self.leaving = False
        """It was cut, and its thread is about to see that."""
        self.token: str | None = None
        """None: a stranger still."""
        self.owner = ""

    @property
    def due_s(self) -> float:
        return self._wire.due_s

    def cut(self) -> None:
        self.leaving = True
        self._wire.cut()

    def start(self, tls: ssl.SSLContext | None, gone: Callable[[], object]) -> None:
        def visit() -> None:
            try:
                self._converse(tls)
            except (OSError, AtollError, CancelledError):
                pass  # it broke, made no sense, or the server stops: the other side knows or sees
            except Exception:
                if not self._loop.is_closed():
                    log.exception("a connection for payloads ended inside the syncer")
            finally:
                self._wire.close()
                with contextlib.suppress(RuntimeError):
                    gone()

        threading.Thread(target=visit, name="atoll-bulk", daemon=True).start()

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """However long it takes, the other side has nothing to do meanwhile."""
        self._wire.expect(float("inf"))
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except RuntimeError:
            work.close()
            if self._loop.is_closed():
                raise ConnectionError("the server has stopped") from None
            raise

    # ------------------------------------------------------------ one conversation

    def _converse(self, tls: ssl.SSLContext | None) -> None:
        self._connection.settimeout(None)
        direct.tuned(self._connection)
        if tls is not None:
            # The handshake comes after: who stands still in the middle of it can be cut.
            due_s = self._wire.due_s
            secured = tls.wrap_socket(self._connection, server_side=True, do_handshake_on_connect=False)
            self._wire = Wire(secured)
            self._wire.due_s = due_s
            if self.leaving:  # cut in between
                return
            secured.do_handshake()
        if self._wire.receive(len(direct.MAGIC)) != direct.MAGIC:
            return
        _, body = self._wire.receive_frame(direct.TOKEN)
        token = body.decode("utf-8", "replace")
        try:
            self._on_loop(self._identify(token))
        except RefusedError as error:
            self._wire.send_refused(error.code, error.detail)
            return
        self.token = token
        self._wire.send_frame(direct.WELCOME)
        while True:
            self._wire.expect(limits.DIRECT_IDLE_S)
            kind, message = self._wire.receive_message(direct.PUSH + direct.FETCH)
            assert isinstance(message, bytes)
            try:
                identity = self._on_loop(self._identify(token))
                goes_on = (self._push if kind == direct.PUSH else self._fetch)(message, identity)
            except (RemoteProtocolError, RefusedError) as error:
                code = error.code if isinstance(error, RefusedError) else Refusal.BAD_REQUEST
                self._wire.expect(self._idle_s)
                self._wire.send_refused(code, error.detail if isinstance(error, RefusedError) else str(error))
                goes_on = True
            if not goes_on:
                return

    async def _identify(self, token: str) -> Identity | None:
        """With each request, as with each call of gRPC: a key may have been revoked."""
        found = self._decisions.identify(token)
        if isinstance(found, str):
            raise RefusedError(Refusal.TOKEN, found)
        self.owner = found.name if found is not None else ""
        return found

    # ------------------------------------------------------------ push

    def _push(self, message: bytes, identity: Identity | None) -> bool:
        transfers = self._decisions.transfers
        transfer = self._on_loop(transfers.open_stripe(parts.parse_push_open(memoryview(message)), identity))
        if (assembly := transfer.assembly) is None and not (reply := self._on_loop(answer_of(transfer))).accepted:
            raise RefusedError(reply.code, reply.detail)
        goes_on = False
        try:
            count = self._take_parts(transfer, assembly)
            reply, goes_on = self._on_loop(transfers.end_stripe(transfer, count)), True
        except (RefusedError, PayloadError, RemoteProtocolError) as error:
            code, detail = _refusal(error)
            reply = self._on_loop(transfers.fail_stripe(transfer, code, detail))
        except OSError:
            broke = "a connection of this transfer broke; send the payload again"
            self._on_loop(transfers.fail_stripe(transfer, Refusal.BUSY, broke))
            raise
        self._wire.expect(self._idle_s)
        self._wire.send_message(direct.ANSWER, parts.encode_push_reply(reply))
        return goes_on

    def _take_parts(self, transfer: Transfer, assembly: Assembly | None) -> int:
        """Receive straight into the payload; returns how many bytes came. Without one the other stripes have brought
        it all."""
        count = 0
        self._receiving = transfer
        self._loop.call_soon_threadsafe(transfer.answer.add_done_callback, lambda _: self._end_soon(transfer))
        try:
            self._wire.expect(self._idle_s)
            self._wire.send_frame(direct.GO)
            while True:
                self._wire.expect(self._idle_s)
                offset, length, checksum = self._wire.receive_head()
                if not length:
                    return count
                if assembly is None:
                    raise RefusedError(Refusal.SIZE, f"the part at offset {offset} is there; send the payload again")
                self._wire.receive_data(assembly.reserve(offset, length), offset, checksum)
                assembly.arrived(offset)
                transfer.arrivals_count += 1
                count += length
                if assembly.complete:
                    self._loop.call_soon_threadsafe(self._decisions.transfers.stripe_complete, transfer)
        finally:
            self._receiving = None

    def _end_soon(self, decided: Transfer) -> None:
        """The whole is decided: whoever sends on (or stands still) is cut, and hears why when it tries again. The next
        push on this connection is another matter."""
        self._loop.call_later(limits.DIRECT_ENDING_S, lambda: self.cut() if self._receiving is decided else None)

    # ------------------------------------------------------------ fetch

    def _fetch(self, message: bytes, identity: Identity | None) -> bool:
        given = self._on_loop(self._decisions.open_fetch(parts.parse_fetch_request(message), identity))
        position = given.start
        try:
            self._wire.expect(self._idle_s)
            self._wire.send_message(direct.HEADER, parts.encode_fetch_header(given.header))
            while position < given.stop:
                end = min(given.stop, (position // limits.PART_BYTES + 1) * limits.PART_BYTES)
                self._wire.expect(self._idle_s)
                self._wire.send_part(position, given.content[position:end])
                position = end
        finally:
            self._loop.call_soon_threadsafe(given.close, position - given.start)
        return True


def listening(host: str, port: int) -> socket.socket:
    """A port on the first address of this host that has it, of IPv4 if there are several. Raises LaunchError."""
    failure: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, place in sorted(found, key=lambda one: one[0] != socket.AF_INET):
            try:
                both = host == "::" and socket.has_dualstack_ipv6()
                return socket.create_server(place[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both)
            except OSError as error:
                failure = failure or error
    except OSError as error:
        failure = error
    raise LaunchError(
        f"cannot listen on port {port} of {host} for payloads ({failure.strerror if failure else 'no address'}); "
        f"choose another with --bulk-port, or give --bulk-port off: gRPC then carries them, too"
    )


async def answer_of(transfer: Transfer) -> PushReply:
    return await asyncio.shield(transfer.answer)


def _refusal(error: AtollError) -> tuple[str, str]:
    if isinstance(error, RefusedError):
        return error.code, error.detail
    code = Refusal.CHECKSUM if isinstance(error, PayloadError) else Refusal.BAD_REQUEST
    return code, f"{error}; send the payload again"
