"""Real arrays: the syncer's `ModelState` and the learner's `Vault`, as in production, on a model of a few blocks.

The inner loop is a deterministic function of parameters, step and learner, so that the same run with real processes
gives the same bits (tests/sim/test_sim_equals_real.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.core.config import SyncConfig
from atoll.core.effects import Adopt
from atoll.core.layout import Layout, padded
from atoll.core.messages import NO_VERSION, PushHeader
from atoll.errors import PayloadError
from atoll.learner.vault import AdoptKey, HeldContribution, HeldVersion, Vault
from atoll.sim.payloads import Made
from atoll.syncer.state import ModelState

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

LEARNING_RATE = np.float32(0.05)
HUGE = np.float32(1000.0)


def inner_step(theta: F32, target: F32, step: int) -> None:
    """One step of gradient descent towards a target of the learner's own, with a wobble that depends on the step."""
    wobble = np.float32(((step * 2654435761) & 1023) / 1023.0 - 0.5)
    theta -= LEARNING_RATE * (theta - target - wobble)


def target_of(fragment: int, size: int, learner: str) -> F32:
    """Where this learner's data pulls its parameters: another place for every learner."""
    pull = (xxhash.xxh3_64_intdigest(learner.encode()) & 0xFFFF) / 0xFFFF
    ramp = np.arange(size, dtype=np.float32) / np.float32(size)
    shifted: F32 = np.float32(pull) + np.float32(0.1 * (fragment + 1)) * ramp
    return shifted


class ArraySyncer:
    def __init__(self, layout: Layout, config: SyncConfig) -> None:
        self.state = ModelState(layout, config)

    def put_seed(self, fragment: int, payload: U8) -> bool:
        return self.state.put_seed(fragment, payload.copy())

    def commit_seed(self) -> tuple[int, ...]:
        self.state.fragments.clear()
        return self.state.commit_seed()

    def inspect(self, fragment: int, payload: U8) -> tuple[bool, float]:
        finite, held = self.state.inspect(fragment, payload)
        return finite, float(np.sqrt(np.square(held.norms).sum())) if finite else 0.0

    def merge(self, fragment: int, version: int, payloads: Sequence[U8], weights: Sequence[float]) -> Made:
        held = [self.state.inspect(fragment, payload)[1] for payload in payloads]
        result = self.state.merge(fragment, held, weights)
        if not result.finite:
            return Made(False)
        arrays = self.state.fragments[fragment]
        return Made(True, arrays.checksum, bool(np.isfinite(arrays.theta).all()), result.gradient_norm)

    def durable(self, fragment: int) -> dict[str, F32]:
        return {name: array.copy() for name, array in self.state.durable(fragment).items()}

    def restore(self, stored: dict[int, tuple[int, int, dict[str, F32]]]) -> None:
        self.state.fragments.clear()
        copies = {p: (v, c, {name: a.copy() for name, a in named.items()}) for p, (v, c, named) in stored.items()}
        self.state.restore(copies)

    def heal(self, fragment: int, version: int, checksum: int, payload: U8) -> None:
        self.state.heal(fragment, version, checksum, payload)

    def version(self, fragment: int) -> tuple[int, int]:
        arrays = self.state.fragments[fragment]
        return arrays.version, arrays.checksum

    def update(self, fragment: int, version: int) -> U8 | None:
        update = self.state.fragments[fragment].ring.get(version)
        return None if update is None else update.payload

    def theta(self, fragment: int) -> U8:
        return self.state.fragments[fragment].theta.copy().view(np.uint8)

    def contribution_bytes(self, fragment: int) -> int:
        return self.state.contribution_size_max(fragment)

    def whole_bytes(self, fragment: int) -> int:
        return self.state.seed_size(fragment)


class Replaced:
    """A snapshot of given values (`learner.vault.Copied`)."""

    __slots__ = ("_values",)

    def __init__(self, values: F32) -> None:
        self._values = values

    def values(self) -> F32:
        return self._values


