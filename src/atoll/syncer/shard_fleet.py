"""The coordinator's links to its shards, and who has which fragment.

All shards must be here before a coordinator serves: what they hold is the run's state. A link that breaks later stops
the fragments behind it, and nothing else. When the shard can be reached again this coordinator begins anew from what is
on disk, as after a crash of its own: contributions that were in the shard's memory are handed over again, and what its
disk has lost comes from learners. Learners train on all the while.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.core import HandedOver, Layout, Refusal, SyncConfig, assign, reassign
from atoll.errors import (
    AtollError,
    ConfigError,
    FencedSyncerError,
    RefusedError,
    RemoteProtocolError,
    StoreError,
    UnreachableError,
)
from atoll.syncer import shard_calls as calls
from atoll.wire import SHARD_ATTACH_S, Bytes, ClientOptions, ShardConnection, ShardPeer, fetch_status

RETRY_S = 0.5
"""Between two attempts to reach a shard: it may be starting."""
TELL_EVERY_S = 10.0
"""How often it is told who is missing."""
INSTANCE_BYTES = 8
Asked = Callable[[str, dict[str, Any], Bytes], Any]


@dataclass(slots=True)
class ShardLink:
    """One shard, as the coordinator sees it."""

    place: ClientOptions
    name: str = ""
    run: str = ""
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The record of each fragment that it holds."""
    handed: list[HandedOver] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    connection: ShardConnection | None = None

    @property
    def peer(self) -> ShardPeer:
        assert self.connection is not None
        return self.connection.peer

    @property
    def address(self) -> str:
        return self.place.address


@dataclass(frozen=True, slots=True)
class Lead:
    """What a coordinator says of itself to its shards."""

    run: str
    """The run that it continues; empty: it begins one."""
    epoch: int
    level: str
    interval_s: float
    record: bool
    instance: str = field(default_factory=lambda: secrets.token_hex(INSTANCE_BYTES))

    def greeting(self) -> dict[str, Any]:
        own = {"run": self.run, "epoch": self.epoch, "instance": self.instance, "link": calls.LINK_VERSION}
        return {**own, "level": self.level, "interval_s": self.interval_s, "record": self.record}


