"""A whole plan: the job, the settings with their reasons, what they need, what that leaves, and the comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from atoll.core import parse_quorum, quorum_count
from atoll.instruments.plan.adaptive import Settled, settle
from atoll.instruments.plan.fabric import Fabric, laid_out
from atoll.instruments.plan.job import NEVER_ZERO, Job
from atoll.instruments.plan.limits import (
    ABSENT,
    ABSENT_MAX,
    DISK,
    Limit,
    binding,
    disk_rate,
    effective_sync_every,
    fits,
    incoming_gbit,
    interval_bytes,
    limits_of,
    uplink_gbit,
)
from atoll.instruments.plan.methods import Method, compare_methods, goodputs
from atoll.instruments.plan.recommend import INTERVAL_DISK_SHARE, quorum_chance
from atoll.instruments.plan.remedies import remedies
from atoll.instruments.plan.rounds import RoundTimes, round_times
from atoll.instruments.plan.search import Choice, recommend
from atoll.instruments.plan.settings import Settings
from atoll.instruments.plan.traffic import (
    DiskBytes,
    FragmentTraffic,
    MemoryBytes,
    disk_of,
    first_bytes,
    fragment_of,
    gbit_per_period,
    memory_of,
)

_RENAMED = {"grace_cap_steps": "grace_cap"}
"""Options whose names differ from SyncConfig's."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Sustained rates in Gbit/s."""

    learner_up: float
    learner_down: float
    syncer_in: float
    syncer_out: float


@dataclass(frozen=True, slots=True)
class Quorum:
    """Who is expected in a round."""

    count: int
    """K."""
    chance: float
    """That so many learners are up."""
    up: float
    """Learners that are up, on average."""
    merged: float
    """Contributions in a round when it closes, on average."""


@dataclass(frozen=True, slots=True)
class Plan:
    job: Job
    settings: Settings
    choices: tuple[Choice, ...]
    fragment: FragmentTraffic
    rates: Rates
    times: RoundTimes
    quorum: Quorum
    limits: tuple[Limit, ...]
    memory: MemoryBytes
    disk: DiskBytes
    disk_bytes_s: float
    methods: tuple[Method, ...]
    remedies: tuple[str, ...]
    settled: Settled | None = None
    """With `adaptive`: where the run would settle."""
    fabric: Fabric | None = None
    """With `sites`: shards and relays, and why."""

    @property
    def binding(self) -> Limit | None:
        return binding(self.limits)

    @property
    def fits(self) -> bool:
        return self.binding is None

    @property
    def fullest(self) -> Limit:
        """The limit that is used the most. What an interval that the plan chose makes of the disk is no news."""
        chosen_here = any(one.name == "durability_interval" and one.chosen_by == "plan" for one in self.choices)
        by_choice = INTERVAL_DISK_SHARE if chosen_here else 0.0
        return max((one for one in self.limits if one.kind != DISK or one.share > by_choice), key=lambda one: one.share)

    @property
    def interval_bytes(self) -> float:
        """What durability interval writes at a time; NaN with another durability."""
        if self.settings.durability != "interval":
            return math.nan
        return interval_bytes(self.job, self.settings, self.times.period_s)

    @property
    def steps_fastest(self) -> float:
        """Steps of the fastest learner between two rounds of a fragment: H, or more if others set the pace."""
        if self.settings.sync.synchronous:
            return float(self.settings.sync.sync_every)
        return self.times.period_s / self.job.step_s_fastest

    @property
    def steps_slowest(self) -> float:
        """Steps of the slowest learner between two rounds of a fragment: H, or fewer."""
        if self.settings.sync.synchronous:
            return float(self.settings.sync.sync_every)
        return self.times.period_s / self.job.step_s_slowest

    @property
    def sync_every_effective(self) -> float:
        return effective_sync_every(self.settings, self.limits)

    def options(self) -> dict[str, Any]:
        """What `atoll run --config` takes: the learners and every setting that was chosen."""
        chosen = {_RENAMED.get(choice.name, choice.name): choice.value for choice in self.choices}
        return {"learners": self.job.learners, **chosen}

    def to_dict(self) -> dict[str, Any]:
        """Everything, for programs. Units are in the names; NaN stands for unknown."""
        worst = self.binding
        return {
            "fits": self.fits,
            "binding": None if worst is None else {**_limit(worst), "would_fit": list(self.remedies)},
            "sync_every_effective": self.sync_every_effective,
            "job": _job(self.job),
            "settings": {name: value for name, value in self.options().items() if name != "learners"},
            "choices": [asdict(choice) for choice in self.choices],
            "bytes": {**asdict(self.fragment), "first": first_bytes(self.job.parameters)},
            "gbit_s": asdict(self.rates),
            "round": {
                **asdict(self.times),
                "takes_s": self.times.takes_s,
                "slack_s": self.times.slack_s,
                "adopt_s": self.times.adopt_s,
                "steps_fastest": self.steps_fastest,
                "steps_slowest": self.steps_slowest,
            },
            "quorum": {**asdict(self.quorum), **self._unknown("chance", "up")},
            "limits": [_limit(limit) for limit in self.limits],
            "syncer": {
                "memory_bytes": {**asdict(self.memory), "total": self.memory.total},
                "disk_bytes": {**asdict(self.disk), "per_s": self.disk_bytes_s, "per_interval": self.interval_bytes},
            },
            "fabric": None if self.fabric is None else asdict(self.fabric),
            "adaptive": None if self.settled is None else asdict(self.settled),
            "methods": [{**asdict(method), **self._unknown("goodput")} for method in self.methods],
        }

    def _unknown(self, *names: str) -> dict[str, float]:
        """NaN for what follows from failures, if the chips that fail are not known."""
        return {} if self.job.chips else dict.fromkeys(names, math.nan)


