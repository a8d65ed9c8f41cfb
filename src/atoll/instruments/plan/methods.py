"""The plan beside data-parallel training and synchronous DiLoCo, on the same links and with the same failures.

The two are modelled as in `utilisation`, with a ring all-reduce over the narrowest link. What is unknown is decided in
their favour: a region's learners form one flow each way, and an exchange costs one round trip however many learners.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.instruments.fleet import YEAR_S, Mechanics, expected_goodput, is_hopeless
from atoll.instruments.plan.job import Job
from atoll.instruments.plan.rounds import RoundTimes
from atoll.instruments.plan.settings import Settings
from atoll.instruments.plan.traffic import (
    all_reduce_gbit,
    all_reduce_total_bytes,
    fragment_of,
    gbit_per_period,
    total_bytes,
)
from atoll.instruments.plan.utilisation import MethodTraffic, bandwidth_for, compute_utilisation, data_parallel, diloco

UTILISATION_WANTED = 0.95
"""The bandwidth that a method needs is given for this utilisation, one of the published columns."""
STEP_S_MIN = 1e-3
"""The shortest step of the goodput estimate."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train the job."""

    name: str
    gbit_s: float
    """What each learner's link must carry, each way: for 95% utilisation, or (Atoll) to keep H."""
    utilisation: float
    """Share of the time in which learners compute and do not wait for the network."""
    goodput: float
    """Share of the chips' time that failures leave."""
    steps: float
    """Steps of each learner for all tokens; NaN if they are unknown."""
    seconds: float
    """Time to all tokens; NaN if unknown."""
    bytes: float
    """Sent over the wide-area links in all; NaN if unknown."""


def goodputs(job: Job) -> dict[str, float]:
    """Share of time left by failures, by method of `atoll.instruments.fleet`; 1 where failures are left out."""
    if not job.chips:
        return dict.fromkeys(("inelastic", "elastic", "diloco", "decoupled"), 1.0)
    # Links are counted here, in `utilisation`: the estimate's own are set to nothing.
    slice_chips = max(1, min(job.slice_chips, job.chips // job.learners))
    mechanics = Mechanics(
        slice_chips=slice_chips, step_s=max(STEP_S_MIN, job.step_s_median), message_s=0.0, transfer_s=0.0, merge_s=0.0
    )

    def share(method: str, learners: int) -> float:
        return expected_goodput(job.chips, learners, method, mechanics, job.mtbi_years * YEAR_S) / 100.0

    def together(method: str) -> float:
        """All chips as one: a fleet of many learners may be large enough for that never to train at all."""
        return 0.0 if is_hopeless(job.chips, mechanics, job.mtbi_years * YEAR_S) else share(method, 1)

    return {
        "inelastic": together("inelastic"),
        "elastic": together("elastic"),
        "diloco": share("diloco", job.learners),
        "decoupled": share("decoupled", job.learners),
    }


def compare_methods(job: Job, settings: Settings, times: RoundTimes, shares: dict[str, float]) -> tuple[Method, ...]:
    """Atoll and the others."""
    per_step = all_reduce_gbit(job)
    latency_s = max(place.rtt_ms for place in job.places) / 1e3
    step_s, depth, period = job.step_s_slowest, job.depth, settings.sync.sync_every
    every_step = data_parallel(per_step, depth, step_s, latency_s=latency_s)
    every_period = diloco(per_step, depth, step_s, sync_every=period, latency_s=latency_s)
    return (
        _all_reduced(job, "data-parallel, restarts", every_step, shares["inelastic"]),
        _all_reduced(job, "data-parallel, elastic", every_step, shares["elastic"]),
        _all_reduced(job, f"synchronous DiLoCo, H={period}", every_period, shares["diloco"]),
        _atoll(job, settings, times, shares["diloco" if settings.sync.synchronous else "decoupled"]),
    )


def _all_reduced(job: Job, name: str, exchange: MethodTraffic, goodput: float) -> Method:
    if job.learners == 1:  # nobody to exchange anything with
        needed, utilisation = 0.0, 1.0
    else:
        needed = bandwidth_for(exchange, UTILISATION_WANTED)
        utilisation = compute_utilisation(exchange, min(min(p.up_gbit, p.down_gbit) for p in job.places))
    steps, seconds = _time(job, job.learners / exchange.step_s * utilisation * goodput)
    sent = all_reduce_total_bytes(job, exchanges=steps / exchange.period_steps)
    return Method(name, needed, utilisation, goodput, steps, seconds, sent)


def _atoll(job: Job, settings: Settings, times: RoundTimes, goodput: float) -> Method:
    sync = settings.sync
    fragment = fragment_of(job.parameters, sync)
    needed = gbit_per_period(max(fragment.up_bytes, fragment.down_bytes), sync) / times.period_s
    utilisation = sync.sync_every * job.step_s_slowest / times.period_s if sync.synchronous else 1.0
    steps, seconds = _time(job, job.steps_per_s * utilisation * goodput)
    return Method("Atoll, this plan", needed, utilisation, goodput, steps, seconds, total_bytes(job, sync, steps=steps))


def _time(job: Job, steps_per_s: float) -> tuple[float, float]:
    """(steps of each learner, seconds) to all tokens."""
    if not job.tokens_per_step:
        return math.nan, math.nan
    steps = job.tokens_total / job.tokens_per_step
    return steps / job.learners, steps / steps_per_s if steps_per_s > 0 else math.inf
