"""A relay stands between the learners of a site and their syncer, and speaks the learners' protocol to both.

Each learner has its session through it, message by message, so that the syncer sees learners and never a relay: its
ledger, weights, guards, quorum and report are the same as without. What comes down is fetched once for the whole site:
an update or a fragment that one learner has fetched is served to the others from here. What goes up is merged here, so
that a round costs one payload for the whole site (`relay_merge`); where the run needs single contributions it is passed
on, one payload for each learner.

It keeps nothing that a restart would lose: learners give again what was not merged. When it dies they go on to the next
address of their list.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from atoll.core import (
    NO_VERSION,
    FetchHeader,
    FetchKind,
    FetchRequest,
    Hello,
    Identity,
    InlinePush,
    InlineReply,
    LearnerMessage,
    Leave,
    Published,
    PushHeader,
    PushReply,
    Refusal,
    Refused,
    Serving,
    Start,
    SyncerMessage,
    Welcome,
    same_secret,
)
from atoll.errors import AtollError, PayloadError, RefusedError, UnreachableError
from atoll.syncer.relay_merge import SiteMerges
from atoll.syncer.relay_ways import Connect
from atoll.wire import Bytes, ClientOptions, ControlClient, RoutedBulk, ShardConnection, ShardPeer

QUEUE_MAX = 16_384
"""Messages of a learner that wait for the syncer: as many as a learner itself may have waiting."""
Content = tuple[FetchHeader, Bytes]
Key = tuple[FetchKind, int, int]


@dataclass(slots=True)
class RelaySession:
    """One learner, as it goes through the relay."""

    learner: str
    send: Callable[[SyncerMessage], None]
    up: asyncio.Queue[LearnerMessage] = field(default_factory=lambda: asyncio.Queue(QUEUE_MAX))
    welcome: Welcome | None = None
    task: asyncio.Task[None] | None = None


class UpdateCache:
    """What was fetched from the syncer, for the whole site: the newest of it, within a bound of bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[Key, Content] = OrderedDict()
        self._coming: dict[Key, asyncio.Future[Content]] = {}
        self._bytes = 0

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0

    def newest_whole(self, fragment: int) -> int:
        """The version of the parameters that are kept of a fragment."""
        whole = [version for kind, of, version in self._kept if kind is FetchKind.THETA and of == fragment]
        return max(whole, default=NO_VERSION)

    async def get(self, key: Key, fetch: Callable[[], Any]) -> Content:
        """From here, or fetched once however many ask. Who asks while it is on its way shares its fate."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        coming = self._coming.get(key)
        if coming is not None:
            return await asyncio.shield(coming)
        self._coming[key] = coming = asyncio.ensure_future(fetch())
        try:
            found: Content = await asyncio.shield(coming)
        finally:
            self._coming.pop(key, None)
        self._keep((key[0], key[1], found[0].version), found)
        return found

    def _keep(self, key: Key, content: Content) -> None:
        if key not in self._kept:
            self._kept[key] = content
            self._bytes += content[1].nbytes
        while self._bytes > self._bytes_max and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1][1].nbytes


class Relay:
    """Implements `atoll.wire.SyncerService` by asking the syncer."""

    def __init__(
        self,
        upstream: ClientOptions,
        cache_bytes_max: int,
        *,
        merge: bool = False,
        session: Callable[[ClientOptions], ControlClient] = ControlClient,
        bulk: RoutedBulk | None = None,
        connect: Connect = ShardConnection,
    ) -> None:
        """`session`, `bulk` and `connect` are the ways upstream; the simulator has its own."""
        self._upstream = upstream
        self._session = session
        self._bulk = bulk or RoutedBulk(upstream)
        self._found = ""
        """Where the last session found the syncer."""
        self._cache, self._bytes_max = UpdateCache(cache_bytes_max), cache_bytes_max
        self._merges = SiteMerges(connect) if merge else None
        self._sessions: dict[int, RelaySession] = {}
        self._by_learner: dict[str, RelaySession] = {}
        self._serves = ("", 0)
        """The run and the epoch that the cache is of: after a loss a version may be made anew."""
        self._versions: dict[int, int] = {}
        """The newest version of each fragment that the syncer has told of."""
        self.end_session: Callable[[int, str], None] = lambda session, reason: None
        """Set by whoever serves: ends a session in order."""
        self.bytes_served = 0

    async def close(self) -> None:
        tasks = [session.task for session in self._sessions.values() if session.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._merges is not None:
            await self._merges.close()
        await self._bulk.close()

    # ------------------------------------------------------------ sessions

    def open_session(
        self,
        session: int,
        hello: Hello,
        send: Callable[[SyncerMessage], None],
        identity: Identity | None = None,
    ) -> None:
        opened = RelaySession(hello.learner, send)
        self._sessions[session] = opened
        opened.task = asyncio.create_task(self._pass(session, opened, replace(hello, shards=True, moves=True)))

    def receive(self, session: int, message: LearnerMessage) -> None:
        opened = self._sessions[session]
        if opened.up.full():
            raise RefusedError(Refusal.BUSY, "the syncer takes no more messages from this relay; say hello again")
        opened.up.put_nowait(message)

    def close_session(self, session: int, reason: str) -> None:
        """The learner is gone: the syncer sees its session break, as if there were no relay."""
        opened = self._sessions.pop(session, None)
        if opened is not None and self._by_learner.get(opened.learner) is opened:
            del self._by_learner[opened.learner]
        if opened is not None and opened.task is not None:
            opened.task.cancel()

    async def _pass(self, session: int, opened: RelaySession, hello: Hello) -> None:
        """One learner's session with the syncer, from its Hello to its end. Only an end in order is passed on as one:
        a leaving learner takes it for being let go."""
        again = f"the relay has lost the syncer at {self._upstream.address}; say hello again"
        for place in self._places():
            try:
                async with self._session(place) as client:
                    welcome = await client.open(hello)
                    self._found = place.address
                    await self._bulk.move(place)
                    if self._merges is not None:
                        await self._merges.meet(place)
                    self._welcome(opened, welcome)
                    await self._both_ways(opened, client)
                    self.end_session(session, "the syncer ended the session")
                    return
            except RefusedError as error:
                opened.send(Refused(error.code, error.detail))
                return
            except AtollError as error:
                again = f"{again} ({error})"
                if opened.welcome is not None:
                    break
        opened.send(Refused(Refusal.BUSY, again))

    def _places(self) -> list[ClientOptions]:
        """Where a syncer may be, beginning where the last session found it: one address of the list may be dead, and
        the whole site's transfers go where the newest session goes."""
        return sorted(self._upstream.places(), key=lambda place: place.address != self._found)

    def _welcome(self, opened: RelaySession, welcome: Welcome) -> None:
        opened.welcome = welcome
        self._by_learner[opened.learner] = opened
        if self._serves != (welcome.run, welcome.epoch):
            self._serves = (welcome.run, welcome.epoch)
            self._cache.clear()
            self._versions.clear()
        self._route(welcome)
        opened.send(replace(welcome, shards=(), shard_of=()))

    def _route(self, told: Welcome | Serving) -> None:
        self._bulk.route(told.shards, told.shard_of)
        if self._merges is not None:
            self._merges.route(told.shards, told.shard_of)

    async def _both_ways(self, opened: RelaySession, client: ControlClient) -> None:
        upwards = asyncio.create_task(self._pass_up(opened, client))
        try:
            async for message in client:
                if isinstance(message, Serving):
                    self._route(message)
                    continue
                self._note_versions(message)
                opened.send(message)
        finally:
            upwards.cancel()

    async def _pass_up(self, opened: RelaySession, client: ControlClient) -> None:
        """Messages in order. What is held here or goes to a shard goes beside them: one that is away must not hold up
        its learner's reports. But a Leave must not overtake what its learner has handed over before."""
        handing: set[asyncio.Task[None]] = set()
        try:
            while True:
                message = await opened.up.get()
                merges = self._merges is not None and self._merges.on
                if isinstance(message, InlinePush) and (self._bulk.routed or merges):
                    task = asyncio.create_task(self._hand_over(opened, client, message))
                    handing.add(task)
                    task.add_done_callback(handing.discard)
                    continue
                if isinstance(message, Leave) and handing:
                    await asyncio.wait(handing)
                client.send(message)
        finally:
            for task in handing:
                task.cancel()

    async def _hand_over(self, opened: RelaySession, client: ControlClient, message: InlinePush) -> None:
        assert opened.welcome is not None
        header = replace(message.header, secret=opened.welcome.secret)
        payload, reply = np.frombuffer(message.payload, np.uint8), None
        if self._merges is not None and xxhash.xxh3_64_intdigest(message.payload) == header.checksum:
            reply = await self._merges.take(header, payload)
        if reply is None and not self._bulk.routed:
            client.send(message)
            return
        reply = reply or await self._push(header, message.payload)
        opened.send(InlineReply(header.fragment, header.seq, reply))

    def _note_versions(self, message: SyncerMessage) -> None:
        if isinstance(message, Published):
            self._versions[message.fragment] = max(message.version, self._versions.get(message.fragment, NO_VERSION))
        elif isinstance(message, Start):
            for fragment, state in enumerate(message.fragments):
                self._versions[fragment] = max(state.version, self._versions.get(fragment, NO_VERSION))

    def answering(self, peer: ShardPeer) -> Callable[[str, dict[str, Any], Bytes], Any]:
        """Answers relays that stand before this one."""

        async def answer(method: str, values: dict[str, Any], _data: Bytes) -> tuple[dict[str, Any], bytes]:
            if self._merges is None:
                raise RefusedError(Refusal.NOT_ALLOWED, "this relay passes everything on (--no-merge)")
            return await self._merges.from_inner(peer, method, values), b""

        return answer

    # ------------------------------------------------------------ who is who

    def _check(self, learner: str, generation: int, secret: str) -> None:
        """The syncer checks what is passed on; this is for what is served from here."""
        opened = self._by_learner.get(learner)
        if opened is None or opened.welcome is None:
            raise RefusedError(Refusal.UNKNOWN_LEARNER, f"learner {learner!r} has no session here; say hello first")
        if generation != opened.welcome.generation:
            raise RefusedError(Refusal.STALE_GENERATION, f"learner {learner!r}: a newer process has replaced this one")
        if opened.welcome.secret and not same_secret(secret, opened.welcome.secret):
            raise RefusedError(Refusal.SECRET, f"learner {learner!r}: not with the secret of its session; use that one")

    def check_sender(self, header: PushHeader) -> None:
        self._check(header.learner, header.generation, header.secret)

    def ask_to_leave(self, learner: str) -> str:
        raise RefusedError(Refusal.NOT_ALLOWED, f"this is a relay; ask the syncer at {self._upstream.address}")

    async def take_snapshot(self) -> str:
        raise RefusedError(Refusal.NOT_ALLOWED, f"this is a relay; ask the syncer at {self._upstream.address}")

    def status(self) -> dict[str, object]:
        return {
            "relay": True,
            "upstream": self._upstream.address,
            "run": self._serves[0],
            "epoch": self._serves[1],
            "learners": sorted(self._by_learner),
            "bytes_fetched": self._bulk.bytes_down,
            "bytes_served": self.bytes_served,
            **self._told_up(),
        }

    def _told_up(self) -> dict[str, object]:
        if self._merges is None:
            return {"bytes_up": self._bulk.bytes_up, "merges": False}
        merges = self._merges
        why = {"passes_on_because": merges.said} if merges.said else {}
        bytes_up = self._bulk.bytes_up + merges.bytes_up
        return {"bytes_up": bytes_up, "merges": merges.on, "merged_payloads": merges.groups, "held": merges.held, **why}

    # ------------------------------------------------------------ payloads

    async def push_begin(self, header: PushHeader) -> int:
        """How much it may be, the syncer says when it comes. Nobody has to claim more here than would be kept."""
        return min(header.size, self._bytes_max)

    async def push_complete(self, header: PushHeader, payload: Bytes) -> PushReply:
        reply = await self._merges.take(header, payload) if self._merges is not None else None
        return reply or await self._push(header, payload)

    async def _push(self, header: PushHeader, payload: Any) -> PushReply:
        try:
            return await self._bulk.push(header, payload)
        except RefusedError as error:
            return PushReply(False, error.code, error.detail)
        except UnreachableError as error:
            return PushReply(False, Refusal.BUSY, str(error))

    async def fetch_open(self, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
        self._check(request.learner, request.generation, request.secret)
        try:
            header, content = await self._find(request)
        except (UnreachableError, PayloadError) as error:
            raise RefusedError(Refusal.BUSY, f"the relay could not fetch it ({error}); ask again") from error
        left = max(0, content.nbytes - request.offset)
        self.bytes_served += min(request.length or left, left)
        return header, content.data

    async def _find(self, request: FetchRequest) -> Content:
        if request.kind is FetchKind.INNER:  # a joiner's own
            return await self._bulk.fetch(request)
        version = request.version
        if request.kind is FetchKind.THETA and version == NO_VERSION:
            kept = self._cache.newest_whole(request.fragment)
            version = kept if kept >= self._versions.get(request.fragment, 0) else NO_VERSION
        return await self._cache.get((request.kind, request.fragment, version), lambda: self._bulk.fetch(request))
