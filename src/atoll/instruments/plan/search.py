"""The settings of a plan: what the user has chosen, and for the rest what fits.

The rest is looked for in the order of what it costs: the smallest H first (a larger one costs loss), then durability
commit before interval, then the smallest overlap (published: little loss up to 10), then the number of fragments. But
an H of up to SYNC_EVERY_COMMIT comes before durability interval. The first that uses every link, disk and processor to
at most HEADROOM, and whose rounds end within the overlap, is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from atoll.core import SyncConfig
from atoll.instruments.plan.job import Job
from atoll.instruments.plan.limits import fits, limits_of
from atoll.instruments.plan.recommend import (
    OVERLAP_CHOICES,
    recommend_codec,
    recommend_fragments,
    recommend_interval,
    recommend_quorum,
    recommend_timeout,
)
from atoll.instruments.plan.rounds import RoundTimes, round_times
from atoll.instruments.plan.settings import OWN, Settings, changed, settings_from
from atoll.instruments.plan.units import seconds_text

HEADROOM = 0.8
"""Links are shared, and their speed varies: a plan should not need more than this of any of them."""
SYNC_EVERY_CHOICES = (8, 12, 16, 24, 30, 40, 50, 75, 100, 150, 200, 300, 500, 750, 1000)
"""8 is the default. With eight learners of 10.8M parameters it cost 1.0% of loss against data-parallel, 24
with plain averaging 2.7% (docs/results/lab.md); others report 3% at 25 and 9% at 500 (FIGURES)."""
SYNC_EVERY_COMMIT = 24
"""A disk too slow for every commit is first met with rounds as rare as this, and only then with fewer writes."""
SHOWN = ("sync_every", "fragments", "overlap", "quorum", "grace_cap_steps", "codec_up", "codec_down", "durability")
"""Settings that every plan names, in this order; others follow if they were chosen."""

Values = dict[str, Any]
Reasons = dict[str, str]


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting of the plan, who chose it, and why."""

    name: str
    value: Any
    chosen_by: str
    """user or plan."""
    reason: str


def recommend(job: Job, given: Mapping[str, Any], *, availability: float) -> tuple[Settings, tuple[Choice, ...]]:
    """The plan's settings: what the user has chosen, and for the rest what fits best, with reasons."""
    left_open = type(given.get("fragments")) is int and given["fragments"] == 0
    chosen = {name: value for name, value in given.items() if name != "fragments" or not left_open}
    settings_from(chosen, learners=job.learners)  # a slip of the user's is an error before anything is searched
    codec, codec_reason = recommend_codec()
    quorum, quorum_reason = recommend_quorum(job.learners, availability)
    fixed = {"codec_up": codec, "codec_down": codec, "quorum": quorum, **chosen}
    settings, found = _search(job, fixed)
    reasons = {"codec_up": codec_reason, "codec_down": codec_reason, "quorum": quorum_reason, **found}
    if left_open:
        reasons["fragments"] = f"0 was given, which leaves it open: {reasons['fragments']}"
    timeout_ns, reason = recommend_timeout(job, settings)
    if "quorum_timeout_ns" not in chosen and timeout_ns != settings.sync.quorum_timeout_ns:
        settings, reasons["quorum_timeout_ns"] = changed(settings, quorum_timeout_ns=timeout_ns), reason
    reasons["grace_cap_steps"] = _grace_reason(round_times(job, settings))
    return settings, _choices(settings, chosen, reasons)


def _search(job: Job, fixed: Values) -> tuple[Settings, Reasons]:
    """The first candidate with headroom whose rounds end within the overlap, else the first of what comes nearest."""
    candidates = [(settings_from(values, learners=job.learners), why) for values, why in _candidates(job, fixed)]
    for share, with_slack in ((HEADROOM, True), (1.0, True), (HEADROOM, False), (1.0, False)):
        for settings, why in candidates:
            if fits(job, settings, share=share) and (not with_slack or _has_slack(job, settings)):
                return settings, why
    settings, why = min(candidates, key=lambda one: max(limit.share for limit in limits_of(job, one[0])))
    return settings, dict.fromkeys(why, "nothing that was tried fits; this misses by the least")


