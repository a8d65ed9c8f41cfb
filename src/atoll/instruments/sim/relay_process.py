"""One process of a relay in virtual time: production's `Relay`, whose sessions and calls upstream are of this world."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.core import FetchHeader, FetchKind, FetchRequest, Hello, PushHeader, PushKind, PushReply, Refused, Welcome
from atoll.errors import PayloadError, RefusedError, UnreachableError
from atoll.instruments.check import facts
from atoll.instruments.sim.calls import Call
from atoll.instruments.sim.connection import Connection
from atoll.instruments.sim.learner_host import CONNECT_NS
from atoll.instruments.sim.link import VirtualLink
from atoll.instruments.sim.pipe import SimConnection
from atoll.instruments.sim.service import ServiceProcess
from atoll.syncer import Relay
from atoll.wire import SYNCER_ENDED, ClientOptions

if TYPE_CHECKING:
    from atoll.instruments.sim.fabric import FabricPlace, FabricWorld

HELLO_S = 15.0
"""For an answer to a Hello."""
CACHE_BYTES = 1_000_000


class UpstreamSession:
    """As `wire.ControlClient`: one learner's session with the syncer, through the relay."""

    def __init__(self, relay: RelayProcess, options: ClientOptions) -> None:
        self._relay, self._place = relay, relay.world.place_at(options.address)
        self.key = ""
        self.dead = False
        self.link: VirtualLink = relay.world.way(relay.place, self._place.name)
        self._connection: Connection | None = None
        self._came: deque[Any] = deque()
        self._news = asyncio.Event()
        self._down = ""

    async def __aenter__(self) -> UpstreamSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._relay.upstream.pop(self, None)
        if self._connection is not None and not self._relay.dead:
            self._connection.closed_by_learner()
        self._down = self._down or "closed"

    async def open(self, hello: Hello) -> Welcome:
        world, self.key = self._relay.world, hello.learner
        await asyncio.sleep((CONNECT_NS if self.link.blocked else sum(self.link.weather.latency_ns)) / 1e9)
        server = self._place.listener
        if server is None or server.dead or not server.serving or self.link.blocked:
            raise UnreachableError(f"{self._place.name} cannot be reached")
        self._connection = world.new_connection(self, server, self.link)
        self._relay.upstream[self] = None
        self._connection.to_syncer_hello(hello)
        try:
            async with asyncio.timeout(HELLO_S):
                message = await self._next()
        except TimeoutError:
            raise UnreachableError(f"{self._place.name} did not answer") from None
        if not isinstance(message, Welcome):
            raise UnreachableError(f"{self._place.name} ended the session")
        return message

    def send(self, message: Any) -> None:
        if self._connection is not None and not self._relay.dead:
            self._connection.to_syncer(message)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self._next()) is not None:
            yield message

    async def _next(self) -> Any:
        """None: the syncer has ended the session in order."""
        while not self._came:
            if self._down == SYNCER_ENDED:
                return None
            if self._down:
                raise UnreachableError(self._down)
            self._news.clear()
            await self._news.wait()
        message = self._came.popleft()
        if isinstance(message, Refused):
            raise RefusedError(message.code, message.detail)
        return message

    def relay_died(self) -> None:
        self.dead = True
        if self._connection is not None:
            self._connection.process_died(learner=True)

    # ------------------------------------------------------------ what the connection asks of its caller

    def call(self, action: Any, *arguments: Any) -> None:
        self._relay.call(action, *arguments)

    def on_message(self, connection: Connection, message: Any) -> None:
        self._came.append(message)
        self._news.set()

    def on_down(self, connection: Connection, reason: str) -> None:
        self._down = self._down or reason
        self._news.set()


