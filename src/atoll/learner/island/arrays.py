"""The arrays of one rank: live parameters, copies of them, and a vault of the blocks that it owns.

    training thread   take, adopt: what the boundary's orders say, the same on all ranks
    worker            everything else: what commands say, in the same order on all ranks

A copy is known by its fragment and the number of the boundary at which it was taken, because commands come later on one
rank than on another. It remembers the base that it was taken from.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from threading import Condition

from atoll.core import NO_VERSION, Layout, PushHeader, PushKind, SyncConfig
from atoll.core import effects as fx
from atoll.errors import PayloadError
from atoll.learner.arithmetic import U8, HostArithmetic
from atoll.learner.fault_hooks import encode_contribution
from atoll.learner.island.parameters import OwnedSnapshot, RankParameters
from atoll.learner.parameters import F32, Snapshot, adopt, into
from atoll.learner.vault import AdoptKey, HeldContribution, HeldVersion, Vault


@dataclass(frozen=True, slots=True)
class Taken:
    """A copy, and the version it started from."""

    snapshot: Snapshot
    base: HeldVersion | None


class RankArrays:
    def __init__(self, parameters: RankParameters, layout: Layout, config: SyncConfig, lock: Condition) -> None:
        parameters.lay_out(layout)
        self.parameters = parameters
        self.vault = Vault(parameters.owned, config, HostArithmetic(parameters.as_kept))
        self.layout = layout
        self._lock = lock
        self._taken: dict[tuple[int, int], Taken] = {}
        self.snapshot_ns = 0
        self.adopt_ns = 0

    # ------------------------------------------------------------ training thread

    def take(self, fragment: int, boundary: int) -> None:
        started_ns = time.perf_counter_ns()
        self._taken[fragment, boundary] = Taken(self.parameters.read(fragment), self.vault.current[fragment])
        self.snapshot_ns += time.perf_counter_ns() - started_ns

    def adopt(self, effect: fx.Adopt) -> int:
        started_ns = time.perf_counter_ns()
        fragment, vault = effect.fragment, self.vault
        new = self._version(fragment, effect.version)
        assert new is not None and new.staged is not None, f"version {effect.version} of {fragment} was not prepared"
        assert new.staged[0] == self.key(effect), "the ranks of this learner disagree on what they adopt"
        adopt(self.parameters, fragment, new.staged[1], rule=effect.rule, alpha=effect.alpha)
        new.staged = None
        vault.adopted(fragment, effect.version)
        self.adopt_ns += time.perf_counter_ns() - started_ns
        return new.checksum

    def key(self, effect: fx.Adopt) -> AdoptKey:
        old = self.vault.current[effect.fragment]
        return AdoptKey(old.version if old is not None else NO_VERSION, effect.rule, effect.already_merged)

    def is_staged(self, effect: fx.Adopt) -> bool:
        new = self._version(effect.fragment, effect.version)
        return new is not None and new.staged is not None and new.staged[0] == self.key(effect)

    def _version(self, fragment: int, version: int) -> HeldVersion | None:
        return self.vault.held(fragment, version)

    # ------------------------------------------------------------ contributions

    def contribute(
        self, fragment: int, seq: int, boundary: int, codec: str, merged: tuple[int, ...], feedback: bool
    ) -> U8:
        """The encoded blocks of this rank. PayloadError if they are not finite."""
        with self._lock:
            taken = self._taken.pop((fragment, boundary))
        assert taken.base is not None
        snapshot, vault = OwnedSnapshot(self.parameters.collect(fragment, taken.snapshot)), self.vault
        origin = taken.base.base
        for earlier in merged:
            sent = vault.sending[fragment, earlier]
            origin = vault.arithmetic.moved(origin, sent.snapshot.values(), sent.origin)
        sending = HeldContribution(_header(fragment, seq, taken.base.version, codec), snapshot, origin, feedback)
        with self._lock:
            vault.sending[fragment, seq] = sending
        return encode_contribution(vault, sending)

    def drop(self, fragment: int, boundary: int) -> None:
        with self._lock:
            taken = self._taken.pop((fragment, boundary), None)
        if taken is not None:
            self.parameters.release(taken.snapshot)

    def settle(self, fragment: int, seq: int, merged: bool) -> None:
        with self._lock:
            self.vault.settle(fragment, seq, merged)

    def forget_residuals(self) -> None:
        self.vault.residuals = [None] * len(self.vault.residuals)

    # ------------------------------------------------------------ versions

    def prepare_update(self, fragment: int, version: int, payload: U8) -> HeldVersion:
        with self._lock:
            before = self.vault.newest(fragment)
        if before is None or before.version != version - 1:
            raise PayloadError(f"version {version} of fragment {fragment} does not follow what is here")
        return self._keep(fragment, self.vault.prepare_update(fragment, before, payload, 0))

    def prepare_whole(self, fragment: int, version: int, payload: U8) -> HeldVersion:
        return self._keep(fragment, self.vault.prepare_whole(fragment, version, payload))

    def _keep(self, fragment: int, made: HeldVersion) -> HeldVersion:
        with self._lock:
            self.vault.prepared[fragment][made.version] = made
        return made

    def discard(self, fragment: int, version: int) -> None:
        with self._lock:
            self.vault.prepared[fragment].pop(version, None)

    def forget_prepared(self, fragment: int) -> None:
        with self._lock:
            for index in range(len(self.vault.prepared)):
                if fragment in (-1, index):
                    self.vault.prepared[index] = {}

    def stage(self, effect: fx.Adopt) -> None:
        """Have the values of this adopt ready. All ranks together."""
        fragment, vault = effect.fragment, self.vault
        with self._lock:
            old, new = vault.current[fragment], self._version(fragment, effect.version)
            sent = [vault.sending[fragment, seq] for seq in effect.already_merged]
            key = self.key(effect)
        assert new is not None, f"version {effect.version} of fragment {fragment} is not here"
        staged = self.parameters.stage(fragment, partial(vault.adopt_values, key, old, new, sent))
        new.staged = (key, staged)

    # ------------------------------------------------------------ published parameters, on the training thread

    def show_published(self) -> None:
        """Put them into the model. All ranks together."""
        for fragment, values in enumerate(self.published()):
            self.parameters.write(fragment, self.parameters.held.stage(fragment, partial(into, values)))
        self.parameters.held.reshard()

    def published(self) -> list[F32]:
        """What is published, as this rank holds it. All ranks together."""
        thetas = [held.theta for held in self.vault.current if held is not None]
        return [self.parameters.spread_now(fragment, theta) for fragment, theta in enumerate(thetas)]

    # ------------------------------------------------------------ as they are

    def seed_values(self, fragment: int) -> F32:
        """The published parameters if there are any, else the model's own: then the training thread waits to join."""
        current = self.vault.current[fragment]
        if current is not None:
            values: F32 = current.theta
            return values
        return self.parameters.collect(fragment, self.parameters.read(fragment))

    def held_values(self, fragment: int, version: int) -> F32 | None:
        with self._lock:
            held = self.vault.held(fragment, version)
        return None if held is None else held.theta


def _header(fragment: int, seq: int, base_version: int, codec: str) -> PushHeader:
    """The part of it that is of use here."""
    return PushHeader(
        kind=PushKind.CONTRIBUTION,
        learner="",
        generation=0,
        fragment=fragment,
        round=0,
        attempt=0,
        seq=seq,
        base_version=base_version,
        steps=0,
        tokens=0,
        codec=codec,
        size=0,
        checksum=0,
    )
