"""The times that decide a fleet's goodput, in one place, with where each number comes from.

The paper names its knobs (mean time between interruptions, down- and up-scale times, return time, speed variance) but
not their values. The defaults below are round numbers that are plausible for each mechanism and that together land on
its table of 30 cells; docs/GOODPUT.md shows how far each of them may move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from atoll.errors import ConfigError
from atoll.instruments.sim import real, whole

YEAR_S = 365.25 * 86400.0
MTBI_YEARS = 1.0
"""Mean time between interruptions of one chip in the published table; 3 to 6 times harsher than large GPU runs."""
CHIPS_MAX = 1_000_000_000
PACE_MIN = 0.25
"""No learner and no step is faster than four times the mean, whatever is drawn."""
LEARNERS_MAX = 4096
"""Islands of one simulated run. Each costs a few kilobytes and its own events; the published table ends at 16."""
SECONDS_MAX = 1e9
HOPELESS = 10.0
"""Failures during one resize or step: from here on fewer than one in 20,000 would get through."""
METHODS = ("inelastic", "elastic", "decoupled", "diloco")


@dataclass(frozen=True, slots=True)
class Mechanics:
    """What a failure costs and how chips come back. All times are in seconds."""

    slice_chips: int = 256
    """Chips that fail, leave and return together: one pod slice. A learner is a whole number of slices."""
    step_s: float = 2.0
    """One inner step. A step that a failure cuts short is lost, so this is also the work lost per failure (half of it,
    on average): replicas in the island's own memory hold the state after every step."""
    detect_s: float = 10.0
    """From a chip's failure until its learner knows: a missed heartbeat or a collective that times out. Failures that
    come meanwhile are found together."""
    shrink_s: float = 7.0
    """Unplanned resize: drop the failed slice, build the mesh anew, take the cached program. Another failure in it
    begins it again, noticed at once because everybody stands at the same barrier."""
    grow_s: float = 18.0
    """Planned resize that takes returned slices in: the same new mesh, and the state copied to the newcomers."""
    hold_off_s: float = 75.0
    """Returned slices wait this long for company before they cause a planned resize. If a failure forces a resize
    first, they join it for nothing: that is why a failure costs less where failures are frequent."""
    return_s: float = 300.0
    """Mean time until a failed slice is back, exponential: a reboot, or a spare that is wired in."""
    restart_s: float = 90.0
    """Mean time of a whole restart on spare chips after detection: without elasticity, or with the last slice lost."""
    restart_shape: float = 0.75
    """Weibull shape of the restart time. Below 1 it has a long tail. A failure during a restart begins another one,
    which cuts the tail where failures are frequent. Published: "exponential / exponentiated Weibull"."""
    speed_spread: float = 0.0
    """Standard deviation of learners' step times relative to `step_s`, drawn once per learner. Decoupled learners do
    not notice each other's; in synchronous DiLoCo everybody waits for the slowest."""
    message_s: float = 0.05
    """One way between a learner and the syncer: half of a long wide-area round trip, with some queueing."""
    transfer_s: float = 0.2
    """A fragment up or down: a quarter of a 5B model as int4 over 25 Gbit/s. Within tau steps it is hidden and costs a
    decoupled run nothing; a synchronous one waits for it. `atoll plan` says what a link allows."""
    merge_s: float = 0.05
    """Merge and commit of one fragment in the syncer."""

    def __post_init__(self) -> None:
        whole("slice_chips", self.slice_chips, 1, CHIPS_MAX)
        for name in (f.name for f in fields(self) if f.name.endswith("_s")):
            positive = name in ("step_s", "restart_s")
            real(name, getattr(self, name), 1e-3 if positive else 0.0, SECONDS_MAX)
        real("restart_shape", self.restart_shape, 0.2, 20.0)
        real("speed_spread", self.speed_spread, 0.0, 1.0)

    @property
    def restart_scale_s(self) -> float:
        """The Weibull's scale, from its mean and shape."""
        return self.restart_s / math.gamma(1.0 + 1.0 / self.restart_shape)


def slices_of(chips: int, learners: int, mechanics: Mechanics) -> int:
    """Slices of one learner: as many of `slice_chips` as come nearest to its share of the chips, at least one."""
    return max(1, round(chips / learners / mechanics.slice_chips))


def is_hopeless(chips: float, mechanics: Mechanics, mtbi_s: float) -> bool:
    """True if so many chips together fail faster than they can come back."""
    return chips / mtbi_s * max(mechanics.step_s, mechanics.detect_s + mechanics.shrink_s) > HOPELESS


def check_fleet(chips: int, learners: int, method: str, mtbi_s: float, mechanics: Mechanics) -> None:
    """Refuse a fleet that cannot be, with what to do."""
    whole("chips", chips, 1, CHIPS_MAX)
    whole("learners", learners, 1, LEARNERS_MAX)
    if learners > chips:
        raise ConfigError(f"{learners} learners on {chips} chips: a learner needs at least one; give more chips")
    if method not in METHODS:
        raise ConfigError(f"method must be one of {', '.join(METHODS)}; not {method!r}")
    if method in ("inelastic", "elastic") and learners != 1:
        raise ConfigError(f"{method} is data-parallel on all chips: use --learners 1, or method decoupled or diloco")
    real("mean time between interruptions of a chip", mtbi_s, 1.0, 1e15)
    if is_hopeless(chips / learners, mechanics, mtbi_s):
        raise ConfigError(
            f"a learner of {chips / learners:,.0f} chips that each fail every {mtbi_s:g} s fails every "
            f"{mtbi_s * learners / chips:.3g} s, faster than it can come back: nothing would train; give fewer chips, "
            "more learners, or a longer mean time between interruptions"
        )
