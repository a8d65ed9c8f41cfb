"""What a merge with `robust` needs of contributions: how far they agree, and that none puts its length into one tensor.

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

from atoll.codec.partial import Partial, alignment
from atoll.codec.protocol import F64, I64, NORM_ZERO, quotient

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