class UpstreamBulk:
    """As `wire.RoutedBulk`."""

    def __init__(self, relay: RelayProcess) -> None:
        self._relay = relay
        self._syncer: FabricPlace | None = None
        self._of: tuple[FabricPlace, ...] = ()
        self.bytes_up = self.bytes_down = 0

    @property
    def routed(self) -> bool:
        return bool(self._of)

    def route(self, shards: Sequence[str], shard_of: Sequence[int]) -> None:
        places = [self._relay.world.place_at(address) for address in shards]
        self._of = tuple(places[index] for index in shard_of)

    async def move(self, place: ClientOptions) -> None:
        self._syncer = self._relay.world.place_at(place.address)

    async def close(self) -> None:
        """Nothing is kept open."""

    def way(self, fragment: int) -> tuple[Any, VirtualLink]:
        """Who serves this fragment (-1: the rest), and the link there."""
        place = self._of[fragment] if 0 <= fragment < len(self._of) else self._syncer
        assert place is not None
        return place.listener, self._relay.world.way(self._relay.place, place.name)

    async def push(self, header: PushHeader, payload: Any) -> PushReply:
        if self._syncer is None:
            raise UnreachableError("no syncer was found yet")
        fragment = -1 if header.kind is PushKind.INNER else header.fragment
        answer = self._relay.loop.create_future()
        data = np.frombuffer(payload, np.uint8)
        self.bytes_up += data.nbytes
        Call(self._relay, header.size, fragment).push(header, data, partial(_settle, answer))
        reply = await answer
        if reply is None:
            raise UnreachableError("the call upstream broke")
        return reply  # type: ignore[no-any-return]

    async def fetch(self, request: FetchRequest) -> tuple[FetchHeader, Any]:
        if self._syncer is None:
            raise UnreachableError("no syncer was found yet")
        fragment = -1 if request.kind is FetchKind.INNER else request.fragment
        answer = self._relay.loop.create_future()
        Call(self._relay, 100, fragment).fetch(request, partial(_settle, answer))
        found = await answer
        if found is None:
            raise UnreachableError("the call upstream broke")
        if isinstance(found, str):
            raise RefusedError(found, "refused upstream")
        version, content, size = found
        if content is None:
            raise PayloadError("a checksum does not fit")
        self.bytes_down += size
        return FetchHeader(version, "", int(content.nbytes), 0), np.array(content)


def _settle(answer: asyncio.Future[Any], result: Any) -> None:
    if not answer.done():
        answer.set_result(result)


class RelayProcess(ServiceProcess):
    world: FabricWorld

    def __init__(self, world: FabricWorld, place: str, name: str) -> None:
        super().__init__(world, place, name)
        self.calls: dict[Call, None] = {}
        self.upstream: dict[UpstreamSession, None] = {}
        self.dice = world.dice

    def die(self) -> None:
        sessions = list(self.upstream)
        super().die()
        for session in sessions:
            session.relay_died()

    async def main(self) -> None:
        upstream = ClientOptions(",".join(self.world.places[name].address for name in self.world.upstream_names))
        relay = Relay(
            upstream,
            CACHE_BYTES,
            merge=self.world.scenario.relay_merges,
            session=partial(UpstreamSession, self),  # type: ignore[arg-type]
            bulk=UpstreamBulk(self),  # type: ignore[arg-type]
            connect=partial(SimConnection, self),  # type: ignore[arg-type]
        )
        self.relay = relay
        relay.end_session = self.end_session
        self._watch_merges(relay)
        self.listen(relay, relay.answering)
        await asyncio.Event().wait()

    @property
    def held(self) -> int:
        """Contributions that wait here."""
        merges: Any = self.relay._merges if self.serving else None
        return int(merges.held) if merges is not None else 0

    def _watch_merges(self, relay: Relay) -> None:
        merges: Any = relay._merges
        if merges is None:
            return
        gather = merges._gather

        async def watched(link: Any, values: dict[str, Any]) -> Any:
            answer = await gather(link, values)
            ids = tuple((learner, generation, seq) for learner, generation, _, seq in values["ids"])
            version = int(values["version"])
            if version and "lost" not in answer[0]:  # what a leaver has here goes up alone, and is in no version yet
                self.world.observe(facts.RelayMerged(self.place, int(values["fragment"]), version, ids))
            return answer

        merges._gather = watched

    def way(self, fragment: int) -> tuple[Any, VirtualLink]:
        bulk: Any = self.relay._bulk
        way: tuple[Any, VirtualLink] = bulk.way(fragment)
        return way