class VaultLearner:
    """What a learner's payloads do with the vault, whatever the parameters are: here arrays, in the lab a model's."""

    def __init__(self, vault: Vault) -> None:
        self.vault = vault
        self._prepared: dict[int, HeldVersion] = {}

    def sending(self, fragment: int, seq: int) -> tuple[PushHeader, U8] | None:
        sending = self.vault.sending.get((fragment, seq))
        return None if sending is None or sending.payload is None else (sending.header, sending.payload)

    def seal(self, fragment: int, seq: int, payload: U8, checksum: int) -> None:
        """The header says what the payload is from now on."""
        sending = self.vault.sending[fragment, seq]
        sending.header = replace(sending.header, size=int(payload.nbytes), checksum=checksum)

    def encode_poisoned(self, sending: HeldContribution, poison: str) -> U8:
        """As a learner encodes that went wrong; its own snapshot stays what it was."""
        honest = sending.snapshot
        sending.snapshot = Replaced(poisoned(honest.values(), sending.origin, poison))
        try:
            return self.vault.encode(sending)
        finally:
            sending.snapshot = honest

    def prepare_whole(self, fragment: int, version: int, payload: U8) -> int:
        checksum = xxhash.xxh3_64_intdigest(payload.data)
        self._prepared[fragment] = self.vault.prepare_whole(fragment, version, payload, checksum)
        return checksum

    def before(self, fragment: int, version: int) -> HeldVersion:
        """What the update to this version must follow."""
        before = self.vault.newest(fragment)
        if before is None or before.version != version - 1:
            raise PayloadError(f"version {version} of fragment {fragment} does not follow what is here")
        return before

    def keep(self, fragment: int, version: int) -> None:
        self.vault.prepared[fragment][version] = self._prepared.pop(fragment)

    def forget_prepared(self, fragment: int) -> None:
        for index in range(len(self.vault.prepared)):
            if fragment in (-1, index):
                self.vault.prepared[index] = {}

    def forget_residuals(self) -> None:
        self.vault.residuals = [None] * len(self.vault.residuals)

    def adopted(self, effect: Adopt) -> tuple[AdoptKey, HeldVersion | None, HeldVersion]:
        """How the vault knows this adopt, and the versions before and after it."""
        old = self.vault.current[effect.fragment]
        new = self.vault.prepared[effect.fragment].get(effect.version, old)
        assert new is not None and new.version == effect.version, "the machine and the vault disagree"
        return AdoptKey(old.version if old is not None else NO_VERSION, effect.rule, effect.minus), old, new

    def held(self, fragment: int, version: int) -> tuple[U8, int] | None:
        held = self.vault.held(fragment, version)
        if held is None:
            return None
        return held.theta.copy().view(np.uint8), xxhash.xxh3_64_intdigest(held.theta.data)


class ArrayLearner(VaultLearner):
    def __init__(self, layout: Layout, config: SyncConfig, learner: str) -> None:
        super().__init__(Vault(layout, config))
        self.steps = 0
        self._sizes = [fragment.size for fragment in layout.fragments]
        masks = [_real_elements(layout, fragment) for fragment in range(len(self._sizes))]
        self._mask = np.concatenate(masks)
        self._target = np.concatenate([target_of(p, mask.size, learner) for p, mask in enumerate(masks)])
        self._flat = np.zeros(self._mask.size, np.float32)
        self.theta: list[F32] = np.split(self._flat, np.cumsum(self._sizes)[:-1])
        self._snapshots: dict[int, Replaced] = {}

    def step(self) -> None:
        self.steps += 1
        inner_step(self._flat, self._target, self.steps)
        self._flat *= self._mask  # padding stays zero

    def take(self, fragment: int) -> None:
        self._snapshots[fragment] = Replaced(self.theta[fragment].copy())

    def drop(self, fragment: int) -> None:
        self._snapshots.pop(fragment, None)

    def start_sending(self, header: PushHeader, minus: tuple[int, ...], feedback: bool) -> None:
        self.vault.start_sending(header, self._snapshots.pop(header.fragment), minus, feedback)

    def encode(self, fragment: int, seq: int, poison: str) -> tuple[U8, int] | None:
        sending = self.vault.sending[fragment, seq]
        try:
            payload = self.encode_poisoned(sending, poison) if poison else self.vault.encode(sending)
        except PayloadError:
            return None
        checksum = xxhash.xxh3_64_intdigest(payload.data)
        self.seal(fragment, seq, payload, checksum)
        return payload, checksum

    def settle(self, fragment: int, seq: int, merged: bool) -> None:
        self.vault.settle(fragment, seq, merged)

    def prepare_update(self, fragment: int, version: int, payload: U8, checksum: int) -> int:
        before = self.before(fragment, version)
        self._prepared[fragment] = self.vault.prepare_update(fragment, before, payload, checksum)
        return self._prepared[fragment].checksum

    def adopt(self, effect: Adopt) -> int:
        vault, theta = self.vault, self.theta[effect.fragment]
        key, old, new = self.adopted(effect)
        sent = [vault.sending[effect.fragment, seq] for seq in effect.minus]
        values = vault.adopt_values(key, old, new, sent)
        if effect.rule == "rebase":
            theta += values
        elif effect.rule == "mix":
            theta += np.float32(1.0 - effect.alpha) * (values - theta)
        else:
            theta[:] = values
        vault.adopted(effect.fragment, effect.version)
        return xxhash.xxh3_64_intdigest(new.theta.data)

    def seed(self, fragment: int) -> U8:
        current = self.vault.current[fragment]
        return (current.theta if current is not None else self.theta[fragment]).copy().view(np.uint8)


def poisoned(values: F32, origin: F32, how: str) -> F32:
    """What a learner that went wrong sends instead of its parameters."""
    if how == "nan":
        return np.full_like(values, np.nan)
    if how == "huge":
        huge: F32 = origin + HUGE * (values - origin)
        return huge
    flipped: F32 = origin - (values - origin)
    return flipped


def _real_elements(layout: Layout, fragment: int) -> F32:
    """1 where the fragment holds a parameter, 0 where it is padded."""
    mask = np.zeros(layout.fragments[fragment].size, np.float32)
    for piece in layout.fragments[fragment].slices:
        mask[piece.offset : piece.offset + piece.size] = 1.0
        assert padded(piece.size) >= piece.size
    return mask
