"""The fleet's syncer: the real machine and the real driver on a platform whose merges take the mechanics' time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atoll.core import (
    LEFT,
    NO_VERSION,
    DisklessPlatform,
    DurabilityGate,
    Payload,
    SyncerDriver,
    SyncerMachine,
    SyncerMessage,
    checksum_of,
)
from atoll.core import effects as fx

if TYPE_CHECKING:
    from atoll.instruments.fleet.world import FleetWorld


class FleetSyncer(DisklessPlatform):
    def __init__(self, world: FleetWorld, merge_ns: int) -> None:
        self.machine = SyncerMachine(world.config, "fleet")
        self.driver = SyncerDriver(self.machine, self, DurabilityGate("none"))
        self.driver.watch = world.count
        self._world = world
        self._merge_ns = merge_ns
        self._versions = [NO_VERSION] * world.config.fragments
        self._tick_ns = -1

    def now_ns(self) -> int:
        return self._world.clock.now_ns

    def wake_at(self, wake_ns: int | None) -> None:
        clock = self._world.clock
        if wake_ns is not None and not clock.now_ns < self._tick_ns <= wake_ns:
            self._tick_ns = max(wake_ns, clock.now_ns + 1)
            clock.at(self._tick_ns, self._tick, self._tick_ns)

    def _tick(self, planned_ns: int) -> None:
        if planned_ns == self._tick_ns:
            self.driver.apply(fx.Tick())

    def end_finished(self, reason: str) -> None:
        self._world.end(reason)

    def send(self, session: int, message: SyncerMessage) -> None:
        self._world.to_learner(session, message)

    def end_session(self, session: int, reason: str) -> None:
        self._world.end_session(session, left=reason == LEFT)

    def commit_seed(self, done: Callable[[tuple[int, ...]], None]) -> None:
        self._world.clock.after(self._merge_ns, self._commit_seed, done)

    def _commit_seed(self, done: Callable[[tuple[int, ...]], None]) -> None:
        self._versions = [0] * len(self._versions)
        done(tuple(map(checksum_of, self._versions)))

    def merge(self, merge: fx.Merge, payloads: list[Payload], done: Callable[[fx.MergeFinished], None]) -> None:
        self._world.clock.after(self._merge_ns, self._merge, merge, done)

    def _merge(self, merge: fx.Merge, done: Callable[[fx.MergeFinished], None]) -> None:
        self._versions[merge.fragment] = merge.version
        done(fx.MergeFinished(merge.fragment, True, checksum_of(merge.version), self._merge_ns))

    def version(self, fragment: int) -> int:
        return self._versions[fragment]
