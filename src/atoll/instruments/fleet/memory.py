"""How long an island remembers a failure, and what it costs: windows and the warm-up must be longer than that.

A stall is over in a minute. A slice in repair is missed until it is back, by its share of the learner: nothing among
hundreds of slices, half of everything among two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.instruments.fleet.mechanics import Mechanics, slices_of

WINDOW_REPAIRS = 4.0
"""Mean repairs in a window where repairs are all that failures cost: what reaches over its ends is then a quarter."""
WARM_UP_REPAIRS = 5.0
"""After so many mean repairs fewer than one in a hundred of a settled fleet's absences is still to come."""
WARM_UP_S_MIN = 3000.0
"""The warm-up is never cut below this, which is more than the default times ask for (2425 s)."""


@dataclass(frozen=True, slots=True)
class Memory:
    cost_s: float
    """What a failure costs its learner, in seconds of the whole learner: root of the mean square, because exponential
    repairs spread as widely as they are long."""
    window_s: float
    """Windows of at least this length are nearly independent."""
    out: float
    """Share of all slices that is in repair at any time, once the fleet has settled."""

    @classmethod
    def of(cls, chips: int, learners: int, method: str, *, mechanics: Mechanics, mtbi_s: float) -> Memory:
        slices = slices_of(chips, learners, mechanics)
        stall_s = mechanics.detect_s + mechanics.step_s
        if method == "inelastic" or slices == 1:
            lasts_s, repair_s, out = mechanics.restart_s, mechanics.restart_s, 0.0
        else:
            lasts_s = mechanics.return_s + mechanics.hold_off_s
            stall_s += mechanics.shrink_s + mechanics.grow_s
            repair_s = lasts_s / slices
            rate = chips / learners / slices / mtbi_s * lasts_s
            out = rate / (1.0 + rate)
        mean_s = stall_s + repair_s
        return cls(math.hypot(mean_s, repair_s), WINDOW_REPAIRS * lasts_s * repair_s / mean_s, out)

    def bias(self, warmed_s: float, mechanics: Mechanics) -> float:
        """Share by which the goodput may be too high because the warm-up was cut short: a fresh fleet is whole."""
        if warmed_s >= _whole_warm_up_s(mechanics):
            return 0.0
        return self.out * math.exp(-warmed_s / (mechanics.return_s + mechanics.hold_off_s))


def warm_up_s(mechanics: Mechanics, affordable_s: float) -> float:
    """A fresh fleet has no slice in repair: wait until those that come and go are in balance, if that is affordable."""
    return min(_whole_warm_up_s(mechanics), max(WARM_UP_S_MIN, affordable_s))


def _whole_warm_up_s(mechanics: Mechanics) -> float:
    repair_s = mechanics.return_s + mechanics.hold_off_s + mechanics.restart_s
    return WARM_UP_REPAIRS * repair_s + 50.0 * mechanics.step_s
