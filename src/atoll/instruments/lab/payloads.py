"""The lab's bytes: real parameters on the device on one side, production's `Vault` and `ModelState` on the other.

What differs from production is only who does the work: there is one process, so a version that several learners would
each decode is decoded once. Its bits are the syncer's (the checksum was compared), so sharing it changes nothing.
Encoding (and the syncer's look at what was encoded), and bringing a version to the device, are given to threads as soon
as they are known to come, as in production; whoever needs the result waits for it. What a thread reads does not change
while it works, so the numbers do not depend on when it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.core import Adopt, Contribute, Fetch, Layout, OutgoingPayload, SyncConfig
from atoll.errors import PayloadError
from atoll.instruments.chaos import encode_poisoned
from atoll.instruments.lab.replica import Replica
from atoll.instruments.sim import ArraySyncer, Made, VaultLearner
from atoll.learner import HeldContribution, HeldVersion, PlanAdopt, TorchParameters

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

T = TypeVar("T")

VERSIONS_SHARED = 4
"""Decoded versions kept per fragment: learners that are further behind decode for themselves."""


class LabSyncer(ArraySyncer):
    """Production's merge; a contribution is looked at once, ahead of its arrival, and nothing is copied for a disk that
    is not there."""

    def __init__(self, layout: Layout, config: SyncConfig, *, durable: bool, rhos: list[float]) -> None:
        super().__init__(layout, config)
        self._rhos = rhos
        self._durable = durable

    def merge(
        self, fragment: int, version: int, payloads: Sequence[U8], weights: Sequence[float], codec_down: str
    ) -> Made:
        held = [self.look(fragment, payload)[1] for payload in payloads]
        result = self.state.merge(fragment, held, weights, codec_down=codec_down)
        if not result.finite:
            return Made(False)
        if not math.isnan(result.rho):
            self._rhos.append(result.rho)
        return Made(True, self.state.fragments[fragment].checksum, True, result.gradient_norm)

    def durable(self, fragment: int) -> dict[str, F32]:
        return super().durable(fragment) if self._durable else {}


class SharedVersions:
    """Decoded versions that learners of one process need not decode again."""

    def __init__(self, fragments: int) -> None:
        self._kept: list[dict[tuple[int, int], F32]] = [{} for _ in range(fragments)]

    def find(self, fragment: int, version: int, checksum: int) -> F32 | None:
        return self._kept[fragment].get((version, checksum)) if checksum else None

    def keep(self, fragment: int, published: HeldVersion) -> None:
        kept = self._kept[fragment]
        kept[published.version, published.checksum] = published.theta
        while len(kept) > VERSIONS_SHARED:
            del kept[min(kept)]


Look = Callable[[int, U8, str], object]
"""The syncer's look at a fragment's contribution, ahead of its arrival. Any thread."""


class AtOnce(Executor):
    """No threads: what is submitted is done on the spot."""

    def submit(self, work: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(work(*arguments, **named))
        except PayloadError as error:
            future.set_exception(error)
        return future


class LabLearner(VaultLearner):
    """One process of a learner: what `learner.engine` keeps and does, around one replica."""

    def __init__(
        self,
        layout: Layout,
        config: SyncConfig,
        replica: Replica,
        *,
        shared: SharedVersions,
        threads: Executor,
        plan_adopt: PlanAdopt,
        look: Look,
    ) -> None:
        self.replica = replica
        with replica.queue():
            super().__init__(TorchParameters(replica.model), layout, config)
        self._shared = shared
        self._threads = threads
        self._plan_adopt = plan_adopt
        self._look = look
        self._encoding: dict[tuple[int, int], Future[tuple[U8, int]]] = {}
        self._staging: dict[tuple[int, int], Future[None]] = {}

    def step(self) -> None:
        """The step was queued when it began."""

    # ------------------------------------------------------------ contributions

    def take(self, fragment: int) -> None:
        with self.replica.queue():
            super().take(fragment)

    def start_sending(self, effect: Contribute) -> HeldContribution:
        sending = super().start_sending(effect)
        self._encoding[effect.header.fragment, effect.header.seq] = self._threads.submit(self._encode, sending)
        return sending

    def _encode(self, sending: HeldContribution) -> tuple[U8, int]:
        payload = self.vault.encode(sending)
        self._look(sending.header.fragment, payload, sending.header.codec)
        return payload, xxhash.xxh3_64_intdigest(payload.data)

    def encode(self, fragment: int, seq: int, poison: str) -> OutgoingPayload | None:
        try:
            payload, checksum = self._encoding.pop((fragment, seq)).result()
            if poison:
                payload = encode_poisoned(self.vault, self.vault.sending[fragment, seq], poison)
                checksum = xxhash.xxh3_64_intdigest(payload.data)
        except PayloadError:
            return None
        return OutgoingPayload(payload, int(payload.nbytes), checksum)

    def _finish(self, fragment: int) -> None:
        """Residuals and snapshots are about to change: whoever reads them now must be done with it."""
        for (of, _), encoding in self._encoding.items():
            if fragment in (-1, of):
                encoding.exception()
        for (of, _), staging in self._staging.items():
            if fragment in (-1, of):
                staging.exception()

    def settle(self, fragment: int, seq: int, merged: bool) -> None:
        self._finish(fragment)
        self._encoding.pop((fragment, seq), None)
        super().settle(fragment, seq, merged)

    # ------------------------------------------------------------ versions

    def prepare_update(self, wanted: Fetch, payload: U8) -> HeldVersion:
        fragment, version, checksum = wanted.fragment, wanted.version, wanted.checksum
        before = self.before(wanted)
        theta = self._shared.find(fragment, version, checksum)
        if theta is None:
            published = self.vault.prepare_update(fragment, before, payload, checksum)
            self._shared.keep(fragment, published)
        else:
            published = self.vault.published(fragment, version, theta, checksum)
        stage = self.stage_ahead(self._plan_adopt, fragment, published)
        if stage is not None:
            self._staging[fragment, version] = self._threads.submit(stage)
        return published

    def forget_prepared(self, fragment: int) -> None:
        self._finish(fragment)
        super().forget_prepared(fragment)
        for key in [key for key in self._staging if fragment in (-1, key[0])]:
            del self._staging[key]  # the same number may name another version after the syncer went back

    def forget_residuals(self) -> None:
        self._finish(-1)
        super().forget_residuals()

    def adopt(self, effect: Adopt) -> int:
        fragment = effect.fragment
        for version in [v for of, v in self._staging if of == fragment and v <= effect.version]:
            staging = self._staging.pop((fragment, version))
            if version == effect.version:
                staging.result()
        with self.replica.queue():
            return super().adopt(effect)

    def seed_values(self, fragment: int) -> F32:
        with self.replica.queue():
            return super().seed_values(fragment)
