"""The other published bandwidth figures beside what this model gives, as far as their inputs are known."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.core import SyncConfig
from atoll.instruments.plan.job import Job
from atoll.instruments.plan.published import (
    MODELS,
    STREAMING_TABLE,
    UTILISATIONS,
    exchange_of,
    first_on_grid,
    grid_value,
)
from atoll.instruments.plan.traffic import all_reduce_gbit, fragment_of, gbit_per_period
from atoll.instruments.plan.utilisation import bandwidth_for

PARAMETERS = 1 << 30
"""Of the model in the ratios of links. They do not depend on it."""


@dataclass(frozen=True, slots=True)
class ComparedClaim:
    """A published figure, ours, and how far the two can be compared."""

    published: str
    ours: str
    remark: str


def bandwidth_ratios(method: str) -> tuple[float, float]:
    """The smallest and the largest ratio of data-parallel's bandwidth to this method's: 3 models x 5 utilisations."""
    ratios = [
        bandwidth_for(exchange_of(model, "Data-Parallel"), utilisation)
        / bandwidth_for(exchange_of(model, method), utilisation)
        for model in MODELS
        if model.table == STREAMING_TABLE
        for utilisation in UTILISATIONS
    ]
    return min(ratios), max(ratios)


def link_ratio(learners: int, sync_every: int) -> float:
    """Bits of a bf16 ring all-reduce in each of H steps over Atoll's int4 bits in those H steps, each way of one link.

    docs/results/bytes.md counts both ways of ours against one of the ring's, which halves it."""
    job = Job(parameters=PARAMETERS, learners=learners, step_s=1.0, up_gbit=1.0)
    sync = SyncConfig(sync_every=sync_every, fragments=24, learners_expected=learners)
    return all_reduce_gbit(job) * sync_every / gbit_per_period(fragment_of(PARAMETERS, sync).up_bytes, sync)


def claims() -> tuple[ComparedClaim, ...]:
    """The other figures of FIGURES.md section 3."""
    low, high = bandwidth_ratios("+ overlap")
    low4, high4 = bandwidth_ratios("+ overlap + FP4")
    model = next(one for one in MODELS if one.table == STREAMING_TABLE and one.name == "10B")
    every_step, streamed = (
        grid_value(first_on_grid(exchange_of(model, method), 0.5)) for method in ("Data-Parallel", "+ overlap")
    )
    return (
        ComparedClaim(
            "8 data centres: 198 against 0.84 Gbit/s (236x)",
            "-",
            "cannot be compared: model, step time, H and utilisation of this row are not known to us",
        ),
        ComparedClaim(
            "1 s step: 104 against 1.7 Gbit/s (61x)",
            f"{every_step:.1f} against {streamed:.1f} Gbit/s ({every_step / streamed:.0f}x)",
            "inputs not known to us; ours is Table 4's 10B, 0.8 s, 50%, + overlap, printed there as 104.8 and 1.7",
        ),
        ComparedClaim(
            "60 to 242x lower than data-parallel",
            f"{low:.0f} to {high:.0f}x",
            "H=100, 16 bits, one step of overlap, over Table 4's models and utilisations; their settings are not known",
        ),
        ComparedClaim(
            "about 1000x with int4",
            f"{low4:.0f} to {high4:.0f}x",
            "the same with FP4. Atoll's int4 against a bf16 ring, each way of a link, 8 learners: "
            f"{link_ratio(8, 24):.0f}x at H=24, {link_ratio(8, 100):.0f}x at H=100, "
            f"1000x from H={math.ceil(1000 / link_ratio(8, 1))} on",
        ),
    )