def _has_slack(job: Job, settings: Settings) -> bool:
    """A synchronous run has none and wants none: its learners wait."""
    return settings.sync.synchronous or round_times(job, settings).slack_s >= 0.0


def _candidates(job: Job, fixed: Values) -> Iterator[tuple[Values, Reasons]]:
    """Settings in the order in which they are preferred, with the reasons of those that were chosen here."""
    periods: tuple[int, ...] = (fixed["sync_every"],) if "sync_every" in fixed else SYNC_EVERY_CHOICES
    if fixed.get("adaptive", "off") != "off" and "sync_every" not in fixed:
        low, high = fixed.get("period_min", SyncConfig().period_min), fixed.get("period_max", SyncConfig().period_max)
        periods = tuple(period for period in periods if low <= period <= high) or (high,)
    levels = (fixed["durability"],) if "durability" in fixed else ("commit", "interval")
    yield from _with(job, fixed, [period for period in periods if period <= SYNC_EVERY_COMMIT], levels[:1])
    yield from _with(job, fixed, periods, levels)


def _with(job: Job, fixed: Values, periods: Sequence[int], levels: Sequence[str]) -> Iterator[tuple[Values, Reasons]]:
    for period in periods:
        counts, count_reason = recommend_fragments(job.parameters, period, waiting=fixed.get("overlap") == 0)
        counts = (fixed["fragments"],) if "fragments" in fixed else counts
        overlaps = tuple(steps for steps in OVERLAP_CHOICES if steps <= period) or (period,)
        overlaps = (fixed["overlap"],) if "overlap" in fixed else overlaps
        for level in levels:
            why = {"sync_every": _period_reason(period, level), "fragments": count_reason}
            for overlap in overlaps:
                for count in counts:
                    rhythm = {"sync_every": period, "fragments": count, "overlap": overlap}
                    kept, kept_reasons = _kept(job, {**fixed, **rhythm, "durability": level})
                    yield {**fixed, **rhythm, **kept}, {**why, "overlap": _overlap_reason(overlap), **kept_reasons}


def _kept(job: Job, values: Values) -> tuple[Values, Reasons]:
    """Durability, and the interval if it needs one that the user has not chosen."""
    level = values["durability"]
    if level != "interval":
        return {"durability": level}, {"durability": "every commit is on disk before it is published"}
    reason = "the disk is too slow for every commit; what a dead syncer has not written, learners bring back"
    if "durability_interval" in values:
        return {"durability": level}, {"durability": reason}
    interval_s, interval_reason = recommend_interval(job, settings_from(values, learners=job.learners).sync)
    kept = {"durability": level, "durability_interval": interval_s}
    return kept, {"durability": reason, "durability_interval": interval_reason}


def _period_reason(period: int, durability: str) -> str:
    if period == SYNC_EVERY_CHOICES[0]:
        return "the default, and everything fits"
    fits = "everything fits and every commit is on disk" if durability == "commit" else "everything fits"
    return f"the smallest of those tried with which {fits}: a larger one costs loss"


def _overlap_reason(overlap: int) -> str:
    if overlap == OVERLAP_CHOICES[0]:
        return "the default: a round fits into it"
    return f"a round needs it; published: less than 0.2% loss up to {OVERLAP_CHOICES[-1]}"


def _grace_reason(times: RoundTimes) -> str:
    if times.grace_s <= 0.0:
        return f"the default; no window is left here ({times.grace_reason})"
    return f"the default; the window is {seconds_text(times.grace_s)} here ({times.grace_reason})"


def _choices(settings: Settings, chosen: Values, reasons: Reasons) -> tuple[Choice, ...]:
    values = {**asdict(settings.sync), **{name: getattr(settings, name) for name in OWN}}
    names = dict.fromkeys((*SHOWN, *reasons, *chosen))
    return tuple(
        Choice(name, values[name], "user", "as given")
        if name in chosen
        else Choice(name, values[name], "plan", reasons[name])
        for name in names
    )
