"""Who has which fragment is changed while the run goes on: one move after the other, led by the coordinator.

    rest      no round of the fragment begins; the one that is under way ends
    copy      everything of it goes to the other shard, which compares checksums and puts it on its disk
    record    the coordinator's tape says who has it now: before that the old one does, from then on the new one
    tell      learners go to the new one, and the old one deletes its copy

Training does not stop: other fragments have their rounds meanwhile. Whatever dies on the way, the tape says whose the
fragment is, and a copy that does not count is deleted when its shard is next met. A shard that is lost for good cannot
give anything away: its fragments go to others (`give_up`), and learners bring the newest versions, without momentum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from atoll.core import Refusal, Refused, Serving, VersionToStore, rebalance, share_out
from atoll.errors import AtollError, FencedSyncerError, RefusedError, StoreError, UnreachableError
from atoll.store import failpoints
from atoll.syncer import shard_calls as calls
from atoll.syncer.relay_peers import AtRelay
from atoll.syncer.shard_fleet import MoveRecord, ShardLink, now_s
from atoll.wire import SHARDS_MAX

if TYPE_CHECKING:
    from atoll.syncer.sharded import ShardedPlatform

PIECE_BYTES = 32 << 20
"""What the coordinator holds of a fragment that moves, at a time."""
REST_LOOK_S = 0.02
REST_MORE_S = 30.0
"""How much longer than a round may take (`quorum_timeout`) its end is waited for."""
MEET_S = 30.0
"""A shard that is added is up: reading its slots takes longer only if it holds what it should not."""
LOOK_S = 1.0
"""How often it is looked for shards that are lost for good."""
MOVES, ADD, REMOVE, GIVE_UP = "move", "add", "remove", "give-up"
ACTIONS = (MOVES, ADD, REMOVE, GIVE_UP)


class ShardChanges:
    """One change at a time."""

    def __init__(self, platform: ShardedPlatform, lost_after_s: float = 0.0) -> None:
        self._platform = platform
        self._fleet = platform.fleet
        self.lost_after_s = lost_after_s
        """A shard that is away for longer is given up; 0: never by itself."""
        self.resting: frozenset[int] = frozenset()
        self.moving: int | None = None
        """The fragment of which nothing is taken in at the moment: it is between two shards."""
        self.number = 0
        self.text = ""
        """What is or was done, and why not, if it failed."""
        self.failed = False
        self._task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._follows: dict[int, bool] = {}
        """By session: whether its learner follows Serving."""

    @property
    def busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def status(self) -> dict[str, object]:
        state = "under way" if self.busy else "failed" if self.failed else "done"
        return {"number": self.number, "state": state if self.number else "", "text": self.text}

    def opened(self, session: int, follows: bool) -> None:
        self._follows[session] = follows

    def closed(self, session: int) -> None:
        self._follows.pop(session, None)

    def watch(self) -> None:
        if self.lost_after_s:
            self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """As in a crash: what is under way is cut short, and the tape says how far it came."""
        tasks = [task for task in (self._task, self._watching) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def rest(self) -> None:
        """Until what is under way has ended."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    # ------------------------------------------------------------ what an operator asks for

    async def asked(self, action: str, shard: str, fragments: Sequence[int]) -> tuple[str, int]:
        """Begin it. Raises RefusedError where that makes no sense."""
        if self.busy:
            raise RefusedError(Refusal.BUSY, f"another change is under way ({self.text}); ask again when it is done")
        if self._begins:
            raise RefusedError(Refusal.BUSY, "the run is beginning; ask again when it has its first parameters")
        match action:
            case "move":
                link, moved = self._known(shard), self._checked(fragments)
                return self._begin(f"fragments {moved} move to {link.name}", self._move_all(dict.fromkeys(moved, link)))
            case "add":
                return self._begin(f"the shard at {shard} comes in", self._add(shard))
            case "remove":
                link = self._known(shard)
                self._others(link)
                return self._begin(f"shard {link.name} at {link.address} goes out", self._remove(link))
            case "give-up":
                link = self._known(shard)
                self._others(link)
                if not link.away:
                    raise RefusedError(Refusal.NOT_ALLOWED, f"shard {link.name} is there; take it out with remove")
                if self._platform.machine.is_healing:
                    raise RefusedError(Refusal.BUSY, "learners are bringing back what was lost; ask again soon")
                return self._begin(f"shard {link.name} at {link.address} is given up", self._give_up(link))
            case _:
                raise RefusedError(Refusal.BAD_REQUEST, f"{action!r} is none of {', '.join(ACTIONS)}")

    @property
    def _begins(self) -> bool:
        """Shards have been told what they will have, and have nothing yet: who has what must not change now."""
        machine = self._platform.machine
        return machine.layout is not None and not machine.committed

    def _begin(self, text: str, work: Coroutine[Any, Any, str]) -> tuple[str, int]:
        self.number, self.text, self.failed = self.number + 1, text, False
        self._task = asyncio.create_task(self._do(work))
        return text, self.number

    async def _do(self, work: Coroutine[Any, Any, str]) -> None:
        try:
            self.text = await work
        except FencedSyncerError as error:
            self._platform.driver.fence(str(error))
        except AtollError as error:
            self.failed, self.text = True, f"{self.text}: this did not go through: {_words(error)}"
        except Exception as error:
            self.failed, self.text = True, f"{self.text}: this failed: {error!r}"
            raise
        finally:
            self._platform.tell(self.text, good=not self.failed)

    def _known(self, shard: str) -> ShardLink:
        link = self._fleet.find(shard)
        if link is None:
            known = ", ".join(f"{one.name} at {one.address}" for one in self._fleet.links)
            raise RefusedError(Refusal.NOT_ALLOWED, f"this run has no shard {shard!r} ({known}); give one of those")
        return link

    def _checked(self, fragments: Sequence[int]) -> list[int]:
        count = len(self._fleet.of)
        wrong = sorted({f for f in fragments if f >= count})
        if not fragments or wrong:
            said = f"this run has no fragment {wrong[0]}" if wrong else "no fragment is given"
            raise RefusedError(Refusal.UNKNOWN_FRAGMENT, f"{said}; it has 0 to {count - 1}")
        return sorted(set(fragments))

    def _others(self, link: ShardLink) -> list[ShardLink]:
        others = [one for one in self._fleet.links if one is not link and not one.away]
        if not others:
            raise RefusedError(
                Refusal.NOT_ALLOWED, f"{link.name} is the only shard that is there; add another one first"
            )
        return others

    def _sizes(self) -> list[int]:
        layout = self._platform.machine.layout
        return [fragment.size for fragment in layout.fragments] if layout is not None else []

    # ------------------------------------------------------------ shards come and go

    async def _add(self, address: str) -> str:
        fleet, platform = self._fleet, self._platform
        if (known := fleet.find(address)) is not None:
            return f"the shard at {address} is one of this run's already ({known.name})"
        if len(fleet.links) >= SHARDS_MAX:
            raise StoreError(f"this run has {len(fleet.links)} shards, and more cannot be told to learners")
        try:
            link = await fleet.meet(address, MEET_S)
        except FencedSyncerError as error:  # what a stranger says ends nobody; this one's own shards would say it, too
            raise StoreError(str(error)) from error
        moves = fleet.moves
        strange = sorted(set(link.records) - moves.leftovers.get(link.name, set()))
        if strange and platform.machine.layout is not None and not self._older(link, strange):
            await fleet.end(link)
            raise StoreError(
                f"the shard at {address} holds fragments {strange} of this run, newer than those who have them now; "
                "start it on an empty folder"
            )
        others = [one for one in moves.added if one != address]
        moves = replace(moves, removed=[one for one in moves.removed if one != address], added=[*others, address])
        fleet.join(link)
        try:
            await self._record(fleet.names, moves)
        except AtollError:  # it would be given fragments, and knows no model
            await fleet.part(link)
            raise
        fleet.moves = moves
        await platform.take_shard_in(link)
        moved = rebalance(self._sizes(), fleet.names, [one.name for one in fleet.links if not one.away])
        here = {one.name: one for one in fleet.links}
        await self._move_all({fragment: here[name] for fragment, name in moved.items()})
        return f"shard {link.name} at {address} is in, and has {len(moved)} of {len(fleet.of)} fragments"

    def _older(self, link: ShardLink, fragments: Sequence[int]) -> bool:
        versions = self._platform.machine.versions
        return all(f < len(versions) and int(link.records[f]["version"]) <= versions[f] for f in fragments)

    async def _remove(self, link: ShardLink) -> str:
        if link.away:
            raise StoreError(
                f"shard {link.name} is away ({link.away}) and cannot give its fragments away; start it again, or give "
                "it up (`atoll shards give-up`): learners bring the newest versions, without momentum"
            )
        count = len(self._fleet.owned(link))
        await self._move_all(self._shared_out(link))
        await self._part(link)
        return f"shard {link.name} at {link.address} is out, and others have its {count} fragments"

    def _shared_out(self, link: ShardLink) -> dict[int, ShardLink]:
        """Who gets the fragments of this shard."""
        sizes, here = self._sizes(), {one.name: one for one in self._others(link)}
        loads = {name: sum(sizes[f] for f in self._fleet.owned(one)) for name, one in here.items()}
        return {f: here[name] for f, name in share_out(sizes, self._fleet.owned(link), loads).items()}

    async def _part(self, link: ShardLink) -> None:
        fleet = self._fleet
        moves = fleet.moves
        added, removed = ([one for one in known if one != link.address] for known in (moves.added, moves.removed))
        moves = replace(moves, added=added, removed=[*removed, link.address])
        await self._record(fleet.names, moves)
        fleet.moves = moves  # and not before: a shard that stayed was not looked for after a restart (seed 4442)
        await fleet.part(link)
        self._tell_learners()

    # ------------------------------------------------------------ shards that are lost

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            machine, before_s = self._platform.machine, now_s() - self.lost_after_s
            late = [one for one in self._fleet.links if one.away and one.away_since_s <= before_s]
            living = any(not one.away for one in self._fleet.links)
            if late and living and not self.busy and machine.committed and not machine.is_healing:
                text = f"shard {late[0].name} at {late[0].address} is away for {self.lost_after_s:g} s, and given up"
                self._tell(text)
                self._begin(text, self._give_up(late[0]))

    async def _give_up(self, link: ShardLink) -> str:
        fleet, platform = self._fleet, self._platform
        targets, name = self._shared_out(link), link.name
        names = [targets[f].name if f in targets else one for f, one in enumerate(fleet.names)]
        moves = fleet.moves.lost({f: to.name for f, to in targets.items()}, name)
        moves.added = [one for one in moves.added if one != link.address]
        moves.removed = [*(one for one in moves.removed if one != link.address), link.address]
        await self._record(names, moves)
        unknown = platform.machine.away_since_start & targets.keys()
        fleet.follow(names, moves)
        await fleet.part(link)
        if unknown:
            platform.again = f"shard {name} is given up, and this coordinator has never met it"
            return platform.again
        self._tell_learners()
        try:
            for to in {one.name: one for one in targets.values()}.values():
                own = [f for f, one in targets.items() if one is to]
                await to.peer.call(calls.ADOPT, {"fragments": own})
        except AtollError:  # it is recorded, and half done: what nobody has was stored as if it were there (seed 3706)
            platform.again = f"shard {name} is given up, and another one did not take its fragments"
            raise
        platform.lost_with_shard(list(targets))
        return (
            f"shard {name} at {link.address} is given up; learners bring its {len(targets)} fragments to others. Their "
            "outer momentum is lost, and begins anew"
        )

    # ------------------------------------------------------------ moves

    async def _move_all(self, targets: Mapping[int, ShardLink]) -> str:
        moved = 0
        for fragment, target in targets.items():
            if self._fleet.link_of(fragment) is not target:
                await self._move(fragment, target)
                moved += 1
        return f"{moved} fragment{'s' if moved != 1 else ''} moved"

    async def _move(self, fragment: int, target: ShardLink) -> None:
        platform = self._platform
        try:
            await self._come_to_rest(fragment)
            self.moving = fragment
            async with platform.turn(fragment):
                source = self._fleet.link_of(fragment)
                await self._copy_and_switch(fragment, source, target)
        finally:
            self.moving = None
            self._rest(frozenset())
        await self._drop(source, fragment)

    def _rest(self, fragments: frozenset[int]) -> None:
        self.resting = fragments
        self._platform.tell_away()

    async def _come_to_rest(self, fragment: int) -> None:
        machine = self._platform.machine
        source = self._fleet.link_of(fragment)
        if not machine.committed or machine.is_healing or machine.is_down(fragment):
            why = f"shard {source.name} is away" if source.away else "the run is not going on"
            raise StoreError(f"fragment {fragment} cannot move now ({why}); ask again when it does")
        self._rest(frozenset({fragment}))
        wait_s = machine.config.quorum_timeout_ns / 1e9 + REST_MORE_S
        until_s = now_s() + wait_s
        while machine.is_busy(fragment):
            if now_s() > until_s:
                raise StoreError(f"fragment {fragment} did not come to rest within {wait_s:.0f} s; try again")
            await asyncio.sleep(REST_LOOK_S)

    async def _copy_and_switch(self, fragment: int, source: ShardLink, target: ShardLink) -> None:
        machine, fleet = self._platform.machine, self._fleet
        version, checksum = machine.published[fragment]
        item = VersionToStore(fragment, version, checksum, machine.fragment_record(fragment))
        try:
            await self._copy(item, source, target)
            met = target.connection
            names = [target.name if f == fragment else name for f, name in enumerate(fleet.names)]
            moves = fleet.moves.moved(fragment, source.name, target.name)
            await self._record(names, moves)
            if target.connection is not met:
                # It was met anew while the tape was written, as one that has no such fragment: it has deleted it.
                await self._record(fleet.names, fleet.moves)
                raise StoreError(f"shard {target.name} went away meanwhile, and is back; move it again")
        except AtollError:
            await self._drop(target, fragment)
            raise
        fleet.follow(names, moves)
        target.records[fragment] = {"version": version, "checksum": checksum}
        self._tell_learners()
        failpoints.hit("move.told")

    async def _copy(self, item: VersionToStore, source: ShardLink, target: ShardLink) -> None:
        own = {"fragment": item.fragment}
        held = self._platform.driver.held.items()
        ids = [one for one, at in held if one.fragment == item.fragment and not isinstance(at, AtRelay)]
        told, _ = await source.peer.call(calls.DESCRIBE, {**own, "ids": [calls.id_values(one) for one in ids]})
        if (told["version"], told["checksum"]) != (item.version, item.checksum):
            raise StoreError(f"shard {source.name} has version {told['version']} of it, not {item.version}")
        await target.peer.call(calls.RECEIVE, {**told, **own})
        failpoints.hit("move.described")
        for what, size, _ in told["parts"]:
            for start in range(0, size, PIECE_BYTES):
                piece = {**own, "what": what, "start": start}
                _, data = await source.peer.call(calls.READ, {**piece, "stop": min(size, start + PIECE_BYTES)})
                await target.peer.call(calls.PUT, piece, data)
        failpoints.hit("move.copied")
        await target.peer.call(calls.INSTALL, asdict(item))
        failpoints.hit("move.installed")

    async def _record(self, names: Sequence[str], moves: MoveRecord) -> None:
        """On disk before anybody hears of it. If that fails the tape is set back, and nothing has changed."""
        platform, fleet = self._platform, self._fleet
        if platform.driver.gate.fenced:
            raise FencedSyncerError("a newer syncer has taken over")
        platform.recorded = list(names)
        if platform.keeper.level != "none":
            platform.keeper.append(fleet.rows(names, moves))
            error = await platform.keeper.sync()
            if error:
                platform.recorded = list(fleet.names)
                platform.keeper.append(fleet.rows(fleet.names, fleet.moves))
                raise StoreError(f"the coordinator cannot write down who has what ({error})")
        failpoints.hit("move.recorded")

    async def _drop(self, link: ShardLink, fragment: int) -> None:
        """It may be away: then it is told when it is met."""
        try:
            if not link.away:
                await link.peer.call(calls.DROP, {"fragment": fragment})
                link.records.pop(fragment, None)
                self._fleet.moves.leftovers.get(link.name, set()).discard(fragment)
        except (UnreachableError, RefusedError) as error:
            self._tell(f"shard {link.name} keeps a copy of fragment {fragment} for now ({_words(error)})")

    def _tell_learners(self) -> None:
        platform, fleet = self._platform, self._fleet
        serving = Serving(tuple(link.address for link in fleet.links), fleet.of)
        again = Refused(Refusal.BUSY, "a fragment has moved to another shard; say hello again")
        for session in list(platform.sends):
            platform.send(session, serving if self._follows.get(session) else again)

    def _tell(self, text: str) -> None:
        self._platform.tell(text)


def _words(error: AtollError) -> str:
    return error.detail if isinstance(error, RefusedError) else str(error)
