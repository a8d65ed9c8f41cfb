"""Real arrays: the syncer's `ModelState` and the learner's `Vault`, as in production, on a model of a few blocks.

The inner loop is a deterministic function of parameters, step and learner, so that the same run with real processes
gives the same bits (tests/sim/test_sim_equals_real.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.codec import Codec, fragment_codec
from atoll.core import Fetch, FetchedPayload, Layout, OutgoingPayload, SyncConfig, TensorSpec, padded
from atoll.errors import PayloadError
from atoll.instruments.chaos import VALUES, encode_poisoned, encode_scaled
from atoll.instruments.sim.payloads import Made
from atoll.learner import HeldVersion, LearnerArrays, MakeValues, Snapshot
from atoll.syncer import InspectedPayload, ModelState

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

LEARNING_RATE = np.float32(0.05)


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


_codecs: dict[int, tuple[weakref.ref[U8], str]] = {}
"""What payloads are encoded in, by their identity: whoever merges one again (a replay, the next syncer) must know."""


def encoded_in(payload: U8, codec: str) -> str:
    """This codec, which is remembered; or, if none is given, the one that was."""
    key, known = id(payload), _codecs.get(id(payload))
    if codec:
        _codecs[key] = (weakref.ref(payload, lambda _: _codecs.pop(key, None)), codec)
        return codec
    return known[1] if known is not None and known[0]() is payload else ""


class ArraySyncer:
    def __init__(self, layout: Layout, config: SyncConfig) -> None:
        self.state = ModelState(layout, config)
        self._looked: dict[int, tuple[weakref.ref[U8], bool, F64, Codec]] = {}
        """What was seen of a contribution, by the payload's identity; gone when the payload is, merged or not."""

    def put_seed(self, fragment: int, payload: U8) -> bool:
        return self.state.put_seed(fragment, payload.copy())

    def commit_seed(self) -> tuple[int, ...]:
        self.state.fragments.clear()
        return self.state.commit_seed()

    def look(self, fragment: int, payload: U8, codec: str = "") -> tuple[bool, InspectedPayload]:
        """What `inspect` and the merge want to know. Any thread."""
        key = id(payload)
        looked = self._looked.get(key)
        if looked is None or looked[0]() is not payload:
            codec = encoded_in(payload, codec)
            finite, held = self.state.inspect(fragment, payload, codec)
            reference = weakref.ref(payload, lambda _: self._looked.pop(key, None))
            self._looked[key] = looked = (reference, finite, held.norms, held.codec)
        return looked[1], InspectedPayload(payload, looked[2], looked[3])

    def inspect(self, fragment: int, payload: U8, codec: str = "") -> tuple[bool, float]:
        finite, held = self.look(fragment, payload, codec)
        return finite, float(np.sqrt(np.square(held.norms).sum())) if finite else 0.0

    def compare(
        self, fragment: int, payloads: Sequence[U8], learners: Sequence[str], voices: Collection[str]
    ) -> dict[str, float]:
        held = [self.look(fragment, payload)[1] for payload in payloads]
        return self.state.compare(fragment, held, learners, voices)

    def merge(
        self, fragment: int, version: int, payloads: Sequence[U8], weights: Sequence[float], codec_down: str
    ) -> Made:
        held = [self.look(fragment, payload)[1] for payload in payloads]
        result = self.state.merge(fragment, held, weights, codec_down=codec_down)
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

    def inspect_whole(self, fragment: int, payload: U8) -> tuple[bool, float]:
        values = payload.view(np.float32)
        finite = bool(np.isfinite(values).all())
        return finite, self.state.distance(fragment, values) if finite else 0.0

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

    def update_bytes(self, fragment: int, version: int) -> int:
        codec = fragment_codec(self.state.fragments[fragment].ring[version].codec, self.state.layout, fragment)
        return codec.size_max(self.state.layout.fragments[fragment].size)

    def whole_bytes(self, fragment: int) -> int:
        return self.state.seed_size(fragment)


class Replaced:
    """A snapshot of given values (`learner.parameters.Snapshot`)."""

    __slots__ = ("_values",)

    def __init__(self, values: F32) -> None:
        self._values = values

    def values(self) -> F32:
        return self._values


