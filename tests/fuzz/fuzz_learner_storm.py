"""A learner machine, a shell of few words and a syncer that says anything.

Nothing may be raised, and every token that the learner has processed is merged, pending or discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from fuzz_machines import MODELS, config_of, count, version

from atoll.core import effects as fx
from atoll.core import messages as m
from atoll.core.learner_machine import LearnerMachine
from atoll.observe.lines import encode
from atoll.wire.convert import (
    encode_learner_message,
    encode_syncer_message,
    parse_learner_message,
    parse_syncer_message,
)


class LearnerStorm:
    """One learner with a shell of few words, and a syncer that says anything."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.config = replace(config_of(rng), fragments=4)
        self.machine = LearnerMachine("a", "a1", MODELS[0])
        self.machine.wants_inner = rng.random() < 0.5
        self.inputs = 0
        self.merged = [0] * 4
        self.sent: dict[tuple[int, int], int] = {}
        self.snapshots: set[int] = set()
        self.prepared: set[tuple[int, int]] = set()
        self.fetches: list[fx.Fetch] = []
        self.pushes: list[tuple[int, int]] = []
        self.versions = [0] * 4
        self.left = False

    def feed(self, event: fx.LearnerInput) -> None:
        self.inputs += 1
        run = self.machine.run
        out = self.machine.handle(event, 0)
        if self.machine.run != run:
            self.merged = [0] * 4  # what an earlier run merged counts as discarded in this one
        for effect in out:
            self._perform(effect)
        self._check()

    def _perform(self, effect: Any) -> None:
        if isinstance(effect, fx.ToSyncer):
            parse_learner_message(encode_learner_message(effect.message))
        elif isinstance(effect, fx.Note):
            encode(1, effect.event)
        elif isinstance(effect, fx.TakeSnapshot):
            self.snapshots.add(effect.fragment)
        elif isinstance(effect, fx.DropSnapshot):
            self.snapshots.remove(effect.fragment)
        elif isinstance(effect, fx.Contribute):
            header = effect.header
            self.snapshots.remove(header.fragment)
            assert header.tokens > 0 and header.steps > 0
            assert all((header.fragment, seq) in self.sent for seq in effect.already_merged)
            self.sent[header.fragment, header.seq] = header.tokens
            self.pushes.append((header.fragment, header.seq))
        elif isinstance(effect, fx.PushAgain):
            assert (effect.fragment, effect.seq) in self.sent
            self.pushes.append((effect.fragment, effect.seq))
        elif isinstance(effect, fx.Settle):
            tokens = self.sent.pop((effect.fragment, effect.seq))
            self.merged[effect.fragment] += tokens if effect.merged else 0
        elif isinstance(effect, fx.Fetch):
            self.fetches.append(effect)
        elif isinstance(effect, fx.Adopt):
            assert all((effect.fragment, seq) in self.sent for seq in effect.already_merged)
            base = self.machine.fragments[effect.fragment].base
            assert (effect.fragment, effect.version) in self.prepared or effect.version == base
        elif isinstance(effect, fx.ForgetPrepared):
            self.prepared = {k for k in self.prepared if effect.fragment not in (-1, k[0])}
        elif isinstance(effect, fx.Left):
            self.left = True

    def _check(self) -> None:
        """Every token that this learner has processed is merged, pending or discarded, for every fragment."""
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
        for fetch in self.fetches:
            self.prepared.add((fetch.fragment, 0))
            self.feed(fx.Fetched(fetch.fragment, 0, fetch.version, 7))
        self.fetches.clear()
        self.feed(fx.Boundary())
        assert self.machine.joined

    def run(self, steps: int) -> int:
        if self.rng.random() < 0.8:
            self._begin()
        for _ in range(steps):
            if self.left:
                break
            self.step()
        return self.inputs

    def step(self) -> None:
        rng = self.rng
        kind = rng.random()
        if kind < 0.25:
            self.feed(fx.Stepped(10, 10**6, 1.0) if self.machine.joined else fx.Boundary())
        elif kind < 0.3:
            self.feed(fx.Boundary())
        elif kind < 0.45 and self.fetches:
            self._fetched(self.fetches.pop(0))
        elif kind < 0.6 and self.pushes:
            self._pushed(*self.pushes.pop(0))
        elif kind < 0.62:
            self.feed(fx.LinkDown("cut"))
            self.feed(fx.FromSyncer(self._welcome()))
        elif kind < 0.622:
            self.feed(fx.Closing(rng.random() < 0.7, "done"))
        else:
            message = self._message()
            self.feed(fx.FromSyncer(parse_syncer_message(encode_syncer_message(message))))

    def _fetched(self, fetch: fx.Fetch) -> None:
        if self.rng.random() < 0.2:
            self.feed(fx.FetchBroken(fetch.fragment, fetch.version, self.rng.random() < 0.5))
            return
        whole = fetch.kind is m.FetchKind.THETA
        found = self.versions[fetch.fragment] if whole else fetch.version
        event = fx.Fetched(fetch.fragment, found, fetch.version, 7)
        self.prepared.add((fetch.fragment, found))
        self.feed(event)

    def _pushed(self, fragment: int, seq: int) -> None:
        if self.rng.random() < 0.1:
            self.feed(fx.PushBroken(fragment, seq))
            return
        reply = (
            m.PushReply(True) if self.rng.random() < 0.7 else m.PushReply(False, self.rng.choice(tuple(m.Refusal)), "")
        )
        self.feed(fx.PushDone(fragment, seq, reply))

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
