"""Which part of each parameter a process has, by the names of the whole model: the manifest of its inner state.

The part of a tensor that a process holds is a product of index ranges, one set along each dimension: rows of FSDP2,
columns of tensor parallel, both, or everything. So what two processes have in common is such a product, too, and state
that lies beside the parameters can be cut anew for any other mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from atoll.errors import ConfigError
from atoll.learner.inner import limits
from atoll.learner.inner.captured import OptimizerLike
from atoll.learner.local_part import indices_at, is_dtensor, ranges_of
from atoll.learner.warmup import torch_optimizers

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Along one dimension, ascending: (first, behind the last)."""
Names: TypeAlias = Callable[[], Mapping[int, str]]
"""The plain names of a model's parameters, by their ids."""


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What one process has of one parameter."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole."""
    held: tuple[Ranges, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.held)

    @property
    def whole(self) -> bool:
        return self.local_shape == self.shape


Places: TypeAlias = list[list[HeldPart]]
"""For each of torch's optimizers inside of an optimizer, for each of its parameters in the order of its groups."""


def places_of(optimizer: OptimizerLike | None, names: Names) -> Places | None:
    """None where that cannot be told: of an optimizer that is not made of torch's."""
    known, found = names(), list(torch_optimizers(optimizer))
    if not found:
        return None
    try:
        return [[_place(known.get(id(p), f"#{i}"), p) for i, p in enumerate(_parameters(part))] for part in found]
    except ConfigError:
        return None


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _place(name: str, parameter: torch.Tensor) -> HeldPart:
    shape, dtype = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
    if not is_dtensor(parameter):
        return HeldPart(name, dtype, shape, tuple(((0, size),) for size in shape))
    sharded: Any = parameter
    indices = indices_at(name, sharded, tuple(sharded.device_mesh.get_coordinate() or ()))
    return HeldPart(name, dtype, shape, tuple(map(ranges_of, indices))[: len(shape)])


# ---------------------------------------------------------------- as JSON


def to_json(places: Places) -> list[Any]:
    return [[[p.name, p.dtype, p.shape, p.held] for p in part] for part in places]


def from_json(value: Any) -> Places:
    """Whatever is wrong raises one of `captured.WRONG`."""
    if type(value) is not list or sum(map(len, value)) > limits.TENSORS_MAX:
        raise ValueError("its manifest is no list, or too long")
    return [[_read(*entry) for entry in part] for part in value]


def _read(name: Any, dtype: Any, shape: Any, held: Any) -> HeldPart:
    if type(name) is not str or type(dtype) is not str or len(shape) > limits.DIMENSIONS_MAX:
        raise ValueError("its manifest names something else than parameters")
    place = HeldPart(name, dtype, tuple(shape), tuple(tuple((start, stop) for start, stop in one) for one in held))
    if any(type(size) is not int or not 0 <= size <= limits.COUNT_MAX for size in place.shape):
        raise ValueError(f"its manifest gives {name[:100]!r} a wrong shape")
    for size, ranges in zip(place.shape, place.held, strict=True):
        edges = [edge for both in ranges for edge in both]
        if any(type(edge) is not int for edge in edges) or edges != sorted(edges) or edges[-1:] > [size]:
            raise ValueError(f"its manifest gives {name[:100]!r} ranges that are not inside of it")
        if edges[:1] < [0] and edges:
            raise ValueError(f"its manifest gives {name[:100]!r} ranges that are not inside of it")
    return place


# ---------------------------------------------------------------- cutting anew


def copy_common(target: torch.Tensor, mine: HeldPart, source: torch.Tensor, theirs: HeldPart) -> int:
    """Copy the elements that both places have; returns how many. Nothing else of the source is read."""
    count = 0
    pairs = [_common(own, other) for own, other in zip(mine.held, theirs.held, strict=True)]
    for pieces in itertools.product(*pairs):
        here = tuple(slice(at, at + length) for at, _, length in pieces)
        there = tuple(slice(at, at + length) for _, at, length in pieces)
        target[here].copy_(source[there])
        count += math.prod(length for _, _, length in pieces)
    return count


def _common(mine: Ranges, theirs: Ranges) -> list[tuple[int, int, int]]:
    """(position in my part, position in theirs, length) of what both have along one dimension."""
    found = []
    for (start, stop), at in zip(mine, _positions(mine), strict=True):
        for (low, high), other in zip(theirs, _positions(theirs), strict=True):
            first, last = max(start, low), min(stop, high)
            if first < last:
                found.append((at + first - start, other + first - low, last - first))
    return found


def _positions(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Where each range begins in the process's own part."""
    return [0, *itertools.accumulate(stop - start for start, stop in ranges)][: len(ranges)]
