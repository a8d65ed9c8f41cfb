"""Which settings follow from the job: pure functions that return (value, reason). `search` joins them."""

from __future__ import annotations

import math

from atoll.core import (
    FRAGMENT_PARAMETERS_MIN,
    FRAGMENTS_MAX,
    SECOND_NS,
    TIMEOUT_NS_MAX,
    SyncConfig,
    fragments_for,
    parse_quorum,
    quorum_count,
)
from atoll.instruments.plan.job import Job
from atoll.instruments.plan.rounds import round_times
from atoll.instruments.plan.settings import DURABILITY_INTERVAL_S, Settings
from atoll.instruments.plan.traffic import disk_of
from atoll.instruments.plan.units import bytes_text, percent_text, seconds_text

OVERLAP_CHOICES = (2, 3, 4, 5, 6, 8, 10)
"""Published: a penalty below 0.2% up to 10 steps."""
EXACT_LEARNERS_MAX = 1000
"""Up to so many learners the binomial sum is exact; beyond it the normal curve is as good."""
TIMEOUT_FACTOR = 3
"""A round is given up after this many times the slowest learner's expected answer."""
INTERVAL_S_MAX = 3600.0
"""An hour of the outer momentum is as much as a plan may put at risk; a disk slower than that is a limit."""
INTERVAL_DISK_SHARE = 0.5
"""Share of the disk that writing at intervals may take: snapshots and the tape want some, too."""


def recommend_codec() -> tuple[str, str]:
    """Encoding of both directions."""
    return "int4", "a quarter of bf16's bytes at the same published loss (2 bits: +32%); both ways have error feedback"


def recommend_quorum(learners: int, availability: float) -> tuple[str, str]:
    """Half of the learners. A share is of those that are there, so it needs no luck."""
    half = quorum_count(SyncConfig(quorum="50%", learners_expected=learners), learners, learners)
    up = f"; of those that are up, on average {learners * availability:.1f}" if availability < 1.0 else ""
    return "50%", f"{half} of {learners}: half of the learners set the pace{up}"


def quorum_chance(sync: SyncConfig, learners: int, availability: float) -> float:
    """How often a quorum is there: so many learners are up, or, for a share, anybody is."""
    count, _ = parse_quorum(sync.quorum)
    return chance_at_least(count or 1, learners, availability)


def recommend_fragments(parameters: int, sync_every: int, *, waiting: bool = False) -> tuple[tuple[int, ...], str]:
    """Numbers of fragments worth trying for this H, the best first, and why. `waiting`: overlap is 0."""
    if waiting:
        return (1,), "learners wait for each round, so that one is enough: this is DiLoCo"
    usual = fragments_for(parameters, sync_every)
    finest = max(1, min(sync_every, FRAGMENTS_MAX, parameters // FRAGMENT_PARAMETERS_MIN))
    reason = f"at most one round per step, and none below {FRAGMENT_PARAMETERS_MIN:,} parameters"
    return tuple(dict.fromkeys((usual, finest))), reason


def recommend_interval(job: Job, sync: SyncConfig) -> tuple[float, str]:
    """Seconds between two writes of the whole state that leave half of the disk free."""
    whole_bytes = disk_of(job, sync).slot * sync.fragments
    seconds = math.ceil(whole_bytes / (1e9 * job.disk_gbyte_s * INTERVAL_DISK_SHARE))
    reason = f"{bytes_text(whole_bytes)} of state in at most {percent_text(INTERVAL_DISK_SHARE)} of the disk's time"
    return min(INTERVAL_S_MAX, max(DURABILITY_INTERVAL_S, float(seconds))), reason


def recommend_timeout(job: Job, settings: Settings) -> tuple[int, str]:
    """quorum_timeout_ns: the default, unless answers take a good part of it."""
    usual = SyncConfig().quorum_timeout_ns
    needed = TIMEOUT_FACTOR * round_times(job, settings).all_s
    if needed * SECOND_NS <= usual:
        return usual, "the default"
    reason = f"{TIMEOUT_FACTOR} times the {seconds_text(needed / TIMEOUT_FACTOR)} of the last answer"
    return min(TIMEOUT_NS_MAX, int(needed * SECOND_NS)), reason


def chance_at_least(count: int, learners: int, availability: float) -> float:
    """The chance that at least `count` of the learners are up."""
    if availability >= 1.0:
        return 1.0
    if learners <= EXACT_LEARNERS_MAX:
        terms = (
            math.comb(learners, k) * availability**k * (1 - availability) ** (learners - k)
            for k in range(count, learners + 1)
        )
        return min(1.0, math.fsum(terms))
    spread = math.sqrt(learners * availability * (1.0 - availability))
    return 0.5 * math.erfc((count - 0.5 - learners * availability) / (spread * math.sqrt(2.0)))
