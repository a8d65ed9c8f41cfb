"""The coordinator's links to its shards, and who has which fragment.

A run begins when all shards are here, because fragments are shared out among them. One that goes on does so with those
that are here. A link that breaks stops the fragments behind it, and nothing else. When the shard can be reached again
it goes on from its disk: contributions that were in its memory are handed over again, and what its disk has lost comes
from learners. Only where that is not enough to go on (a shard that this coordinator has never met, say) does the
coordinator begin anew, as after a crash of its own.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from atoll.core import HandedOver, Layout, Refusal, SyncConfig, assign, reassign
from atoll.errors import AtollError, ConfigError, FencedSyncerError, RefusedError, StoreError, UnreachableError
from atoll.syncer import shard_calls as calls
from atoll.syncer.recover import MOVES_ROW, PLACES_ROW, SHARDS_ROW
from atoll.wire import SHARD_ATTACH_S, Bytes, ClientOptions, ShardConnection, ShardPeer

RETRY_S = 0.5
"""Between two attempts to reach a shard: it may be starting."""
TELL_EVERY_S = 10.0
"""How often it is told who is missing."""
INSTANCE_BYTES = 8


def now_s() -> float:
    """By the loop's clock: in the simulator time is virtual."""
    return asyncio.get_running_loop().time()


class ShardWatcher(Protocol):
    """Hears of links that break and come back."""

    def shard_down(self, link: ShardLink, reason: str) -> None: ...
    async def shard_back(self, link: ShardLink, before: str) -> None:
        """It is led again, and has said what it holds; `before` is the name that it had."""

    def shard_refused(self, link: ShardLink, error: AtollError) -> None: ...


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
    trouble: str = ""
    """Why it could not be reached when that was last tried."""
    away_since_s: float = field(default_factory=now_s)
    """When it was last there; while it is, that means nothing."""

    @property
    def peer(self) -> ShardPeer:
        """Raises UnreachableError if it was never met."""
        if self.connection is None:
            raise UnreachableError(self.away)
        return self.connection.peer

    @property
    def away(self) -> str:
        """Why nothing can be asked of it; empty: it is there."""
        return self.connection.peer.closed if self.connection is not None else self.trouble or "it was not there yet"

    @property
    def address(self) -> str:
        return self.place.address


Asked = Callable[[ShardLink, str, dict[str, Any]], Any]


