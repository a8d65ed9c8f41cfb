"""An outer optimizer of a user's own, with two arrays of state: Adam, for fragments of any size."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from atoll.codec import OuterRates


class ToyAdam:
    def init(self, size: int) -> dict[str, np.ndarray]:
        return {"first": np.zeros(size, np.float32), "second": np.full(size, 1e-12, np.float32)}

    def update(self, gradient: np.ndarray, state: Mapping[str, np.ndarray], rates: OuterRates) -> np.ndarray:
        beta = np.float32(rates.momentum)
        state["first"][:] = beta * state["first"] + (1 - beta) * gradient
        state["second"][:] = beta * state["second"] + (1 - beta) * gradient * gradient
        grown = np.float32(1.0 - rates.momentum ** (rates.updates + 1))
        return np.float32(-0.01 * rates.lr) * (state["first"] / grown) / np.sqrt(state["second"] / grown)


ADAM = ToyAdam()
