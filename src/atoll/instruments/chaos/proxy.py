"""A TCP proxy between learners and the syncer that delays, limits, stalls, cuts, corrupts and partitions.

Each learner has a listening port of its own, which stays the same while it and the syncer come and go. One event loop
on one thread carries everything. Per connection and direction there is a reader and a writer with a bounded pipe
between them (delayed bytes wait there); when it is full the sender feels it through TCP.

What it cannot do is what happens below TCP: the sender's kernel gets its acknowledgements from the proxy at once, also
from a proxy that then holds the bytes back. Where root is at hand, `namespaces` has real links for that.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from atoll.errors import ConfigError, LaunchError
from atoll.instruments.chaos.link import DOWN, UP, Link
from atoll.instruments.chaos.weather import Weather

T = TypeVar("T")

READ_BYTES_MAX = 256 << 10
"""Per read: large enough that Python's share of each byte is small (measured: 1 GB/s on one core of loopback)."""
SOCKET_BUFFER_BYTES = 512 << 10
"""The kernel's share of each side. Left alone it grows to 6 MB, behind which a limited link is not felt."""
CONNECTIONS_MAX = 64
"""Open connections per learner; a learner has a handful. More are closed at once."""
CONNECT_TIMEOUT_S = 10.0
ACCEPT_RETRY_S = 0.1
"""Pause after a failed accept (no file descriptors left)."""
CALL_TIMEOUT_S = 30.0
"""A call into the proxy's loop that takes longer means that the loop is stuck."""
BACKLOG = 128


@dataclass(frozen=True, slots=True)
class ProxyStats:
    """What has happened on one learner's link since it was added."""

    bytes_up: int
    bytes_down: int
    flips_up: int
    flips_down: int
    cuts: int
    """Connections that `cut` has reset."""
    connections: int
    """Connections accepted so far."""
    connections_open: int


class ChaosProxy:
    """One proxy for all learners of a run. Its methods may be called from any thread, between start and close."""

    def __init__(self, *, seed: int = 0, host: str = "127.0.0.1") -> None:
        self._seed = seed
        self._host = host
        self._ports: dict[str, _Port] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def start(self, upstream: Callable[[], tuple[str, int]]) -> None:
        """Start the thread. `upstream` says where the syncer is now, for each new connection; it must not block."""
        if self._thread is not None:
            raise LaunchError("this proxy has been started before; use a new one")
        ready = threading.Event()
        self._upstream = upstream
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)), name="chaos-proxy", daemon=True)
        self._thread.start()
        if not ready.wait(CALL_TIMEOUT_S):
            raise LaunchError("the proxy's thread did not start; look for an exception above")

    def add(
        self, learner: str, *, host: str = "", upstream: Callable[[], tuple[str, int]] | None = None
    ) -> tuple[str, int]:
        """The address that this learner uses for the syncer; made when it has none yet. `host`: where to listen for
        this one, if not where the others are. `upstream`: where it leads, if that is not the syncer."""

        async def add() -> tuple[str, int]:
            if learner not in self._ports:
                seed = f"{self._seed}/{learner}"
                self._ports[learner] = _Port(host or self._host, seed, upstream or self._upstream)
            return self._ports[learner].address

        return self._call(add())

    def set(self, learner: str, weather: Weather) -> None:
        """From when this returns the learner's link is like that, also for connections that are open."""
        port = self._port(learner)

        async def set_() -> None:
            port.link.set(weather)

        self._call(set_())

    def cut(self, learner: str) -> int:
        """Reset all connections of a learner, wherever they are in a message; returns how many."""
        return self._call(self._port(learner).cut())

    def stats(self, learner: str) -> ProxyStats:
        """Counters of one learner's link."""
        port = self._port(learner)

        async def stats() -> ProxyStats:
            return port.stats()

        return self._call(stats())

    def close(self) -> None:
        """Reset every connection, close every port and end the thread. May be called again."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CALL_TIMEOUT_S)
            if self._thread.is_alive():
                raise LaunchError("the proxy's thread does not end; this is a bug in the proxy, please report it")

    def __enter__(self) -> ChaosProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _main(self, ready: threading.Event) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        ready.set()
        try:
            await self._stop.wait()
        finally:
            for port in self._ports.values():
                await port.close()

    def _port(self, learner: str) -> _Port:
        try:
            return self._ports[learner]
        except KeyError:
            raise ConfigError(f"the proxy has no link for {learner}; add it first") from None

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the proxy's loop and wait for it."""
        with self._lock:
            if self._loop is None:
                work.close()
                raise LaunchError("the proxy is not running; call start first, and do not use it after close")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(CALL_TIMEOUT_S)