class ArrayParameters:
    """A model of a few blocks in host memory (`learner.parameters.Parameters`)."""

    def __init__(self, specs: tuple[TensorSpec, ...], learner: str) -> None:
        self.specs = specs
        self._learner = learner
        self._steps = 0

    def lay_out(self, layout: Layout) -> None:
        masks = [_real_elements(layout, fragment) for fragment in range(len(layout.fragments))]
        self._mask = np.concatenate(masks)
        self._target = np.concatenate([target_of(p, mask.size, self._learner) for p, mask in enumerate(masks)])
        self._flat = np.zeros(self._mask.size, np.float32)
        self.theta: list[F32] = np.split(self._flat, np.cumsum([mask.size for mask in masks])[:-1])

    def step(self) -> None:
        self._steps += 1
        inner_step(self._flat, self._target, self._steps)
        self._flat *= self._mask  # padding stays zero

    def read(self, fragment: int) -> Replaced:
        return Replaced(self.theta[fragment].copy())

    def release(self, snapshot: Snapshot) -> None:
        return

    def stage(self, fragment: int, make: MakeValues) -> F32:
        return make(None)

    def write(self, fragment: int, staged: F32) -> None:
        self.theta[fragment][:] = staged

    def add(self, fragment: int, staged: F32) -> None:
        self.theta[fragment] += staged

    def mix(self, fragment: int, staged: F32, alpha: float) -> None:
        self.theta[fragment] += np.float32(1.0 - alpha) * (staged - self.theta[fragment])

    def as_kept(self, fragment: int, theta: F32) -> F32:
        return theta

    def save(self) -> F32:
        return self._flat.copy()

    def restore(self, saved: F32) -> None:
        self._flat[:] = saved


class VaultLearner(LearnerArrays):
    """What a learner's payloads do with the vault, whatever the parameters are: here arrays, in the lab a model's."""

    def prepare_whole(self, fragment: int, came: FetchedPayload) -> HeldVersion:
        checksum = xxhash.xxh3_64_intdigest(came.payload.data)
        return self.vault.prepare_whole(fragment, came.version, came.payload, checksum)

    def held(self, fragment: int, version: int) -> tuple[U8, int] | None:
        held = self.vault.held(fragment, version)
        if held is None:
            return None
        return held.theta.copy().view(np.uint8), xxhash.xxh3_64_intdigest(held.theta.data)

    def seed(self, fragment: int) -> U8:
        return self.seed_values(fragment).copy().view(np.uint8)

    def forged(self, fragment: int) -> OutgoingPayload:
        """What it has trained itself, which is nobody's version."""
        payload = self.seed(fragment)
        return OutgoingPayload(payload, int(payload.nbytes), xxhash.xxh3_64_intdigest(payload.data))


class ArrayLearner(VaultLearner):
    def __init__(self, layout: Layout, config: SyncConfig, learner: str) -> None:
        self.model = ArrayParameters(layout.tensors, learner)
        super().__init__(self.model, layout, config)

    def step(self) -> None:
        self.model.step()

    def encode(self, fragment: int, seq: int, poison: str) -> OutgoingPayload | None:
        sending = self.vault.sending[fragment, seq]
        try:
            if poison in VALUES:
                payload = encode_scaled(self.vault, sending, VALUES[poison])
                sending.residual = None  # what a lie left out is owed to nobody
            else:
                payload = encode_poisoned(self.vault, sending, poison) if poison else self.vault.encode(sending)
        except PayloadError:
            return None
        return OutgoingPayload(payload, int(payload.nbytes), xxhash.xxh3_64_intdigest(payload.data))

    def prepare_update(self, wanted: Fetch, payload: U8) -> HeldVersion:
        return self.vault.prepare_update(wanted.fragment, self.before(wanted), payload, wanted.checksum)


def _real_elements(layout: Layout, fragment: int) -> F32:
    """1 where the fragment holds a parameter, 0 where it is padded."""
    mask = np.zeros(layout.fragments[fragment].size, np.float32)
    for piece in layout.fragments[fragment].slices:
        mask[piece.offset : piece.offset + piece.size] = 1.0
        assert padded(piece.size) >= piece.size
    return mask
