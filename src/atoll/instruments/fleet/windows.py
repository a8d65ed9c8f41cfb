"""A share and its 95% interval from one long run, cut into windows.

Windows are much longer than the memory of an island (a repair and a hold-off), so their means are nearly independent:
batch means. Most of their spread is luck in the number of failures, and that luck is known: failures minus the integral
of their rate has mean zero exactly. It serves as control variate: the share's regression on it is taken out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

NORMAL_95 = 1.959964
"""The two-sided 95% point of the normal distribution."""
WINDOWS_MIN = 24
"""Before this many windows no interval is believed."""


@dataclass(slots=True)
class Windows:
    """Per window: allocated seconds, useful seconds, seconds in which something advanced, failures minus hazard."""

    allocated_s: list[float] = field(default_factory=list)
    useful_s: list[float] = field(default_factory=list)
    up: list[float] = field(default_factory=list)
    """Seconds in which at least one learner stepped; of `wall_s`."""
    wall_s: list[float] = field(default_factory=list)
    luck: list[float] = field(default_factory=list)

    def add(self, *, allocated_s: float, useful_s: float, up_s: float, wall_s: float, luck: float) -> None:
        self.allocated_s.append(allocated_s)
        self.useful_s.append(useful_s)
        self.up.append(up_s)
        self.wall_s.append(wall_s)
        self.luck.append(luck)

    def __len__(self) -> int:
        return len(self.luck)

    def goodput(self) -> tuple[float, float]:
        """The share of allocated time that was useful, and half of its 95% interval."""
        return ratio(self.useful_s, self.allocated_s, self.luck)

    def uptime(self) -> float:
        return min(1.0, round(math.fsum(self.up) / math.fsum(self.wall_s), 12))


def ratio(parts: list[float], wholes: list[float], luck: list[float]) -> tuple[float, float]:
    """sum(parts) / sum(wholes) with the control variate taken out, and half of the 95% interval."""
    part, whole, control = (np.asarray(values, dtype=np.float64) for values in (parts, wholes, luck))
    count = len(part)
    share = part.sum() / whole.sum()
    if count < 3:
        return float(share), math.inf
    # Linearised around the share: the spread of a ratio is that of these residuals.
    residuals = (part - share * whole) / whole.mean()
    spread = float(control @ control)
    slope = float(residuals @ control) / spread if spread > 0.0 else 0.0
    # The control's mean is zero by construction, so what it happens to be is luck, and so is slope times it.
    adjusted = residuals - slope * control
    error = math.sqrt(float(((adjusted - adjusted.mean()) ** 2).sum()) / (count - 2) / count)
    return float(share + adjusted.mean()), student_95(count - 2) * error


def student_95(freedom: int) -> float:
    """The two-sided 95% point of Student's t (Cornish-Fisher; right to 1% from 4 degrees of freedom on)."""
    z = NORMAL_95
    first = (z**3 + z) / (4.0 * freedom)
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / (96.0 * freedom**2)
    return z + first + second
