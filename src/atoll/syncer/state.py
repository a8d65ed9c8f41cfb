"""The arrays of the run: for every fragment Theta, the outer optimizer's state, residual, and recent updates.

Memory per parameter: 4 bytes Theta, 4 outer momentum, 4 residual (none when the downlink is lossless or has no
feedback), up to 4 of the last merged gradient (a 1/16 sample for fragments above a million parameters), and
`ring_versions` encoded updates. It does not depend on the number of learners; contributions are held in their encoded
form, apart from this.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.codec import (
    NORM_MAX,
    Codec,
    GradientSample,
    MergeResult,
    OuterRates,
    OuterTarget,
    Partial,
    agreement,
    balanced,
    combine,
    fragment_codec,
    get_codec,
    get_outer,
    merge_fragment,
    reduce,
    trimmed,
)
from atoll.core import BLOCK, NO_VERSION, Fragment, Layout, SyncConfig, elements_of, ladder_down, padded, scales_steps
from atoll.errors import ConfigError, PayloadError

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

Stored = Mapping[int, tuple[int, int, Mapping[str, F32]]]
"""By fragment: version, checksum and arrays, as they were on disk."""

SHARE_DIGITS = 12
"""Of the sum of a merge's weights: with everybody there it is 1, whatever rounding made of its parts."""


@dataclass(frozen=True, slots=True)
class Update:
    """A published update, as it went out."""

    payload: U8
    checksum: int
    codec: str


@dataclass(frozen=True, slots=True)
class InspectedPayload:
    """A contribution's bytes and the norms that were measured when it came in."""

    payload: U8
    norms: NDArray[np.float64]
    codec: Codec
    """What it is encoded in, for its fragment."""


@dataclass(slots=True)
class FragmentArrays:
    theta: F32
    outer: dict[str, F32]
    """The outer optimizer's arrays by name: of Nesterov the momentum."""
    residual: F32 | None
    slice_blocks: NDArray[np.int64]
    slice_merges: list[str]
    version: int = 0
    checksum: int = 0
    sample: GradientSample | None = None
    ring: OrderedDict[int, Update] = field(default_factory=OrderedDict)

    def named(self) -> dict[str, F32]:
        """Everything that a version is made of, in the order in which it is written."""
        residual = {} if self.residual is None else {"residual": self.residual}
        return {"theta": self.theta, **self.outer, **residual}


