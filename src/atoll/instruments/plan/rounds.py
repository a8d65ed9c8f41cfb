"""How long a round takes on the job's links, step by step, and what that leaves for the grace window.

    request      half a round trip to each learner
    encode       snapshot - base + residual, on the learner's host
    upload       over the region's link, which its learners share, and into the syncer's
    quorum       when the K-th contribution is there
    grace        core.policy.grace_ns: gamma * (round_steps * step - quorum - merge - commit), at most the cap
    merge        in the syncer's memory
    commit       onto its disk, before anybody hears of it (durability commit)
    download     a notice, a request and the update; small updates are inside the notice

A round ends for the syncer with its commit, and for a learner with the adopt that follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.core import INLINE_BYTES_MAX, SyncConfig, grace_ns, quorum_count, round_steps
from atoll.instruments.plan.job import Job, Region, ranked
from atoll.instruments.plan.settings import Settings
from atoll.instruments.plan.traffic import FragmentTraffic, disk_of, fragment_of, up_bytes_of

DECODE_OVER_ENCODE = 5.4
"""Decoding an update takes so many times less than encoding a contribution (docs/results/merge.md, 2 threads)."""
STATE_BYTES_TOUCHED = 24
"""Theta, momentum and residual of a parameter, read and written by a merge (docs/results/merge.md)."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """One round, in seconds from its launch. `in_flight` rounds of one fragment each run at a time at most."""

    encode_s: float
    quorum_s: float
    """The K-th contribution is complete."""
    all_s: float
    """The last contribution is complete."""
    grace_s: float
    grace_reason: str
    merge_s: float
    commit_s: float
    download_s: float
    """From the commit to the slowest learner's adopt."""
    has_s: float
    """tau steps: the time that a round has while training goes on."""
    in_flight: int
    every_s: float
    """Time between two launches, on average."""
    period_s: float
    """Time between two rounds of the same fragment: H steps of the clock, and the waits of a synchronous run."""
    contributions: float
    """Learners whose contribution is in the round when it closes, of those that are there."""

    @property
    def takes_s(self) -> float:
        """From launch to adopt, with no grace window."""
        return self.quorum_s + self.merge_s + self.commit_s + self.download_s

    @property
    def slack_s(self) -> float:
        return self.has_s - self.takes_s

    @property
    def close_s(self) -> float:
        """The round closes: all are there, or the grace window after the quorum is over."""
        return min(self.all_s, self.quorum_s + self.grace_s)

    @property
    def busy_s(self) -> float:
        """The fragment's round is in flight for the syncer, with no grace window."""
        return self.quorum_s + self.merge_s + self.commit_s

    @property
    def adopt_s(self) -> float:
        """From launch to the slowest learner's adopt."""
        return self.close_s + self.merge_s + self.commit_s + self.download_s


def round_times(job: Job, settings: Settings) -> RoundTimes:
    """A round of this job with these settings."""
    sync = settings.sync
    fragment = fragment_of(job.parameters, sync)
    at_once = burst(sync)
    quorum = quorum_count(sync, job.learners, job.learners)
    encode_s = at_once * fragment.parameters / (1e9 * job.encode_gparam_s)
    up_bytes = {place.name: at_once * up_bytes_of(job.parameters, settings, place.name) for place in job.places}
    arrivals = [(arrival_s(job, one, up_bytes[one.name]) + encode_s, n * one.learners) for one, n in job.groups]
    quorum_s, all_s = ranked(arrivals, quorum), ranked(arrivals, job.learners)
    merge_s = at_once * _merge_bytes(job, fragment) / (1e9 * job.merge_gbyte_s)
    commit_s = (
        at_once * disk_of(job, sync).commit / (1e9 * job.disk_gbyte_s) if settings.durability == "commit" else 0.0
    )
    download_s = (
        max(download_s_of(job, place, at_once, fragment) for place in job.places) + encode_s / DECODE_OVER_ENCODE
    )
    steps = round_steps(sync.fragments, sync.sync_every, sync.rounds_in_flight_max)
    window_ns, reason = grace_ns(sync, 1e9 * job.step_s_median, 1e9 * quorum_s, 1e9 * (merge_s + commit_s), steps)
    close_s = min(all_s, quorum_s + window_ns / 1e9)
    adopt_s = close_s + merge_s + commit_s + download_s
    period_s = sync.sync_every * job.step_s_of(quorum)
    if sync.synchronous:
        period_s = sync.sync_every * job.step_s_slowest + sync.fragments / at_once * adopt_s
    return RoundTimes(
        encode_s=encode_s,
        quorum_s=quorum_s,
        all_s=all_s,
        grace_s=window_ns / 1e9,
        grace_reason=reason,
        merge_s=merge_s,
        commit_s=commit_s,
        download_s=download_s,
        has_s=sync.overlap * job.step_s_median,
        in_flight=sync.rounds_in_flight_max,
        every_s=period_s / sync.fragments,
        period_s=period_s,
        contributions=sum(count for arrived_s, count in arrivals if arrived_s <= close_s + 1e-12),
    )


def burst(sync: SyncConfig) -> int:
    """Fragments that fall due on the same step: one, unless there are more fragments than steps."""
    return math.ceil(sync.fragments / sync.sync_every)


def arrival_s(job: Job, place: Region, payload_bytes: int) -> float:
    """Request, upload and its way: a round trip and the bytes, where the link or the syncer's is the narrower."""
    share = max(job.learners_on_link(place) / place.up_gbit, _at_the_syncer(job))
    return place.rtt_ms / 1e3 + payload_bytes * 8 / 1e9 * share


def _at_the_syncer(job: Job) -> float:
    """Payloads for each Gbit/s of the syncer's link, or of the link of the shard that has the fragment."""
    return job.payloads_through / job.syncer_gbit if job.syncer_gbit else 0.0


def download_s_of(job: Job, place: Region, at_once: int, fragment: FragmentTraffic) -> float:
    share = max(job.learners_on_link(place) / place.down_gbit, _at_the_syncer(job))
    ways = 0.5 if fragment.down_bytes <= INLINE_BYTES_MAX else 1.5  # the notice; then a request and the update
    return ways * place.rtt_ms / 1e3 + at_once * fragment.down_bytes * 8 / 1e9 * share


def _merge_bytes(job: Job, fragment: FragmentTraffic) -> int:
    """Memory traffic of one merge with everybody in it."""
    return fragment.parameters * STATE_BYTES_TOUCHED + job.learners * fragment.up_bytes + fragment.down_bytes
