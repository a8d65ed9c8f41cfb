"""Sorted, disjoint intervals of positions, each with a place in some flat array; and copies between such arrays.

Where a model is cut over processes, what one of them has is a set of positions of a fragment. Sets of any size are kept
as intervals, as arrays of numbers: a tensor that is cut along its columns has one for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
FEW = 64
"""Copies of so many intervals are made one by one; more of them by one array of places."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Positions [start, stop), ascending; position start + i is element at + i of the array that they are kept in."""

    start: I64
    stop: I64
    at: I64

    @property
    def lengths(self) -> I64:
        return self.stop - self.start

    @property
    def count(self) -> int:
        """Positions, not intervals."""
        return int(self.lengths.sum())

    def __bool__(self) -> bool:
        return bool(self.start.size)

    def places(self, lo: I64, index: I64) -> I64:
        """Where positions are in the array, of which the interval is known."""
        return self.at[index] + (lo - self.start[index])


def intervals(start: Any, stop: Any, at: Any = None) -> Intervals:
    """Without `at` they are kept one behind the other."""
    start, stop = np.asarray(start, np.int64), np.asarray(stop, np.int64)
    if at is None:
        at = np.concatenate(([0], np.cumsum(stop - start)[:-1])) if start.size else start
    return Intervals(start, stop, np.asarray(at, np.int64))


EMPTY = intervals([], [])


def joined(parts: list[Intervals]) -> Intervals:
    """Several sets, which must follow each other."""
    parts = [part for part in parts if part]
    if not parts:
        return EMPTY
    return Intervals(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("start", "stop", "at")))


@dataclass(frozen=True, slots=True)
class Common:
    """What two sets have in common: the positions, and which interval of each they are in."""

    start: I64
    stop: I64
    first: I64
    second: I64


def common(first: Intervals, second: Intervals) -> Common:
    low = np.searchsorted(second.stop, first.start, "right")
    high = np.searchsorted(second.start, first.stop, "left")
    counts = np.maximum(high - low, 0)
    a = np.repeat(np.arange(first.start.size), counts)
    within = np.arange(a.size) - np.repeat(np.cumsum(counts) - counts, counts)
    b = np.repeat(low, counts) + within
    return Common(np.maximum(first.start[a], second.start[b]), np.minimum(first.stop[a], second.stop[b]), a, b)


def without(first: Intervals, second: Intervals) -> Intervals:
    """The positions of the first that are not in the second."""
    if not first or not second:
        return first
    both = common(first, second)
    edges = np.concatenate((first.start, both.stop)), np.concatenate((both.start, first.stop))
    owners = (
        np.concatenate((np.arange(first.start.size), both.first)),
        np.concatenate((both.first, np.arange(first.stop.size))),
    )
    # Within each interval of the first: its start and the ends of what is taken out open a rest, their counterparts
    # close it. Sorted by interval and position, the n-th opening belongs to the n-th closing.
    opening = np.lexsort((edges[0], owners[0]))
    closing = np.lexsort((edges[1], owners[1]))
    start, stop, owner = edges[0][opening], edges[1][closing], owners[0][opening]
    left = stop > start
    start, stop, owner = start[left], stop[left], owner[left]
    return Intervals(start, stop, first.places(start, owner))


@dataclass(frozen=True, slots=True)
class Pieces:
    """Elements of a flat array: `lengths[i]` of them from `at[i]` on."""

    at: I64
    lengths: I64

    @property
    def count(self) -> int:
        return int(self.lengths.sum())

    def _places(self) -> I64:
        ends = np.cumsum(self.lengths)
        return np.repeat(self.at - (ends - self.lengths), self.lengths) + np.arange(ends[-1] if ends.size else 0)

    def take(self, array: NDArray[Any]) -> NDArray[Any]:
        """These elements, one behind the other."""
        if self.at.size == 1:
            return array[int(self.at[0]) : int(self.at[0] + self.lengths[0])]
        if self.at.size <= FEW:
            pairs = zip(self.at.tolist(), self.lengths.tolist(), strict=True)
            return np.concatenate([array[at : at + length] for at, length in pairs] or [array[:0]])
        return array[self._places()]

    def put(self, array: NDArray[Any], values: NDArray[Any]) -> None:
        """The other way round."""
        if self.at.size <= FEW:
            taken = 0
            for at, length in zip(self.at.tolist(), self.lengths.tolist(), strict=True):
                array[at : at + length] = values[taken : taken + length]
                taken += length
        else:
            array[self._places()] = values


def moves(source: Intervals, target: Intervals) -> tuple[Pieces, Pieces]:
    """What the two sets have in common: where it is in the array of each."""
    both = common(source, target)
    lengths = both.stop - both.start
    return (
        Pieces(source.places(both.start, both.first), lengths),
        Pieces(target.places(both.start, both.second), lengths),
    )
