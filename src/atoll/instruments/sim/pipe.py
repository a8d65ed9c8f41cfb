"""The stream between two parties of a run (coordinator and shard, primary and standby, relay and syncer) in virtual
time. `wire.ShardPeer` runs on it as it does on gRPC."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from atoll.errors import AtollError, UnreachableError
from atoll.instruments.sim.learner_host import CONNECT_NS
from atoll.instruments.sim.link import DOWN, UP, Stream, VirtualLink
from atoll.wire import EOF, ClientOptions, ShardPeer

if TYPE_CHECKING:
    from atoll.instruments.sim.fabric import FabricWorld
    from atoll.instruments.sim.loop import LoopProcess

FRAME_BYTES = 40
BROKE = "the link broke"


class PipeEnd:
    """What one side reads and writes."""

    def __init__(self, process: LoopProcess, link: VirtualLink, direction: int) -> None:
        self.process = process
        self.other: PipeEnd | None = None
        self._link, self._direction, self._stream = link, direction, Stream()
        self._came: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._unsent: list[bytes] = []
        self.open = False
        self.broken = ""

    async def read(self) -> Any:
        while not self._came:
            if self.broken:
                raise UnreachableError(self.broken)
            self._waiting = self.process.loop.create_future()
            await self._waiting
        return self._came.popleft()

    async def write(self, data: bytes) -> None:
        if self.broken:
            raise UnreachableError(self.broken)
        if not self.open:
            self._unsent.append(data)
        elif not self.process.dead:
            self._link.carry(self._direction, len(data) + FRAME_BYTES, self._stream, self._deliver, data)

    def connected(self, other: PipeEnd) -> None:
        self.other, self.open = other, True
        unsent, self._unsent = self._unsent, []
        for data in unsent:
            self._link.carry(self._direction, len(data) + FRAME_BYTES, self._stream, self._deliver, data)

    def _deliver(self, data: Any) -> None:
        assert self.other is not None
        if data is not EOF and self._link.damaged(self._direction):
            data = bytes([data[0] ^ 1]) + data[1:]
        self.other.process.call(self.other.take, data)

    def take(self, data: Any) -> None:
        if not self.broken:
            self._came.append(data)
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        """In order: the other side hears of it after everything that was sent before."""
        if not self.broken:
            self.broken = "the link was closed"
            self.process.pipes.pop(self, None)
            if self.other is not None and not self.process.dead:
                self._link.carry(self._direction, FRAME_BYTES, self._stream, self._deliver, EOF)

    def end(self) -> None:
        """The same, and whoever reads here hears of it as well."""
        self.close()
        self._came.clear()
        self._wake()

    def cut(self, reason: str = BROKE) -> None:
        """It is over on this side."""
        self.process.pipes.pop(self, None)
        if not self.broken and not self.process.dead:
            self.process.call(self._cut, reason)

    def _cut(self, reason: str) -> None:
        self.broken = self.broken or reason
        self._came.clear()
        self._wake()

    def process_died(self) -> None:
        """The kernel of the dead process's machine closes the connection; the other side hears of it, if it can."""
        if self.other is not None:
            self._link.carry(self._direction, FRAME_BYTES, Stream(), self.other.cut)

    @property
    def link(self) -> VirtualLink:
        return self._link

    def peer(self) -> str:
        """Who is at the other end, as gRPC says it."""
        return f"sim:{self.other.process.place}" if self.other is not None else ""


def guarded(process: LoopProcess, answer: Any) -> Any:
    """The same, and the world hears of mistakes: a peer that fails otherwise only ends its link."""

    async def answered(method: str, values: dict[str, Any], data: Any) -> Any:
        try:
            return await answer(method, values, data)
        except (AtollError, OSError):
            raise
        except Exception as error:
            process.world.crashed(error)  # type: ignore[attr-defined]
            raise

    return answered


class SimConnection:
    """As `wire.ShardConnection`, for a process of this world."""

    def __init__(self, process: LoopProcess, options: ClientOptions, answer: Any) -> None:
        self._world: FabricWorld = process.world  # type: ignore[assignment]
        self._place = self._world.place_at(options.address)
        self._near = PipeEnd(process, self._world.way(process.place, self._place.name), UP)
        process.pipes[self._near] = None
        self.peer = ShardPeer(self._near.read, self._near.write, guarded(process, answer))
        self.running: asyncio.Task[str] | None = None

    async def __aenter__(self) -> SimConnection:
        self.running = asyncio.create_task(self.peer.run())
        link = self._near.link
        wait_ns = CONNECT_NS if link.blocked else sum(link.weather.latency_ns)
        self._near.process.later(wait_ns, self._connect)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.peer.close("the link was closed")
        self._near.close()
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)

    def _connect(self) -> None:
        near, server = self._near, self._place.listener
        if near.broken:
            return
        if server is None or server.dead or near.link.blocked:
            near.cut(f"{self._place.name} cannot be reached")
            return
        far = PipeEnd(server, near.link, DOWN)
        far.other, far.open = near, True
        server.pipes[far] = None
        near.connected(far)
        server.call(server.accept, far)
