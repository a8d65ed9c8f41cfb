"""HeLoCo's correction (arXiv 2606.00271): contributions that disagree with the outer momentum are turned towards it.

Per contribution and tensor slice, with the pseudo-gradient v, the momentum m of the fragment before this merge and

    c = cos(v, m)        conf = |v| / (|v| + kappa |m| + epsilon)

    c >= c_ok            v as it is
    0 <= c < c_ok        |v| unit((1 - lambda) unit(v) + lambda unit(m)),   lambda = min(k_d (1 - c) conf, 1)
    c < 0                v - beta c |v| unit(m),                            beta = min(k_s (-c) conf, beta_max)

Whatever the case, the result is own * v + pull * m with two numbers, and its norm follows from |v|, |m| and v . m. So
nothing is decoded and stored: the merge takes the corrected contributions as sums of the ones that came in and, as one
more summand, the momentum. What the correction costs is the products v . m, one more pass over the contributions.

A tensor that is cut into slices over several fragments is corrected slice by slice. While the momentum is zero (the
first merge, or after a restart of the momentum) everything passes as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

C_OK: Final = 0.2
K_SHRINK: Final = 0.5
K_TURN: Final = 1.0
BETA_MAX: Final = 0.5
KAPPA: Final = 3.0
EPSILON: Final = 1e-8
"""The constants of the paper."""
RATIO_MIN: Final = 1e-20
"""A momentum that is smaller than a contribution by more than this counts as zero: |v| / |m| must stay in fp32."""


@dataclass(frozen=True, slots=True)
class Corrected:
    """v' = own * v + pull * m, per slice and contribution."""

    own: F64
    pull: F64
    norms: F64
    """|v'|."""


def correct(norms: F64, products: F64, momentum_norms: F64, *, zero: float) -> Corrected:
    """norms and products: |v| and v . m as [slice, contribution]; momentum_norms: |m| per slice.

    A norm below `zero` counts as zero and has no direction: such slices pass as they are, as do those with a norm or a
    product that is not finite (the merge refuses them by their norm).
    """
    m = np.broadcast_to(momentum_norms[:, None], norms.shape)
    usable = (norms >= zero) & (m >= np.maximum(zero, RATIO_MIN * norms)) & np.isfinite(products)
    v, m = np.where(usable, norms, 1.0), np.where(usable, m, 1.0)
    cosine = np.clip(np.where(usable, products, 0.0) / v / m, -1.0, 1.0)
    confidence = v / (v + KAPPA * m + EPSILON)

    beta = np.minimum(K_SHRINK * -cosine * confidence, BETA_MAX)
    shrunk = np.sqrt(np.maximum(1.0 - cosine**2 * beta * (2.0 - beta), 0.0))  # |v'| / |v|

    turn = np.minimum(K_TURN * (1.0 - cosine) * confidence, 1.0)
    between = np.sqrt((1.0 - turn) ** 2 + 2.0 * (1.0 - turn) * turn * cosine + turn**2)

    against, astray = usable & (cosine < 0.0), usable & (cosine >= 0.0) & (cosine < C_OK)
    own = np.where(astray, (1.0 - turn) / np.where(astray, between, 1.0), 1.0)
    pull = np.where(against, -beta * cosine * (v / m), 0.0)
    pull = np.where(astray, turn / np.where(astray, between, 1.0) * (v / m), pull)
    return Corrected(own, pull, np.where(against, norms * shrunk, norms))
