"""How many shards and relays a job of several sites needs, and why.

A shard has a share of the fragments: of their traffic, merges, commits and memory. So what one syncer would need is
divided by their number. A relay fetches an update once for its site and sends what its learners have contributed as one
payload. So the site's link carries one learner's bytes, however many there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from atoll.instruments.plan.job import Job
from atoll.instruments.plan.limits import Limit, limits_of
from atoll.instruments.plan.search import HEADROOM, recommend
from atoll.instruments.plan.settings import Settings
from atoll.instruments.plan.units import rate_text

SHARDS_TRIED = (0, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""0 is one syncer for everything. Fragments are shared out whole, so that finer steps would say nothing."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """The processes between the learners of a job, with reasons."""

    shards: int
    """0: the syncer has all fragments itself."""
    shards_why: str
    relays: int
    relays_why: str


def laid_out(job: Job, given: Mapping[str, Any], availability: float) -> tuple[Job, Fabric | None]:
    """The job with as many shards and relays as it needs, where it has sites and says nothing of its own."""
    if not job.sites:
        return job, None
    job = job if job.relays is not None else replace(job, relays=_relays_help(job))
    if job.shards is not None:
        return job, Fabric(job.shards, "as given", *_relays(job, given, availability))
    # As the links allow: a syncer that is too small must not be what makes H longer.
    settings = _settings(replace(job, shards=SHARDS_TRIED[-1]), given, availability)
    wanted = [count for count in SHARDS_TRIED if _fullest(replace(job, shards=count), settings).share <= HEADROOM]
    job = replace(job, shards=min(wanted, default=SHARDS_TRIED[-1]))
    why = _why(_fullest(replace(job, shards=0), settings), "one syncer")
    if job.shards:
        why += f"; {_why(_fullest(job, settings), 'each shard')}"
    return job, Fabric(job.shards or 0, why, *_relays(job, given, availability))


def _settings(job: Job, given: Mapping[str, Any], availability: float) -> Settings:
    return recommend(job, given, availability=availability)[0]


def _fullest(job: Job, settings: Settings) -> Limit:
    """Of what every shard has a share of, what is used the most."""
    return max((one for one in limits_of(job, settings) if one.shared_by_shards), key=lambda one: one.share)


def _why(limit: Limit, who: str) -> str:
    return f"{who} would need {limit.text(limit.need)} of {limit.text(limit.have)} ({limit.name})"


def _relays_help(job: Job) -> bool:
    return any(place.learners > 1 for place in job.places)


def _relays(job: Job, given: Mapping[str, Any], availability: float) -> tuple[int, str]:
    """How many relays there are, and what a site's link carries with and without them."""
    if not _relays_help(job):
        return 0, "each site has one learner: a relay would save nothing"
    settings = _settings(job, given, availability)
    links = {relays: _downlink(replace(job, relays=relays), settings) for relays in (False, True)}
    rates = f"{rate_text(links[True])} with a relay, {rate_text(links[False])} without one"
    return (len(job.places) if job.relays else 0), f"a site's link carries {rates}, each way"


def _downlink(job: Job, settings: Settings) -> float:
    return max(one.need for one in limits_of(job, settings) if one.name.startswith("downlink of "))
