"""What would fit, for a plan that misses a limit. Nothing is suggested that was not tried.

Settings that the user left open were searched already. So a setting can only help if it was given: each is left open
in turn, then all together, and the search says what would fit. Faster links and disks are tried with the settings as
they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from atoll.errors import ConfigError
from atoll.instruments.plan.job import GBIT_S_MAX, GBYTE_S_MAX, Job
from atoll.instruments.plan.limits import TIME, WAIT, Limit, fits, limits_of
from atoll.instruments.plan.search import Choice, recommend
from atoll.instruments.plan.settings import Settings
from atoll.instruments.plan.units import rate_text

TOGETHER = (("codec_up", "codec_down"), ("durability", "durability_interval"))
"""Settings that are left open at once, because one without the other seldom helps."""
GROWTH = 1.25
GROWTHS_MAX = 40
"""Links and disk are made a quarter faster at a time, up to 7500 times."""


def remedies(job: Job, settings: Settings, given: Mapping[str, Any], *, availability: float) -> tuple[str, ...]:
    """Changes that would each be enough, in words."""
    found = [text for names in _groups(given) if (text := _left_open(job, given, names, availability))]
    if not found and len(given) > 1:
        found = [text for text in (_left_open(job, given, tuple(given), availability),) if text]
    faster = _faster(job, settings)
    return tuple(found + ([faster] if faster else []))


def _groups(given: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The settings that were given, those of TOGETHER in one."""
    seen: set[str] = set()
    for name in given:
        group = next((names for names in TOGETHER if name in names), (name,))
        if name not in seen:
            yield tuple(one for one in group if one in given)
        seen.update(group)


def _left_open(job: Job, given: Mapping[str, Any], names: tuple[str, ...], availability: float) -> str:
    """The options that the search would choose for these names, if the plan then fits; else nothing."""
    rest = {name: value for name, value in given.items() if name not in names}
    try:
        settings, choices = recommend(job, rest, availability=availability)
    except ConfigError:  # the rest makes no sense without them, such as an interval without its durability
        return ""
    if not fits(job, settings):
        return ""
    values = {choice.name: choice for choice in choices}
    return " ".join(_option(values[name]) for name in names if name in values and _differs(values[name], given))


def _differs(choice: Choice, given: Mapping[str, Any]) -> bool:
    return str(choice.value) != str(given[choice.name])


def _option(choice: Choice) -> str:
    name = "grace-cap" if choice.name == "grace_cap_steps" else choice.name.replace("_", "-")
    return f"--{name} {choice.value:g}" if isinstance(choice.value, float) else f"--{name} {choice.value}"


def _faster(job: Job, settings: Settings) -> str:
    """The links and the disk with which these settings fit, if any do."""
    tried = job
    for _ in range(GROWTHS_MAX):
        missed = [limit for limit in limits_of(tried, settings) if not limit.met]
        if not missed:
            return _changes(job, _spared(job, tried, settings))
        tried = _grown(tried, missed)
    return ""


def _spared(job: Job, tried: Job, settings: Settings) -> Job:
    """Without what has grown for nothing: learners' links, disk and syncer's link as they were, if that still fits."""
    for names in (("regions", "up_gbit", "down_gbit"), ("disk_gbyte_s",), ("syncer_gbit",)):
        other = replace(tried, **{name: getattr(job, name) for name in names})
        tried = other if fits(other, settings) else tried
    return tried


def _grown(job: Job, missed: Sequence[Limit]) -> Job:
    """A quarter more of what is missed; a round that takes too long wants more of everything that moves bytes."""
    slow = any(limit.kind in (TIME, WAIT) for limit in missed)
    names = {limit.name for limit in missed}

    def grown(value: float, name: str, most: float) -> float:
        return min(most, value * GROWTH) if slow or name in names else value

    regions = tuple(
        replace(
            place,
            up_gbit=grown(place.up_gbit, f"uplink of {place.name}", GBIT_S_MAX),
            down_gbit=grown(place.down_gbit, f"downlink of {place.name}", GBIT_S_MAX),
        )
        for place in job.places
    )
    disk = grown(job.disk_gbyte_s, "syncer's disk", GBYTE_S_MAX)
    syncer = job.syncer_gbit
    if "syncer's link, in" in names or "syncer's link, out" in names or (slow and syncer):
        syncer = min(GBIT_S_MAX, syncer * GROWTH)
    if job.regions:
        return replace(job, regions=regions, disk_gbyte_s=disk, syncer_gbit=syncer)
    one = regions[0]
    return replace(job, up_gbit=one.up_gbit, down_gbit=one.down_gbit, disk_gbyte_s=disk, syncer_gbit=syncer)


def _changes(job: Job, other: Job) -> str:
    """What the other job has more of, in words."""
    texts = []
    for old, new in zip(job.places, other.places, strict=True):
        for way in ("up", "down"):
            gbit = getattr(new, f"{way}_gbit")
            if gbit > getattr(old, f"{way}_gbit"):
                texts.append(f"{way}link of {old.name} {rate_text(gbit)}")
    if other.syncer_gbit > job.syncer_gbit:
        texts.append(f"syncer's link {rate_text(other.syncer_gbit)}")
    if other.disk_gbyte_s > job.disk_gbyte_s:
        texts.append(f"syncer's disk {other.disk_gbyte_s:.3g} GB/s")
    return ", ".join(texts)