class _Port:
    """A learner's listening port and the connections that came through it."""

    def __init__(self, host: str, seed: str, upstream: Callable[[], tuple[str, int]]) -> None:
        self.link = Link(seed)
        self._upstream = upstream
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            # Accepted sockets inherit the buffer.
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            self._listener.setblocking(False)
            self._listener.bind((host, 0))
            self._listener.listen(BACKLOG)
        except OSError as error:
            self._listener.close()
            raise LaunchError(
                f"the proxy cannot listen on {host} ({error.strerror}); use an address of this machine"
            ) from None
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._open: set[asyncio.Task[None]] = set()
        self._accepted = 0
        self._cuts = 0
        self._accepting = asyncio.create_task(self._accept())

    def stats(self) -> ProxyStats:
        link = self.link
        return ProxyStats(
            bytes_up=link.bytes[UP],
            bytes_down=link.bytes[DOWN],
            flips_up=link.flippers[UP].count,
            flips_down=link.flippers[DOWN].count,
            cuts=self._cuts,
            connections=self._accepted,
            connections_open=len(self._open),
        )

    async def cut(self) -> int:
        cut = list(self._open)
        for task in cut:
            task.cancel()
        await asyncio.gather(*cut, return_exceptions=True)
        self._cuts += len(cut)
        return len(cut)

    async def close(self) -> None:
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        await self.cut()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                near, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            self._accepted += 1
            if len(self._open) >= CONNECTIONS_MAX:
                _close(near, reset=True)
                continue
            task = asyncio.create_task(self._carry(near))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _carry(self, near: socket.socket) -> None:
        """One connection from its beginning to its end. Whatever goes wrong, or cancels it, resets both sides."""
        far: socket.socket | None = None
        orderly = False
        try:
            await self.link.connectable()
            far = await _connect(self._upstream)
            _tune(near)
            await self._exchange(near, far)
            orderly = True
        except OSError:
            # The other side must not hear of it through a partition.
            await self.link.connectable()
        finally:
            for each in (near, far):
                if each is not None:
                    _close(each, reset=not orderly)

    async def _exchange(self, near: socket.socket, far: socket.socket) -> None:
        """Carry both directions until both have ended. The first error ends both."""
        try:
            async with asyncio.TaskGroup() as group:
                for source, sink, direction in ((near, far, UP), (far, near, DOWN)):
                    pipe = _Pipe()
                    group.create_task(_read(source, pipe, self.link, direction))
                    group.create_task(_write(sink, pipe, self.link, direction))
        except ExceptionGroup as errors:
            broken, bugs = errors.split(OSError)
            raise bugs or ConnectionResetError(f"a side of the connection went away: {broken}") from None


class _Pipe:
    """Bytes with the time they were read, between a reader and a writer. An empty piece is the end of the stream."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._moved = asyncio.Event()

    def put(self, read_at: float, data: bytes) -> None:
        self._pieces.append((read_at, data))
        self._size += len(data)
        self._moved.set()

    async def get(self) -> tuple[float, bytes]:
        while not self._pieces:
            await self._wait()
        read_at, data = self._pieces.popleft()
        self._size -= len(data)
        self._moved.set()
        return read_at, data

    async def room(self, size_max: int) -> None:
        while self._size >= size_max:
            await self._wait()

    async def _wait(self) -> None:
        # One event for both sides is enough: at most one of them waits, because it cannot be both empty and full.
        self._moved.clear()
        await self._moved.wait()


async def _connect(upstream: Callable[[], tuple[str, int]]) -> socket.socket:
    host, port = upstream()
    far = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        far.setblocking(False)
        _tune(far)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):  # TimeoutError is an OSError
            await asyncio.get_running_loop().sock_connect(far, (host, port))
    except BaseException:
        far.close()
        raise
    return far


async def _read(source: socket.socket, pipe: _Pipe, link: Link, direction: str) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await link.readable(direction)
        window = link.way(direction).window_bytes
        await pipe.room(window)
        data = await loop.sock_recv(source, min(READ_BYTES_MAX, window))
        pipe.put(loop.time(), data)
        if not data:
            return


async def _write(sink: socket.socket, pipe: _Pipe, link: Link, direction: str) -> None:
    loop = asyncio.get_running_loop()
    while True:
        read_at, data = await pipe.get()
        left = memoryview(data)
        while len(left):
            piece = left[: link.way(direction).piece_bytes]
            await link.passable(direction, read_at, len(piece))
            left = left[len(piece) :]
            await loop.sock_sendall(sink, link.flippers[direction].apply(piece))
            link.bytes[direction] += len(piece)
        if not data:
            await link.passable(direction, read_at, 0)
            sink.shutdown(socket.SHUT_WR)
            return


def _tune(each: socket.socket) -> None:
    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)


def _close(each: socket.socket, *, reset: bool) -> None:
    """Close, on request so that the other side gets a reset instead of an orderly end."""
    try:
        if reset:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass
    finally:
        each.close()
