"""A codec of a user's own. Its sizes depend on the data: only what is large is sent, the rest waits in the residual."""

from __future__ import annotations

import numpy as np

from atoll.codec import PlainCodec


class ToySparse(PlainCodec):
    """Indices (u4), then values (f4), of what is at least a quarter of the largest."""

    name = "toy-sparse"

    def size_max(self, n: int) -> int:
        return 8 * n

    def encode(self, values: np.ndarray) -> bytes:
        size = np.abs(values)
        kept = np.flatnonzero((size >= size.max(initial=0.0) / 4) & (size > 0))
        return kept.astype("<u4").tobytes() + values[kept].tobytes()

    def decode(self, payload: np.ndarray, n: int) -> np.ndarray:
        indices, values = np.split(payload, 2)
        at = indices.view("<u4")
        if np.any(np.diff(at.astype(np.int64)) <= 0):
            raise ValueError("indices do not rise")
        decoded = np.zeros(n, np.float32)
        decoded[at] = values.view("<f4")
        return decoded


SPARSE = ToySparse()
