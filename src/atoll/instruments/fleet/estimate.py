"""A cell's goodput without simulating it: the island as a small renewal process, solved on paper.

An elastic island is in one of four states. r is its rate of failures, w the hold-off.

    E  running, nothing waits to join      fails at rate r (to D); slices return at rate r (to W)
    W  running, returned slices wait       fails at rate r (to D); after w they are taken in (to G)
    D  stalled by a failure                detection, then a resize that failures begin again (to E)
    G  stalled by a planned resize         fails at rate r (to D), else to E

In steady state slices return as often as they fail, and (exponential repair) at independent moments. How many slices
are there is a chain of births and deaths; of many, the mean says enough, of few the last may be lost, and then the
learner restarts whole. The simulator makes none of these simplifications; a test holds the two together.
"""

from __future__ import annotations

import math

import numpy as np

from atoll.instruments.fleet.mechanics import Mechanics, check_fleet, slices_of
from atoll.instruments.fleet.parts import Parts

QUANTILES = 4096
"""Points of the restart time's distribution in the numeric Laplace transform: right to four digits."""
SLICES_FEW = 64
"""Up to so many slices of a learner the chain is solved; with more, the last is never lost while anything trains."""
HUGE = 1e100
SYNC_EVERY = 24
"""H of the simulated runs. Goodput does not depend on it."""


def expected_goodput(
    chips: int, learners: int, method: str, mechanics: Mechanics, mtbi_s: float, parts: Parts | None = None
) -> float:
    """Goodput in percent, to within a point or two of `simulate_cell` (held together by a test). Of parts of the fabric
    that fail only a synchronous run notices anything: the others train on."""
    check_fleet(chips, learners, method, mtbi_s, mechanics)
    slices = slices_of(chips, learners, mechanics)
    rate = chips / learners / mtbi_s
    if method == "inelastic" or slices == 1:
        share, stall_s = _restarting(rate, mechanics), mechanics.detect_s + mechanics.restart_s
    else:
        share = _elastic(slices, rate / slices, mechanics)
        stall_s = mechanics.detect_s + mechanics.shrink_s
    if method == "diloco":
        share = _synchronous(share, stall_s + _lost_s(rate, mechanics.step_s), learners, mechanics)
        if parts is not None and share > 0.0:
            share *= parts.synchronous_share(SYNC_EVERY * mechanics.step_s / share)
    return 100.0 * share


def _restarting(rate: float, mechanics: Mechanics) -> float:
    """Every failure costs a restart."""
    stall_s = _restart_s(rate, mechanics)
    return (1.0 / rate - _lost_s(rate, mechanics.step_s)) / (1.0 / rate + stall_s) if stall_s < math.inf else 0.0


def _restart_s(rate: float, mechanics: Mechanics) -> float:
    """A failure that comes during a restart begins another, drawn anew: with L the Laplace transform of the restart
    time at the rate, that takes (1 - L) / (rate * L) on average."""
    levels = (np.arange(QUANTILES) + 0.5) / QUANTILES
    times_s = mechanics.restart_scale_s * (-np.log1p(-levels)) ** (1.0 / mechanics.restart_shape)
    laplace = float(np.exp(-rate * times_s).mean())
    return math.inf if laplace <= 0.0 else mechanics.detect_s + (1.0 - laplace) / (rate * laplace)


def _elastic(slices: int, slice_rate: float, mechanics: Mechanics) -> float:
    back_s = mechanics.return_s + mechanics.hold_off_s / 2.0
    if slices > SLICES_FEW or back_s == 0.0:
        live = 1.0 / (1.0 + slice_rate * back_s)
        return live * _at_work(live * slices * slice_rate, mechanics)
    shares = _live_shares(slices, slice_rate, back_s, _restart_s(slices * slice_rate, mechanics))
    return sum(
        share * live / slices * _at_work(live * slice_rate, mechanics) for live, share in enumerate(shares) if live
    )


def _live_shares(slices: int, slice_rate: float, back_s: float, restart_s: float) -> list[float]:
    """Of the time, the share with so many live slices; with none, the learner restarts with all of them.

    Between k and k + 1 slices the flow down is that up, but for the cycles through a restart, which go down through
    every k: with c of them per second, down(k + 1) = up(k) + c.
    """
    cycles = 1.0
    time_s = [restart_s, 1.0 / slice_rate]
    for live in range(1, slices):
        up = time_s[live] * (slices - live) / back_s
        time_s.append((up + cycles) / ((live + 1) * slice_rate))
        if time_s[-1] > HUGE:  # rare failures: nearly all of the time is above
            time_s, cycles = [one_s / HUGE for one_s in time_s], cycles / HUGE
    total_s = sum(time_s)
    return [one_s / total_s for one_s in time_s]


def _at_work(rate: float, mechanics: Mechanics) -> float:
    """Of an island that fails at this rate, the share of time in which it makes progress that counts."""
    fails_waiting = -math.expm1(-rate * mechanics.hold_off_s)
    fails_growing = -math.expm1(-rate * mechanics.grow_s)
    # Visits per cycle from E to E: half of the cycles pass through W, and those that come through it unharmed grow.
    grows = 0.5 * (1.0 - fails_waiting)
    cuts = 0.5 + 0.5 * fails_waiting
    running_s = 0.5 * (1.0 + fails_waiting) / rate
    shrink_s = math.expm1(min(700.0, rate * mechanics.shrink_s)) / rate
    stalled_s = (cuts + grows * fails_growing) * (mechanics.detect_s + shrink_s) + grows * fails_growing / rate
    useful_s = running_s - cuts * _lost_s(rate, mechanics.step_s)
    return useful_s / (running_s + stalled_s)


def _lost_s(rate: float, step_s: float) -> float:
    """Mean work lost in the step that a failure cuts short, which is less than the time since the last stall."""
    return 1.0 / rate - step_s / math.expm1(rate * step_s) if rate * step_s < 700.0 else 1.0 / rate


def _synchronous(share: float, stall_s: float, learners: int, mechanics: Mechanics) -> float:
    """Every period lasts as long as for the learner with the most stalls in it. `share` is one learner's own; its loss
    is taken as independent stalls of the size of an unplanned one. The worst of M Poisson counts, on average, is the
    sum over k of the chance that somebody has more than k."""
    period_s = SYNC_EVERY * mechanics.step_s
    mean = (1.0 / share - 1.0) * period_s / stall_s if share > 0.0 else math.inf
    if mean > 700.0:
        return 0.0
    worst, below, term, count = 0.0, 0.0, math.exp(-mean), 0
    while below < 1.0 - 1e-12 and count < 10_000:
        below = min(1.0, below + term)
        worst += 1.0 - below**learners
        count += 1
        term *= mean / count
    sync_s = 2.0 * (mechanics.message_s + mechanics.transfer_s) + mechanics.merge_s
    return period_s / (period_s + worst * stall_s + sync_s)
