"""One process of the syncer in virtual time: what `syncer.shell`, `bulk` and `keeper` do with the machine's effects.

Nothing is decided here. Merges and writes take (virtual) time, so that other things happen in between; messages wait
for the tape as they do in production; a disk that fails makes the process train on without it and catch up later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from atoll.check import facts
from atoll.core import effects as fx
from atoll.core.beginning import Begin
from atoll.core.durable import EPOCH_KEY, Recovery
from atoll.core.layout import Layout
from atoll.core.messages import (
    NO_VERSION,
    Contribution,
    FetchKind,
    FetchRequest,
    Hello,
    LearnerMessage,
    Published,
    PushHeader,
    PushKind,
    PushReply,
    Received,
    Refusal,
    Refused,
    Start,
    SyncerMessage,
)
from atoll.core.policy import age_limit, contribution_weight, scales_steps, stale_factor
from atoll.core.rounds import Contribution as Merged
from atoll.core.rounds import ContributionId, HandedOver
from atoll.core.syncer_machine import SyncerMachine
from atoll.sim.payloads import Payload, SyncerPayloads
from atoll.sim.process import Process
from atoll.syncer.keeper import LOOK_S, RETRY_S

if TYPE_CHECKING:
    from atoll.sim.connection import Connection
    from atoll.sim.world import World

RETRY_NS = int(RETRY_S * 1e9)
LOOK_NS = int(LOOK_S * 1e9)
SESSION_GRACE_NS = 5_000_000
"""A session ends after what was queued for it has gone out."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What things take on the syncer's machine."""

    merge_ns: int = 2_000_000
    sync_ns: int = 3_000_000
    commit_ns: int = 10_000_000


