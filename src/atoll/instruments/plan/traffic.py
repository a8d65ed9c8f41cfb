"""What a setting sends, holds and writes: bytes of a round, rates, totals, the syncer's memory and disk.

Encoded sizes are those of the codecs themselves, blocks and scales included. Checked against the bytes of a real run
in docs/results/bytes.md. Framing, heartbeats and progress reports (some 100 bytes per step) are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.codec import SAMPLE_ALL_MAX, SAMPLE_EVERY, get_codec, get_outer
from atoll.core import SyncConfig, padded
from atoll.instruments.plan.job import PRECISIONS, Job
from atoll.instruments.plan.settings import Settings
from atoll.syncer import written_per_commit

COMMIT_EXTRA_BYTES = 4500
"""Header and column of a commit (docs/results/recovery.md)."""
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class FragmentTraffic:
    """One fragment of the model as it travels. Fragments are balanced: all of them are about this size."""

    parameters: int
    """Elements, padded to whole blocks."""
    up_bytes: int
    down_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """The syncer's memory, in bytes."""

    state: int
    """Parameters, momentum and, if the downlink rounds and has feedback, residual: 8 or 12 bytes per parameter."""
    sample: int
    """Of the last gradient, for rho."""
    updates: int
    """Published updates kept for learners that missed some."""
    contributions: int
    """Encoded contributions of the rounds in flight."""

    @property
    def total(self) -> int:
        return self.state + self.sample + self.updates + self.contributions


@dataclass(frozen=True, slots=True)
class DiskBytes:
    """The syncer's disk, in bytes."""

    slot: int
    """All state of one fragment."""
    commit: int
    """Written by one commit, in the mean: a slot now and then, and what merges were made from in between."""
    state: int
    """Of each fragment two slots, and the log of merges at its longest."""


def fragment_of(parameters: int, sync: SyncConfig) -> FragmentTraffic:
    """The mean fragment. `sync.fragments` must be known."""
    size = padded(-(-parameters // sync.fragments))
    return FragmentTraffic(size, get_codec(sync.codec_up).size_max(size), get_codec(sync.codec_down).size_max(size))


def up_bytes_of(parameters: int, settings: Settings, place: str) -> int:
    """A contribution of one fragment, as learners of this region send it."""
    return get_codec(settings.codec_up(place)).size_max(fragment_of(parameters, settings.sync).parameters)


def gbit_per_period(fragment_bytes: int, sync: SyncConfig) -> float:
    """Gbit of one learner, one way, for one round of every fragment."""
    return fragment_bytes * sync.fragments * 8 / 1e9


def first_bytes(parameters: int) -> int:
    """The parameters in fp32: sent once to each learner (by the one that seeds the run)."""
    return FLOAT_BYTES * parameters


def total_bytes(job: Job, sync: SyncConfig, *, steps: float) -> float:
    """Bytes of the run, both ways and all learners, for so many steps of each."""
    fragment = fragment_of(job.parameters, sync)
    per_round = fragment.up_bytes + fragment.down_bytes
    rounds = steps / sync.sync_every * sync.fragments
    return job.learners * (rounds * per_round + first_bytes(job.parameters))


def all_reduce_gbit(job: Job) -> float:
    """Gbit that one learner sends (and receives) in one all-reduce of the model: a ring, 2 (M - 1) / M of it."""
    return 2 * (job.learners - 1) / job.learners * PRECISIONS[job.precision] * job.parameters / 1e9


def all_reduce_total_bytes(job: Job, *, exchanges: float) -> float:
    """Bytes that all learners together send in so many all-reduces."""
    return job.learners * all_reduce_gbit(job) * 1e9 / 8 * exchanges


def memory_of(job: Job, sync: SyncConfig) -> MemoryBytes:
    """As syncer/state.py holds it."""
    fragment = fragment_of(job.parameters, sync)
    elements = fragment.parameters * sync.fragments
    sampled = elements if fragment.parameters <= SAMPLE_ALL_MAX else elements // SAMPLE_EVERY
    return MemoryBytes(
        state=elements * _state_bytes(sync),
        sample=sampled * FLOAT_BYTES,
        updates=sync.ring_versions * sync.fragments * fragment.down_bytes,
        contributions=sync.rounds_in_flight_max * job.learners * fragment.up_bytes,
    )


def disk_of(job: Job, sync: SyncConfig) -> DiskBytes:
    """As syncer/state_writer.py writes it, where everybody is in every merge."""
    fragment = fragment_of(job.parameters, sync)
    slot = fragment.parameters * _state_bytes(sync) + COMMIT_EXTRA_BYTES
    commit, log = written_per_commit(slot, job.payloads_through * fragment.up_bytes + COMMIT_EXTRA_BYTES)
    return DiskBytes(slot, commit, sync.fragments * (2 * slot + log))


def _state_bytes(sync: SyncConfig) -> int:
    """Per parameter: Theta, outer momentum, and the residual of a downlink that rounds and has error feedback."""
    residual = sync.feedback_down and not get_codec(sync.codec_down).lossless
    return FLOAT_BYTES * (1 + len(get_outer(sync.outer).init(0)) + residual)
