"""The syncer as the coordinator of shards: the same machine, driver and port, with arrays that are elsewhere.

It never sees a parameter, but where somebody wants the whole model from it: a snapshot or the model file, fragment by
fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core import (
    NO_VERSION,
    Begin,
    ContributionId,
    ContributionRecord,
    FetchHeader,
    FetchKind,
    FetchRequest,
    Hello,
    Identity,
    InlinePush,
    Layout,
    LearnerMessage,
    PushHeader,
    PushKind,
    PushReply,
    Recovery,
    Refusal,
    StoreOutcome,
    SyncConfig,
    SyncerMachine,
    SyncerMessage,
    VersionToStore,
    Welcome,
)
from atoll.core import effects as fx
from atoll.errors import AtollError, FencedSyncerError, RefusedError, UnreachableError
from atoll.observe import Writer, events
from atoll.syncer import shard_calls as calls
from atoll.syncer.news import News
from atoll.syncer.platform import AsyncioPlatform
from atoll.syncer.recover import SHARDS_ROW
from atoll.syncer.relay_peers import AtRelay
from atoll.syncer.shard_changes import ShardChanges
from atoll.syncer.shard_fleet import ShardFleet, ShardLink
from atoll.syncer.shell import SyncerShell
from atoll.syncer.state import ModelState, Stored
from atoll.syncer.state_writer import StateWriter

ON_A_SHARD = "shards serve the fragments of this run; go where Welcome says"


@dataclass(frozen=True, slots=True)
class AtShard:
    """Stands for bytes that a shard holds: a contribution, or (`learner`) a whole fragment that was brought back."""

    fragment: int
    learner: str = ""


class ShardedPlatform(AsyncioPlatform):
    """Production's platform with its arrays on shards. `state` knows versions and no parameter."""

    def __init__(self, machine: SyncerMachine, keeper: StateWriter, writer: News, fleet: ShardFleet) -> None:
        super().__init__(machine, keeper, writer)
        self.fleet = fleet
        self.recorded: list[str] | None = None
        """Who has which fragment, as the tape says."""
        self.again = ""
        """Why this coordinator begins anew: a shard that was away is back, or did not do what it was told."""
        self.came: Callable[[int], None] = lambda size: None
        """Told of the bytes of each push that has come in."""
        self.changes = ShardChanges(self)
        fleet.asked = self._asked

    # ------------------------------------------------------------ what shards ask

    async def _asked(self, link: ShardLink, method: str, values: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        match method:
            case calls.PUSH_OPEN | calls.PUSH_DONE:
                header = calls.header_of(values["header"])
                if self._is_elsewhere(link, header.fragment):
                    reply = PushReply(False, Refusal.BUSY, f"fragment {header.fragment} is moving; push it again")
                elif method == calls.PUSH_OPEN:
                    reply = self.driver.open_push(header)
                else:
                    reply = self._push_done(header, bool(values["finite"]), values["norm"])
                return asdict(reply), b""
            case calls.FETCHED:
                self.inline_down += int(values["bytes"])
                self.flow_down.add(values["learner"], int(values["bytes"]))
                self.driver.apply(fx.FetchOpened(values["learner"], int(values["generation"])))
            case calls.RELAY_FAILED:
                self.relays.peers.failed(str(values["name"]), str(values["why"]))
            case calls.THETA:
                fragment = int(values["fragment"])
                async with self.turn(fragment):
                    await self.call(fragment, calls.COPY_THETA, {"fragment": fragment})
            case _:
                raise RefusedError(Refusal.BAD_REQUEST, f"this syncer knows no {method!r}; update the older side")
        return {}, b""

    def _is_elsewhere(self, link: ShardLink, fragment: int) -> bool:
        """True if bytes that came to this shard would not be where the fragment is."""
        known = fragment < len(self.fleet.of)
        return fragment == self.changes.moving or (known and self.fleet.link_of(fragment) is not link)

    def _push_done(self, header: PushHeader, finite: bool, norm: float) -> PushReply:
        self.came(header.size)
        self.flow_up.add(header.learner, header.size)
        brought = AtShard(header.fragment, header.learner if header.kind is PushKind.HEAL else "")
        return self.driver.complete_push(header, brought, finite=finite, norm=float(norm))

    async def call(self, fragment: int, method: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Have the fragment's shard do something. Raises UnreachableError if it is away."""
        return (await self.fleet.link_of(fragment).peer.call(method, values))[0]

    # ------------------------------------------------------------ links

    def send(self, session: int, message: SyncerMessage) -> None:
        if isinstance(message, Welcome):
            message = self._with_shards(session, message)
        super().send(session, message)

    def _with_shards(self, session: int, welcome: Welcome) -> Welcome:
        """Shards hear of a session before its learner does, so that they know it when it comes to them."""
        layout = self.machine.layout
        assert layout is not None
        if len(self.fleet.of) != len(layout.fragments):
            self.settle(layout)
        learner = self.machine.learner_of(session)
        who = {"learner": learner, "generation": welcome.generation, "secret": welcome.secret}
        self.fleet.tell_all(calls.SENDER, who)  # one that is away hears it when it is back
        addresses = tuple(link.address for link in self.fleet.links)
        return replace(welcome, shards=addresses, shard_of=self.fleet.of)

    def forget_sender(self, learner: str) -> None:
        self.fleet.tell_all(calls.REVOKED, {"learner": learner})

    def shard_down(self, link: ShardLink, reason: str) -> None:
        fragments = self.fleet.owned(link)
        self.tell(
            f"shard {link.name} at {link.address} is away ({reason}); its {len(fragments)} of {len(self.fleet.of)} "
            "fragments wait for it, learners and the others go on"
        )
        if self.machine.committed:
            self.tell_away()

    def tell_away(self) -> None:
        """The machine hears whose fragments are away, and which are about to move."""
        away = {f for one in self.fleet.links if one.away for f in self.fleet.owned(one)}
        self.driver.apply(fx.FragmentsDown(frozenset(away), self.changes.resting))

    def shard_refused(self, link: ShardLink, error: AtollError) -> None:
        if isinstance(error, FencedSyncerError):
            self.driver.fence(str(error))
        else:
            self.tell(str(error))

    async def shard_back(self, link: ShardLink, before: str) -> None:
        """Go on with its fragments from its disk; with all, from all disks, where this coordinator knows too little."""
        owned, machine = self.fleet.owned(link), self.machine
        renamed = link.name != before
        unknown = not machine.committed or machine.is_healing or machine.away_since_start & set(owned)
        if unknown or (renamed and link.records) or self.state is None or machine.layout is None:
            self.again = f"shard {link.name} at {link.address} is {'back' if not renamed else 'there'}"
            return
        if renamed:  # it has lost its disk, and takes its own place
            self._record([link.name if name == before else name for name in self.recorded or []])
        on_disk = {f: _version_of(link.records.get(f)) for f in owned}
        await self.fleet.lay_out_one(link, machine.layout, machine.config, restore=True)
        for fragment, (version, checksum) in on_disk.items():
            self._now_at(fragment, version, checksum)
        self._tell_senders(link)
        handed = frozenset(one.contribution.id for one in link.handed)
        self.driver.shard_back(fx.FragmentsBack(on_disk, handed))
        for identity in handed:
            if not machine.holds(identity):
                self.drop_handed(identity)
        self.tell(f"shard {link.name} at {link.address} is back; its fragments go on from its disk", good=True)

    def _tell_senders(self, link: ShardLink) -> None:
        for member in self.machine.members.values():
            if member.connected:
                who = {"learner": member.learner, "generation": member.generation, "secret": member.secret}
                link.peer.tell(calls.SENDER, who)

    async def take_shard_in(self, link: ShardLink) -> None:
        """A shard that was added: it hears of the model and of the learners, and has nothing yet."""
        if (layout := self.machine.layout) is not None and self.machine.committed:
            await self.fleet.lay_out_one(link, layout, self.machine.config, restore=True)
            self._tell_senders(link)

    def lost_with_shard(self, fragments: list[int]) -> None:
        """Whoever has these now has nothing of them: learners bring the newest versions."""
        for fragment in fragments:
            self._now_at(fragment, NO_VERSION, 0)
        self.driver.shard_back(fx.FragmentsBack(dict.fromkeys(fragments, (NO_VERSION, 0))))
        self.tell_away()

    def _record(self, names: list[str]) -> None:
        self.recorded = names
        self.driver.perform([fx.Remember(self.fleet.rows(names, self.fleet.moves), first=True)])

    def tell(self, text: str, *, good: bool = False) -> None:
        self._writer.emit(events.GoodNews("syncer", text) if good else events.Warned("syncer", text))
        print(f"atoll syncer: {text}", flush=True)

    # ------------------------------------------------------------ arrays, on shards

    def settle(self, layout: Layout) -> None:
        """Decide who has which fragment, and put that on the tape."""
        known = self.recorded if self.recorded and len(self.recorded) == len(layout.fragments) else None
        chosen = list(self.fleet.settle(layout, known))
        self._record(chosen)

    def lay_out(self, layout: Layout, *, lost: bool) -> None:
        self.settle(layout)
        self.state = ModelState(layout, self.machine.config, owned=())
        if lost:
            self.state.restore({})
            self.tell_layout(layout)
        self.start_on_shards(self.fleet.lay_out(self.machine.run, layout, self.machine.config, restore=lost))

    def start_on_shards(self, work: Any) -> None:
        """A shard that goes away does not answer, as a disk that is gone does not: nothing follows from it."""
        self.start(self._unless_away(work))

    async def _unless_away(self, work: Any) -> None:
        try:
            await work
        except UnreachableError:
            pass
        except RefusedError as error:
            self.tell(f"a shard did not do what it was told: {error.detail}")
            self.again = self.again or error.detail

    def commit_seed(self, done: Callable[[tuple[int, ...]], None]) -> None:
        self.start_on_shards(self._seed_on_shards(done))

    async def _seed_on_shards(self, done: Callable[[tuple[int, ...]], None]) -> None:
        assert self.state is not None
        found: dict[int, int] = {}
        for link in self.fleet.links:  # all of them: a run does not begin without
            told, _ = await link.peer.call(calls.COMMIT_SEED, {})
            found |= {int(fragment): int(checksum) for fragment, checksum in told["checksums"].items()}
        self.state.commit_seed()
        for fragment, checksum in found.items():
            self.state.fragments[fragment].checksum = checksum
        self.tell_layout(self.state.layout)
        done(tuple(found[fragment] for fragment in range(len(self.state.fragments))))

    def compare(self, compare: fx.Compare, payloads: list[Any], done: Callable[[fx.Compared], None]) -> None:
        async def work() -> None:
            told = await self.call(compare.fragment, calls.COMPARE, calls.compare_values(compare))
            done(fx.Compared(compare.fragment, told["cosines"]))

        self.start_on_shards(work())

    def merge(self, merge: fx.Merge, payloads: list[Any], done: Callable[[fx.MergeFinished], None]) -> None:
        at = [self._whereabouts(item) for item in payloads]

        async def work() -> None:
            told = await self.call(merge.fragment, calls.MERGE, calls.merge_values(merge, at))
            result, bytes_up = calls.finished_of(told)
            self.relays.peers.bytes_up += bytes_up
            if result.finite:
                self._now_at(merge.fragment, merge.version, result.checksum)
                self.keeper.note(merge, result.checksum)
            done(result)

        self.start_on_shards(work())

    def _whereabouts(self, item: AtShard | AtRelay) -> calls.At:
        """A relay has a link to each shard, by the name that it has here. What it held is gone with its link here."""
        if not isinstance(item, AtRelay):
            return None
        return ("" if item.peer.closed else self.relays.peers.name_of(item.peer), item.norm)

    def heal(self, heal: fx.CommitHealed, payload: Any, done: Callable[[], None]) -> None:
        async def work() -> None:
            more = {"learner": payload.learner, "rounds": self.machine.rounds_started}
            await self.call(heal.fragment, calls.HEAL, {**asdict(heal), **more})
            self._now_at(heal.fragment, heal.version, heal.checksum)
            done()

        self.start_on_shards(work())

    def _now_at(self, fragment: int, version: int, checksum: int) -> None:
        assert self.state is not None
        arrays = self.state.fragments[fragment]
        arrays.version, arrays.checksum = version, checksum
        self.fleet.link_of(fragment).records[fragment] = {"version": version, "checksum": checksum}

    def inline_update(self, fragment: int, version: int) -> bytes | None:
        return None

    def store(self, item: VersionToStore, done: Callable[[StoreOutcome], None]) -> None:
        async def work() -> None:
            try:
                outcome = StoreOutcome(**await self.call(item.fragment, calls.STORE, asdict(item)))
            except UnreachableError as error:
                if not self._closing:
                    raise
                outcome = StoreOutcome(str(error))  # the end does not wait for it
            done(outcome)

        self.start_on_shards(work())

    def keep_handed(
        self, items: list[tuple[ContributionRecord, Any]], processed: int, done: Callable[[], None]
    ) -> None:
        async def work() -> None:
            for record, held in items:
                values = {"item": calls.record_values(record), "processed": processed, "at": self._whereabouts(held)}
                told = await self.call(record.id.fragment, calls.KEEP_HANDED, values)
                if told["brought"] and self.driver.held.get(record.id) is held:
                    self.driver.held[record.id] = AtShard(record.id.fragment)
            done()

        self.start_on_shards(work())

    def drop_handed(self, identity: ContributionId) -> None:
        self.relays.forget(identity)
        link = self.fleet.link_of(identity.fragment)
        if not link.away:
            link.peer.tell(calls.FORGET, {"id": calls.id_values(identity)})

    async def copy(self, fragment: int) -> tuple[int, dict[str, NDArray[np.float32]]]:
        """Every array of a fragment, by name. The caller has its turn."""
        told, data = await self.fleet.link_of(fragment).peer.call(calls.COPY, {"fragment": fragment})
        names, size = told["names"], int(told["size"])
        values = data.view(np.float32) if data.size else np.empty(0, np.float32)
        return int(told["version"]), {name: values[i * size : (i + 1) * size] for i, name in enumerate(names)}


def _version_of(record: Mapping[str, Any] | None) -> tuple[int, int]:
    return (int(record["version"]), int(record["checksum"])) if record is not None else (NO_VERSION, 0)


class ShardedShell(SyncerShell):
    """The coordinator's port. Payloads of fragments are refused here: shards take them."""

    def __init__(
        self,
        config: SyncConfig,
        run: str,
        writer: Writer,
        *,
        epoch: int,
        keeper: StateWriter,
        begin: Begin,
        fleet: ShardFleet,
    ) -> None:
        self.fleet = fleet
        self.writes_model = True
        """Whether the whole model is wanted here at the end."""
        self._whole: ModelState | None = None
        super().__init__(config, run, writer, epoch=epoch, keeper=keeper, begin=begin)
        self.shards.came = self._came

    def _came(self, size: int) -> None:
        self.inline_up += size

    def _platform(self, machine: SyncerMachine) -> ShardedPlatform:
        return ShardedPlatform(machine, self.keeper, self.news, self.fleet)

    @property
    def shards(self) -> ShardedPlatform:
        assert isinstance(self.platform, ShardedPlatform)
        return self.platform

    def start(self) -> None:
        super().start()
        self.fleet.watch(self.shards)
        self.shards.changes.watch()

    def must_begin_anew(self) -> bool:
        """True if this coordinator can only go on from what is on disk, as after a crash; `shards.again` says why."""
        if self.machine.mends_in_vain(self.platform.now_ns()):
            self.shards.again = self.shards.again or "nobody holds the newest version of what a shard has lost"
        return bool(self.shards.again)

    @property
    def published(self) -> ModelState | None:
        return self._whole

    async def close(self) -> None:
        await self.shards.changes.close()
        await super().close()
        if self.writes_model and not self.fenced and self.failure is None:
            await self.gather()
        await self.fleet.close()

    def status(self) -> dict[str, object]:
        layout = self.machine.layout
        sizes = [fragment.size for fragment in layout.fragments] if layout is not None else []
        shards = [
            {
                "name": link.name,
                "address": link.address,
                "fragments": self.fleet.owned(link),
                "bytes": 4 * sum(sizes[fragment] for fragment in self.fleet.owned(link)),
                "away": link.away,
            }
            for link in self.fleet.links
        ]
        return {**super().status(), "shards": shards, "shard_change": self.shards.changes.status()}

    # ------------------------------------------------------------ continuing an earlier run

    def restore(
        self,
        recovery: Recovery,
        stored: Stored,
        payloads: Mapping[ContributionId, NDArray[np.uint8]],
        load_ns: int = 0,
    ) -> None:
        """As for a syncer of its own arrays; those stay where they are."""
        self.shards.recorded = list(recovery.rows[SHARDS_ROW]) if SHARDS_ROW in recovery.rows else None
        effects = self.driver.restore(recovery, load_ns)
        machine = self.machine
        assert machine.layout is not None
        state = self.platform.state = ModelState(machine.layout, machine.config, owned=())
        state.restore(stored)
        self.shards.settle(machine.layout)
        self.shards.start_on_shards(self.fleet.lay_out(machine.run, machine.layout, machine.config, restore=True))
        for item in recovery.handed:
            identity = item.contribution.id
            if machine.holds(identity):
                self.driver.held[identity] = AtShard(identity.fragment)
            else:
                self.shards.drop_handed(identity)
        self.driver.perform(effects)

    async def copy_fragment(self, fragment: int) -> tuple[int, dict[str, NDArray[np.float32]], dict[str, object]]:
        async with self.platform.turn(fragment):
            fragment_record = self.machine.fragment_record(fragment)
            version, arrays = await self.shards.copy(fragment)
        return version, arrays, fragment_record

    async def gather(self) -> None:
        """Bring the published parameters here, for the model file."""
        layout = self.machine.layout
        if layout is None or not self.machine.committed:
            return
        stored = {}
        try:
            for fragment in range(len(layout.fragments)):
                version, arrays = await self._copy_published(fragment)
                stored[fragment] = (version, 0, {"theta": arrays["theta"]})
        except UnreachableError as error:
            text = f"the model cannot be written, because a shard is away ({error}); start it, and the syncer again"
            self.news.emit(events.Warned("syncer", text))
            print(f"atoll syncer: {text}", flush=True)
            return
        self._whole = ModelState(layout, self.machine.config)
        self._whole.restore(stored)

    async def _copy_published(self, fragment: int) -> tuple[int, dict[str, NDArray[np.float32]]]:
        """A fragment whose shard is away may never give its turn back: that is not waited for."""
        if self.fleet.link_of(fragment).away:
            raise UnreachableError(self.fleet.link_of(fragment).away)
        async with self.platform.turn(fragment):
            return await self.shards.copy(fragment)

    # ------------------------------------------------------------ SyncerService

    def open_session(
        self,
        session: int,
        hello: Hello,
        send: Callable[[SyncerMessage], None],
        identity: Identity | None = None,
    ) -> None:
        if not hello.shards:
            raise RefusedError(
                Refusal.SHARDS,
                f"learner {hello.learner!r} is older than shards, which serve the fragments of this run; install this "
                "syncer's version of atoll where it runs, or run without --shards",
            )
        if not self.fleet.links:
            raise RefusedError(Refusal.BUSY, "the run waits for its first shard (`atoll shard --join`); ask again soon")
        super().open_session(session, hello, send, identity)
        self.shards.changes.opened(session, hello.moves)

    def close_session(self, session: int, reason: str) -> None:
        self.shards.changes.closed(session)
        super().close_session(session, reason)

    def receive(self, session: int, message: LearnerMessage) -> None:
        if isinstance(message, InlinePush):
            reply = PushReply(False, Refusal.NOT_ALLOWED, ON_A_SHARD)
            self.driver.answer_inline(session, message.header, reply)
        else:
            super().receive(session, message)

    async def push_begin(self, header: PushHeader) -> int:
        if header.kind is not PushKind.INNER:
            raise RefusedError(Refusal.NOT_ALLOWED, ON_A_SHARD)
        return await super().push_begin(header)

    async def fetch_open(self, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
        if request.kind is not FetchKind.INNER:
            raise RefusedError(Refusal.NOT_ALLOWED, ON_A_SHARD)
        return await super().fetch_open(request)