class ModelState:
    """All fragments, or those of one shard. Methods are plain and may run on any thread, one at a time per
    fragment."""

    def __init__(self, layout: Layout, config: SyncConfig, owned: Collection[int] | None = None) -> None:
        self.layout = layout
        self.config = config
        self.owned = frozenset(range(len(layout.fragments)) if owned is None else owned)
        """The fragments whose arrays are here; of the others only versions are known. A shard has some, and the
        coordinator of shards has none."""
        self.fragments: list[FragmentArrays] = []
        self._seeds: dict[int, F32] = {}
        self._slices = [_slice_table(fragment, layout, config) for fragment in layout.fragments]
        self._outer = get_outer(config.outer)
        if config.correction != "none" and "momentum" not in self._outer.init(0):
            raise ConfigError(
                f"correction {config.correction} turns contributions towards the momentum, and outer {config.outer} "
                "keeps none; use correction none, or outer nesterov"
            )

    @property
    def keeps_residuals(self) -> bool:
        """True if what encoding an update has lost goes into the next one."""
        return self.config.feedback_down and any(not get_codec(name).lossless for name, _ in ladder_down(self.config))

    def codec_up(self, fragment: int, name: str = "") -> Codec:
        """The codec of this name for a fragment; without one, that of the run's contributions."""
        return fragment_codec(name or self.config.codec_up, self.layout, fragment)

    def contribution_size_max(self, fragment: int, codec: str = "") -> int:
        return self.codec_up(fragment, codec).size_max(self.layout.fragments[fragment].size)

    def seed_size(self, fragment: int) -> int:
        return 4 * self.layout.fragments[fragment].size

    # ------------------------------------------------------------ seed

    def put_seed(self, fragment: int, payload: U8) -> bool:
        """Keep one fragment of the seed; False if nobody can train from it."""
        values = np.frombuffer(payload, np.float32)
        if not is_usable(values):
            return False
        self._seeds[fragment] = values.copy() if not values.flags.writeable else values
        return True

    def commit_seed(self) -> tuple[int, ...]:
        """The seed becomes version 0; returns one checksum per fragment. All are there at once: others look on."""
        indices = range(len(self.layout.fragments))
        self.fragments = [self._seeded(i) if i in self.owned else self._elsewhere(i, 0, 0) for i in indices]
        self._seeds.clear()
        return tuple(arrays.checksum for arrays in self.fragments)

    def _seeded(self, index: int) -> FragmentArrays:
        theta = self._seeds[index]
        residual = np.zeros_like(theta) if self.keeps_residuals else None
        arrays = FragmentArrays(theta, self._outer.init(theta.size), residual, *self._slices[index])
        arrays.checksum = xxhash.xxh3_64_intdigest(theta.data)
        return arrays

    def _elsewhere(
        self, index: int, version: int, checksum: int, _named: Mapping[str, F32] | None = None
    ) -> FragmentArrays:
        """A fragment whose arrays are on a shard."""
        return FragmentArrays(np.empty(0, np.float32), {}, None, *self._slices[index], version, checksum)

    # ------------------------------------------------------------ what a commit writes, and coming back from it

    def durable(self, fragment: int) -> dict[str, F32]:
        """The arrays that a commit of this fragment writes."""
        return self.fragments[fragment].named()

    def restore(self, stored: Stored) -> None:
        """Put (version, checksum, arrays) of each fragment back. One that is missing waits for a learner's values, and
        arrays that the settings of that time did not need begin as in a new run."""

        def made(index: int) -> FragmentArrays:
            make = self._restored if index in self.owned else self._elsewhere
            return make(index, *stored.get(index, (NO_VERSION, 0, {})))

        self.fragments = [made(index) for index in range(len(self.layout.fragments))]

    def _restored(self, index: int, version: int, checksum: int, named: Mapping[str, F32]) -> FragmentArrays:
        size = self.layout.fragments[index].size
        arrays = {name: np.zeros(size, np.float32) for name in ("theta", "residual")} | self._outer.init(size)
        arrays |= {name: array for name, array in named.items() if name in arrays and array.size}
        if {array.size for array in arrays.values()} != {size}:
            raise PayloadError(f"fragment {index} has another size than the layout's {size}")
        theta, residual = arrays.pop("theta"), arrays.pop("residual")
        kept = residual if self.keeps_residuals else None
        return FragmentArrays(theta, arrays, kept, *self._slices[index], version, checksum)

    # ------------------------------------------------------------ fragments that move between shards

    def take_in(
        self, fragment: int, version: int, checksum: int, named: Mapping[str, F32], ring: Mapping[int, Update]
    ) -> None:
        """From here on this fragment is here. Without arrays it waits for a learner's values."""
        self.fragments[fragment] = self._restored(fragment, version, checksum, named)
        self.fragments[fragment].ring.update(sorted(ring.items()))
        self.owned |= {fragment}

    def give_away(self, fragment: int) -> None:
        """Another shard has it."""
        self.owned -= {fragment}
        if self.fragments:
            self.fragments[fragment] = self._elsewhere(fragment, NO_VERSION, 0)

    def distance(self, fragment: int, values: F32) -> float:
        """How far these parameters are from those that are here; 0 if there are none."""
        arrays = self.fragments[fragment]
        return 0.0 if arrays.version == NO_VERSION else float(np.linalg.norm(values - arrays.theta))

    def heal(self, fragment: int, version: int, checksum: int, payload: U8) -> None:
        """Take a learner's parameters of a version that was lost. Momentum stays as it is."""
        arrays = self.fragments[fragment]
        arrays.theta[:] = np.frombuffer(payload, np.float32)
        if arrays.residual is not None:
            arrays.residual[:] = 0.0
        arrays.version, arrays.checksum, arrays.sample = version, checksum, None
        arrays.ring.clear()

    # ------------------------------------------------------------ contributions and merges

    def inspect(self, fragment: int, payload: U8, codec: str = "") -> tuple[bool, InspectedPayload]:
        """Finite or not, and the norm of each slice: the guards' view of a contribution, and half of its merge."""
        size, encoded_in = self.layout.fragments[fragment].size, self.codec_up(fragment, codec)
        finite, norms = encoded_in.inspect(payload, size, self._slices[fragment][0])
        return finite, InspectedPayload(payload, norms, encoded_in)

    def compare(
        self, fragment: int, held: Sequence[InspectedPayload], learners: Sequence[str], voices: Collection[str]
    ) -> dict[str, float]:
        """How far each learner's contributions agree with those of the voices (`core.effects.Compared`)."""
        payloads, norms = [item.payload for item in held], [item.norms for item in held]
        blocks = self._slices[fragment][0]
        partial = reduce(payloads, [item.codec for item in held], [1.0] * len(held), norms, blocks)
        return agreement(partial, learners, voices)

    def reduce(self, fragment: int, held: Sequence[InspectedPayload], weights: Sequence[float]) -> Partial:
        """These contributions with their weights, as a part of a merge."""
        payloads, norms = [item.payload for item in held], [item.norms for item in held]
        codecs, blocks = [item.codec for item in held], self.fragments[fragment].slice_blocks
        return reduce(payloads, codecs, weights, norms, blocks)

    def merge(
        self,
        fragment: int,
        held: Sequence[InspectedPayload],
        weights: Sequence[float],
        groups: Sequence[Partial] = (),
        codec_down: str = "",
    ) -> MergeResult:
        """Merge, take the outer step and make the next version. Untouched if the result is not finite. `groups` are
        parts that relays have condensed; they come after the contributions, in the order given. The update is encoded
        in `codec_down`, or as the settings say."""
        arrays, config = self.fragments[fragment], self.config
        codec_down = codec_down or config.codec_down
        every = config.momentum_restart or arrays.version + 1
        parts = [self.reduce(fragment, held, weights)] if held else []
        partial = combine([*parts, *groups]) if groups else parts[0]
        if config.robust != "off":
            partial = balanced(partial)
        if config.robust == "trimmed":
            partial = trimmed(partial, arrays.slice_merges)
        result = merge_fragment(
            partial,
            arrays.slice_merges,
            OuterTarget(arrays.theta, arrays.outer, arrays.residual),
            codec_down=fragment_codec(codec_down, self.layout, fragment),
            outer=config.outer,
            rates=OuterRates(config.outer_lr, config.outer_momentum, arrays.version % every),
            previous=arrays.sample,
            feedback=config.feedback_down,
            correction=config.correction,
            restart=self._restarts(arrays.version),
            share=self._share([*weights, *(float(group.weights[0]) for group in groups)]),
        )
        if result.finite:
            arrays.sample = result.sample
            arrays.version += 1
            arrays.checksum = xxhash.xxh3_64_intdigest(arrays.theta.data)
            digest = xxhash.xxh3_64_intdigest(result.update.data)
            arrays.ring[arrays.version] = Update(result.update, digest, codec_down)
            while len(arrays.ring) > self.config.ring_versions:
                arrays.ring.popitem(last=False)
        return result

    def _share(self, weights: Sequence[float]) -> float:
        """How much of the merged gradient counts (`core.effects.Merge`)."""
        return round(math.fsum(weights), SHARE_DIGITS) if scales_steps(self.config) else 1.0

    def _restarts(self, version: int) -> bool:
        """True if the outer optimizer begins anew in the merge into the version after this one. It follows from the
        version, so that a replay or a syncer that comes back does the same."""
        every = self.config.momentum_restart
        return every > 0 and version > 0 and version % every == 0

    # ------------------------------------------------------------ export

    def tensors(self) -> dict[str, F32]:
        """The published parameters by tensor name, in fp32."""
        flat = {spec.name: np.empty(elements_of(spec), np.float32) for spec in self.layout.tensors}
        for fragment, arrays in zip(self.layout.fragments, self.fragments, strict=True):
            for piece in fragment.slices:
                name = self.layout.tensors[piece.tensor].name
                flat[name][piece.start : piece.stop] = arrays.theta[piece.offset : piece.offset + piece.size]
        return {spec.name: flat[spec.name].reshape(spec.shape) for spec in self.layout.tensors}

    def save(self, path: Path) -> None:
        """Write the published parameters as safetensors; a reader sees the old file or the new one, never a part."""
        from safetensors.numpy import save_file

        versions = ",".join(str(arrays.version) for arrays in self.fragments)
        temporary = path.with_name(path.name + ".tmp")
        save_file(self.tensors(), temporary, metadata={"format": "pt", "atoll_versions": versions})
        _order_metadata(temporary)
        temporary.replace(path)


def _order_metadata(path: Path) -> None:
    """Sort what safetensors writes in the order of a hash, so that the same model is the same file, byte for byte."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(ordered) == size:
            file.seek(8)
            file.write(ordered)


def is_usable(values: F32) -> bool:
    """True if these parameters are finite, and small enough that no step can make them overflow."""
    largest = max(float(values.max(initial=0.0)), -float(values.min(initial=0.0)))  # NaN, if there is one, in both
    return largest * math.sqrt(values.size) <= NORM_MAX


def _slice_table(fragment: Fragment, layout: Layout, config: SyncConfig) -> tuple[NDArray[np.int64], list[str]]:
    """Block offsets of the fragment's slices and how each is merged."""
    edges = np.zeros(len(fragment.slices) + 1, np.int64)
    for index, piece in enumerate(fragment.slices):
        edges[index + 1] = edges[index] + padded(piece.size) // BLOCK
    always = [layout.tensors[piece.tensor].merge == "mean" for piece in fragment.slices]
    return edges, ["mean" if mean else config.merge for mean in always]