class ShardFleet:
    """All shards of a run, in the order in which they were given."""

    def __init__(self, places: Sequence[ClientOptions], lead: Lead, say: Callable[[str], None]) -> None:
        self.links = [ShardLink(place) for place in places]
        self.of: tuple[int, ...] = ()
        """By fragment: the index of its shard."""
        self.asked: Asked | None = None
        """Answers what shards ask. Set before any of them serves a learner."""
        self._lead = lead
        self._say = say
        self._watching: list[asyncio.Task[None]] = []

    async def attach(self) -> None:
        """Wait until all shards are here and led by this coordinator. Raises what a shard refuses it for."""
        attaching = [asyncio.create_task(self._attach(link)) for link in self.links]
        try:
            while True:
                done, missing = await asyncio.wait(attaching, timeout=TELL_EVERY_S, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
                if not missing:
                    break
                names = [link.address for link, task in zip(self.links, attaching, strict=True) if task in missing]
                self._say(f"waits for shards at {', '.join(names)}; start them there with `atoll shard`")
        finally:
            for task in attaching:
                task.cancel()
        self._check_names()

    async def _attach(self, link: ShardLink) -> None:
        while True:
            connection = ShardConnection(link.place, self._answer)
            await connection.__aenter__()
            try:
                async with asyncio.timeout(SHARD_ATTACH_S):
                    told, _ = await connection.peer.call(calls.ATTACH, self._lead.greeting())
            except RefusedError as error:
                await connection.__aexit__()
                raise self._refused(link, error) from error
            except (UnreachableError, TimeoutError):
                await connection.__aexit__()
                await asyncio.sleep(RETRY_S)
                continue
            link.connection = connection
            _take(link, told)
            return

    def _refused(self, link: ShardLink, error: RefusedError) -> AtollError:
        text = f"the shard at {link.address} refuses this syncer: {error.detail}"
        if error.code in (Refusal.STALE_EPOCH, Refusal.FENCED):
            return FencedSyncerError(text)
        return StoreError(text)

    def _check_names(self) -> None:
        for link in self.links:
            twins = [other.address for other in self.links if other.name == link.name]
            if len(twins) > 1:
                raise ConfigError(
                    f"{' and '.join(twins)} are one shard, or shards on copies of one folder; give each address once"
                )

    async def _answer(self, method: str, values: dict[str, Any], data: Bytes) -> Any:
        if self.asked is None:
            raise RefusedError(Refusal.BUSY, "the syncer is starting; ask again soon")
        return await self.asked(method, values, data)

    # ------------------------------------------------------------ fragments

    def settle(self, layout: Layout, recorded: Sequence[str] | None) -> tuple[str, ...]:
        """Decide who has which fragment, as it is recorded or (None) by size. Returns what is to be recorded."""
        held = {link.name: frozenset(link.records) for link in self.links}
        names = [link.name for link in self.links]
        if recorded is None and any(held.values()):
            recorded = self._by_holdings(layout, held)
        if recorded is None:
            chosen = assign([fragment.size for fragment in layout.fragments], names)
        else:
            chosen = reassign(recorded, held)
        self.of = tuple(names.index(name) for name in chosen)
        return chosen

    def _by_holdings(self, layout: Layout, held: dict[str, frozenset[int]]) -> tuple[str, ...]:
        """The record of who has what was lost with the coordinator's disk: each has what it holds."""
        balanced = assign([fragment.size for fragment in layout.fragments], [link.name for link in self.links])
        holders = {fragment: name for name, own in held.items() for fragment in own}
        return tuple(holders.get(fragment, name) for fragment, name in enumerate(balanced))

    def link_of(self, fragment: int) -> ShardLink:
        return self.links[self.of[fragment]]

    def owned(self, link: ShardLink) -> list[int]:
        return [fragment for fragment, index in enumerate(self.of) if self.links[index] is link]

    async def lay_out(self, run: str, layout: Layout, config: SyncConfig, *, restore: bool) -> None:
        tensors = [[t.name, list(t.shape), t.dtype, t.merge] for t in layout.tensors]
        values = {"run": run, "tensors": tensors, "config": config.to_dict(), "restore": restore}
        await asyncio.gather(
            *(link.peer.call(calls.LAY_OUT, {**values, "owned": self.owned(link)}) for link in self.links)
        )

    def tell_all(self, method: str, values: dict[str, Any]) -> None:
        for link in self.links:
            link.peer.tell(method, values)

    # ------------------------------------------------------------ links that break

    def watch(self, down: Callable[[ShardLink, str], None], back: Callable[[ShardLink], None]) -> None:
        """From here on say when a link breaks, and when its shard can be reached again."""
        self._watching = [asyncio.create_task(self._watch(link, down, back)) for link in self.links]

    async def _watch(
        self, link: ShardLink, down: Callable[[ShardLink, str], None], back: Callable[[ShardLink], None]
    ) -> None:
        assert link.connection is not None and link.connection.running is not None
        down(link, await link.connection.running)
        while True:
            with contextlib.suppress(UnreachableError, RemoteProtocolError, RefusedError):
                await fetch_status(link.place)
                back(link)
                return
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.gather(*(link.connection.__aexit__() for link in self.links if link.connection is not None))


def _take(link: ShardLink, told: dict[str, Any]) -> None:
    link.name, link.run, link.problems = str(told["name"]), str(told["run"]), [str(one) for one in told["problems"]]
    link.records = {int(fragment): dict(record) for fragment, record in told["fragments"].items()}
    link.handed = [HandedOver(calls.record_of(record), int(processed)) for record, processed in told["handed"]]
