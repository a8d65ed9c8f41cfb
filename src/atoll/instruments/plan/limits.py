"""What a plan needs of each part of the job, against what that part has. The largest ratio above 1 is binding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.core import SyncConfig
from atoll.instruments.plan.job import Job, Region
from atoll.instruments.plan.rounds import RoundTimes, burst, round_times
from atoll.instruments.plan.settings import Settings
from atoll.instruments.plan.traffic import disk_of, fragment_of, gbit_per_period, memory_of, up_bytes_of
from atoll.instruments.plan.units import bytes_text, percent_text, rate_text, seconds_text

LINK, TIME, DISK, WORK, WAIT, ABSENT = "link", "time", "disk", "work", "wait", "absent"
BYTES, MEMORY = "bytes", "memory"
"""Kinds of limits: links (Gbit/s), a round's time (s), the disk (bytes/s), work on processors (s per period), waiting
in a synchronous run (s per period), the share of the time without a quorum, payloads through one process (bytes/s) and
its host's memory (bytes)."""
PROCESS_BYTES_S = 1e9
"""Payloads that one process takes in and gives out, both ways together: about a gigabyte per second was measured with a
syncer and learners on 16 quiet cores."""
WAITING = "waiting of the learners"
WAITING_MAX = 0.25
"""Of the time that they train: a synchronous run must leave its learners four fifths of their time."""
ABSENT_MAX = 0.1
"""Of the time: with rounds less often than that, H is not what the plan says."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One part of the job: what is needed of it and what it has, in the same unit."""

    name: str
    kind: str
    need: float
    have: float
    shared_by_shards: bool = False
    """Each shard has its part of this."""

    @property
    def share(self) -> float:
        return self.need / self.have

    @property
    def met(self) -> bool:
        return self.share <= 1.0

    def text(self, value: float) -> str:
        """`value` in this limit's unit."""
        if self.kind == LINK:
            return rate_text(value)
        if self.kind == ABSENT:
            return percent_text(value)
        if self.kind == MEMORY:
            return bytes_text(value)
        return f"{bytes_text(value)}/s" if self.kind in (DISK, BYTES) else seconds_text(value)


def limits_of(job: Job, settings: Settings, times: RoundTimes | None = None) -> tuple[Limit, ...]:
    """Every limit of the plan."""
    times = times or round_times(job, settings)
    sync = settings.sync
    fragment = fragment_of(job.parameters, sync)
    down = gbit_per_period(fragment.down_bytes, sync) / times.period_s
    found: list[Limit] = []
    for place in job.places:
        crowd = job.learners_on_link(place)
        up = uplink_gbit(job, settings, place, times)
        found.append(Limit(f"uplink of {place.name}", LINK, crowd * up, place.up_gbit))
        found.append(Limit(f"downlink of {place.name}", LINK, crowd * down, place.down_gbit))
    found += _of_shards(job, settings, times, (incoming_gbit(job, settings, times), job.payloads_through * down))
    found.append(Limit("encoding in a learner, per period", WORK, _rounds(sync) * times.encode_s, times.period_s))
    if sync.synchronous:
        name = f"{WAITING} per period, most of it for {_longest(times)}"
        have = WAITING_MAX * sync.sync_every * job.step_s_slowest
        found.append(Limit(name, WAIT, _rounds(sync) * times.adopt_s, have))
    else:
        found.append(Limit("time of a round until its commit", TIME, times.busy_s, times.in_flight * times.every_s))
    return tuple(found)


def uplink_gbit(job: Job, settings: Settings, place: Region, times: RoundTimes) -> float:
    """Sustained, of one learner of this region."""
    return gbit_per_period(up_bytes_of(job.parameters, settings, place.name), settings.sync) / times.period_s


def incoming_gbit(job: Job, settings: Settings, times: RoundTimes) -> float:
    """Sustained, of all learners, as it comes to the syncer or to all shards together."""
    places = [(n * job.learners_on_link(place), place) for place, n in job.groups]
    return sum(count * uplink_gbit(job, settings, place, times) for count, place in places)


