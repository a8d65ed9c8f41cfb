"""A learner machine, the driver around it, a world of few words and a syncer that says anything.

Nothing may be raised, and every token that the learner has processed is merged, pending or discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from fuzz_machines import MODELS, SECOND_NS, config_of, count, version

from atoll.core import effects as fx
from atoll.core import messages as m
from atoll.core.arrayless import ArraylessHost, VersionNumber
from atoll.core.learner_driver import LearnerDriver
from atoll.core.learner_host import FetchAnswer, FetchedPayload, OutgoingPayload, PreparedVersion
from atoll.core.learner_machine import LearnerMachine
from atoll.observe.lines import encode
from atoll.wire.convert import (
    encode_learner_message,
    encode_syncer_message,
    parse_learner_message,
    parse_syncer_message,
)

CHECKSUM = 7
"""Of every version, wherever the syncer does not lie about it."""


class LearnerStorm(ArraylessHost):
    """One learner in a world of few words, and a syncer that says anything."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.config = replace(config_of(rng), fragments=4)
        self.machine = LearnerMachine("a", "a1", MODELS[0])
        missing = rng.random() < 0.5
        self.driver = LearnerDriver(self.machine, self)
        self.driver.watch = self._count
        self.time_ns = 0
        self.timers: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = []
        self.driver.start()
        self.inputs = 0
        if missing:
            self.driver.handle(fx.InnerMissing())
        self.run_known = ""
        self.merged = [0] * 4
        self.sent: dict[tuple[int, int], int] = {}
        self.snapshots: set[int] = set()
        self.prepared: set[tuple[int, int]] = set()
        self.fetches: list[tuple[m.FetchRequest, Callable[[FetchAnswer], None]]] = []
        self.pushes: list[Callable[[m.PushReply | None], None]] = []
        self.versions = [0] * 4

    def _count(self, event: fx.LearnerInput) -> None:
        self.inputs += 1

    def feed(self, event: fx.LearnerInput) -> None:
        if isinstance(event, fx.FromSyncer):
            self.driver.heard(event.message)
        elif isinstance(event, fx.LinkDown):
            self.driver.link_down(event.reason, let_go=False)
        else:
            self.driver.handle(event)
        self._check()

    # ------------------------------------------------------------ the world

    def now_ns(self) -> int:
        return self.time_ns

    def later(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        self.timers.append((self.time_ns + delay_ns, action, arguments))

    def _wait(self, duration_ns: int) -> None:
        self.time_ns += duration_ns
        due = [timer for timer in self.timers if timer[0] <= self.time_ns]
        self.timers = [timer for timer in self.timers if timer[0] > self.time_ns]
        for _, action, arguments in due:
            action(*arguments)
            self._check()

    def news(self) -> None:
        """Nobody waits."""

    def send(self, message: m.LearnerMessage) -> None:
        parse_learner_message(encode_learner_message(message))

    def push(self, header: m.PushHeader, payload: Any, done: Callable[[m.PushReply | None], None]) -> None:
        self.pushes.append(done)

    def fetch(self, request: m.FetchRequest, done: Callable[[FetchAnswer], None]) -> None:
        self.fetches.append((request, done))

    def note(self, note: fx.Note) -> None:
        encode(1, note.event)

    def fail(self, code: str, detail: str) -> None:
        """The storm goes on."""

    def let_go(self) -> None:
        """The same."""

    # ------------------------------------------------------------ what stands for arrays

    def take(self, fragment: int) -> None:
        self.snapshots.add(fragment)

    def drop(self, fragment: int) -> None:
        self.snapshots.remove(fragment)

    def contribute(self, effect: fx.Contribute, done: Callable[[OutgoingPayload | str], None]) -> None:
        header = effect.header
        self.snapshots.remove(header.fragment)
        assert header.tokens > 0 and header.steps > 0
        assert all((header.fragment, seq) in self.sent for seq in effect.already_merged)
        self.sent[header.fragment, header.seq] = header.tokens
        self.later(0, self._encoded, effect, done)

    def _encoded(self, effect: fx.Contribute, done: Callable[[OutgoingPayload | str], None]) -> None:
        if self.rng.random() < 0.01:
            done("not finite")
        else:
            super().contribute(effect, done)

    def settle(self, fragment: int, seq: int, merged: bool) -> None:
        self._look_at_run()
        tokens = self.sent.pop((fragment, seq))
        self.merged[fragment] += tokens if merged else 0

    def prepare_whole(self, fragment: int, came: FetchedPayload, done: Callable[[PreparedVersion | str], None]) -> None:
        done(VersionNumber(came.version, CHECKSUM))

    def prepare_update(self, wanted: fx.Fetch, payload: Any, done: Callable[[PreparedVersion | str], None]) -> None:
        done(VersionNumber(wanted.version, CHECKSUM))

    def keep(self, fragment: int, made: VersionNumber) -> None:
        self.prepared.add((fragment, made.version))

    def adopt(self, effect: fx.Adopt) -> int:
        assert all((effect.fragment, seq) in self.sent for seq in effect.already_merged)
        base = self.machine.fragments[effect.fragment].base
        assert (effect.fragment, effect.version) in self.prepared or effect.version == base
        return CHECKSUM

    def forget_prepared(self, fragment: int) -> None:
        self.prepared = {k for k in self.prepared if fragment not in (-1, k[0])}

    # ------------------------------------------------------------ what must be true

    def _look_at_run(self) -> None:
        if self.machine.run != self.run_known:
            self.run_known = self.machine.run
            self.merged = [0] * 4  # what an earlier run merged counts as discarded in this one

    def _check(self) -> None:
        """Every token that this learner has processed is merged, pending or discarded, for every fragment."""
        self._look_at_run()
        machine = self.machine
        parse_learner_message(encode_learner_message(machine.hello()))
        for progress in machine.fragments:
            discarded = machine._state.discarded(progress.index)
            known = sum(s.counters.tokens for s in progress.outstanding)
            assert machine.tokens == self.merged[progress.index] + progress.local.tokens + known + discarded
            assert progress.local.tokens >= 0 and progress.local.steps >= 0 and discarded >= 0

    def _begin(self) -> None:
        """Most storms break out over a run that goes well."""
        self.feed(fx.FromSyncer(m.Welcome("run", 1, 1, self.config, "f", False, 2)))
        self.feed(fx.FromSyncer(self._start()))
        self._wait(0)
        while self.fetches:
            _, done = self.fetches.pop(0)
            done(FetchedPayload(0, b"0", 1))
        self.feed(fx.Boundary())
        assert self.machine.joined

    def run(self, steps: int) -> int:
        if self.rng.random() < 0.8:
            self._begin()
        for _ in range(steps):
            if self.driver.left:
                break
            self.step()
        return self.inputs

    def step(self) -> None:
        rng = self.rng
        self._wait(rng.choice((0, 0, 0, SECOND_NS)))
        kind = rng.random()
        if kind < 0.25:
            self.feed(fx.Stepped(10, 10**6, 1.0) if self.machine.joined else fx.Boundary())
        elif kind < 0.3:
            self.feed(fx.Boundary())
        elif kind < 0.45 and self.fetches:
            self._fetched(*self.fetches.pop(0))
        elif kind < 0.6 and self.pushes:
            self._pushed(self.pushes.pop(0))
        elif kind < 0.62:
            self.feed(fx.LinkDown("cut"))
            self.feed(fx.FromSyncer(self._welcome()))
        elif kind < 0.622:
            self.feed(fx.Closing(rng.random() < 0.7, "done"))
        else:
            message = self._message()
            self.feed(fx.FromSyncer(parse_syncer_message(encode_syncer_message(message))))

    def _fetched(self, request: m.FetchRequest, done: Callable[[FetchAnswer], None]) -> None:
        kind = self.rng.random()
        if kind < 0.2:
            done(self.rng.choice((None, m.Refusal.UNKNOWN_VERSION, m.Refusal.BUSY)))
        else:
            whole = request.kind is m.FetchKind.THETA
            found = self.versions[request.fragment] if whole else request.version
            done(FetchedPayload(found, b"0" if kind < 0.95 else None, 1))
        self._check()

    def _pushed(self, done: Callable[[m.PushReply | None], None]) -> None:
        kind = self.rng.random()
        if kind < 0.1:
            done(None)
        else:
            done(m.PushReply(True) if kind < 0.75 else m.PushReply(False, self.rng.choice(tuple(m.Refusal)), ""))
        self._check()

    def _welcome(self) -> m.Welcome:
        run = "run" if self.rng.random() < 0.9 else "other"
        return m.Welcome(run, count(self.rng, 1, 2), count(self.rng, 1, 2), self.config, "f", False, 2)

    def _message(self) -> m.SyncerMessage:
        rng = self.rng
        fragment = rng.randrange(4) if rng.random() < 0.9 else count(rng) % 4096
        inside = fragment if fragment < 4 else 0
        progress = self.machine.fragments[inside] if self.machine.fragments else None
        seq = progress.next_seq - 1 if progress is not None else 0
        fragments = rng.choice((4, 4, 4, 4, 0, 3, 4096 if rng.random() < 0.01 else 5))
        makes: Sequence[Callable[[], m.SyncerMessage]] = (
            self._welcome,
            lambda: m.Start(count(rng, 0, 24), self._states(fragments), tuple(count(rng, 4) for _ in range(fragments))),
            lambda: self._start(),
            lambda: self._start(),
            lambda: m.Upcoming(
                tuple(rng.randrange(4096) if rng.random() < 0.2 else rng.randrange(4) for _ in range(3))
            ),
            lambda: m.Request(count(rng, 1, 5), count(rng, 0), fragment),
            lambda: m.Request(count(rng, 1, 5), 0, inside),
            lambda: self._published(fragment, inside, seq),
            lambda: self._published(inside, inside, seq),
            lambda: m.Fate(
                fragment, count(rng, max(0, seq)), version(rng, 0, self.versions[inside]), rng.choice(("", "stale"))
            ),
            lambda: m.Reseed("not finite") if rng.random() < 0.2 else m.Upcoming(()),
            lambda: m.Heal((fragment, inside)),
            lambda: m.Donate(rng.randrange(16), tuple(version(rng, 0, 1) for _ in range(fragments))),
            lambda: m.InnerOffer(rng.randrange(16), 0, 0, "", "none"),
            lambda: m.Stop("over") if rng.random() < 0.05 else m.Upcoming((inside,)),
            lambda: m.InlineReply(fragment, count(rng, max(0, seq)), m.PushReply(True)),
        )
        return rng.choice(makes)()

    def _states(self, fragments: int) -> tuple[m.FragmentState, ...]:
        rng = self.rng
        likely = [self.versions[p] if p < 4 else 0 for p in range(fragments)]
        return tuple(m.FragmentState(count(rng, likely[p]), rng.choice((7, 7, 0, 9))) for p in range(fragments))

    def _start(self) -> m.Start:
        states = tuple(m.FragmentState(v, 7) for v in self.versions)
        return m.Start(0, states, (4, 4, 4, 4))

    def _published(self, fragment: int, inside: int, seq: int) -> m.Published:
        rng = self.rng
        if rng.random() < 0.7:
            self.versions[inside] += 1
            told = (version(rng, max(0, seq)), 1, count(rng, 4), b"", count(rng, 8))
            return m.Published(fragment, self.versions[inside], 5, 7, *told)
        return m.Published(
            fragment, count(rng, self.versions[inside]), count(rng, 5), 7, version(rng, max(0, seq)), 1, count(rng, 4)
        )
