"""rda: g = N unit(D), radial-directional averaging. As long as the contributions are themselves."""

from __future__ import annotations

from atoll.codec.merges import SliceSums
from atoll.codec.protocol import F64, quotient


class Rda:
    by_direction = True

    def stretch(self, sums: SliceSums) -> F64:
        return quotient(sums.radius, sums.length)


RDA = Rda()
