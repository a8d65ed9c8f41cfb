"""What a merge with `robust` needs of contributions: how far they agree, that none puts its length into one tensor, and
what is left of a mean without its extremes.

The cosine of v with the sum of the others' directions follows from sums over all, S = sum of unit(v_j) over the voices:

    v . (S - unit(v)) = v . S - |v|        |S - unit(v)|^2 = S . S - 2 unit(v) . S + 1

So one pass makes S and a second one the products with it, however many learners there are. Directions are of the whole
fragment. Slice by slice the cosines of honest learners are as clear in large tensors, and much nearer to zero in small
ones (docs/results/robust.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from atoll import kernels
from atoll.codec.fp32 import FP32
from atoll.codec.merges import get_merge
from atoll.codec.partial import Partial, alignment
from atoll.codec.protocol import BLOCK, F32, F64, I64, NORM_ZERO, quotient

OTHERS_MIN = 1e-3
"""A sum of the others' directions that is shorter has none of its own: they cancel."""
SHARE_FACTOR = 5.0
"""How much longer a contribution may be in one tensor than in most, beside the others. Honest ones were below 2.5; the
longest were of slow learners, which bring a step or two."""
CONTRIBUTIONS_MIN = 3
"""A median of fewer is that of the one that is wrong."""


def agreement(partial: Partial, learners: Sequence[str], voices: Collection[str]) -> dict[str, float]:
    """By learner: the cosine of what it contributed (`learners` has one name per contribution) with the sum of the
    directions of the voices, its own left out. NaN where one of the two is zero."""
    names = sorted(set(learners))
    of = np.array([names.index(learner) for learner in learners], np.int64)
    lengths = _lengths(partial, of, len(names))
    moved = lengths >= NORM_ZERO
    own = np.where(moved & np.array([name in voices for name in names]), 1.0, 0.0)
    factors = quotient(own, lengths)[of]
    products, squares = alignment(partial, partial.sum(np.tile(factors, (len(partial.radii), 1))))
    along = quotient(_by_learner(products.sum(axis=0), of, len(names)), lengths)  # unit(v) . S
    others = np.sqrt(np.maximum(squares.sum() - own * (2.0 * along - 1.0), 0.0))
    told = moved & (others >= OTHERS_MIN)
    cosines = np.where(told, (along - own) / np.maximum(others, OTHERS_MIN), math.nan)
    return dict(zip(names, np.clip(cosines, -1.0, 1.0).tolist(), strict=True))


def _by_learner(values: F64, of: I64, count: int) -> F64:
    return np.bincount(of, weights=values, minlength=count).astype(np.float64)


def _lengths(partial: Partial, of: I64, count: int) -> F64:
    """By learner: the norm of the sum of its contributions, which is rarely of more than one."""
    lengths = _by_learner(np.sqrt(np.square(partial.radii).sum(axis=0)), of, count)
    for learner in np.flatnonzero(np.bincount(of, minlength=count) > 1):
        if lengths[learner] >= NORM_ZERO:
            part = np.where(of == learner, 1.0 / lengths[learner], 0.0)  # so that the sum has norm 1 or less
            slices = partial.length(np.tile(part, (len(partial.radii), 1)))
            lengths[learner] *= math.hypot(*slices.tolist())
    return lengths


def balanced(partial: Partial) -> Partial:
    """Every contribution shortened in those slices in which it is far longer, beside the others, than it is as a rule.
    A slice that fewer than three of them have moved (an expert that only some have used) stays as it is."""
    moved = partial.directed > 0.0
    judged = moved & (np.count_nonzero(moved, axis=1) >= CONTRIBUTIONS_MIN)[:, None]
    if not judged.any():
        return partial
    usual = np.array([np.median(row[at]) if at.any() else 0.0 for row, at in zip(partial.radii, judged, strict=True)])
    beside = quotient(partial.radii, usual[:, None])
    rule = np.array([_lower_median(row[at]) for row, at in zip(beside.T, judged.T, strict=True)])
    kept = np.where(judged, np.minimum(1.0, quotient(SHARE_FACTOR * rule, beside)), 1.0)
    if (kept == 1.0).all():
        return partial
    return replace(partial, radii=partial.radii * kept, in_mean=partial.in_mean * kept)


