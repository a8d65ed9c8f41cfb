"""half-rda: g = N sqrt(|D| / W) unit(D). Averaging shortens equally long contributions by |D|; RDA gives all of that
length back, this one the square root of it: its length is the geometric mean of the other two."""

from __future__ import annotations

import numpy as np

from atoll.codec.merges import SliceSums
from atoll.codec.protocol import F64, quotient


class HalfRda:
    by_direction = True

    def stretch(self, sums: SliceSums) -> F64:
        # A square root is correctly rounded on every machine; other powers are not.
        return quotient(sums.radius, np.sqrt(sums.length * sums.directed))


HALF_RDA = HalfRda()