def make_plan(job: Job, given: Mapping[str, Any] | None = None) -> Plan:
    """The plan for this job. `given` are settings that stay as they are, by SyncConfig's names or durability's."""
    chosen = dict(given or {})
    shares = goodputs(job)
    job, fabric = laid_out(job, chosen, shares["decoupled"])
    settings, choices = recommend(job, chosen, availability=shares["decoupled"])
    found = settle(job, settings)
    settings = settings if found is None else found.over(settings)
    times = round_times(job, settings)
    quorum = _quorum(job, settings, times, shares["decoupled"])
    limits = (*limits_of(job, settings, times), *_absence(job, settings, quorum))
    worst = binding(limits)
    sync = settings.sync
    fragment = fragment_of(job.parameters, sync)
    up = max(uplink_gbit(job, settings, place, times) for place in job.places)
    incoming = incoming_gbit(job, settings, times)
    down = gbit_per_period(fragment.down_bytes, sync) / times.period_s
    return Plan(
        job=job,
        settings=settings,
        choices=choices,
        fragment=fragment,
        rates=Rates(up, down, incoming, job.payloads_through * down),
        times=times,
        quorum=quorum,
        limits=limits,
        memory=memory_of(job, sync),
        disk=disk_of(job, sync),
        disk_bytes_s=disk_rate(job, settings, times.period_s),
        methods=compare_methods(job, settings, times, shares),
        remedies=() if worst is None else _remedies(job, settings, chosen, limits, shares["decoupled"]),
        settled=found,
        fabric=fabric,
    )


def _quorum(job: Job, settings: Settings, times: RoundTimes, availability: float) -> Quorum:
    count = quorum_count(settings.sync, job.learners, job.learners)
    chance = quorum_chance(settings.sync, job.learners, availability)
    least = float(parse_quorum(settings.sync.quorum)[0])  # a round waits for so many; for a share, of those that are up
    return Quorum(count, chance, job.learners * availability, max(least, times.contributions * availability))


def _absence(job: Job, settings: Settings, quorum: Quorum) -> list[Limit]:
    """A number of learners may not always be up; a share of those that are is."""
    if not job.chips or not parse_quorum(settings.sync.quorum)[0]:
        return []
    return [Limit(f"time without a quorum of {quorum.count} learners", ABSENT, 1.0 - quorum.chance, ABSENT_MAX)]


def _remedies(
    job: Job, settings: Settings, chosen: Mapping[str, Any], limits: tuple[Limit, ...], availability: float
) -> tuple[str, ...]:
    """For a quorum that is rarely there, a share of the learners, and whatever else that asks for: with a share the
    fast ones set the pace."""
    if all(one.met or one.kind != ABSENT for one in limits):
        return remedies(job, settings, chosen, availability=availability)
    other = {**chosen, "quorum": "50%"}
    shared, _ = recommend(job, other, availability=availability)
    if fits(job, shared):
        return ("--quorum 50%",)
    return tuple(f"--quorum 50% {text}" for text in remedies(job, shared, other, availability=availability))


def _job(job: Job) -> dict[str, Any]:
    """The job with what was derived for it; NaN where nothing was given."""
    derived = {"layers": job.depth, "tokens": job.tokens_total, "down_gbit": job.down_gbit or job.up_gbit}
    values = {**asdict(job), **derived}
    values["regions"] = [{**asdict(place), "step_s": job.step_at(place)} for place in job.regions]
    return {name: math.nan if name in NEVER_ZERO and not value else value for name, value in values.items()}


def _limit(limit: Limit) -> dict[str, Any]:
    share = limit.share if math.isfinite(limit.share) else math.inf
    return {
        "name": limit.name,
        "kind": limit.kind,
        "need": limit.need,
        "have": limit.have,
        "share": share,
        "met": limit.met,
    }