def _lower_median(values: F64) -> float:
    """Of two slices the one that is not too long."""
    return float(np.sort(values)[(values.size - 1) // 2]) if values.size else 0.0


def trimmed(partial: Partial, merges: Sequence[str]) -> Partial:
    """With the trimmed mean for slices that are averaged: of each value the highest and the lowest that anybody brought
    are left out. A value that fewer than three have moved is averaged as it is, as is what has a codec that the loops
    do not know.

    A cosine is of the whole fragment, and a flipped embedding is a small part of one. This sees it value by value."""
    averaged = np.array([not get_merge(name).by_direction for name in merges], bool)
    judged = averaged & (np.count_nonzero(partial.directed > 0.0, axis=1) >= CONTRIBUTIONS_MIN)
    if partial.kinds is None or len(partial.weights) != len(partial.columns) or not judged.any():
        return partial
    shares = partial.shares()
    first = int(np.argmax(shares))
    ends = partial.slice_blocks * BLOCK
    inside = np.concatenate([np.arange(ends[at], ends[at + 1]) for at in np.flatnonzero(judged)])
    values = np.zeros(int(ends[-1]), np.float32)
    values[inside] = _without_extremes(partial, shares.astype(np.float32), inside)
    # Where heavy ones are extreme, light ones count for more: it goes no further than a mean could.
    lengths = np.sqrt(kernels.inspect(FP32.kind, values.view(np.uint8), values.size, partial.segments)[1])
    kept = judged * np.minimum(1.0, quotient(partial.mean_of(partial.radii, shares), lengths))
    return replace(
        partial,
        codecs=(*partial.codecs, FP32),
        columns=(*partial.columns, values.view(np.uint8)),
        member=np.append(partial.member, first),
        divisors=np.column_stack([partial.divisors, np.full(len(judged), np.inf)]),  # it is no part of D
        in_mean=np.column_stack([np.where(judged[:, None], 0.0, partial.in_mean), kept / shares[first]]),
    )


def _without_extremes(partial: Partial, shares: F32, inside: I64) -> F32:
    """The weighted mean of the contributions at these places. Twice over them, one decoded at a time: subtracting what
    is extreme from the sum of all would leave its rounding."""
    moved = np.zeros(inside.size, np.int64)
    highest, lowest = np.full(inside.size, -np.inf, np.float32), np.full(inside.size, np.inf, np.float32)
    high, low = np.zeros(inside.size, np.int64), np.zeros(inside.size, np.int64)
    for index in range(len(partial.columns)):
        one = _decoded(partial, index)[inside]
        moved += one != 0.0
        above, below = one > highest, one <= lowest  # the first of several equal ones, and the last: never the same
        highest, high = np.where(above, one, highest), np.where(above, index, high)
        lowest, low = np.where(below, one, lowest), np.where(below, index, low)
    total, weight = np.zeros(inside.size, np.float32), np.zeros(inside.size, np.float32)
    whole = moved < CONTRIBUTIONS_MIN
    for index, share in enumerate(shares):
        counted = np.where(whole | ((index != high) & (index != low)), share, np.float32(0.0))
        total += counted * _decoded(partial, index)[inside]
        weight += counted
    return np.divide(total, weight, out=np.zeros_like(total), where=weight > 0.0)


def _decoded(partial: Partial, index: int) -> F32:
    assert partial.kinds is not None
    only = slice(index, index + 1)
    return kernels.accumulate(partial.kinds[only], partial.columns[only], partial.in_mean[:, only], partial.segments)