@dataclass(slots=True)
class MoveRecord:
    """What of earlier moves must be known to go on after a crash."""

    added: list[str] = field(default_factory=list)
    """Addresses of shards that came while a coordinator ran: no command line names them."""
    removed: list[str] = field(default_factory=list)
    """Addresses of shards that were taken out: a command line may name them still."""
    moved_from: dict[int, str] = field(default_factory=dict)
    """By fragment that has moved: who had it before."""
    leftovers: dict[str, set[int]] = field(default_factory=dict)
    """By the name of a shard: fragments that it may have on its disk, and that are another's."""

    @classmethod
    def of(cls, rows: Mapping[str, Any]) -> MoveRecord:
        row = rows.get(MOVES_ROW) or {}
        return cls(
            [str(one) for one in row.get("added", ())],
            [str(one) for one in row.get("removed", ())],
            {int(fragment): str(name) for fragment, name in row.get("from", {}).items()},
            {str(name): {int(one) for one in own} for name, own in row.get("left", {}).items()},
        )

    def row(self) -> dict[str, Any]:
        moved = {str(fragment): name for fragment, name in self.moved_from.items()}
        left = {name: sorted(own) for name, own in self.leftovers.items() if own}
        return {"added": self.added, "removed": self.removed, "from": moved, "left": left}

    def places(self, given: Sequence[str]) -> list[str]:
        """Where the run's shards are, if a command line names these."""
        kept = [address for address in given if address not in self.removed]
        return [*kept, *(address for address in self.added if address not in kept)]

    def moved(self, fragment: int, before: str, after: str) -> MoveRecord:
        """The same once this fragment has moved."""
        made = MoveRecord(list(self.added), list(self.removed), dict(self.moved_from), self._copies())
        made.moved_from[fragment] = before
        made.leftovers.setdefault(before, set()).add(fragment)
        made.leftovers.get(after, set()).discard(fragment)
        return made

    def lost(self, fragments: Mapping[int, str], before: str) -> MoveRecord:
        """The same once learners bring these fragments of a lost shard to others."""
        made = MoveRecord(list(self.added), list(self.removed), dict(self.moved_from), self._copies())
        for fragment, after in fragments.items():
            made.moved_from.pop(fragment, None)
            made.leftovers.setdefault(before, set()).add(fragment)
            made.leftovers.get(after, set()).discard(fragment)
        return made

    def _copies(self) -> dict[str, set[int]]:
        return {name: set(own) for name, own in self.leftovers.items()}


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

    def __init__(
        self,
        places: Sequence[ClientOptions],
        lead: Lead,
        say: Callable[[str], None],
        moves: MoveRecord | None = None,
        reach: Callable[[str], ClientOptions] | None = None,
    ) -> None:
        self.links = [ShardLink(place) for place in places]
        self.of: tuple[int, ...] = ()
        """By fragment: the index of its shard."""
        self.asked: Asked | None = None
        """Answers what shards ask. Set before any of them serves a learner."""
        self.lead = lead
        self.moves = moves or MoveRecord()
        self.reach = reach or (lambda address: replace(places[0], address=address))
        """How a shard at this address is reached."""
        self.connect = ShardConnection
        """The link to a shard at a place."""
        self._met: dict[str, str] = {}
        """By the name of a shard: where it was met by an earlier coordinator."""
        self._say = say
        self._watcher: ShardWatcher | None = None
        self._watching: dict[str, asyncio.Task[None]] = {}
        """By address."""

    async def attach(self, patience_s: float | None) -> None:
        """Wait until all shards are here and led by this coordinator, or (unless None) this long. Raises what a shard
        refuses it for."""
        attaching = [asyncio.create_task(self._attach(link)) for link in self.links]
        until_s = asyncio.get_running_loop().time() + (patience_s if patience_s is not None else math.inf)
        try:
            while True:
                left_s = max(0.0, until_s - asyncio.get_running_loop().time())
                done, missing = await _ended(
                    attaching, timeout=min(TELL_EVERY_S, left_s), return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
                if not missing or left_s == 0.0:
                    break
                absent = [link for link, task in zip(self.links, attaching, strict=True) if task in missing]
                places = ", ".join(f"{link.address} ({link.trouble or 'no answer yet'})" for link in absent)
                self._say(f"waits for shards at {places}; start them there with `atoll shard`")
        finally:
            for task in attaching:
                task.cancel()
            await asyncio.gather(*attaching, return_exceptions=True)
        self._check_names()

    async def _attach(self, link: ShardLink) -> None:
        while True:
            connection = self.connect(link.place, partial(self._answer, link))
            await connection.__aenter__()
            try:
                async with asyncio.timeout(SHARD_ATTACH_S):
                    told, _ = await connection.peer.call(calls.ATTACH, self.lead.greeting())
            except RefusedError as error:
                await connection.__aexit__()
                raise self._refused(link, error) from error
            except (UnreachableError, TimeoutError) as error:
                await connection.__aexit__()
                link.trouble = str(error) or "it does not answer"
                await asyncio.sleep(RETRY_S)
                continue
            except BaseException:
                await connection.__aexit__()
                raise
            before, link.connection = link.connection, connection
            if before is not None:
                await before.__aexit__()
            _take(link, told)
            return

    def _refused(self, link: ShardLink, error: RefusedError) -> AtollError:
        text = f"the shard at {link.address} refuses this syncer: {error.detail}"
        if error.code in (Refusal.STALE_EPOCH, Refusal.FENCED):
            return FencedSyncerError(text)
        return StoreError(text)

    def _check_names(self) -> None:
        for link in self.links:
            twins = [other.address for other in self.links if other.name == link.name and not other.away]
            if len(twins) > 1:
                raise ConfigError(
                    f"{' and '.join(twins)} are one shard, or shards on copies of one folder; give each address once"
                )

    async def _answer(self, link: ShardLink, method: str, values: dict[str, Any], _data: Bytes) -> Any:
        if self.asked is None:
            raise RefusedError(Refusal.BUSY, "the syncer is starting; ask again soon")
        return await self.asked(link, method, values)

    # ------------------------------------------------------------ fragments

    def settle(self, layout: Layout, recorded: Sequence[str] | None) -> tuple[str, ...]:
        """Decide who has which fragment, as it is recorded or (None) by size. Returns what is to be recorded."""
        if recorded is None:
            sizes = [fragment.size for fragment in layout.fragments]
            recorded = self._by_holdings(assign(sizes, [link.name for link in self.links]))
        return self._place(recorded)

    def settle_recorded(self, rows: Mapping[str, Any], fragments: int) -> None:
        """The same, as the tape says, before anything else of the run is known. Where it says nothing the coordinator's
        disk was lost, and each shard has what it holds."""
        recorded = rows.get(SHARDS_ROW)
        if recorded is None or len(recorded) != fragments:
            names = [link.name for link in self.links]
            recorded = self._by_holdings([names[fragment % len(names)] for fragment in range(fragments)])
        self._met = dict(rows.get(PLACES_ROW, {}))
        self._place(list(recorded))

    def _place(self, recorded: Sequence[str]) -> tuple[str, ...]:
        here = [link for link in self.links if not link.away]
        absent = [link for link in self.links if link.away]
        held = {link.name: frozenset(link.records) for link in here}
        at = {link.address: link.name for link in here}
        successors = {name: at[address] for name, address in self._met.items() if address in at}
        chosen = reassign(
            recorded,
            held,
            absent=len(absent),
            successors=successors,
            moved_from=self.moves.moved_from,
            leftovers={name: frozenset(own) for name, own in self.moves.leftovers.items()},
        )
        for link in absent:  # who they are is not known before they are met; their place is
            known = [name for name in chosen if name not in held and name not in {one.name for one in absent}]
            met = {address: name for name, address in self._met.items() if name in known}
            link.name = link.name or met.get(link.address, "") or next(iter(known), "")
        names = [link.name for link in self.links]
        self.of = tuple(names.index(name) for name in chosen)
        return chosen

    def places(self) -> dict[str, str]:
        return {link.name: link.address for link in self.links if link.name}

    def _by_holdings(self, balanced: Sequence[str]) -> tuple[str, ...]:
        """The record of who has what was lost with the coordinator's disk: each has what it holds, and where two hold
        one fragment, whoever has the newer version of it."""
        holders = {f: (int(r["version"]), link.name) for link in self.links for f, r in link.records.items()}
        for link in self.links:
            for f, r in link.records.items():
                holders[f] = max(holders[f], (int(r["version"]), link.name))
        return tuple(holders[f][1] if f in holders else name for f, name in enumerate(balanced))

    def link_of(self, fragment: int) -> ShardLink:
        return self.links[self.of[fragment]]

    @property
    def names(self) -> list[str]:
        """By fragment: the name of its shard."""
        return [self.links[index].name for index in self.of]

    def find(self, shard: str) -> ShardLink | None:
        """By name or address."""
        return next((link for link in self.links if shard in (link.name, link.address)), None)

    def follow(self, names: Sequence[str], moves: MoveRecord) -> None:
        """From here on these shards have the fragments."""
        known = [link.name for link in self.links]
        self.of, self.moves = tuple(known.index(name) for name in names), moves

    def rows(self, names: Sequence[str], moves: MoveRecord) -> dict[str, Any]:
        """What is to be on the tape."""
        return {SHARDS_ROW: list(names), PLACES_ROW: self.places(), MOVES_ROW: moves.row()}

    def owned(self, link: ShardLink) -> list[int]:
        return [fragment for fragment, index in enumerate(self.of) if self.links[index] is link]

    async def lay_out(self, run: str, layout: Layout, config: SyncConfig, *, restore: bool) -> None:
        self.lead = replace(self.lead, run=run)
        here = [link for link in self.links if not link.away]
        await asyncio.gather(*(self.lay_out_one(link, layout, config, restore=restore) for link in here))

    async def lay_out_one(self, link: ShardLink, layout: Layout, config: SyncConfig, *, restore: bool) -> None:
        tensors = [[t.name, list(t.shape), t.dtype, t.merge] for t in layout.tensors]
        values = {"run": self.lead.run, "tensors": tensors, "config": config.to_dict(), "restore": restore}
        over = self._left_behind(link) if restore else []
        await link.peer.call(calls.LAY_OUT, {**values, "owned": self.owned(link), "drop": over})
        for fragment in over:
            link.records.pop(fragment, None)
            self.moves.leftovers.get(link.name, set()).discard(fragment)

    def _left_behind(self, link: ShardLink) -> list[int]:
        """Copies on its disk that do not count, because another has the fragment. One that the other has not got yet
        stays: nobody knows what it may be good for."""
        left = self.moves.leftovers.get(link.name, set())
        over = []
        for fragment, record in link.records.items():
            owner = self.link_of(fragment) if fragment < len(self.of) else link
            own = owner.records.get(fragment)
            if owner is not link and own is not None:
                over += [fragment] if fragment in left or int(record["version"]) <= int(own["version"]) else []
        return over

    def tell_all(self, method: str, values: dict[str, Any]) -> None:
        for link in self.links:
            if not link.away:
                link.peer.tell(method, values)

    # ------------------------------------------------------------ links that break

    def watch(self, watcher: ShardWatcher) -> None:
        """From here on say when a link breaks, and when its shard can be reached again."""
        self._watcher = watcher
        for link in self.links:
            self._watching[link.address] = asyncio.create_task(self._watch(link, watcher))

    async def meet(self, address: str, patience_s: float) -> ShardLink:
        """Lead a shard at a new address. Raises what it refuses, or UnreachableError."""
        link = ShardLink(self.reach(address))
        try:
            async with asyncio.timeout(patience_s):
                await self._attach(link)
        except TimeoutError:
            raise UnreachableError(f"there is no shard at {address} ({link.trouble or 'no answer'})") from None
        twin = next((one for one in self.links if one.name == link.name), None)
        if twin is not None:
            await self.end(link)
            raise ConfigError(f"the shard at {address} is {twin.name} at {twin.address}, or on a copy of its folder")
        return link

    def join(self, link: ShardLink) -> None:
        """It is one of the run's shards from here on."""
        self.links.append(link)
        if self._watcher is not None:
            self._watching[link.address] = asyncio.create_task(self._watch(link, self._watcher))

    async def part(self, link: ShardLink) -> None:
        """It is none of them any more, and has no fragments."""
        names = self.names
        self.links.remove(link)
        self.follow(names, self.moves)
        if (task := self._watching.pop(link.address, None)) is not None:
            task.cancel()
        await self.end(link)

    async def end(self, link: ShardLink) -> None:
        if link.connection is not None:
            await link.connection.__aexit__()

    async def _watch(self, link: ShardLink, watcher: ShardWatcher) -> None:
        while True:
            if link.connection is not None and link.connection.running is not None:
                reason = await asyncio.shield(link.connection.running)
                link.away_since_s = now_s()
                watcher.shard_down(link, reason)
            before = link.name
            try:
                await self._attach(link)
                await watcher.shard_back(link, before)
            except UnreachableError:
                await asyncio.sleep(RETRY_S)  # it is gone again
            except AtollError as error:
                watcher.shard_refused(link, error)
                if link.connection is not None:
                    link.connection.peer.close(str(error))  # what it would not do now is asked of it again
                await asyncio.sleep(TELL_EVERY_S)

    async def close(self) -> None:
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        await asyncio.gather(*(link.connection.__aexit__() for link in self.links if link.connection is not None))


async def _ended(tasks: Sequence[asyncio.Task[None]], **how: Any) -> tuple[set[Any], set[Any]]:
    """As asyncio.wait, which wants at least one."""
    return await asyncio.wait(tasks, **how) if tasks else (set(), set())


def _take(link: ShardLink, told: dict[str, Any]) -> None:
    link.name, link.run, link.problems = str(told["name"]), str(told["run"]), [str(one) for one in told["problems"]]
    link.records = {int(fragment): dict(record) for fragment, record in told["fragments"].items()}
    link.handed = [HandedOver(calls.record_of(record), int(processed)) for record, processed in told["handed"]]
