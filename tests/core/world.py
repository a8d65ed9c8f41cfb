"""A syncer machine and some learner machines, joined by a fake link: the smallest world in which the protocol runs.

Payloads are scalars: a learner's parameter of a fragment is one float that grows by 1 per step, so that merges and
rebases can be checked by hand. Messages are delivered in order per link; pushes and fetches take one delivery each.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from atoll.core import effects as fx
from atoll.core.beginning import Begin
from atoll.core.config import SyncConfig
from atoll.core.diskless import DisklessPlatform
from atoll.core.durability_gate import DurabilityGate
from atoll.core.durable import Recovery
from atoll.core.events import CoreEvent
from atoll.core.learner_driver import LearnerDriver
from atoll.core.learner_host import FetchAnswer, FetchedPayload, HostArrays, LearnerDriverHost, OutgoingPayload
from atoll.core.learner_machine import LearnerMachine
from atoll.core.messages import (
    FetchKind,
    FetchRequest,
    InnerPiece,
    PushHeader,
    PushKind,
    PushReply,
    Refusal,
    Refused,
    SyncerMessage,
    TensorSpec,
)
from atoll.core.policy import scales_steps
from atoll.core.rounds import ContributionId, ContributionRecord, HandedOver
from atoll.core.syncer_driver import StoreOutcome, SyncerDriver, SyncerDriverHost, VersionToStore
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
    driver: LearnerDriver = field(init=False)
    session: int = -1
    theta: dict[int, float] = field(default_factory=dict)
    base: dict[int, float] = field(default_factory=dict)
    prepared: dict[tuple[int, int], float] = field(default_factory=dict)
    snapshots: dict[int, float] = field(default_factory=dict)
    progress: dict[tuple[int, int], float] = field(default_factory=dict)
    calls: list[Callable[[None], None]] = field(default_factory=list)
    """Pushes under way: what each of them does when it breaks."""
    dead: bool = False
    push_delay: int = 0
    sign: float = 1.0
    """-1: it lies about the direction of everything that it sends."""
    notes: list[CoreEvent] = field(default_factory=list)
    stopped: str = ""
    code: str = ""
    waits: str = ""
    """Why it was told to say hello again."""

    @property
    def left(self) -> bool:
        return self.driver.left


class FakeHost(LearnerDriverHost, HostArrays):
    """What one learner has of the world: a link, and a float for each fragment."""

    def __init__(self, world: World, learner: FakeLearner) -> None:
        self._world = world
        self._learner = learner

    @property
    def arrays(self) -> FakeHost:
        return self

    def now_ns(self) -> int:
        return self._world.now_ns

    def later(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """At once: nobody waits in this world."""
        self._world.queue.append(lambda: None if self._learner.dead else action(*arguments))

    def news(self) -> None:
        return

    def send(self, message: Any) -> None:
        session = self._learner.session
        if session >= 0:
            self._world.queue.append(lambda: self._world.to_syncer(fx.FromLearner(session, message)))

    def push(self, header: PushHeader, payload: Any, done: Callable[[PushReply | None], None]) -> None:
        learner, world = self._learner, self._world
        learner.calls.append(done)

        def arrive() -> None:
            if done in learner.calls and not learner.dead:
                learner.calls.remove(done)
                done(world.push(header, payload) if learner.session >= 0 else None)

        if learner.push_delay and header.kind is PushKind.CONTRIBUTION:
            world.later.append((world.now_ns + learner.push_delay, arrive))
        else:
            world.queue.append(arrive)

    def fetch(self, request: FetchRequest, done: Callable[[FetchAnswer], None]) -> None:
        self._world.queue.append(lambda: self._world.fetch(self._learner, request, done))

    # ------------------------------------------------------------ arrays

    def take(self, fragment: int) -> None:
        self._learner.snapshots[fragment] = self._learner.theta[fragment]

    def drop(self, fragment: int) -> None:
        del self._learner.snapshots[fragment]

    def adopt(self, effect: fx.Adopt) -> int:
        learner, p = self._learner, effect.fragment
        new = learner.prepared.pop((p, effect.version), None)
        new = learner.base[p] if new is None else new
        if effect.rule == "overwrite":
            learner.theta[p] = new
        elif effect.rule == "mix":
            learner.theta[p] = effect.alpha * learner.theta[p] + (1 - effect.alpha) * new
        else:
            already_merged = sum(learner.progress[p, s] for s in effect.already_merged)
            learner.theta[p] = new + (learner.theta[p] - learner.base[p]) - already_merged
        learner.base[p] = new
        return 0

    def settle(self, fragment: int, seq: int, merged: bool) -> None:
        self._learner.progress.pop((fragment, seq))

    def forget_residuals(self) -> None:
        return

    def forget_prepared(self, fragment: int) -> None:
        for key in [k for k in self._learner.prepared if fragment in (-1, k[0])]:
            del self._learner.prepared[key]

    def keep(self, fragment: int, made: FakeVersion) -> None:
        self._learner.prepared[fragment, made.version] = made.value

    def contribute(self, effect: fx.Contribute, done: Callable[[OutgoingPayload | str], None]) -> None:
        learner, p = self._learner, effect.header.fragment
        value = learner.snapshots.pop(p) - learner.base[p] - sum(learner.progress[p, s] for s in effect.already_merged)
        learner.progress[p, effect.header.seq] = value
        done(OutgoingPayload(learner.sign * value, 1, 1))

    @property
    def inline_bytes_max(self) -> int:
        return 0

    def prepare_whole(self, fragment: int, came: FetchedPayload, done: Callable[[Any], None]) -> None:
        done(FakeVersion(came.version, came.checksum, came.payload))

    def prepare_update(self, wanted: fx.Fetch, payload: Any, done: Callable[[Any], None]) -> None:
        checksum = checksum_of(wanted.version, payload)
        assert wanted.checksum in (0, checksum), "an update with another checksum than announced"
        done(FakeVersion(wanted.version, checksum, payload))

    def read_seed(self, fragment: int, done: Callable[[OutgoingPayload], None]) -> None:
        if self._world.gives_seed(self._learner):
            done(OutgoingPayload(self._learner.base.get(fragment, self._learner.theta[fragment]), 1, 1))

    def read_held(self, fragment: int, version: int, done: Callable[[OutgoingPayload | None], None]) -> None:
        value = self._learner.prepared.get((fragment, version), self._learner.base[fragment])
        done(OutgoingPayload(value, 1, self._learner.machine.fragments[fragment].newest_checksum))

    def copy_inner(self, done: Callable[[Sequence[OutgoingPayload]], None]) -> None:
        done([OutgoingPayload(0.0, 1, 1)])

    def inner_came(self, pieces: Sequence[Any], peer: str, reason: str) -> None:
        self._world.taken_inner.append((self._learner.machine.learner, len(pieces)))

    def note(self, note: fx.Note) -> None:
        self._learner.notes.append(note.event)

    def stopped(self, effect: fx.Stopped) -> None:
        self._learner.stopped, self._learner.code = effect.reason, effect.code

    def fail(self, code: str, detail: str) -> None:
        raise AssertionError(f"{code}: {detail}")

    def let_go(self) -> None:
        return


class FakeVersion(NamedTuple):
    version: int
    checksum: int
    value: float


class RecordingDriver(SyncerDriver):
    """Keeps what the machine has said."""

    def __init__(self, machine: SyncerMachine, host: SyncerDriverHost, gate: DurabilityGate) -> None:
        super().__init__(machine, host, gate)
        self.said: list[fx.SyncerEffect] = []

    def perform(self, effects: list[fx.SyncerEffect]) -> None:
        self.said += effects
        super().perform(effects)


class FakeSyncer(DisklessPlatform):
    """What the syncer has of the world: links, a float for each fragment, and a disk that writes at once."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now_ns(self) -> int:
        return self._world.now_ns

    def wake_at(self, wake_ns: int | None) -> None:
        """`World.advance` asks the machine itself."""

    def note(self, note: fx.Note) -> None:
        self._world.notes.append(note.event)

    def end_fenced(self, reason: str) -> None:
        self._world.fenced = reason

    def end_finished(self, reason: str) -> None:
        self._world.finished = reason

    def send(self, session: int, message: SyncerMessage) -> None:
        world, learner = self._world, self._world.by_session(session)
        if learner is not None and isinstance(message, Refused) and message.code == Refusal.BUSY:
            learner.session, learner.waits = -1, message.detail  # the link's word, not the machine's
            world.queue.append(lambda: learner.driver.link_down(learner.waits, let_go=False))
        elif learner is not None:
            world.queue.append(lambda: None if learner.dead else learner.driver.heard(message))

    def end_session(self, session: int, reason: str) -> None:
        self._world.queue.append(lambda: self._world.to_syncer(fx.SessionClosed(session, reason)))

    def commit_seed(self, done: Callable[[tuple[int, ...]], None]) -> None:
        world = self._world
        world.theta = dict(world.seeds)
        world.history.update({(p, 0): value for p, value in world.theta.items()})
        checksums = tuple(checksum_of(0, value) for _, value in sorted(world.theta.items()))
        world.queue.append(lambda: done(checksums))

    def compare(self, compare: fx.Compare, payloads: list[float], done: Callable[[fx.Compared], None]) -> None:
        """A scalar's direction is its sign."""
        ways = {c.learner: math.copysign(1.0, value) for c, value in zip(compare.contributions, payloads, strict=True)}
        others = {name: sum(ways[voice] for voice in compare.voices if voice != name) for name in ways}
        cosines = {name: way * math.copysign(1.0, others[name]) if others[name] else 0.0 for name, way in ways.items()}
        self._world.queue.append(lambda: done(fx.Compared(compare.fragment, cosines)))

    def merge(self, merge: fx.Merge, payloads: list[float], done: Callable[[fx.MergeFinished], None]) -> None:
        self._world.queue.append(lambda: self._merge(merge, payloads, done))

    def _merge(self, merge: fx.Merge, values: list[float], done: Callable[[fx.MergeFinished], None]) -> None:
        world = self._world
        world.merges.append(merge)
        assert len(set(merge.contributions)) == len(merge.contributions)
        for identity in merge.contributions:
            assert identity not in world.merged_ids, "a contribution was merged twice"
            world.merged_ids.append(identity)
            world.merged_in[identity] = merge.version
        whole = 1.0 if scales_steps(world.config) else sum(merge.weights)
        world.theta[merge.fragment] += sum(w * v for w, v in zip(merge.weights, values, strict=True)) / whole
        world.history[merge.fragment, merge.version] = world.theta[merge.fragment]
        checksum = checksum_of(merge.version, world.theta[merge.fragment])
        done(fx.MergeFinished(merge.fragment, finite=True, checksum=checksum))

    def publish(self, merge: fx.Merge, announce: Callable[[], None]) -> None:
        if self._world.crash_before_publish:
            self._world.crash_before_publish = False
            self._world.crash_syncer()
        else:
            announce()

    def heal(self, heal: fx.CommitHealed, payload: float, done: Callable[[], None]) -> None:
        self._world.theta[heal.fragment] = payload
        self._world.history[heal.fragment, heal.version] = payload
        self._world.queue.append(done)

    def version(self, fragment: int) -> int:
        return self._world.syncer.book.tracks[fragment].version

    def append(self, rows: Mapping[str, Any]) -> None:
        world = self._world
        if world.disk_works:
            world.disk_rows = {key: row for key, row in {**world.disk_rows, **rows}.items() if row is not None}

    def sync(self, done: Callable[[str], None]) -> None:
        done("")

    def store(self, item: VersionToStore, done: Callable[[StoreOutcome], None]) -> None:
        if self._world.disk_works:  # a disk that does not work says nothing of it
            self._world.disk_records[item.fragment] = item.fragment_record
            self._world.disk_theta[item.fragment] = self._world.theta[item.fragment]
        done(StoreOutcome())

    def check_epoch(self, done: Callable[[], None]) -> None:
        self._world.looks += 1
        if self._world.newer:
            self._world.driver.fence(self._world.newer)
        else:
            self._world.queue.append(done)

    def keep_handed(
        self, items: list[tuple[ContributionRecord, float]], processed: int, done: Callable[[], None]
    ) -> None:
        if self._world.disk_works:
            self._world.handed |= {item.id: (HandedOver(item, processed), value) for item, value in items}
        done()

    def drop_handed(self, identity: ContributionId) -> None:
        if not self._world.files_stay:
            self._world.handed.pop(identity, None)


