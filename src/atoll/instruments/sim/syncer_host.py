"""One process of the syncer in virtual time: what `syncer.shell`, `bulk` and `keeper` do with the machine's effects.

Nothing is decided here. Merges and writes take (virtual) time, so that other things happen in between; messages wait
for the tape as they do in production; a disk that fails makes the process train on without it and catch up later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.core import (
    ASKED_TO_LEAVE,
    EPOCH_KEY,
    INNER_LINGER_NS,
    NO_VERSION,
    Begin,
    ContributionId,
    DataLeases,
    DurabilityGate,
    FetchKind,
    FetchRequest,
    HandedOver,
    Hello,
    Identity,
    InlinePush,
    InnerPiece,
    InnerPieceRequest,
    InnerSlot,
    Layout,
    LearnerMessage,
    Published,
    PushHeader,
    PushKind,
    PushReply,
    Recovery,
    Refusal,
    Request,
    Role,
    Start,
    Stop,
    StoreOutcome,
    SyncerDriver,
    SyncerMachine,
    SyncerMessage,
    VersionToStore,
    messages,
)
from atoll.core import ContributionRecord as Merged
from atoll.core import effects as fx
from atoll.instruments.check import facts
from atoll.instruments.sim.data_reader import STREAM
from atoll.instruments.sim.merge_facts import MergeFacts
from atoll.instruments.sim.payloads import Payload, SyncerPayloads
from atoll.instruments.sim.process import Process

if TYPE_CHECKING:
    from atoll.instruments.sim.connection import Connection
    from atoll.instruments.sim.world import World

SESSION_GRACE_NS = 5_000_000
"""A session ends after what was queued for it has gone out."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What things take on the syncer's machine."""

    merge_ns: int = 2_000_000
    sync_ns: int = 3_000_000
    commit_ns: int = 10_000_000


