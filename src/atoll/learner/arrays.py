"""The arrays of one learner: live parameters, snapshots of them, and the vault, behind the driver's words.

The simulator and the lab use it, too, on parameters of their own. What the training thread will need for an adopt is
made, and brought to where the parameters live, before it asks. In production the caller holds the shell's lock unless
a method says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import xxhash

from atoll.core import NO_VERSION, Layout, OutgoingPayload, SyncConfig
from atoll.core import effects as fx
from atoll.errors import PayloadError
from atoll.learner.arithmetic import arithmetic_of
from atoll.learner.parameters import F32, Parameters, Snapshot, adopt, into
from atoll.learner.vault import AdoptKey, HeldContribution, HeldVersion, Vault


class PlanAdopt(Protocol):
    """`LearnerMachine.plan_adopt`."""

    def __call__(self, fragment: int, version: int, *, ahead: bool = False) -> fx.Adopt: ...


class LearnerArrays:
    def __init__(self, parameters: Parameters[Any], layout: Layout, config: SyncConfig) -> None:
        parameters.lay_out(layout)
        self.vault = Vault(layout, config, arithmetic_of(parameters, config))
        self._parameters = parameters
        self._snapshots: dict[int, Snapshot] = {}

    # ------------------------------------------------------------ the training thread

    def take(self, fragment: int) -> None:
        self.drop(fragment)
        self._snapshots[fragment] = self._parameters.read(fragment)

    def drop(self, fragment: int) -> None:
        snapshot = self._snapshots.pop(fragment, None)
        if snapshot is not None:
            self._parameters.release(snapshot)

    def adopt(self, effect: fx.Adopt) -> int:
        fragment, vault = effect.fragment, self.vault
        old = vault.current[fragment]
        new = vault.prepared[fragment].get(effect.version, old)
        assert new is not None and new.version == effect.version, "the machine and the vault disagree"
        key = AdoptKey(old.version if old is not None else NO_VERSION, effect.rule, effect.already_merged)
        if new.staged is not None and new.staged[0] == key:
            values = new.staged[1]
        else:
            values = self._stage(fragment, key, old, new, self._sent(fragment, effect.already_merged))
        adopt(self._parameters, fragment, values, rule=effect.rule, alpha=effect.alpha)
        vault.adopted(fragment, effect.version)
        return new.checksum

    # ------------------------------------------------------------ contributions

    def start_sending(self, effect: fx.Contribute) -> HeldContribution:
        """The snapshot belongs to the contribution from now on."""
        snapshot = self._snapshots.pop(effect.header.fragment)
        return self.vault.start_sending(effect.header, snapshot, effect.already_merged, effect.feedback)

    def settle(self, fragment: int, seq: int, merged: bool) -> None:
        sending = self.vault.settle(fragment, seq, merged)
        if sending is not None and sending.payload is not None:
            self._parameters.release(sending.snapshot)

    def forget_residuals(self) -> None:
        self.vault.residuals = [None] * len(self.vault.residuals)

    # ------------------------------------------------------------ versions

    def before(self, wanted: fx.Fetch) -> HeldVersion:
        """What the update to this version must follow."""
        before = self.vault.newest(wanted.fragment)
        if before is None or before.version != wanted.version - 1:
            raise PayloadError(f"version {wanted.version} of fragment {wanted.fragment} does not follow what is here")
        return before

    def forget_prepared(self, fragment: int) -> None:
        for index in range(len(self.vault.prepared)):
            if fragment in (-1, index):
                self.vault.prepared[index] = {}

    def keep(self, fragment: int, made: HeldVersion) -> None:
        self.vault.prepared[fragment][made.version] = made

    def stage_ahead(self, plan_adopt: PlanAdopt, fragment: int, made: HeldVersion) -> Callable[[], None] | None:
        """What makes, on any thread, the values that the adopt of this version will need while the training thread is
        still computing. If the guess is wrong (another version was adopted in between), the adopt makes them again.
        None: only the next version is worth preparing for, one behind it would be made anew anyway."""
        if self.vault.prepared[fragment]:
            return None
        old = self.vault.current[fragment]
        plan = plan_adopt(fragment, made.version, ahead=True)
        if old is None and plan.rule != "overwrite":
            return None
        key = AdoptKey(old.version if old is not None else NO_VERSION, plan.rule, plan.already_merged)
        make = partial(self._stage, fragment, key, old, made, self._sent(fragment, plan.already_merged))

        def stage() -> None:
            try:
                made.staged = (key, make())
            except RuntimeError:  # no device memory to spare just now: the adopt will make them
                return

        return stage

    def _sent(self, fragment: int, seqs: tuple[int, ...]) -> list[HeldContribution]:
        return [self.vault.sending[fragment, seq] for seq in seqs]

    def _stage(
        self, fragment: int, key: AdoptKey, old: HeldVersion | None, new: HeldVersion, sent: list[HeldContribution]
    ) -> Any:
        return self._parameters.stage(fragment, partial(self.vault.adopt_values, key, old, new, sent))

    # ------------------------------------------------------------ published parameters

    def show_published(self) -> None:
        """Training thread: put them into the model."""
        for fragment, values in enumerate(self.vault.current):
            assert values is not None
            self._parameters.write(fragment, self._parameters.stage(fragment, partial(into, values.theta)))

    def published(self) -> list[F32]:
        """What is published, on the host."""
        return [self.on_host(held.theta) for held in self.vault.current if held is not None]

    # ------------------------------------------------------------ whole fragments, on any thread

    def seed_values(self, fragment: int) -> F32:
        """The published parameters if there are any, else the model's own: then the training thread waits to join, so
        that they do not move."""
        current = self.vault.current[fragment]
        return self.on_host(current.theta if current is not None else self._parameters.read(fragment).values())

    def on_host(self, array: Any) -> F32:
        """Any array of the vault, in host memory."""
        values: F32 = self.vault.arithmetic.on_host(array)
        return values


class StepArrays(LearnerArrays):
    """Production's: it keeps count of the training thread's time."""

    def __init__(self, parameters: Parameters[Any], layout: Layout, config: SyncConfig) -> None:
        super().__init__(parameters, layout, config)
        self.snapshot_ns = 0
        self.adopt_ns = 0

    def take(self, fragment: int) -> None:
        started_ns = time.perf_counter_ns()
        super().take(fragment)
        self.snapshot_ns += time.perf_counter_ns() - started_ns

    def adopt(self, effect: fx.Adopt) -> int:
        started_ns = time.perf_counter_ns()
        checksum = super().adopt(effect)
        self.adopt_ns += time.perf_counter_ns() - started_ns
        return checksum


def whole_payload(values: F32) -> OutgoingPayload:
    """Parameters as they are pushed. Any thread."""
    payload = np.ascontiguousarray(values).view(np.uint8)
    return OutgoingPayload(payload, int(payload.nbytes), xxhash.xxh3_64_intdigest(payload.data))
