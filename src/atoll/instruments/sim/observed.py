"""Production's platforms of a syncer, with somebody who watches: what they do is stated as facts for the checkers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.codec import get_codec
from atoll.core import PushHeader, PushKind, PushReply
from atoll.core import effects as fx
from atoll.errors import AtollError
from atoll.instruments.check import facts
from atoll.instruments.sim.payloads import Made
from atoll.syncer import (
    AsyncioPlatform,
    AtRelay,
    InspectedPayload,
    ShardChanges,
    ShardedPlatform,
    ShardedShell,
    ShardLink,
    SyncerShell,
)

if TYPE_CHECKING:
    from atoll.instruments.sim.syncer_process import SyncerProcess


class ObservedPlatform(AsyncioPlatform):
    host: SyncerProcess

    def observed_by(self, host: SyncerProcess) -> None:
        self.host = host
        self.close_link = host.end_session
        driver = self.driver
        driver.watch = host.heard
        opened, completed = driver.open_push, driver.complete_push

        def open_push(header: PushHeader) -> PushReply:
            reply = opened(header)
            if not reply.accepted:
                host.world.refused[header.learner, header.generation, header.fragment] += header.tokens
            return reply

        def complete_push(header: PushHeader, payload: Any, *, finite: bool, norm: float = 0.0) -> PushReply:
            reply = completed(header, payload, finite=finite, norm=norm)
            if not reply.accepted and header.kind is PushKind.CONTRIBUTION:
                told = host.world.refusal_noted(header)
                host.world.observe(facts.Refused(header.learner, reply.code, told))
            return reply

        driver.open_push, driver.complete_push = open_push, complete_push  # type: ignore[method-assign]

    def now_ns(self) -> int:
        return self.host.world.clock.now_ns

    def note(self, note: fx.Note) -> None:
        self.host.world.note(self.host.name, note)

    def end_fenced(self, reason: str) -> None:
        super().end_fenced(reason)
        self.host.fenced(reason)

    def end_finished(self, reason: str) -> None:
        super().end_finished(reason)
        self.host.finished = reason

    def durability_lost(self, reason: str) -> None:
        self.host.world.durability_lost()

    def durability_back(self, reason: str) -> None:
        return

    def inline_update(self, fragment: int, version: int) -> bytes | None:
        return super().inline_update(fragment, version) if self.host.world.scenario.inline else None

    # ------------------------------------------------------------ versions

    def commit_seed(self, done: Callable[[tuple[int, ...]], None]) -> None:
        super().commit_seed(lambda checksums: self._seeded(checksums, done))

    def _seeded(self, checksums: tuple[int, ...], done: Callable[[tuple[int, ...]], None]) -> None:
        host = self.host
        for fragment, checksum in enumerate(checksums):
            host.world.observe(facts.Committed(host.epoch, fragment, 0, checksum))
        host.world.record_seed(host.epoch, host, self.machine)  # type: ignore[arg-type]
        done(checksums)

    def merge(self, merge: fx.Merge, payloads: list[Any], done: Callable[[fx.MergeFinished], None]) -> None:
        """The bytes are looked at now: afterwards a shard or a relay need not have them any more."""
        given = self.host.payloads_of(merge, payloads)
        weighed = zip(merge.contributions, payloads, merge.weights, strict=True)
        away = tuple(
            (one.learner, one.generation, one.seq) for one, at, weight in weighed if isinstance(at, AtRelay) and weight
        )
        super().merge(merge, payloads, lambda result: self._merged(merge, given, away, result, done))

    def _merged(
        self,
        merge: fx.Merge,
        given: list[InspectedPayload] | None,
        away: tuple[facts.Identity, ...],
        result: fx.MergeFinished,
        done: Callable[[fx.MergeFinished], None],
    ) -> None:
        if result.finite and self.machine.merges(merge):
            theta = self.host.theta(merge.fragment)
            finite = theta is None or bool(np.isfinite(theta).all())
            # A relay encodes what it has merged once more, with feedback of its own: how far that moves the model is
            # not known to a codec's error, unless the codec loses nothing.
            known = given is not None or get_codec(self.machine.config.codec_up).lossless
            made = Made(True, result.checksum, finite, result.gradient_norm if known else 0.0)
            fact = replace(self.host._fact_of(merge, made), at_relays=away)
            self.host.world.made_of[merge.fragment] = fact
            self.host.recorded(merge, result.checksum, given)
        done(result)

    def publish(self, merge: fx.Merge, announce: Callable[[], None]) -> None:
        self.host.world.is_made(merge.fragment)
        # A process may die here: on disk, and nobody has heard of it.
        self.later(1, lambda: self._publish(merge, announce))

    def _publish(self, merge: fx.Merge, announce: Callable[[], None]) -> None:
        self.host.world.merged(merge)
        announce()

    def heal(self, heal: fx.CommitHealed, payload: Any, done: Callable[[], None]) -> None:
        super().heal(heal, payload, lambda: self._healed(heal, done))

    def _healed(self, heal: fx.CommitHealed, done: Callable[[], None]) -> None:
        host = self.host
        host.world.observe(facts.Healed(host.epoch, heal.fragment, heal.version, heal.checksum))
        done()


class ObservedChanges(ShardChanges):
    """Moves, and what becomes of those that do not go through."""

    host: SyncerProcess

    async def _move(self, fragment: int, target: ShardLink) -> None:
        world, before = self.host.world, self._place_of(fragment)
        was_there = self._is_on_disk(before, fragment)
        try:
            await super()._move(fragment, target)
        except AtollError:
            shard = self._place_of(fragment)
            there = self._is_on_disk(shard, fragment) or not was_there or not world.lossless
            world.observe(facts.NotMoved(fragment, before, shard, there))
            raise
        world.moves += 1

    def _place_of(self, fragment: int) -> str:
        return self.host.world.place_at(self._fleet.link_of(fragment).address).name

    def _is_on_disk(self, place: str, fragment: int) -> bool:
        return fragment in self.host.world.places[place].disk.slots

    async def _give_up(self, link: ShardLink) -> str:
        """What a lost shard had comes from learners, without momentum; what none of them has heard of is gone."""
        self.host.world.durability_lost()
        self.host.world.given_up += 1
        return await super()._give_up(link)


class ObservedSharded(ObservedPlatform, ShardedPlatform):
    """The order of bases: what is watched is what shards do."""

    def observed_by(self, host: SyncerProcess) -> None:
        super().observed_by(host)
        self.changes = changes = ObservedChanges(self, host.world.scenario.lost_after_s)
        changes.host = host

    def tell(self, text: str, *, good: bool = False) -> None:
        if self.host.world.tracing:
            self.host.world.say(f"{self.host.name} says {text}")

    async def shard_back(self, link: ShardLink, before: str) -> None:
        await ShardedPlatform.shard_back(self, link, before)

    def went_back(self, event: fx.FragmentsBack) -> None:
        """Fragments go on from their shard's disk."""
        found = {fragment: at for fragment, at in event.on_disk.items() if at[0] >= 0}
        host = self.host
        for fragment in event.on_disk:
            host.world.made_of.pop(fragment, None)
        host.world.observe(facts.Restored(host.epoch, found, host.world.lossless_of(found)))


class ObservedShell(SyncerShell):
    host: SyncerProcess

    def _platform(self, machine: Any) -> AsyncioPlatform:
        return ObservedPlatform(machine, self.keeper, self.news)


class ObservedShardedShell(ShardedShell):
    host: SyncerProcess

    def _platform(self, machine: Any) -> ShardedPlatform:
        return ObservedSharded(machine, self.keeper, self.news, self.fleet)