class SyncerHost(MergeFacts, Process):
    """The platform of a SyncerDriver (`core.syncer_driver`)."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world)
        self.name = name
        self.serving = False
        self.disk = world.disk
        self.level = world.scenario.durability
        opened = self.disk.open(world.dice_disk)
        self.epoch = opened if self.level != "none" else 1
        # A learner that holds another run is taken in: here is nobody to decide, and everybody must make progress.
        begin = Begin(takes_strangers=True)
        counted = int(self.disk.read_rows().get(EPOCH_KEY, 0))
        self.machine = SyncerMachine(world.scenario.config, f"run-{opened}", self.epoch + counted, begin)
        self.driver = SyncerDriver(self.machine, self, DurabilityGate(self.level))
        self.driver.watch = self._watch
        self.gate = self.driver.gate
        self.payloads: SyncerPayloads | None = None
        self.connections: dict[int, Connection] = {}
        self.accepted: dict[int, Connection] = {}
        """Connections whose Hello this process has not read yet."""
        self.finished = ""
        """Why it is over: everybody has left."""
        self._tick_ns = -1
        self._made: dict[int, facts.Committed] = {}
        """By fragment: a merge that is not committed yet."""
        self.inner: dict[int, dict[int, int]] = {}
        """By slot: the pieces of inner state that wait for a joiner, and their sizes."""
        if self.level != "none":
            world.observe(facts.Opened(self.epoch))

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Find what an earlier syncer left, then serve."""
        rows = self.disk.read_rows()
        seeded = bool(rows.get("run", {}).get("seeded"))
        if seeded:
            wanted = int(rows["run"]["fragments"])
            slots = {p: slot for p, slot in self.disk.read_slots().items() if p < wanted}
            if slots:
                self._restore(rows, slots)
        elif self.disk.slots:
            self.disk.slots.clear()  # of a seed that was never complete
        self.serving = True
        self.driver.look_after_disk()
        self.wake_at(self.machine.next_wake_ns())

    def _restore(self, rows: dict[str, Any], slots: dict[int, tuple[int, int, dict[str, Any], Any]]) -> None:
        exact = self.level == "commit" and self.disk.lossless
        handed = [entry[0] for entry in self.disk.handed.values()]
        fragment_records = {p: fragment_record for p, (_, _, fragment_record, _) in slots.items()}
        self.world.observe(
            facts.Restored(self.epoch, {p: (v, c) for p, (v, c, _, _) in slots.items()}, self.disk.lossless)
        )
        effects = self.driver.restore(Recovery(rows, fragment_records, exact, handed=handed))
        assert self.machine.layout is not None
        self.payloads = self.world.new_syncer_payloads(self.machine.layout, self.machine.config)
        self.payloads.restore({p: (v, c, stored) for p, (v, c, _, stored) in slots.items()})
        for identity, (item, payload) in list(self.disk.handed.items()):
            if self.machine.holds(identity):
                self.payloads.inspect(identity.fragment, payload, item.contribution.codec)
                self.driver.held[identity] = payload
            else:
                del self.disk.handed[identity]
        self.driver.perform(effects)

    def die(self) -> None:
        super().die()
        self.serving = False

    def hear(self, event: fx.SyncerInput) -> None:
        self.driver.apply(event)

    def _watch(self, event: fx.SyncerInput) -> None:
        self.world.events += 1
        if self.world.tracing:
            self.world.trace(self.name, event)

    # ------------------------------------------------------------ the platform: clock and links

    def now_ns(self) -> int:
        return self.world.clock.now_ns

    def wake_at(self, wake_ns: int | None) -> None:
        if wake_ns is not None and (self._tick_ns < 0 or wake_ns < self._tick_ns):
            self._tick_ns = wake_ns
            self.world.clock.at(wake_ns, self.call, self._tick, wake_ns)

    def _tick(self, planned_ns: int) -> None:
        if planned_ns == self._tick_ns:  # else an earlier one was planned since
            self._tick_ns = -1
            self.driver.wake()

    def note(self, note: fx.Note) -> None:
        self.world.note(self.name, note)

    def end_fenced(self, reason: str) -> None:
        self.world.observe(facts.Overtaken(self.epoch, self.disk.epoch if self.level != "none" else self.epoch))
        self.world.syncer_ended(self)

    def end_finished(self, reason: str) -> None:
        self.finished = reason

    def send(self, session: int, message: SyncerMessage) -> None:
        if self.gate.fenced:
            return
        match message:
            case messages.Upcoming() | Request() | messages.InlineReply():  # most of them, and nobody's promise
                pass
            case Published():
                self._told(message.fragment, message.version, message.checksum)
            case Start():
                for fragment, state in enumerate(message.fragments):
                    self._told(fragment, state.version, state.checksum)
            case Stop() if message.reason != ASKED_TO_LEAVE:
                self.world.stop_told()
            case DataLeases() if not self.world.is_honest(self.machine.learner_of(session)):
                self.world.leased_to_liar.update(lease.chunk for lease in message.granted)
        connection = self.connections.get(session)
        if connection is not None:
            connection.to_learner(message)

    def _told(self, fragment: int, version: int, checksum: int) -> None:
        promised = self.level == "commit" and not self.gate.degraded
        self.world.observe(facts.Told(self.epoch, fragment, version, checksum, promised))

    def end_session(self, session: int, reason: str) -> None:
        self.later(SESSION_GRACE_NS, self._end_session, session, reason)

    def _end_session(self, session: int, reason: str) -> None:
        connection = self.connections.pop(session, None)
        if connection is not None:
            connection.ended_by_syncer(reason)
            self.driver.apply(fx.SessionClosed(session, reason))

    # ------------------------------------------------------------ the platform: arrays

    def lay_out(self, layout: Layout, *, lost: bool) -> None:
        self.payloads = self.world.new_syncer_payloads(layout, self.machine.config)
        if lost:  # nothing is left of the run but what learners will bring
            self.payloads.restore({})

    def commit_seed(self, done: Callable[[tuple[int, ...]], None]) -> None:
        timing = self.world.timing
        self.later(timing.merge_ns + self._disk_ns(timing.commit_ns), self._commit_seed, done)

    def _commit_seed(self, done: Callable[[tuple[int, ...]], None]) -> None:
        assert self.payloads is not None
        checksums = self.payloads.commit_seed()
        for fragment, checksum in enumerate(checksums):
            self.world.observe(facts.Committed(self.epoch, fragment, 0, checksum))
        if self._is_newest():
            self.world.record_seed(self.epoch, self.payloads, self.machine)
            done(checksums)

    def compare(self, compare: fx.Compare, payloads: list[Payload], done: Callable[[fx.Compared], None]) -> None:
        self.later(self.world.timing.merge_ns, self._compare, compare, payloads, done)

    def _compare(self, compare: fx.Compare, payloads: list[Payload], done: Callable[[fx.Compared], None]) -> None:
        assert self.payloads is not None
        learners = [identity.learner for identity in compare.contributions]
        cosines = self.payloads.compare(compare.fragment, payloads, learners, compare.voices)
        done(fx.Compared(compare.fragment, cosines))

    def merge(self, merge: fx.Merge, payloads: list[Payload], done: Callable[[fx.MergeFinished], None]) -> None:
        self.later(self.world.timing.merge_ns, self._merge, merge, payloads, done)

    def _merge(self, merge: fx.Merge, payloads: list[Payload], done: Callable[[fx.MergeFinished], None]) -> None:
        assert self.payloads is not None
        made = self.payloads.merge(merge.fragment, merge.version, payloads, merge.weights, merge.codec_down)
        if not made.finite:
            done(fx.MergeFinished(merge.fragment, finite=False))
            return
        self._made[merge.fragment] = self._fact_of(merge, made)
        self.world.record_merge(self.epoch, merge, made.checksum, payloads)
        done(fx.MergeFinished(merge.fragment, finite=True, checksum=made.checksum, merge_ns=1_000_000))

    def publish(self, merge: fx.Merge, announce: Callable[[], None]) -> None:
        self._state_made(merge.fragment)
        # A process may die here: on disk, and nobody has heard of it.
        self.later(1, self._publish, merge, announce)

    def _state_made(self, fragment: int) -> None:
        fact = self._made.pop(fragment, None)
        if fact is not None:
            self.world.observe(fact)

    def _publish(self, merge: fx.Merge, announce: Callable[[], None]) -> None:
        self.world.merged(merge)
        announce()

    def heal(self, heal: fx.CommitHealed, payload: Payload, done: Callable[[], None]) -> None:
        self.later(self.world.timing.merge_ns, self._heal, heal, payload, done)

    def _heal(self, heal: fx.CommitHealed, payload: Payload, done: Callable[[], None]) -> None:
        assert self.payloads is not None
        self.payloads.heal(heal.fragment, heal.version, heal.checksum, payload)
        undecidable = self.world.is_undecidable(self, heal)
        self.world.undecidable += undecidable
        self.world.observe(facts.Healed(self.epoch, heal.fragment, heal.version, heal.checksum, undecidable))
        done()

    def version(self, fragment: int) -> int:
        assert self.payloads is not None
        return self.payloads.version(fragment)[0]

    def inline_update(self, fragment: int, version: int) -> bytes | None:
        if not self.world.scenario.inline or self.payloads is None:
            return None
        update: Any = self.payloads.update(fragment, version)
        return update  # type: ignore[no-any-return]

    # ------------------------------------------------------------ the platform: disk

    def append(self, rows: Mapping[str, Any]) -> None:
        self.disk.append(self.epoch, rows)
        # What is leased to a liar is its own from here on, also while the word of it waits for a slow disk: it may call
        # done what it does not even know to have (draw 3, seed 2994).
        hand = rows.get(f"data/{STREAM}/hand/{self.world.scenario.liar}")
        if hand is not None:
            self.world.leased_to_liar.update(chunk for chunk, *_ in hand["leases"])

    def sync(self, done: Callable[[str], None]) -> None:
        self.later(self._disk_ns(self.world.timing.sync_ns), self._sync, done)

    def _sync(self, done: Callable[[str], None]) -> None:
        if not self._is_newest():
            return
        if not self.disk.broken:
            self.disk.sync()
        done(self.disk.broken)

    def store(self, item: VersionToStore, done: Callable[[StoreOutcome], None]) -> None:
        if item.seed:
            # All of it at one moment: a run whose beginning is on no disk as a whole cannot be had back once its
            # learners are gone, and here is nobody who would begin it anew.
            self._store(item, done)
        else:
            self.later(self._disk_ns(self.world.timing.commit_ns), self._store, item, done)

    def _store(self, item: VersionToStore, done: Callable[[StoreOutcome], None]) -> None:
        if not self._is_newest():
            return
        self._state_made(item.fragment)
        if not self.disk.broken:
            assert self.payloads is not None
            arrays = self.payloads.durable(item.fragment)
            self.disk.commit(item.fragment, item.version, item.checksum, item.fragment_record, arrays)
            self.world.observe(facts.Durable(self.epoch, item.fragment, item.version))
        done(StoreOutcome(self.disk.broken))

    def check_epoch(self, done: Callable[[], None]) -> None:
        if self._is_newest():
            done()

    def durability_lost(self, reason: str) -> None:
        self.disk.lossless = False

    def durability_back(self, reason: str) -> None:
        return

    def _is_newest(self) -> bool:
        if self.gate.fenced:
            return False
        if self.disk.epoch > self.epoch and self.level != "none":
            self.driver.fence(f"epoch {self.disk.epoch} has opened the run")
            return False
        return True

    def _disk_ns(self, plain_ns: int) -> int:
        return int(plain_ns * self.disk.slow * self.world.dice_disk.uniform(0.5, 1.5))

    def keep_handed(self, items: list[tuple[Merged, Payload]], processed: int, done: Callable[[], None]) -> None:
        self.later(self._disk_ns(self.world.timing.commit_ns), self._keep_handed, items, processed, done)

    def _keep_handed(self, items: list[tuple[Merged, Payload]], processed: int, done: Callable[[], None]) -> None:
        if self.level != "none" and not self.disk.broken and self._is_newest():
            for item, payload in items:
                self.disk.handed[item.id] = (HandedOver(item, processed), payload)
        elif self.disk.broken and items:
            self.disk.lossless = False  # it waits in memory only
        done()

    def drop_handed(self, identity: ContributionId) -> None:
        if not self.disk.broken:
            self.disk.handed.pop(identity, None)

    def forget_inner(self, slot: int) -> None:
        self.inner.pop(slot, None)

    # ------------------------------------------------------------ sessions

    def open_session(self, connection: Connection, hello: Hello) -> None:
        self.accepted.pop(connection.session, None)
        self.connections[connection.session] = connection
        declared = self.world.specs[connection.key].tokens
        identity = Identity(connection.key, Role.LEARNER, declared) if self.world.scenario.keys else None
        secret = f"{self.epoch}-{connection.session}"
        self.driver.open_session(connection.session, hello, secret=secret, identity=identity)

    def receive(self, session: int, message: LearnerMessage) -> None:
        if session not in self.connections:
            return
        if isinstance(message, InlinePush):
            header = self.machine.of_session(session, message.header)
            reply = header if isinstance(header, PushReply) else self._take_inline(header, message.payload)
            self.driver.answer_inline(session, message.header, reply)
        else:
            self.driver.apply(fx.FromLearner(session, message))

    def _take_inline(self, header: PushHeader, payload: Payload) -> PushReply:
        refusal = self.push_begin(header)
        return self.push_complete(header, payload) if refusal is None else refusal

    def session_broke(self, session: int, reason: str) -> None:
        if self.connections.pop(session, None) is not None:
            self.driver.apply(fx.SessionClosed(session, reason))

    # ------------------------------------------------------------ bulk

    def push_begin(self, header: PushHeader) -> PushReply | None:
        """None if the bytes may come, else the refusal."""
        reply = self.driver.open_push(header)
        if reply.accepted:
            return None
        self.world.refused[header.learner, header.generation, header.fragment] += header.tokens
        return reply

    def begin_push(self, header: PushHeader, answered: Callable[[PushReply | None], None]) -> None:
        answered(self.push_begin(header))

    def end_push(self, header: PushHeader, payload: Payload, answered: Callable[[PushReply], None]) -> None:
        answered(self.push_complete(header, payload))

    def push_complete(self, header: PushHeader, payload: Payload) -> PushReply:
        if self.payloads is None:
            return PushReply(False, Refusal.NOT_READY, "no layout")
        if header.kind is not PushKind.CONTRIBUTION:
            return self._complete_whole(header, payload)
        finite, norm = self.payloads.inspect(header.fragment, payload, header.codec)
        reply = self.driver.complete_push(header, payload, finite=finite, norm=norm)
        if not reply.accepted:
            self.world.observe(facts.Refused(header.learner, reply.code, self.world.refusal_noted(header)))
        return reply

    def _complete_whole(self, header: PushHeader, payload: Payload) -> PushReply:
        """A fragment of the seed, one that was lost, or a piece of inner state."""
        assert self.payloads is not None
        finite, distance = True, 0.0
        if header.kind is PushKind.SEED:
            finite = self.payloads.put_seed(header.fragment, payload)
        elif header.kind is PushKind.HEAL:
            finite, distance = self.payloads.inspect_whole(header.fragment, payload)
        reply = self.driver.complete_push(header, payload, finite=finite, norm=distance)
        if reply.accepted and header.kind is PushKind.INNER:
            piece = InnerPiece.of(header)
            self.inner.setdefault(piece.slot, {})[piece.piece] = piece.size
        return reply

    def fetch(self, request: FetchRequest, done: Callable[[tuple[int, Payload, int] | str], None]) -> None:
        """`done` hears version, bytes and size, or the code of the refusal. A joiner waits for the merge that is under
        way, and its turn comes: asking again now and then, it might never find a busy fragment at rest."""
        refusal = self.driver.open_fetch(request)
        if refusal is not None:
            done(refusal.code)
            return
        if request.kind is FetchKind.INNER:
            done(self._inner_piece(InnerPieceRequest.of(request)))
            return
        if not self.machine.committed or self.payloads is None:
            done(Refusal.UNKNOWN_FRAGMENT)
            return
        if request.kind is FetchKind.UPDATE:
            done(self._update(request))
        else:
            self.driver.turns.take(request.fragment, lambda: self._give_whole(request, done))

    def _inner_piece(self, wanted: InnerPieceRequest) -> tuple[int, Payload, int] | str:
        inner_slot = self.machine.inner_slot(wanted.slot, wanted.learner, wanted.generation)
        if inner_slot is None or not 0 <= wanted.piece < inner_slot.pieces:
            return Refusal.UNKNOWN_VERSION
        self.hear(fx.InnerTaken(wanted.slot, done=False))
        size = self.inner.get(wanted.slot, {}).get(wanted.piece)
        if size is None:
            return Refusal.BUSY
        if wanted.piece == inner_slot.pieces - 1:
            self.later(INNER_LINGER_NS, self._end_slot, inner_slot)
        return wanted.piece, b"", size

    def _end_slot(self, inner_slot: InnerSlot) -> None:
        if self.machine.inner_slot(inner_slot.slot, inner_slot.joiner, inner_slot.joiner_generation) is inner_slot:
            self.hear(fx.InnerTaken(inner_slot.slot, done=True))

    def _update(self, request: FetchRequest) -> tuple[int, Payload, int] | str:
        assert self.payloads is not None
        update = self.payloads.update(request.fragment, request.version)
        if update is None:
            return Refusal.UNKNOWN_VERSION
        return request.version, update, self.payloads.update_bytes(request.fragment, request.version)

    def _give_whole(self, request: FetchRequest, done: Callable[[tuple[int, Payload, int] | str], None]) -> None:
        done(self._whole(request))
        self.driver.turns.give_back(request.fragment)

    def _whole(self, request: FetchRequest) -> tuple[int, Payload, int] | str:
        assert self.payloads is not None
        version, _ = self.payloads.version(request.fragment)
        if request.version not in (NO_VERSION, version):
            return Refusal.UNKNOWN_VERSION
        return version, self.payloads.theta(request.fragment), self.payloads.whole_bytes(request.fragment)
