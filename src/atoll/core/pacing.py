"""How many steps lie between two rounds of the same fragment: the pacing policy, on the syncer.

Fragment p is due when the clock has moved one period since its last launch (design section 4, syncer 1). Without it a
fast network would run rounds back to back, H would collapse to about 2 and cost some 9% of loss.

A policy is asked once for each launch. It sees numbers only and returns the period and the reason for it, so that the
same run is paced alike in the simulator and on real machines. Learners hear the step at which a fragment is next due
with each version (`Published.due_step`) and need not know the policy. One of a user's own:

    class Patient:
        def period(self, config: SyncConfig, pace: Pace) -> tuple[int, str]:
            return 2 * config.sync_every, "patient"

    atoll.register_pacing("patient", Patient())     # before the syncer starts, with SyncConfig(pacing="patient")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from atoll.core.registry import Registry
from atoll.core.values import dataclass

if TYPE_CHECKING:
    from atoll.core.config import SyncConfig

PERIOD_MAX = 1_000_000
"""Steps, as for `sync_every`."""
RAMP_STEPS = 16
"""Of a run, for each step that a warm-up adds to the period: H = 8 is reached at step 128, H = 24 at 384."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What a policy may look at when a fragment is launched."""

    fragment: int
    version: int
    """Its newest one."""
    clock_step: int
    """Where the run is."""
    period: int
    """What was decided for this fragment the last time; `sync_every` at first and after a restart of the syncer."""
    learners: int
    """That rounds count on."""
    step_ns: float
    """The median of their step times; 0 before there is one."""
    quorum_ns: float
    """Running mean of the time from a launch to its quorum."""
    sync_ns: float
    """Running mean of the time from a quorum to the publication."""
    rho: float
    """Cosine between the last two merged gradients of this fragment; 0 before there are two."""


class Pacing(Protocol):
    def period(self, config: SyncConfig, pace: Pace) -> tuple[int, str]:
        """Steps from this launch to the next one of the same fragment, and why. A pure function of its arguments."""


class FixedPacing:
    """Every `sync_every` steps, as the paper does."""

    def period(self, config: SyncConfig, pace: Pace) -> tuple[int, str]:
        return config.sync_every, "fixed"


class WarmupPacing:
    """Every other step at first, or every `overlap` steps if that is more; then, step by step, every `sync_every`."""

    def period(self, config: SyncConfig, pace: Pace) -> tuple[int, str]:
        return ramp(config.sync_every, pace.clock_step, max(2, config.overlap))


def ramp(sync_every: int, clock_step: int, low: int) -> tuple[int, str]:
    """A period that grows by a step in RAMP_STEPS: while a run begins, learners part soon after each merge."""
    steps = max(min(low, sync_every), min(sync_every, clock_step // RAMP_STEPS))
    return steps, "fixed" if steps == sync_every else f"warm-up, at step {clock_step}"


PACING: Registry[Pacing] = Registry("pacing policy", {"fixed": FixedPacing(), "warmup": WarmupPacing()})


def period(config: SyncConfig, pace: Pace) -> tuple[int, str]:
    """What the run's policy says, within bounds: a period of 0 would launch a fragment for ever."""
    steps, reason = PACING.get(config.pacing).period(config, pace)
    if config.adaptive in ("on", "learning"):
        steps, reason = min((steps, reason), ramp(steps, pace.clock_step, max(config.period_min, config.overlap)))
    return min(max(1, int(steps)), PERIOD_MAX), reason
