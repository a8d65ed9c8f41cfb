"""A merge method of a user's own: the mean, no longer than half of what the learners went on average."""

from __future__ import annotations

import numpy as np

from atoll.codec import SliceSums


class ToyHalfMean:
    by_direction = False

    def stretch(self, sums: SliceSums) -> np.ndarray:
        return sums.radius * np.minimum(1.0, 0.5 / np.maximum(sums.length, 1e-6))


HALF_MEAN = ToyHalfMean()
