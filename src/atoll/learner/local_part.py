"""Tensors of which this process has only a part (DTensors of FSDP2 and tensor parallel), and what it has of them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.errors import ConfigError


def is_dtensor(value: object) -> bool:
    tensors = sys.modules.get("torch.distributed.tensor")  # imported by whoever shards, and not by us: it takes long
    return tensors is not None and isinstance(value, tensors.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of it."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.detach()


def part_like(value: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A value of this process's part, as a tensor that is cut like `whole`; itself where that is not cut."""
    if not is_dtensor(whole):
        return value
    like: Any = whole
    kind: Any = type(whole.data)
    made: torch.Tensor = kind.from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


def indices_at(name: str, parameter: Any, where: tuple[int, ...]) -> tuple[NDArray[np.int64], ...]:
    """The indices along each dimension that the rank at this place of the mesh holds."""
    from torch.distributed.tensor.placement_types import Replicate, Shard

    shape = tuple(parameter.shape) or (1,)
    index = [torch.arange(size) for size in shape]
    for axis, placement in enumerate(parameter.placements):
        strided = type(placement).__name__ == "_StridedShard"  # no subclass of Shard in every version of torch
        if isinstance(placement, Replicate):
            continue
        if not (isinstance(placement, Shard) or strided):
            raise ConfigError(
                f"parameter {name!r} has the placement {placement}, of which no rank has the values; shard or "
                "replicate it (Shard, Replicate)"
            )
        dim = placement.dim
        along: Any = Shard(0) if not strided else type(placement)(0, split_factor=placement.split_factor)
        chunks, _ = along._split_tensor(index[dim], parameter.device_mesh.size(axis), with_padding=False)
        index[dim] = chunks[where[axis]] if where[axis] < len(chunks) else index[dim][:0]
    return tuple(one.numpy() for one in index)


def ranges_of(index: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Ascending indices as ranges: (first, behind the last)."""
    if not index.size:
        return ()
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    first = index[np.concatenate(([0], breaks))].tolist()
    last = index[np.concatenate((breaks - 1, [index.size - 1]))].tolist()
    return tuple((start, stop + 1) for start, stop in zip(first, last, strict=True))