E = TypeVar("E")


class World:
    def __init__(self, config: SyncConfig, learners: int = 0) -> None:
        self.config = config
        self.syncer = SyncerMachine(config, "run-1")
        self.driver = RecordingDriver(self.syncer, FakeSyncer(self), DurabilityGate("commit"))
        self.now_ns = 0
        self.queue: deque[Any] = deque()
        self.later: list[tuple[int, Any]] = []
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
        self.disk_records: dict[int, dict[str, Any]] = {}
        self.disk_theta: dict[int, float] = {}
        self.handed: dict[ContributionId, tuple[HandedOver, float]] = {}
        self.files_stay = False
        """Files of merged contributions are not deleted: a crash came in between."""
        self.refuse_heals = False
        """What learners bring back turns out not to be finite."""
        self.newer = ""
        """What the disk says of a newer syncer."""
        self.looks = 0
        self.disk_works = True
        self.crash_before_publish = False
        self.crashed = False
        self.given_inner: list[tuple[str, int]] = []
        self.taken_inner: list[tuple[str, int]] = []
        self.learners: dict[str, FakeLearner] = {}
        for index in range(learners):
            self.add(f"l{index}")

    def gives_seed(self, learner: FakeLearner) -> bool:
        """Whether this learner's first parameters come out of it."""
        return True

    def noted(self, kind: type[E]) -> list[E]:
        """The syncer's events of this kind."""
        return [event for event in self.notes if isinstance(event, kind)]

    # ------------------------------------------------------------ members

    def add(self, name: str, instance: str = "", tensors: tuple[TensorSpec, ...] = TENSORS) -> FakeLearner:
        learner = self._new(LearnerMachine(name, instance or f"{name}-1", tensors))
        self.connect(learner)
        return learner

    def _new(self, machine: LearnerMachine) -> FakeLearner:
        learner = FakeLearner(machine)
        learner.driver = LearnerDriver(machine, FakeHost(self, learner))
        learner.theta = dict.fromkeys(range(self.config.fragments), 0.0)
        self.learners[machine.learner + "@" + machine.instance] = learner
        return learner

    def add_later(self, name: str) -> FakeLearner:
        """A learner that is not connected yet."""
        return self._new(LearnerMachine(name, f"{name}-1", TENSORS))

    def secret_of(self, name: str) -> str:
        """What the pushes of this learner carry."""
        return self.syncer.membership.members[name].secret

    def connect(self, learner: FakeLearner) -> None:
        self.sessions += 1
        learner.session = self.sessions
        self.to_syncer(fx.SessionOpened(learner.session, learner.machine.hello(), secret=f"s{learner.session}"))
        self.run()

    def disconnect(self, learner: FakeLearner) -> None:
        session, learner.session = learner.session, -1
        learner.driver.link_down("cut", let_go=False)
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
        self.later.clear()
        for learner in self.learners.values():
            if learner.session >= 0:
                learner.session = -1
                learner.driver.link_down("the syncer died", let_go=False)
        self.queue.clear()
        for learner in self.learners.values():
            while learner.calls:
                learner.calls.pop(0)(None)

    def restart_syncer(self, *, exact: bool = True, reconnect: bool = True) -> None:
        """A new process on the same disk."""
        self.crashed = False
        rows = json.loads(json.dumps(self.disk_rows))
        fragment_records = {int(p): c for p, c in json.loads(json.dumps(self.disk_records)).items()}
        self.syncer = SyncerMachine(self.config, "another", self.syncer.epoch + 1)
        handed = [entry[0] for entry in self.handed.values()]
        self.driver = RecordingDriver(self.syncer, FakeSyncer(self), DurabilityGate("commit"))
        self.driver.perform(self.driver.restore(Recovery(rows, fragment_records, exact, handed=handed)))
        self.handed = {identity: entry for identity, entry in self.handed.items() if self.syncer.holds(identity)}
        self.driver.held = {identity: value for identity, (_, value) in self.handed.items()}
        self.theta = dict(self.disk_theta)
        # Contributions merged into versions that were lost may be merged again.
        kept = {
            (p, v) for p, c in fragment_records.items() for _, _, _, _, _, merged in c["accounts"] for _, v in merged
        }
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
        self.driver = RecordingDriver(self.syncer, FakeSyncer(self), DurabilityGate("commit"))
        self.disk_rows, self.disk_records, self.disk_theta, self.handed = {}, {}, {}, {}
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
        """Returns what the machine has said to it."""
        before = len(self.driver.said)
        self.driver.apply(event)
        return self.driver.said[before:]

    def learner_input(self, learner: FakeLearner, event: Any) -> None:
        if learner.dead:
            return
        learner.driver.handle(event)

    def run(self) -> None:
        """Deliver everything that is under way."""
        for _ in range(100_000):
            if not self.queue:
                return
            self.queue.popleft()()
        raise AssertionError("the world does not come to rest")

    def advance(self, duration_ns: int) -> None:
        target = self.now_ns + duration_ns
        while True:
            wake = self.syncer.next_wake_ns() if not self.crashed else None
            due = [t for t, _ in self.later]
            nexts = [t for t in [*due, wake] if t is not None and t <= target]
            if not nexts:
                break
            self.now_ns = max(self.now_ns, min(nexts))
            ready = [a for t, a in self.later if t <= self.now_ns]
            self.later = [(t, a) for t, a in self.later if t > self.now_ns]
            for action in ready:
                action()
            if not self.crashed:
                self.to_syncer(fx.Tick())
            self.run()
        self.now_ns = target

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

    # ------------------------------------------------------------ pushes and fetches

    def push(self, header: PushHeader, value: float) -> PushReply:
        if header.kind is PushKind.CONTRIBUTION:
            return self.complete_push(header, value)
        if header.kind is PushKind.INNER:
            self.given_inner.append((header.learner, InnerPiece.of(header).slot))
            return PushReply(False, Refusal.CLOSED, "nobody takes it here")
        reply = self.driver.open_push(header)
        if not reply.accepted:
            return reply
        healed = header.kind is PushKind.HEAL
        if not healed:
            self.seeds[header.fragment] = value
        return self.driver.complete_push(header, value, finite=not (healed and self.refuse_heals))

    def complete_push(self, header: PushHeader, value: float, norm: float = 1.0, finite: bool = True) -> PushReply:
        reply = self.driver.open_push(header)
        return self.driver.complete_push(header, value, finite=finite, norm=norm) if reply.accepted else reply

    def fetch(self, learner: FakeLearner, request: FetchRequest, done: Callable[[FetchAnswer], None]) -> None:
        if learner.dead:
            return
        if learner.session < 0:
            done(None)
            return
        refusal = self.syncer.check_sender(request.learner, request.generation, request.secret)
        if refusal is not None:
            done(refusal.code)
            return
        if request.kind is FetchKind.INNER:
            done(FetchedPayload(request.version, b"", 1))
            return
        current = self.syncer.book.tracks[request.fragment].version
        if request.kind is FetchKind.UPDATE and request.version <= current - self.config.ring_versions:
            done(Refusal.UNKNOWN_VERSION)
            return
        version = current if request.kind is FetchKind.THETA else request.version
        value = self.history[request.fragment, version]
        done(FetchedPayload(version, value, 1, checksum_of(version, value)))

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
