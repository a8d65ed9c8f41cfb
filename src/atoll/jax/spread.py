"""Arrays that are cut over several processes: which part of one is here, as an array of this process alone.

Both are views of the same device memory: nothing is copied, and nobody is asked.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.errors import LayoutError, PayloadError
from atoll.learner import I64

Shape: TypeAlias = tuple[int, ...]


def is_spread(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def indices_of(path: str, sharding: Any, shape: Shape, process: int) -> tuple[I64, ...]:
    """Along each dimension, the indices whose elements a process has. LayoutError if they make no box."""
    places = sharding.devices_indices_map(shape)
    boxes = {
        tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in places.items()
        if device.process_index == process
    }
    along = [sorted({box[dim] for box in boxes}) for dim in range(len(shape))]
    if not boxes or len(boxes) != int(np.prod([len(ranges) for ranges in along])):
        raise LayoutError(
            f"what process {process} has of leaf {path!r} is no box of it; make a mesh in which the devices of each "
            "process are next to each other (jax.make_mesh does)"
        )
    return tuple(np.concatenate([np.arange(*one) for one in ranges]) for ranges in along)


class Cut:
    """How a leaf is cut over processes, and the part that this one has."""

    def __init__(self, path: str, whole: Any, shape: Shape) -> None:
        if not isinstance(whole, NamedSharding):
            raise LayoutError(
                f"leaf {path!r} is cut over processes by a {type(whole).__name__}; use jax.sharding.NamedSharding"
            )
        indices = indices_of(path, whole, shape, jax.process_index())
        self._whole, self._whole_shape = whole, shape
        self.indices = indices
        """Along each dimension: what this process has. As runs of them: `ranges`."""
        self.shape = tuple(index.size for index in indices)
        self.ranges = [[[int(run[0]), int(run[-1]) + 1] for run in _runs(index)] for index in indices]
        try:
            self.sharding = NamedSharding(whole.mesh.local_mesh, whole.spec)
        except ValueError as error:
            raise LayoutError(
                f"the devices of process {jax.process_index()} are not next to each other in the mesh of leaf {path!r} "
                f"({' '.join(str(error).split())[:120]}); jax.make_mesh makes one in which they are"
            ) from None
        self._check(path, indices)

    @property
    def spec(self) -> list[Any]:
        """The names of the mesh's axes, as JSON has them."""
        return [list(axes) if isinstance(axes, tuple) else axes for axes in self._whole.spec]

    def _check(self, path: str, indices: tuple[I64, ...]) -> None:
        """Each device has here what it has of the whole."""
        there = self._whole.devices_indices_map(self._whole_shape)
        for device, index in self.sharding.devices_indices_map(self.shape).items():
            for own, part, whole, size in zip(indices, index, there[device], self._whole_shape, strict=True):
                if own[part].tolist() != list(range(*whole.indices(size))):
                    raise LayoutError(f"leaf {path!r} is cut in an order that Atoll does not know; use jax.make_mesh")

    def here(self, leaf: Any) -> Any:
        """The part of this process."""
        parts = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)

    def whole(self, here: Any) -> Any:
        """The array over all processes of which this is the part."""
        parts = [shard.data for shard in here.addressable_shards]
        return jax.make_array_from_single_device_arrays(self._whole_shape, self._whole, parts)


def _runs(index: I64) -> list[I64]:
    return list(np.split(index, np.flatnonzero(np.diff(index) != 1) + 1))


def cut_of(path: str, leaf: Any) -> Cut:
    return Cut(path, leaf.sharding, leaf.shape)


def cut_again(path: str, shape: Shape, mesh: Mesh, told: Any) -> Cut:
    """As a checkpoint tells of it. PayloadError if this mesh cannot be cut like that."""
    try:
        axes = (tuple(names) if isinstance(names, list) else names for names in told["spec"])
        spec = PartitionSpec(*axes)  # type: ignore[no-untyped-call]
        return Cut(path, NamedSharding(mesh, spec), shape)
    except (TypeError, KeyError, ValueError, LayoutError) as error:
        raise PayloadError(f"its leaf {path!r} cannot be cut as it was: {error}") from None


def part_here(leaf: Any) -> Any:
    return cut_of("", leaf).here(leaf) if is_spread(leaf) else leaf
