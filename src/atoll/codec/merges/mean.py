"""mean: g = S. What contributions disagree about cancels, so it is shorter than they are."""

from __future__ import annotations

from atoll.codec.merges import SliceSums
from atoll.codec.protocol import F64


class Mean:
    by_direction = False

    def stretch(self, sums: SliceSums) -> F64:
        return sums.radius


MEAN = Mean()
