"""A syncer machine and some learner machines, joined by a fake link: the smallest world in which the protocol runs.

Payloads are scalars: a learner's parameter of a fragment is one float that grows by 1 per step, so that merges and
rebases can be checked by hand. Messages are delivered in order per link; pushes and fetches take one delivery each.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from atoll.core import effects as fx
from atoll.core.beginning import Begin
from atoll.core.config import SyncConfig
from atoll.core.diskless import DisklessPlatform
from atoll.core.durability_gate import DurabilityGate
from atoll.core.durable import Recovery
from atoll.core.events import CoreEvent
from atoll.core.learner_machine import LearnerMachine
from atoll.core.messages import (
    FetchKind,
    PushHeader,
    PushKind,
    PushReply,
    Refusal,
    Refused,
    SyncerMessage,
    TensorSpec,
)
from atoll.core.policy import scales_steps
from atoll.core.rounds import Contribution, ContributionId, HandedOver
from atoll.core.syncer_driver import StoreOutcome, SyncerDriver, SyncerPlatform, VersionToStore
from atoll.core.syncer_machine import SyncerMachine


def checksum_of(version: int, theta: float) -> int:
    """Stands for the xxh3 of a version's parameters."""
    return zlib.crc32(struct.pack("<qd", version, theta)) or 1


TENSORS = tuple(TensorSpec(f"w{i}", (256,), "float32") for i in range(4))
STEP_NS = 1_000_000


def config(**changes: object) -> SyncConfig:
    """Small numbers, and an outer step that adds up by hand."""
    settings = {
        "sync_every": 4,
        "fragments": 4,
        "overlap": 2,
        "quorum": "50%",
        "learners_expected": 2,
        "grace_cap_steps": 0.0,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
    }
    return SyncConfig(**{**settings, **changes})  # type: ignore[arg-type]


@dataclass
class FakeLearner:
    machine: LearnerMachine
    session: int = -1
    theta: dict[int, float] = field(default_factory=dict)
    base: dict[int, float] = field(default_factory=dict)
    prepared: dict[tuple[int, int], float] = field(default_factory=dict)
    snapshots: dict[int, float] = field(default_factory=dict)
    progress: dict[tuple[int, int], float] = field(default_factory=dict)
    payloads: dict[tuple[int, int], tuple[PushHeader, float]] = field(default_factory=dict)
    dead: bool = False
    push_delay: int = 0
    notes: list[CoreEvent] = field(default_factory=list)
    stopped: str = ""
    code: str = ""
    waits: str = ""
    """Why it was told to say hello again."""
    left: bool = False


E = TypeVar("E")


class RecordingDriver(SyncerDriver):
    """Keeps what the machine has said."""

    def __init__(self, machine: SyncerMachine, host: SyncerPlatform, gate: DurabilityGate) -> None:
        super().__init__(machine, host, gate)
        self.said: list[fx.SyncerEffect] = []

    def perform(self, effects: list[fx.SyncerEffect]) -> None:
        self.said += effects
        super().perform(effects)


