"""A syncer machine, the shell around it and any number of remote processes that say whatever the wire lets through.

What the machine decides is performed and checked: nothing may be raised, the ledger adds up to the token after every
input, a contribution is merged at most once, everything that is sent can be sent, everything that is kept is JSON.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from fuzz_machines import LARGE, MODELS, NAMES, SECOND_NS, config_of, count, version

from atoll.core import effects as fx
from atoll.core import messages as m
from atoll.core.diskless import DisklessPlatform
from atoll.core.durability_gate import DurabilityGate
from atoll.core.durable import Recovery
from atoll.core.layout import Layout
from atoll.core.rounds import ContributionId, ContributionRecord, HandedOver
from atoll.core.syncer_driver import StoreOutcome, SyncerDriver, VersionToStore
from atoll.core.syncer_machine import SyncerMachine
from atoll.observe.lines import encode
from atoll.wire import parts
from atoll.wire.convert import (
    encode_learner_message,
    encode_syncer_message,
    parse_learner_message,
    parse_syncer_message,
)


class SyncerStorm(DisklessPlatform):
    """One machine, everybody who talks to it, and a disk that writes at once."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.config = config_of(rng)
        self.time_ns = 0
        self._new_machine(1)
        self.inputs = 0
        self.sessions = 0
        self.open: list[int] = []
        self.coming: deque[Callable[[], None]] = deque()
        """What takes a while and will be over."""
        self.merged: dict[ContributionId, int] = {}
        self.rows: dict[str, Any] = {}
        self.fragment_records: dict[int, dict[str, Any]] = {}
        self.handed: dict[ContributionId, tuple[HandedOver, m.PushHeader]] = {}
        self.versions: list[int] = []
        self.pushes: list[m.PushHeader] = []
        self.fenced = False

    # ------------------------------------------------------------ one input, and what comes of it

    def _new_machine(self, epoch: int) -> None:
        self.machine = SyncerMachine(self.config, "run", epoch)
        self.driver = SyncerDriver(self.machine, self, DurabilityGate("commit"))
        self.driver.watch = self._count

    def _count(self, event: fx.SyncerInput) -> None:
        self.inputs += 1

    def feed(self, event: fx.SyncerInput) -> m.PushReply | None:
        reply = None
        if isinstance(event, fx.PushOpened):
            reply = self.driver.open_push(event.header)
        elif isinstance(event, fx.PushCompleted):
            reply = self.driver.complete_push(event.header, event.header, finite=event.finite, norm=event.norm)
        elif isinstance(event, fx.SessionOpened):
            self.driver.open_session(event.session, event.hello)
        else:
            self.driver.apply(event)
        self._check()
        return reply

    def accepts(self, event: fx.PushOpened | fx.PushCompleted) -> bool:
        reply = self.feed(event)
        return reply is not None and reply.accepted

    def _go_on(self) -> None:
        """The oldest thing that takes a while is over."""
        self.coming.popleft()()
        self._check()

    # ------------------------------------------------------------ the platform

    def now_ns(self) -> int:
        return self.time_ns

    def wake_at(self, wake_ns: int | None) -> None:
        """Ticks come whenever the storm likes."""

    def send(self, session: int, message: m.SyncerMessage) -> None:
        assert parse_syncer_message(encode_syncer_message(message)) == message

    def note(self, note: fx.Note) -> None:
        encode(1, note.event)

    def end_fenced(self, reason: str) -> None:
        self.fenced = True

    def end_finished(self, reason: str) -> None:
        """The storm goes on."""

    def end_session(self, session: int, reason: str) -> None:
        self.coming.append(lambda: self._close(session, reason))

    def _close(self, session: int, reason: str) -> None:
        if session in self.open:
            self.open.remove(session)
        self.driver.apply(fx.SessionClosed(session, reason))

    def lay_out(self, layout: Layout, *, lost: bool) -> None:
        self.versions = [m.NO_VERSION] * len(layout.fragments)

    def commit_seed(self, done: Callable[[tuple[int, ...]], None]) -> None:
        self.versions = [0] * self.machine.config.fragments
        self.coming.append(lambda: done(tuple(range(1, self.machine.config.fragments + 1))))

    def compare(self, compare: fx.Compare, payloads: list[Any], done: Callable[[fx.Compared], None]) -> None:
        learners = {identity.learner for identity in compare.contributions}
        assert len(learners) > len(compare.voices) / 2 >= 1 and learners >= set(compare.voices)
        assert [identity_of(header) for header in payloads] == list(compare.contributions)
        cosines = {name: self.rng.choice([-1.0, -0.3, 0.0, 0.5, 1.0, math.nan]) for name in learners}
        self.coming.append(lambda: done(fx.Compared(compare.fragment, cosines)))

    def merge(self, merge: fx.Merge, payloads: list[Any], done: Callable[[fx.MergeFinished], None]) -> None:
        assert merge.contributions and len(set(merge.contributions)) == len(merge.contributions)
        assert all(math.isfinite(w) and w >= 0 for w in merge.weights) and sum(merge.weights) > 0
        assert not self.merged.keys() & set(merge.contributions), "merged twice"
        assert [identity_of(header) for header in payloads] == list(merge.contributions)
        finite = self.rng.random() < 0.95
        if finite:
            self.merged |= dict.fromkeys(merge.contributions, merge.version)
            self.versions[merge.fragment] = merge.version
        self.coming.append(lambda: done(fx.MergeFinished(merge.fragment, finite, checksum=7)))

    def heal(self, heal: fx.CommitHealed, payload: Any, done: Callable[[], None]) -> None:
        self.versions[heal.fragment] = heal.version
        self.coming.append(done)

    def version(self, fragment: int) -> int:
        return self.versions[fragment]

    def append(self, rows: Mapping[str, Any]) -> None:
        json.dumps(dict(rows), allow_nan=False)
        self.rows = {k: v for k, v in {**self.rows, **rows}.items() if v is not None}

    def sync(self, done: Callable[[str], None]) -> None:
        done("")

    def store(self, item: VersionToStore, done: Callable[[StoreOutcome], None]) -> None:
        json.dumps(item.fragment_record, allow_nan=False)
        self.fragment_records[item.fragment] = item.fragment_record
        done(StoreOutcome())

    def keep_handed(
        self, items: list[tuple[ContributionRecord, Any]], processed: int, done: Callable[[], None]
    ) -> None:
        for item, header in items:
            assert item.id == identity_of(header)
            self.handed[item.id] = (HandedOver(item, processed), header)
        done()

    def drop_handed(self, identity: ContributionId) -> None:
        self.handed.pop(identity, None)

    # ------------------------------------------------------------ what must hold

    def _check(self) -> None:
        ledger = self.machine.ledger
        for fragment in range(self.machine.config.fragments if self.machine.layout is not None else 0):
            line = ledger.fragment_totals(fragment)
            assert line.processed == line.merged + line.pending + sum(line.discarded.values())
            assert min(line.merged, line.pending, *line.discarded.values(), 0) == 0
        totals = ledger.totals()
        if self.machine.layout is not None:
            assert totals.processed == totals.merged + totals.pending + sum(totals.discarded.values())
        wake = self.machine.next_wake_ns()
        assert wake is None or isinstance(wake, int)
        if self.machine.book.in_flight:
            bound = self.time_ns + self.machine.config.quorum_timeout_ns
            assert any(track.merging for track in self.machine.book.tracks) or (wake is not None and wake <= bound)
        for stream in self.machine.leases.status().values():
            assert stream["issued"] == stream["done"] + stream["in_hand"] + stream["pool"]

    # ------------------------------------------------------------ what remote processes do

    def step(self) -> None:
        rng = self.rng
        self.time_ns += rng.choice((0, 0, 1, 10**6, SECOND_NS, 20 * SECOND_NS, 200 * SECOND_NS))
        if self.coming and rng.random() < 0.5:
            self._go_on()
            return
        act = rng.choice((self._hello, self._say, self._say, self._say, self._say, self._push, self._push, self._rest))
        act()

    def run(self, steps: int) -> int:
        """Returns how many inputs the machine has taken."""
        if self.rng.random() < 0.8:
            self._begin()
        for _ in range(steps):
            self.step()
            if self.fenced:
                break
            if self.rng.random() < 0.004 and self.machine.committed:
                self.restart()
        json.dumps(self.machine.stats())
        return self.inputs

    def _begin(self) -> None:
        """Most storms break out over a run that goes well."""
        for name in NAMES[: self.config.learners_expected]:
            self.sessions += 1
            self.open.append(self.sessions)
            self.feed(fx.SessionOpened(self.sessions, m.Hello(name, f"{name}1", 2, MODELS[0])))
        fragments = self.machine.config.fragments
        for p in range(fragments):
            header = m.PushHeader(m.PushKind.SEED, "a", 1, p, 0, 0, 0, -1, 0, 0, "fp32", 1, 1)
            assert self.accepts(fx.PushOpened(header))
            assert self.accepts(fx.PushCompleted(header, True, 0.0))
        while self.coming:
            self._go_on()
        for session in self.open:
            self.feed(fx.FromLearner(session, m.Ready(0, (0,) * fragments)))
        for step in range(1, self.rng.choice((2, 10, 40))):
            for session, name in zip(list(self.open), NAMES, strict=False):
                self.feed(fx.FromLearner(session, m.Progress(step, step, 10 * step, 10**6, 1.0, (0,) * fragments)))
                if self.rng.random() < 0.5:
                    self._push_as(name)
            if self.coming and self.rng.random() < 0.5:
                self._go_on()

    def _push_as(self, learner: str) -> None:
        """What an honest learner would push."""
        member, config = self.machine.membership.members[learner], self.machine.config
        fragment = self.rng.randrange(config.fragments)
        track = self.machine.book.tracks[fragment]
        number = track.round.number if track.round is not None else 0
        base, seq = max(0, track.version), member.seq_seen[fragment] + 1
        fields = (member.generation, fragment, number, 0, seq, base, 1, 10, config.codec_up, 1, 1)
        header = m.PushHeader(m.PushKind.CONTRIBUTION, learner, *fields)
        if self.accepts(fx.PushOpened(header)):
            self.feed(fx.PushCompleted(header, True, 1.0))

    def restart(self) -> None:
        """A new process on what is on disk."""
        rows, fragment_records = (json.loads(json.dumps(value)) for value in (self.rows, self.fragment_records))
        recovery = Recovery(
            rows,
            {int(p): c for p, c in fragment_records.items()},
            exact=True,
            handed=[handed for handed, _ in self.handed.values()],
        )
        self._new_machine(self.machine.epoch + 1)
        effects = self.driver.restore(recovery)
        self.inputs += 1
        self.coming.clear()
        self.open.clear()
        self.handed = {identity: entry for identity, entry in self.handed.items() if self.machine.holds(identity)}
        self.driver.held = {identity: header for identity, (_, header) in self.handed.items()}
        versions = {p: fragment_record["version"] for p, fragment_record in self.fragment_records.items()}
        self.versions = [versions.get(p, m.NO_VERSION) for p in range(self.machine.config.fragments)]
        self.merged = {i: v for i, v in self.merged.items() if v <= versions.get(i.fragment, -1)}
        self.driver.perform(effects)

    def _rest(self) -> None:
        if self.open and self.rng.random() < 0.15:
            session = self.open.pop(self.rng.randrange(len(self.open)))
            self.feed(fx.SessionClosed(session, "cut"))
        elif self.rng.random() < 0.01:
            self.feed(fx.StopRequested("enough"))
        elif self.rng.random() < 0.3:
            self.feed(fx.InnerTaken(self.rng.randrange(m.INNER_SLOTS_MAX), self.rng.random() < 0.5))
        else:
            self.feed(fx.Tick())

    def _hello(self) -> None:
        rng, machine = self.rng, self.machine
        self.sessions += 1
        learner = rng.choice(NAMES)
        known = machine.membership.members.get(learner)
        versions = [track.version for track in machine.book.tracks]
        bases = tuple(version(rng, *versions) for _ in range(rng.choice((0, 1, 4, 4, 5))))
        hello = m.Hello(
            learner,
            rng.choice((f"{learner}1", f"{learner}1", f"{learner}1", f"{learner}2", known.instance if known else "x")),
            rng.choice((2, 2, 2, 2, 1, 0, 3, 2**32 - 1)),
            MODELS[0] if rng.random() < 0.85 else rng.choice(MODELS),
            count(rng, 0, known.generation if known else 1) if rng.random() < 0.8 else 0,
            rng.choice(("", machine.run, machine.run, "other")),
            bases,
            tuple(m.Outstanding(count(rng, 0, 1, 3) % 4096, count(rng, 0, 1)) for _ in range(rng.choice((0, 0, 1, 5)))),
            count(rng, machine.epoch, 0) if rng.random() < 0.02 else min(machine.epoch, 1),
            tuple(count(rng, 7) for _ in bases) if rng.random() < 0.7 else (),
            rng.random() < 0.3,
        )
        self._say_as(hello, lambda message: fx.SessionOpened(self.sessions, message))
        self.open.append(self.sessions)

    def _say(self) -> None:
        rng, machine = self.rng, self.machine
        session = rng.choice(self.open) if self.open and rng.random() < 0.97 else rng.randrange(self.sessions + 2)
        member = machine.membership.by_session(session)
        fragments = machine.config.fragments if rng.random() < 0.9 else rng.choice((0, 1, 5, 5, 5, 300))
        versions = [track.version for track in machine.book.tracks]
        bases = tuple(version(rng, *versions) for _ in range(fragments))
        step, steps, tokens = (member.step, member.steps, member.tokens) if member is not None else (0, 0, 0)
        kind = rng.randrange(20)
        if kind < 6:
            message: Any = m.Ready(count(rng, step, step + 1), bases)
        elif kind < 13:
            pending = rng.choice((0, fragments, fragments, 5))
            message = m.Progress(
                count(rng, step, step + 1, step + 24),
                count(rng, steps, steps + 1),
                count(rng, tokens, tokens + 10, tokens + 500),
                rng.choice((0, 1, 10**6, 10**9, LARGE)),
                rng.choice((1.5, math.nan, math.inf, -1.0)),
                bases,
                tuple(self._discard() for _ in range(rng.choice((0, 0, 0, 1, 3)))),
                tuple(count(rng, 0, tokens) for _ in range(pending)),
            )
        elif kind < 15:
            started = machine.book.rounds_started
            message = m.Nothing(count(rng, started, started - 1), count(rng, 0, 1, 3) % 4096)
        elif kind < 18:
            message = self._report()
        elif kind == 18:
            small = replace(self._header(), kind=m.PushKind.CONTRIBUTION)
            message = m.Leave("done") if rng.random() < 0.5 else m.InlinePush(small, b"x")
        else:
            message = m.Hello("a", "a1", 2, MODELS[0])
        self._say_as(message, lambda said: fx.FromLearner(session, said))

    def _say_as(self, message: m.LearnerMessage, event: Callable[[Any], fx.SyncerInput]) -> None:
        """Only what the wire lets through reaches the machine."""
        self.feed(event(parse_learner_message(encode_learner_message(message))))

    def _discard(self) -> m.DiscardCount:
        fragment = count(self.rng, 0, 1, 3) % 4096
        return m.DiscardCount(fragment, self.rng.choice(tuple(m.Discard)), count(self.rng, 0, 10))

    def _report(self) -> m.DataReport:
        rng = self.rng
        numbers = [count(rng, 0, 1, 2, 3, 5, 9) for _ in range(rng.choice((0, 1, 3, 6)))]
        cut = sorted(rng.randrange(len(numbers) + 1) for _ in range(2))
        done, holding, rest = numbers[: cut[0]], numbers[cut[0] : cut[1]], numbers[cut[1] :]
        return m.DataReport(
            rng.choice(("books", "books", "web", "no/slash", "x" * 65)),
            count(rng, 0, 1, 2, 3),
            rng.choice((10, 10, 10, 0, 1, LARGE)),
            rng.choice((0, 1, 3, 10_000)),
            tuple(done),
            tuple(holding),
            tuple(m.Lease(number, count(rng, 0, 5)) for number in rest),
        )

    def _header(self) -> m.PushHeader:
        rng, machine = self.rng, self.machine
        learner = rng.choice(NAMES)
        member = machine.membership.members.get(learner)
        fragment = rng.randrange(max(1, machine.config.fragments)) if rng.random() < 0.95 else count(rng) % 4096
        inside = member is not None and fragment < len(member.seq_seen)
        seen = member.seq_seen[fragment] if member is not None and inside else 0
        track = machine.book.tracks[fragment] if fragment < len(machine.book.tracks) else None
        kind = rng.choice((m.PushKind.CONTRIBUTION,) * 6 + (m.PushKind.SEED,) * 4 + (m.PushKind.HEAL, m.PushKind.INNER))
        if kind is m.PushKind.SEED and machine._seeding.seeder and rng.random() < 0.9:
            learner = machine._seeding.seeder
        generation = member.generation if member is not None else 1
        now = track.version if track is not None else 0
        current = track.round.number if track is not None and track.round is not None else 0
        header = m.PushHeader(
            kind,
            learner,
            count(rng, generation),
            fragment,
            count(rng, 0, current),
            count(rng, 0),
            count(rng, seen + 1, seen + 1, seen),
            version(rng, now, now, now - 1, now - 5) if kind is not m.PushKind.HEAL else count(rng, now, now + 1),
            count(rng, 1, 4),
            count(rng, 10, 40),
            "fp32" if kind is m.PushKind.SEED else machine.config.codec_up if rng.random() < 0.97 else "zip",
            count(rng, 5, 100) % 2**36,
            count(rng, 7),
        )
        if kind is m.PushKind.INNER:
            pieces = rng.choice((1, 2, 2**20))
            header = replace(header, fragment=fragment % m.INNER_SLOTS_MAX, codec="inner", size=rng.choice((1, 2**23)))
            whole = min(pieces * 2**23, max(header.size, (pieces - 1) * 2**23 + header.size))
            header = replace(header, steps=pieces, seq=rng.randrange(pieces), tokens=whole)
        return header

    def _push(self) -> None:
        """A push opens; it is complete at once, or after other things have happened, or never."""
        rng = self.rng
        if self.pushes and rng.random() < 0.5:
            header = self.pushes.pop(rng.randrange(len(self.pushes)))
            norm = rng.choice((1.0, 1.0, 0.0, 1e-30, 1e30, 1e300))
            self.feed(fx.PushCompleted(header, rng.random() < 0.9, norm))
            return
        header = self._header()
        opened = parts.PushOpen(header, 1, 1, 2**16)
        assert parts.parse_push_open(memoryview(parts.encode_push_open(opened))).header == header
        if self.accepts(fx.PushOpened(header)):
            self.pushes.append(header)


def identity_of(header: m.PushHeader) -> ContributionId:
    return ContributionId(header.learner, header.generation, header.fragment, header.seq)
