"""nesterov: buf = mu * buf + g; step = -lr * (g + mu * buf), per element in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from atoll.codec.outer import OuterRates
from atoll.codec.protocol import F32


class Nesterov:
    """The compiled merge does the same, with the same bits, in its one pass over the memory."""

    def init(self, size: int) -> dict[str, F32]:
        return {"momentum": np.zeros(size, np.float32)}

    def update(self, gradient: F32, state: Mapping[str, F32], rates: OuterRates) -> F32:
        momentum, lr, mu = state["momentum"], np.float32(rates.lr), np.float32(rates.momentum)
        momentum *= mu
        momentum += gradient
        step: F32 = -lr * (gradient + mu * momentum)
        return step


NESTEROV = Nesterov()
