"""delayed: Nesterov's momentum, taken up every fourth update (delayed Nesterov, arXiv 2401.09135).

    each update     step = -lr * g;  waiting += g
    every fourth    momentum = mu * momentum + waiting / 4;  step -= lr * 4 * mu * momentum;  waiting = 0

Where merges hold contributions of different ages, momentum that is applied at once pushes along a direction that the
late ones already have in them. Collected over four merges it is a mean over all of them. A gradient that stays moves
the model as far as `nesterov` does: 1 / (1 - mu) times as far as without momentum.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from atoll.codec.outer import OuterRates
from atoll.codec.protocol import F32

EVERY = 4
"""Updates. The paper takes the number of workers that come one by one; here a merge has most of them."""


class Delayed:
    def init(self, size: int) -> dict[str, F32]:
        return {"momentum": np.zeros(size, np.float32), "waiting": np.zeros(size, np.float32)}

    def update(self, gradient: F32, state: Mapping[str, F32], rates: OuterRates) -> F32:
        momentum, waiting, lr, mu = (
            state["momentum"],
            state["waiting"],
            np.float32(rates.lr),
            np.float32(rates.momentum),
        )
        waiting += gradient
        step: F32 = -lr * gradient
        if rates.updates % EVERY == EVERY - 1:
            momentum *= mu
            momentum += waiting / np.float32(EVERY)
            waiting[:] = 0.0
            step -= lr * np.float32(EVERY) * mu * momentum
        return step


DELAYED = Delayed()
