"""rownorm: Nesterov on a gradient whose rows are brought half way to one length.

A learner's optimizer normalises before the average: AdamW's steps are about equally long in every row, Muon's too. What
the average has lost of a row's length is what learners disagreed about there. This outer step gives every row (a block
of 256 values) the root of that back, at most a factor of two, and leaves the length of the whole as it was: `outer_lr`
and the merge decide about that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from atoll.codec.outer import OuterRates
from atoll.codec.outer.nesterov import NESTEROV
from atoll.codec.protocol import BLOCK, F32, F64

FACTOR_MAX = 2.0
"""Rows that hardly move have little but noise."""


class RowNorm:
    def init(self, size: int) -> dict[str, F32]:
        return NESTEROV.init(size)

    def update(self, gradient: F32, state: Mapping[str, F32], rates: OuterRates) -> F32:
        return NESTEROV.update(levelled(gradient), state, rates)


def levelled(gradient: F32) -> F32:
    """The same gradient with rows of more equal length, and the same norm."""
    squares = row_squares(gradient)
    moving = squares > 0.0
    total = math.fsum(squares)
    if not total:
        return gradient
    usual = total / int(moving.sum())
    factors = np.ones_like(squares)
    factors[moving] = np.clip(np.sqrt(np.sqrt(usual / squares[moving])), 1.0 / FACTOR_MAX, FACTOR_MAX)
    factors *= math.sqrt(total / math.fsum(squares * factors * factors))
    even: F32 = (gradient.reshape(-1, BLOCK) * factors.astype(np.float32)[:, None]).ravel()
    return even


def row_squares(gradient: F32) -> F64:
    """Sum of the squares of each block. Added in halves, one order on every machine: the bits must be the same."""
    sums: F64 = np.square(gradient.reshape(-1, BLOCK), dtype=np.float64)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


ROWNORM = RowNorm()