def _rounds(sync: SyncConfig) -> float:
    """Rounds of a period, those that fall due together counted as one."""
    return sync.fragments / burst(sync)


def _of_shards(job: Job, settings: Settings, times: RoundTimes, gbit: tuple[float, float]) -> list[Limit]:
    """What the syncer has to do, or each of its shards a part of. `gbit`: what comes in and goes out, in all."""
    shards, found = job.shards or 0, []
    whose, each = ("a shard's", "in a shard") if shards else ("syncer's", "in the syncer")
    if job.syncer_gbit:
        found.append((f"{whose} link, in", LINK, gbit[0], job.syncer_gbit))
        found.append((f"{whose} link, out", LINK, gbit[1], job.syncer_gbit))
    if settings.durability != "none":
        found.append((f"{whose} disk", DISK, disk_rate(job, settings, times.period_s), 1e9 * job.disk_gbyte_s))
    found.append((f"merging {each}, per period", WORK, _rounds(settings.sync) * times.merge_s, times.period_s))
    if job.sites or shards:
        found.append((f"what moves {each}", BYTES, sum(gbit) * 1e9 / 8, PROCESS_BYTES_S))
        found.append((f"memory {each}", MEMORY, memory_of(job, settings.sync).total, 1e9 * job.host_gbyte))
    return [Limit(name, kind, need / max(1, shards), have, True) for name, kind, need, have in found]


def _longest(times: RoundTimes) -> str:
    """What the learners of a synchronous run wait for most."""
    parts = {
        "uploads": times.close_s - times.encode_s,
        "encoding": times.encode_s,
        "merging": times.merge_s,
        "the disk": times.commit_s,
        "downloads": times.download_s,
    }
    return max(parts, key=lambda name: parts[name])


def disk_rate(job: Job, settings: Settings, period_s: float) -> float:
    """Bytes per second that the syncer writes: every commit, or all dirty fragments once per interval."""
    if settings.durability == "none":
        return 0.0
    if settings.durability == "interval":
        return interval_bytes(job, settings, period_s) / settings.durability_interval
    return disk_of(job, settings.sync).commit * settings.sync.fragments / period_s


def interval_bytes(job: Job, settings: Settings, period_s: float) -> float:
    """Bytes that durability interval writes at a time: all state, or the part that has changed since the last."""
    whole_bytes = disk_of(job, settings.sync).slot * settings.sync.fragments
    return whole_bytes * min(1.0, settings.durability_interval / period_s)


def binding(limits: tuple[Limit, ...]) -> Limit | None:
    """The limit that is missed by the most, if one is."""
    worst = max(limits, key=lambda limit: limit.share)
    return None if worst.met else worst


def fits(job: Job, settings: Settings, *, share: float = 1.0) -> bool:
    """True if every limit is used to at most this share."""
    return all(limit.share <= share for limit in limits_of(job, settings))


def effective_sync_every(settings: Settings, limits: tuple[Limit, ...]) -> float:
    """H as it would really be: launches wait for what is in flight and for a quorum, so that H grows by the ratio that
    is missed. A synchronous run keeps its H: its learners wait.

    Writing at intervals holds nobody up: it only falls behind."""
    if settings.sync.synchronous:
        return float(settings.sync.sync_every)
    idle = (ABSENT,) if settings.durability == "commit" else (ABSENT, DISK)
    held_up = [one.share for one in limits if one.kind not in idle]
    there = with_quorum(limits)
    return settings.sync.sync_every * max(1.0, *held_up) / there if there > 0.0 else math.inf


def with_quorum(limits: tuple[Limit, ...]) -> float:
    """Share of the time in which a quorum is there."""
    return min((1.0 - one.need for one in limits if one.kind == ABSENT), default=1.0)