class World(DisklessPlatform):
    """A platform with a disk that writes at once."""

    def __init__(self, config: SyncConfig, learners: int = 0) -> None:
        self.config = config
        self.syncer = SyncerMachine(config, "run-1")
        self.driver = RecordingDriver(self.syncer, self, DurabilityGate("commit"))
        self.time_ns = 0
        self.queue: deque[Any] = deque()
        self.planned: list[tuple[int, Any]] = []
        self.sessions = 0
        self.theta: dict[int, float] = {}
        self.history: dict[tuple[int, int], float] = {}
        self.seeds: dict[int, float] = {}
        self.merges: list[fx.Merge] = []
        self.merged_ids: list[ContributionId] = []
        self.merged_in: dict[ContributionId, int] = {}
        self.notes: list[CoreEvent] = []
        self.finished = ""
        self.fenced = ""
        self.disk_rows: dict[str, Any] = {}
        self.disk_columns: dict[int, dict[str, Any]] = {}
        self.disk_theta: dict[int, float] = {}
        self.handed: dict[ContributionId, tuple[HandedOver, float]] = {}
        self.files_stay = False
        """Files of merged contributions are not deleted: a crash came in between."""
        self.refuse_heals = False
        """What learners bring back turns out not to be finite."""
        self.disk_works = True
        self.crash_before_publish = False
        self.crashed = False
        self.given_inner: list[tuple[str, int]] = []
        self.taken_inner: list[tuple[str, fx.TakeInner]] = []
        self.learners: dict[str, FakeLearner] = {}
        for index in range(learners):
            self.add(f"l{index}")

    def noted(self, kind: type[E]) -> list[E]:
        """The syncer's events of this kind."""
        return [event for event in self.notes if isinstance(event, kind)]

    # ------------------------------------------------------------ members

    def add(self, name: str, instance: str = "", tensors: tuple[TensorSpec, ...] = TENSORS) -> FakeLearner:
        learner = FakeLearner(LearnerMachine(name, instance or f"{name}-1", tensors))
        learner.theta = dict.fromkeys(range(self.config.fragments), 0.0)
        self.learners[name + "@" + learner.machine.instance] = learner
        self.connect(learner)
        return learner

    def add_later(self, name: str) -> FakeLearner:
        """A learner that is not connected yet."""
        learner = FakeLearner(LearnerMachine(name, f"{name}-1", TENSORS))
        learner.theta = dict.fromkeys(range(self.config.fragments), 0.0)
        self.learners[name + "@" + learner.machine.instance] = learner
        return learner

    def connect(self, learner: FakeLearner) -> None:
        self.sessions += 1
        learner.session = self.sessions
        self.to_syncer(fx.SessionOpened(learner.session, learner.machine.hello()))
        self.run()

    def disconnect(self, learner: FakeLearner) -> None:
        session, learner.session = learner.session, -1
        self.learner_input(learner, fx.LinkDown("cut"))
        self.to_syncer(fx.SessionClosed(session, "cut"))
        self.run()

    def kill(self, learner: FakeLearner) -> None:
        learner.dead = True
        session, learner.session = learner.session, -1
        self.to_syncer(fx.SessionClosed(session, "killed"))
        self.run()

    def crash_syncer(self) -> None:
        """kill -9: what is on the disk stays, sessions break, what was under way is gone."""
        self.crashed = True
        self.queue.clear()
        self.planned.clear()
        for learner in self.learners.values():
            if learner.session >= 0:
                learner.session = -1
                self.learner_input(learner, fx.LinkDown("the syncer died"))
        self.queue.clear()

    def restart_syncer(self, *, exact: bool = True, reconnect: bool = True) -> None:
        """A new process on the same disk."""
        self.crashed = False
        rows = json.loads(json.dumps(self.disk_rows))
        columns = {int(p): c for p, c in json.loads(json.dumps(self.disk_columns)).items()}
        self.syncer = SyncerMachine(self.config, "another", self.syncer.epoch + 1)
        handed = [entry[0] for entry in self.handed.values()]
        self.driver = RecordingDriver(self.syncer, self, DurabilityGate("commit"))
        self.driver.perform(self.driver.restore(Recovery(rows, columns, exact, handed=handed)))
        self.handed = {identity: entry for identity, entry in self.handed.items() if self.syncer.holds(identity)}
        self.driver.held = {identity: value for identity, (_, value) in self.handed.items()}
        self.theta = dict(self.disk_theta)
        # Contributions merged into versions that were lost may be merged again.
        kept = {(p, v) for p, c in columns.items() for _, _, _, _, _, merged in c["accounts"] for _, v in merged}
        self.merged_ids = [i for i in self.merged_ids if (i.fragment, self.merged_in[i]) in kept or exact]
        if reconnect:
            for learner in self.learners.values():
                if not learner.dead and not learner.left:
                    self.connect(learner)

    def lose_state(self, begin: Begin | None = None) -> None:
        """The syncer dies with its disk; a new process knows nothing."""
        self.crash_syncer()
        self.crashed = False
        self.syncer = SyncerMachine(self.config, f"run-{self.sessions + 2}", begin=begin)
        self.driver = RecordingDriver(self.syncer, self, DurabilityGate("commit"))
        self.disk_rows, self.disk_columns, self.disk_theta, self.handed = {}, {}, {}, {}
        self.theta, self.seeds, self.merged_ids = {}, {}, []

    def reconnect_refused(self) -> None:
        """Whoever was told to say hello again does so."""
        for learner in self.learners.values():
            if learner.session < 0 and not learner.dead and not learner.left:
                self.connect(learner)

    def by_session(self, session: int) -> FakeLearner | None:
        return next((x for x in self.learners.values() if x.session == session and not x.dead), None)

    # ------------------------------------------------------------ time and delivery

    def to_syncer(self, event: Any) -> list[Any]:
        """What the machine has said to it."""
        before = len(self.driver.said)
        self.driver.apply(event)
        return self.driver.said[before:]

    def learner_input(self, learner: FakeLearner, event: Any) -> None:
        if learner.dead:
            return
        for effect in learner.machine.handle(event, self.time_ns):
            self._learner_effect(learner, effect)

    def run(self) -> None:
        """Deliver everything that is under way."""
        for _ in range(100_000):
            if not self.queue:
                return
            self.queue.popleft()()
        raise AssertionError("the world does not come to rest")

    def advance(self, duration_ns: int) -> None:
        target = self.time_ns + duration_ns
        while True:
            wake = self.syncer.next_wake_ns() if not self.crashed else None
            due = [t for t, _ in self.planned]
            nexts = [t for t in [*due, wake] if t is not None and t <= target]
            if not nexts:
                break
            self.time_ns = max(self.time_ns, min(nexts))
            ready = [a for t, a in self.planned if t <= self.time_ns]
            self.planned = [(t, a) for t, a in self.planned if t > self.time_ns]
            for action in ready:
                action()
            if not self.crashed:
                self.to_syncer(fx.Tick())
            self.run()
        self.time_ns = target

    def step(self, learner: FakeLearner, tokens: int = 10) -> None:
        assert learner.machine.joined
        for fragment in learner.theta:
            learner.theta[fragment] += 1.0
        self.learner_input(learner, fx.Stepped(tokens, STEP_NS, 1.0))
        self.run()
        for _ in range(10):
            if learner.machine.adopt_ready:
                self.boundary(learner)

    def boundary(self, learner: FakeLearner) -> None:
        self.learner_input(learner, fx.Boundary())
        self.run()

    def join_all(self) -> None:
        for _ in range(3):
            for learner in self.learners.values():
                self.boundary(learner)

    def everyone_steps(self, count: int, tokens: int = 10) -> None:
        for _ in range(count):
            for learner in self.learners.values():
                if learner.machine.joined and not learner.dead and not learner.machine.must_wait and not learner.left:
                    self.step(learner, tokens)
            self.advance(STEP_NS)
            for learner in self.learners.values():
                self.boundary(learner)

    def close(self, learner: FakeLearner) -> None:
        self.learner_input(learner, fx.Closing(True, "done"))
        self.run()
        self.boundary(learner)

    # ------------------------------------------------------------ the syncer's platform

    def now_ns(self) -> int:
        return self.time_ns

    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        self.planned.append((self.time_ns + delay_ns, action))

    def wake_at(self, wake_ns: int | None) -> None:
        """`advance` asks the machine itself."""

    def note(self, note: fx.Note) -> None:
        self.notes.append(note.event)

    def end_fenced(self, reason: str) -> None:
        self.fenced = reason

    def end_finished(self, reason: str) -> None:
        self.finished = reason

    def send(self, session: int, message: SyncerMessage) -> None:
        learner = self.by_session(session)
        if learner is not None and isinstance(message, Refused) and message.code == Refusal.BUSY:
            learner.session, learner.waits = -1, message.detail  # the link's word, not the machine's
            self.queue.append(lambda: self.learner_input(learner, fx.LinkDown(learner.waits)))
        elif learner is not None:
            self.queue.append(lambda: self.learner_input(learner, fx.FromSyncer(message)))

    def end_session(self, session: int, reason: str) -> None:
        self.queue.append(lambda: self.to_syncer(fx.SessionClosed(session, reason)))

    def commit_seed(self, done: Callable[[tuple[int, ...]], None]) -> None:
        self.theta = dict(self.seeds)
        self.history.update({(p, 0): value for p, value in self.theta.items()})
        checksums = tuple(checksum_of(0, v) for _, v in sorted(self.theta.items()))
        self.queue.append(lambda: done(checksums))

    def merge(self, merge: fx.Merge, payloads: list[float], done: Callable[[fx.MergeFinished], None]) -> None:
        self.queue.append(lambda: self._merge(merge, payloads, done))

    def _merge(self, merge: fx.Merge, values: list[float], done: Callable[[fx.MergeFinished], None]) -> None:
        self.merges.append(merge)
        assert len(set(merge.contributions)) == len(merge.contributions)
        for identity in merge.contributions:
            assert identity not in self.merged_ids, "a contribution was merged twice"
            self.merged_ids.append(identity)
            self.merged_in[identity] = merge.version
        whole = 1.0 if scales_steps(self.config) else sum(merge.weights)
        self.theta[merge.fragment] += sum(w * v for w, v in zip(merge.weights, values, strict=True)) / whole
        self.history[merge.fragment, merge.version] = self.theta[merge.fragment]
        checksum = checksum_of(merge.version, self.theta[merge.fragment])
        done(fx.MergeFinished(merge.fragment, finite=True, checksum=checksum))

    def publish(self, merge: fx.Merge, announce: Callable[[], None]) -> None:
        if self.crash_before_publish:
            self.crash_before_publish = False
            self.crash_syncer()
        else:
            announce()

    def heal(self, heal: fx.CommitHealed, payload: float, done: Callable[[], None]) -> None:
        self.theta[heal.fragment] = payload
        self.history[heal.fragment, heal.version] = payload
        self.queue.append(done)

    def version(self, fragment: int) -> int:
        return self.syncer.book.tracks[fragment].version

    def append(self, rows: Mapping[str, Any]) -> None:
        if self.disk_works:
            self.disk_rows = {key: row for key, row in {**self.disk_rows, **rows}.items() if row is not None}

    def sync(self, done: Callable[[str], None]) -> None:
        done("")

    def store(self, item: VersionToStore, done: Callable[[StoreOutcome], None]) -> None:
        if self.disk_works:  # a disk that does not work says nothing of it
            self.disk_columns[item.fragment] = item.column
            self.disk_theta[item.fragment] = self.theta[item.fragment]
        done(StoreOutcome())

    def keep_handed(self, items: list[tuple[Contribution, float]], processed: int, done: Callable[[], None]) -> None:
        if self.disk_works:
            self.handed |= {item.id: (HandedOver(item, processed), value) for item, value in items}
        done()

    def drop_handed(self, identity: ContributionId) -> None:
        if not self.files_stay:
            self.handed.pop(identity, None)

    # ------------------------------------------------------------ the learners' shells

    def _learner_effect(self, learner: FakeLearner, effect: Any) -> None:
        if isinstance(effect, fx.ToSyncer):
            session = learner.session
            if session >= 0:
                self.queue.append(lambda: self.to_syncer(fx.FromLearner(session, effect.message)))
        elif isinstance(effect, fx.PushSeed):
            self.queue.append(lambda: self._push_seed(learner))
        elif isinstance(effect, fx.TakeSnapshot):
            learner.snapshots[effect.fragment] = learner.theta[effect.fragment]
        elif isinstance(effect, fx.DropSnapshot):
            del learner.snapshots[effect.fragment]
        elif isinstance(effect, fx.Contribute):
            self._contribute(learner, effect)
        elif isinstance(effect, fx.PushAgain):
            header, value = learner.payloads[effect.fragment, effect.seq]
            self.queue.append(lambda: self._push(learner, header, value))
        elif isinstance(effect, fx.Settle):
            learner.payloads.pop((effect.fragment, effect.seq))
            learner.progress.pop((effect.fragment, effect.seq))
        elif isinstance(effect, fx.Fetch):
            self.queue.append(lambda: self._fetch(learner, effect))
        elif isinstance(effect, fx.Adopt):
            self._adopt(learner, effect)
        elif isinstance(effect, fx.Note):
            learner.notes.append(effect.event)
        elif isinstance(effect, fx.Stopped):
            learner.stopped, learner.code = effect.reason, effect.code
        elif isinstance(effect, fx.GiveHeal):
            self.queue.append(lambda: self._give_heal(learner, effect))
        elif isinstance(effect, fx.GiveInner):
            self.given_inner.append((learner.machine.learner, effect.slot))
        elif isinstance(effect, fx.TakeInner):
            self.taken_inner.append((learner.machine.learner, effect))
        elif isinstance(effect, fx.ForgetPrepared):
            gone = [k for k in learner.prepared if effect.fragment in (-1, k[0])]
            for key in gone:
                del learner.prepared[key]
        elif isinstance(effect, fx.Left):
            learner.left = True

    def _push_seed(self, learner: FakeLearner) -> None:
        for p in range(self.config.fragments):
            header = PushHeader(
                PushKind.SEED, learner.machine.learner, learner.machine.generation, p, 0, 0, 0, -1, 0, 0, "fp32", 1, 1
            )
            if self.driver.open_push(header).accepted:
                self.seeds[p] = learner.base.get(p, learner.theta[p])
                self.driver.complete_push(header, None, finite=True)

    def _give_heal(self, learner: FakeLearner, effect: fx.GiveHeal) -> None:
        for p, version in effect.versions:
            value = learner.prepared.get((p, version), learner.base[p])
            checksum = learner.machine.fragments[p].newest_checksum
            name, generation = learner.machine.learner, learner.machine.generation
            header = PushHeader(PushKind.HEAL, name, generation, p, 0, 0, 0, version, 0, 0, "fp32", 1, checksum)
            if self.driver.open_push(header).accepted:
                self.driver.complete_push(header, value, finite=not self.refuse_heals)

    def _contribute(self, learner: FakeLearner, effect: fx.Contribute) -> None:
        p, seq = effect.header.fragment, effect.header.seq
        value = learner.snapshots.pop(p) - learner.base[p] - sum(learner.progress[p, s] for s in effect.minus)
        learner.progress[p, seq] = value
        header = replace(effect.header, size=1, checksum=1)
        learner.payloads[p, seq] = (header, value)
        if learner.push_delay:
            self.planned.append((self.time_ns + learner.push_delay, lambda: self._push(learner, header, value)))
        else:
            self.queue.append(lambda: self._push(learner, header, value))

    def _push(self, learner: FakeLearner, header: PushHeader, value: float) -> None:
        if learner.dead or learner.session < 0:
            self.learner_input(learner, fx.PushBroken(header.fragment, header.seq))
            return
        reply = self.complete_push(header, value)
        self.queue.append(lambda: self.learner_input(learner, fx.PushDone(header.fragment, header.seq, reply)))

    def complete_push(self, header: PushHeader, value: float, norm: float = 1.0, finite: bool = True) -> PushReply:
        reply = self.driver.open_push(header)
        return self.driver.complete_push(header, value, finite=finite, norm=norm) if reply.accepted else reply

    def _fetch(self, learner: FakeLearner, effect: fx.Fetch) -> None:
        if learner.dead or learner.session < 0:
            self.learner_input(learner, fx.FetchBroken(effect.fragment, effect.version, gone=False))
            return
        current = self.syncer.book.tracks[effect.fragment].version
        if effect.kind is FetchKind.UPDATE and effect.version <= current - self.config.ring_versions:
            self.learner_input(learner, fx.FetchBroken(effect.fragment, effect.version, gone=True))
            return
        version = current if effect.kind is FetchKind.THETA else effect.version
        value = self.history[effect.fragment, version]
        if effect.kind is FetchKind.UPDATE and effect.checksum not in (0, checksum_of(version, value)):
            raise AssertionError("an update with another checksum than announced")
        learner.prepared[effect.fragment, version] = value
        checksum = checksum_of(version, value)
        self.learner_input(learner, fx.Fetched(effect.fragment, version, effect.version, checksum))

    def _adopt(self, learner: FakeLearner, effect: fx.Adopt) -> None:
        p = effect.fragment
        new = learner.prepared.pop((p, effect.version), None)
        new = learner.base[p] if new is None else new
        if effect.rule == "overwrite":
            learner.theta[p] = new
        elif effect.rule == "mix":
            learner.theta[p] = effect.alpha * learner.theta[p] + (1 - effect.alpha) * new
        else:
            minus = sum(learner.progress[p, s] for s in effect.minus)
            learner.theta[p] = new + (learner.theta[p] - learner.base[p]) - minus
        learner.base[p] = new

    # ------------------------------------------------------------ checks

    def check_ledger(self) -> None:
        for fragment in range(self.config.fragments):
            line = self.syncer.ledger.fragment_totals(fragment)
            assert line.processed == line.merged + line.pending + sum(line.discarded.values())
            assert min(line.merged, line.pending, *line.discarded.values(), 0) == 0
        total = self.syncer.ledger.totals()
        assert total.processed == total.merged + total.pending + sum(total.discarded.values())

    def check_rebase(self) -> None:
        """Under rebase, theta - base is exactly the learner's own progress that is not merged: one per local step."""
        for learner in self.learners.values():
            if learner.dead or not learner.machine.joined:
                continue
            for progress in learner.machine.fragments:
                own = progress.local.steps + sum(s.counters.steps for s in progress.outstanding if not s.overwritten)
                assert abs(learner.theta[progress.index] - learner.base[progress.index] - own) < 1e-9