class SyncerHost(Process):
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
        self.payloads: SyncerPayloads | None = None
        self.held: dict[ContributionId, Payload] = {}
        self.heals: dict[int, Payload] = {}
        self.connections: dict[int, Connection] = {}
        self.accepted: dict[int, Connection] = {}
        """Connections whose Hello this process has not read yet."""
        self.degraded = False
        self.fenced = ""
        self.finished = ""
        self._said: deque[tuple[int, Callable[[], None]]] = deque()
        self._appended = 0
        self._synced = 0
        self._syncing = False
        self._dirty: set[int] = set()
        self._busy: dict[int, deque[Callable[[], None]]] = {}
        """Fragments whose arrays are being changed, and who waits for each."""
        self._tick_ns = -1
        self._layout: Layout | None = None
        if self.level != "none":
            world.state(facts.Opened(self.epoch))

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
        self.later(LOOK_NS, self._look)
        self._schedule()

    def _restore(self, rows: dict[str, Any], slots: dict[int, tuple[int, int, dict[str, Any], Any]]) -> None:
        exact = self.level == "commit" and self.disk.lossless
        handed = [entry[0] for entry in self.disk.handed.values()]
        columns = {p: column for p, (_, _, column, _) in slots.items()}
        self.world.state(
            facts.Restored(self.epoch, {p: (v, c) for p, (v, c, _, _) in slots.items()}, self.disk.lossless)
        )
        effects = self.machine.restore(Recovery(rows, columns, exact, handed=handed), self.world.now_ns)
        assert self.machine.layout is not None
        self.payloads = self.world.new_syncer_payloads(self.machine.layout, self.machine.config)
        self._layout = self.machine.layout
        self.payloads.restore({p: (v, c, stored) for p, (v, c, _, stored) in slots.items()})
        for identity, (_, payload) in list(self.disk.handed.items()):
            if self.machine.holds(identity):
                self.held[identity] = payload
            else:
                del self.disk.handed[identity]
        for effect in effects:
            self._perform(effect)

    def die(self) -> None:
        super().die()
        self.serving = False

    # ------------------------------------------------------------ machine in, effects out

    def apply(self, event: fx.SyncerInput) -> PushReply | None:
        world = self.world
        world.events += 1
        if world.tracing:
            world.trace(self.name, event)
        answer: PushReply | None = None
        for effect in self.machine.handle(event, world.now_ns):
            if type(effect) is fx.Answer:
                answer = effect.reply
            else:
                self._perform(effect)
        self._schedule()
        return answer

    def hear(self, event: fx.SyncerInput) -> None:
        """The same, for an event that nobody waits for."""
        self.apply(event)

    def _perform(self, effect: fx.SyncerEffect) -> None:
        if isinstance(effect, fx.ToLearner):
            self._say(effect.session, effect.message)
        elif isinstance(effect, fx.Note):
            self.world.note(self.name, effect)
        elif isinstance(effect, fx.Remember):
            self._remember(effect)
        elif isinstance(effect, fx.Merge):
            self._lock(effect.fragment, lambda: self._merge(effect))
        elif isinstance(effect, fx.Forget):
            self.held.pop(effect.contribution, None)
            if not self.disk.broken:
                self.disk.handed.pop(effect.contribution, None)
        elif isinstance(effect, fx.EndSession):
            self.later(SESSION_GRACE_NS, self._end_session, effect.session, effect.reason)
        elif isinstance(effect, fx.KeepHeld):
            self.later(self._disk_ns(self.world.timing.commit_ns), self._keep_held, effect)
        elif isinstance(effect, fx.CommitSeed):
            self.later(self.world.timing.merge_ns, self._commit_seed)
        elif isinstance(effect, fx.CommitHealed):
            self._lock(effect.fragment, lambda: self._commit_healed(effect))
        elif isinstance(effect, fx.Fenced):
            self._fence(effect.reason)
        elif isinstance(effect, fx.Finished):
            self.finished = effect.reason

    def _schedule(self) -> None:
        wake_ns = self.machine.next_wake_ns()
        if wake_ns is not None and (self._tick_ns < 0 or wake_ns < self._tick_ns):
            self._tick_ns = wake_ns
            self.world.clock.at(wake_ns, self.call, self._tick, wake_ns)

    def _tick(self, planned_ns: int) -> None:
        if planned_ns != self._tick_ns:
            return  # an earlier one was planned since
        self._tick_ns = -1
        wake_ns = self.machine.next_wake_ns()
        if wake_ns is not None and wake_ns <= self.world.now_ns:
            self.apply(fx.Tick())
        else:
            self._schedule()

    def _fence(self, reason: str) -> None:
        self.fenced = self.fenced or reason
        self._said.clear()
        self.world.syncer_ended(self)

    # ------------------------------------------------------------ the tape, and what waits for it

    def _remember(self, effect: fx.Remember) -> None:
        if self.level == "none" or self.fenced:
            return
        self.disk.append(self.epoch, effect.rows)
        if effect.first and self.level == "commit" and not self.degraded:
            self._appended += 1
            if not self._syncing:
                self._syncing = True
                self._sync()

    def _sync(self) -> None:
        self.later(self._disk_ns(self.world.timing.sync_ns), self._sync_done, self._appended)

    def _sync_done(self, upto: int) -> None:
        if not self._is_newest():
            return
        if self.disk.broken:
            self._degrade()
            upto = self._appended
        else:
            self.disk.sync()
        self._synced = upto
        if self._synced < self._appended:
            self._let_go(upto)
            self._sync()
            return
        self._syncing = False
        self._let_go(upto)

    def _let_go(self, upto: int) -> None:
        while self._said and self._said[0][0] <= upto:
            self._said.popleft()[1]()

    def _say(self, session: int, message: SyncerMessage) -> None:
        if isinstance(message, Refused):
            self._send(session, message)
            return
        if (
            isinstance(message, Published)
            and self.world.scenario.inline
            and self.payloads is not None
            and self.machine.keeps_up(session, message.fragment, message.version)
        ):
            update: Any = self.payloads.update(message.fragment, message.version)
            message = replace(message, update=update)
        self._after_tape(lambda: self._send(session, message))

    def _after_tape(self, action: Callable[[], None]) -> None:
        """Do it when everything that was remembered before is on disk."""
        if not self._syncing and not self._said:
            action()
        else:
            self._said.append((self._appended, action))

    def _send(self, session: int, message: SyncerMessage) -> None:
        if self.fenced:
            return
        promised = self.level == "commit" and not self.degraded
        if isinstance(message, Published):
            self.world.state(facts.Told(self.epoch, message.fragment, message.version, message.checksum, promised))
        elif isinstance(message, Start):
            for fragment, state in enumerate(message.fragments):
                self.world.state(facts.Told(self.epoch, fragment, state.version, state.checksum, promised))
        connection = self.connections.get(session)
        if connection is not None:
            connection.to_learner(message)

    # ------------------------------------------------------------ arrays and commits

    def _lock(self, fragment: int, work: Callable[[], None]) -> None:
        """One change of a fragment's arrays at a time."""
        waiting = self._busy.get(fragment)
        if waiting is None:
            self._busy[fragment] = deque()
            work()
        else:
            waiting.append(work)

    def _unlock(self, fragment: int) -> None:
        waiting = self._busy[fragment]
        if waiting:
            waiting.popleft()()
        else:
            del self._busy[fragment]

    def _commit_seed(self) -> None:
        assert self.payloads is not None
        checksums = self.payloads.commit_seed()
        for fragment, checksum in enumerate(checksums):
            column = {**self.machine.column(fragment), "version": 0, "checksum": checksum}
            self.world.state(facts.Committed(self.epoch, fragment, 0, checksum))
            self._write(fragment, 0, checksum, column, seed=True)
        if not self.fenced:
            self.world.record_seed(self.epoch, self.payloads, self.machine)
            self.later(self._disk_ns(self.world.timing.commit_ns), self.hear, fx.SeedCommitted(checksums))

    def _merge(self, effect: fx.Merge) -> None:
        self.later(self.world.timing.merge_ns, self._merged, effect)

    def _merged(self, effect: fx.Merge) -> None:
        assert self.payloads is not None
        payloads = [self.held[identity] for identity in effect.contributions]
        made = self.payloads.merge(effect.fragment, effect.version, payloads, effect.weights)
        if not made.finite:
            self._unlock(effect.fragment)
            self.apply(fx.MergeFinished(effect.fragment, finite=False))
            return
        items = self.machine.book.merging(effect.fragment)
        oldest = max(effect.version - 1 - item.base_version for item in items)
        carried = age_limit(self.machine.config, aside=True)
        self.world.state(facts.Sizes("versions is the age of a merged contribution", oldest, carried))
        fact = facts.Committed(
            self.epoch,
            effect.fragment,
            effect.version,
            made.checksum,
            tuple((i.learner, i.generation, i.seq) for i in effect.contributions),
            tuple(item.tokens for item in items),
            tuple(item.norm for item in items),
            tuple(item.steps for item in items),
            made.theta_finite,
            tuple(weight / sum(effect.weights) for weight in effect.weights),
            self._share(effect, items),
        )
        self.world.record_merge(self.epoch, effect, made.checksum, payloads)
        column = self.machine.column_after_merge(effect.fragment, made.checksum)
        stored = self.payloads.durable(effect.fragment)
        commit_ns = self._disk_ns(self.world.timing.commit_ns)
        self._after_tape(lambda: self.later(commit_ns, self._committed, effect, fact, column, stored))

    def _share(self, effect: fx.Merge, items: list[Merged]) -> float:
        """How much of a merged step is taken, of what its contributions by themselves would give."""
        config = self.machine.config
        if not scales_steps(config):
            return 1.0
        ages = [effect.version - 1 - item.base_version for item in items]
        alone = [contribution_weight(config, i.steps, i.tokens, a) for i, a in zip(items, ages, strict=True)]
        old = sum(weight * stale_factor(config, age) for weight, age in zip(alone, ages, strict=True))
        return sum(effect.weights) / (old / sum(alone) if any(alone) else 1.0)

    def _committed(self, effect: fx.Merge, fact: facts.Committed, column: dict[str, Any], stored: Any) -> None:
        if not self._is_newest():
            return
        self.world.state(fact)
        self._write(effect.fragment, effect.version, fact.checksum, column, stored=stored)
        # A process may die here: on disk, and nobody has heard of it.
        self.later(1, self._publish, effect, fact.checksum)

    def _publish(self, effect: fx.Merge, checksum: int) -> None:
        self._unlock(effect.fragment)
        self.world.merged(effect)
        self.apply(fx.MergeFinished(effect.fragment, finite=True, checksum=checksum, merge_ns=1_000_000))

    def _commit_healed(self, effect: fx.CommitHealed) -> None:
        assert self.payloads is not None
        payload = self.heals.pop(effect.fragment, None)
        if payload is None or effect.version <= self.payloads.version(effect.fragment)[0]:
            self._unlock(effect.fragment)
            return
        self.payloads.heal(effect.fragment, effect.version, effect.checksum, payload)
        column = self.machine.column_after_heal(effect.fragment, effect.version, effect.checksum)
        stored = self.payloads.durable(effect.fragment)
        self.world.state(facts.Healed(self.epoch, effect.fragment, effect.version, effect.checksum))
        commit_ns = self._disk_ns(self.world.timing.commit_ns)
        self._after_tape(lambda: self.later(commit_ns, self._healed, effect, column, stored))

    def _healed(self, effect: fx.CommitHealed, column: dict[str, Any], stored: Any) -> None:
        if not self._is_newest():
            return
        self._write(effect.fragment, effect.version, effect.checksum, column, stored=stored)
        self._unlock(effect.fragment)
        self.apply(fx.HealCommitted(effect.fragment, effect.version, effect.checksum))

    def _write(
        self,
        fragment: int,
        version: int,
        checksum: int,
        column: dict[str, Any],
        *,
        stored: Any = None,
        seed: bool = False,
    ) -> None:
        """Put a version on disk, as the level says."""
        if self.level == "none" or not self._is_newest():
            return
        if not seed and (self.level != "commit" or self.degraded):
            self._dirty.add(fragment)
            return
        if self.disk.broken:
            self._dirty.add(fragment)
            self._degrade()
            return
        assert self.payloads is not None
        arrays = stored if stored is not None else self.payloads.durable(fragment)
        self.disk.commit(fragment, version, checksum, column, arrays)
        self._dirty.discard(fragment)
        self.world.state(facts.Durable(self.epoch, fragment, version))

    def _degrade(self) -> None:
        if not self.degraded:
            self.degraded = True
            self.disk.lossless = False
            self.later(RETRY_NS, self._catch_up)

    def _look(self) -> None:
        """Facts that nobody waits for are on disk within a second or two; at level interval, fragments too."""
        if not self.degraded and self.level != "none" and self._is_newest():
            if self.disk.broken:
                if self.disk.pending:
                    self._degrade()
            else:
                if self.level == "interval":
                    self._store_dirty()
                if not self._syncing:
                    self.disk.sync()
        self.later(LOOK_NS, self._look)

    def _catch_up(self) -> None:
        """Write everything that is not on disk, as soon as that is possible again."""
        if not self._is_newest():
            return
        if self.disk.broken:
            self.later(RETRY_NS, self._catch_up)
            return
        self.disk.sync()
        self._store_dirty()
        if self._dirty:
            self.later(RETRY_NS // 10, self._catch_up)  # a merge is under way
            return
        self.disk.sync()
        self.degraded = False

    def _store_dirty(self) -> None:
        assert self.payloads is not None or not self._dirty
        for fragment in sorted(self._dirty - set(self._busy)):
            assert self.payloads is not None
            version, checksum = self.payloads.version(fragment)
            column = self.machine.column(fragment)
            self.disk.commit(fragment, version, checksum, column, self.payloads.durable(fragment))
            self._dirty.discard(fragment)
            self.world.state(facts.Durable(self.epoch, fragment, version))

    def _is_newest(self) -> bool:
        if self.fenced:
            return False
        if self.disk.epoch > self.epoch and self.level != "none":
            self._fence(f"epoch {self.disk.epoch} has opened the run")
            return False
        return True

    def _disk_ns(self, plain_ns: int) -> int:
        return int(plain_ns * self.disk.slow * self.world.dice_disk.uniform(0.5, 1.5))

    def _keep_held(self, effect: fx.KeepHeld) -> None:
        if self.level != "none" and not self.disk.broken and self._is_newest():
            for item in effect.contributions:
                if item.id in self.held and self.machine.holds(item.id):
                    self.disk.handed[item.id] = (HandedOver(item, effect.processed), self.held[item.id])
        elif self.disk.broken and effect.contributions:
            self.disk.lossless = False  # it waits in memory only
        self._after_tape(lambda: self._end_session(effect.session, "left"))

    # ------------------------------------------------------------ sessions

    def open_session(self, connection: Connection, hello: Hello) -> None:
        self.accepted.pop(connection.session, None)
        self.connections[connection.session] = connection
        self.apply(fx.SessionOpened(connection.session, hello))
        layout = self.machine.layout
        if layout is not None and (self.payloads is None or self._layout is not layout):
            self.payloads = self.world.new_syncer_payloads(layout, self.machine.config)
            if self.machine.healing is not None:  # nothing is left of the run but what learners will bring
                self.payloads.restore({})
        self._layout = layout

    def receive(self, session: int, message: LearnerMessage) -> None:
        connection = self.connections.get(session)
        if connection is None:
            return
        if isinstance(message, Contribution):
            reply = self.push_begin(message.header)
            if reply is None:
                reply = self.push_complete(message.header, message.payload)
            connection.to_learner(Received(message.header.fragment, message.header.seq, reply))
        else:
            self.apply(fx.FromLearner(session, message))

    def session_broke(self, session: int, reason: str) -> None:
        if self.connections.pop(session, None) is not None:
            self.apply(fx.SessionClosed(session, reason))

    def _end_session(self, session: int, reason: str) -> None:
        connection = self.connections.pop(session, None)
        if connection is not None:
            connection.ended_by_syncer(reason)
            self.apply(fx.SessionClosed(session, reason))

    # ------------------------------------------------------------ bulk

    def push_begin(self, header: PushHeader) -> PushReply | None:
        """None if the bytes may come, else the refusal."""
        reply = self.apply(fx.PushOpened(header))
        assert reply is not None
        if reply.accepted:
            return None
        if reply.code == Refusal.DUPLICATE:
            self.apply(fx.PushCompleted(header, finite=True, norm=0.0))
        return reply

    def push_complete(self, header: PushHeader, payload: Payload) -> PushReply:
        if self.payloads is None:
            return PushReply(False, Refusal.NOT_READY, "no layout")
        if header.kind is PushKind.SEED:
            finite = self.payloads.put_seed(header.fragment, payload)
            return self._answer(fx.PushCompleted(header, finite, 0.0))
        if header.kind is PushKind.HEAL:
            before = self.heals.get(header.fragment)
            self.heals[header.fragment] = payload
            reply = self._answer(fx.PushCompleted(header, True, 0.0))
            if not reply.accepted:
                self.heals.pop(header.fragment, None)
                if before is not None:
                    self.heals[header.fragment] = before
            return reply
        if header.kind is PushKind.INNER:
            return self._answer(fx.PushCompleted(header, True, 0.0))
        finite, norm = self.payloads.inspect(header.fragment, payload)
        identity = ContributionId(header.learner, header.generation, header.fragment, header.seq)
        taken = identity in self.held
        if not taken:
            self.held[identity] = payload
        reply = self._answer(fx.PushCompleted(header, finite, norm))
        if not reply.accepted and not taken:
            self.held.pop(identity, None)
        if reply.code == Refusal.NORM_OUTLIER:
            self.world.state(facts.Outlier(header.fragment, norm, header.steps))
        if not reply.accepted:
            self.world.state(facts.Refused(header.learner, reply.code, self.world.refusal_noted(header)))
        return reply

    def _answer(self, event: fx.PushCompleted) -> PushReply:
        reply = self.apply(event)
        assert reply is not None
        return reply

    def fetch(self, request: FetchRequest) -> tuple[int, Payload, int] | str:
        """Version, bytes and size, or the code of the refusal."""
        if not self.machine.committed or self.payloads is None:
            return Refusal.UNKNOWN_FRAGMENT
        self.apply(fx.FetchOpened(request.learner, request.generation))
        if request.kind is FetchKind.UPDATE:
            update = self.payloads.update(request.fragment, request.version)
            if update is None:
                return Refusal.UNKNOWN_VERSION
            return request.version, update, self.payloads.contribution_bytes(request.fragment)
        if request.fragment in self._busy:
            # A joiner waits for the merge that is under way: the caller asks again.
            return Refusal.BUSY
        version, _ = self.payloads.version(request.fragment)
        if request.version not in (NO_VERSION, version):
            return Refusal.UNKNOWN_VERSION
        return version, self.payloads.theta(request.fragment), self.payloads.whole_bytes(request.fragment)
