"""A whole plan: the job, the settings with their reasons, what they need, what that leaves, and the comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from atoll.core.policy import quorum_count
from atoll.plan.job import Job
from atoll.plan.limits import Limit, binding, disk_rate, effective_sync_every, limits_of
from atoll.plan.methods import Method, compare_methods, goodputs
from atoll.plan.recommend import chance_at_least
from atoll.plan.remedies import remedies
from atoll.plan.rounds import RoundTimes, round_times
from atoll.plan.search import Choice, recommend
from atoll.plan.settings import Settings
from atoll.plan.traffic import Disk, Fragment, Memory, disk_of, first_bytes, fragment_of, gbit_per_period, memory_of

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
    fragment: Fragment
    rates: Rates
    times: RoundTimes
    quorum: Quorum
    limits: tuple[Limit, ...]
    memory: Memory
    disk: Disk
    disk_bytes_s: float
    methods: tuple[Method, ...]
    remedies: tuple[str, ...]

    @property
    def binding(self) -> Limit | None:
        return binding(self.limits)

    @property
    def fits(self) -> bool:
        return self.binding is None

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
            "job": {**asdict(self.job), "layers": self.job.depth, "tokens": self.job.tokens_total},
            "settings": {name: value for name, value in self.options().items() if name != "learners"},
            "choices": [asdict(choice) for choice in self.choices],
            "bytes": {**asdict(self.fragment), "first": first_bytes(self.job.parameters)},
            "gbit_s": asdict(self.rates),
            "round": {
                **asdict(self.times),
                "takes_s": self.times.takes_s,
                "slack_s": self.times.slack_s,
                "adopt_s": self.times.adopt_s,
            },
            "quorum": asdict(self.quorum),
            "limits": [_limit(limit) for limit in self.limits],
            "syncer": {
                "memory_bytes": {**asdict(self.memory), "total": self.memory.total},
                "disk_bytes": {**asdict(self.disk), "per_s": self.disk_bytes_s},
            },
            "methods": [asdict(method) for method in self.methods],
        }


def make_plan(job: Job, given: Mapping[str, Any] | None = None) -> Plan:
    """The plan for this job. `given` are settings that stay as they are, by SyncConfig's names or durability's."""
    chosen = dict(given or {})
    shares = goodputs(job)
    settings, choices = recommend(job, chosen, availability=shares["decoupled"])
    times = round_times(job, settings)
    limits = limits_of(job, settings, times)
    worst = binding(limits)
    sync = settings.sync
    fragment = fragment_of(job.parameters, sync)
    up = gbit_per_period(fragment.up_bytes, sync) / times.period_s
    down = gbit_per_period(fragment.down_bytes, sync) / times.period_s
    return Plan(
        job=job,
        settings=settings,
        choices=choices,
        fragment=fragment,
        rates=Rates(up, down, job.learners * up, job.learners * down),
        times=times,
        quorum=_quorum(job, settings, times, shares["decoupled"]),
        limits=limits,
        memory=memory_of(job, sync),
        disk=disk_of(job, sync),
        disk_bytes_s=disk_rate(job, settings, times.period_s),
        methods=compare_methods(job, settings, times, shares),
        remedies=() if worst is None else remedies(job, settings, chosen, availability=shares["decoupled"]),
    )


def _quorum(job: Job, settings: Settings, times: RoundTimes, availability: float) -> Quorum:
    count = quorum_count(settings.sync, job.learners, job.learners)
    chance = chance_at_least(count, job.learners, availability)
    return Quorum(count, chance, job.learners * availability, times.contributions * availability)


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
