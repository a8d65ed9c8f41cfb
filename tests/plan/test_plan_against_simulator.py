"""The plan's round beside the protocol itself, in virtual time: when a quorum is there, and how large H really is."""

from __future__ import annotations

import pytest

from atoll.core.config import SyncConfig
from atoll.instruments.plan import Job
from atoll.instruments.plan.limits import effective_sync_every, limits_of
from atoll.instruments.plan.rounds import round_times
from atoll.instruments.plan.settings import settings_from
from atoll.instruments.sim.references import CONTRIBUTION_BYTES
from atoll.instruments.sim.scenario import LearnerSpec, Scenario
from atoll.instruments.sim.world import World

LEARNERS, STEP_S = 3, 0.2
FROM_S, TO_S = 40, 140


def simulated(config: SyncConfig, latency_ms: int, up_bits_per_s: float = 0.0) -> tuple[float, float]:
    """(effective H, the running mean of the quorum's time) of the real machines, once the run is in its rhythm."""
    learner = LearnerSpec(
        step_ns=int(STEP_S * 1e9), latency_ns=latency_ms * 1_000_000, encode_ns=0, up_bits_per_s=up_bits_per_s
    )
    quick = {"merge_ns": 0, "sync_ns": 0, "commit_ns": 0}
    # A link's bandwidth only counts for calls.
    inline = not up_bits_per_s
    world = World(Scenario(1, config, (learner,) * LEARNERS, seconds=TO_S, arrays=False, inline=inline, **quick))
    world.begin()
    seen = []
    for until_s in (FROM_S, TO_S):
        world.clock.run(until_s * 10**9)
        assert world.syncer is not None
        book = world.syncer.machine.book
        seen.append((book.clock_last, sum(track.version for track in book.tracks)))
    (steps_before, versions_before), (steps, versions) = seen
    return (steps - steps_before) / (versions - versions_before) * config.fragments, book._quorum_ns / 1e9


@pytest.mark.parametrize(
    ("latency_ms", "sync_every", "fragments", "overlap"),
    [(5, 24, 6, 2), (100, 8, 4, 1), (250, 4, 4, 1), (400, 8, 8, 2), (1000, 24, 6, 2)],
    ids=["fits", "just fits", "one round at a time", "two rounds", "long way"],
)
def test_a_round_takes_as_long_as_planned(latency_ms: int, sync_every: int, fragments: int, overlap: int) -> None:
    values = {"sync_every": sync_every, "fragments": fragments, "overlap": overlap, "quorum": "all"}
    planned = settings_from({**values, "grace_cap_steps": 0.0}, learners=LEARNERS)
    # A model of one block per fragment and very fast machines: only the way is left.
    job = Job(
        parameters=256 * fragments,
        learners=LEARNERS,
        step_s=STEP_S,
        up_gbit=1e5,
        rtt_ms=2 * latency_ms,
        disk_gbyte_s=1e4,
    )
    period, quorum_s = simulated(planned.sync, latency_ms)
    assert quorum_s == pytest.approx(round_times(job, planned).quorum_s, rel=0.01)
    assert period == pytest.approx(effective_sync_every(planned, limits_of(job, planned)), rel=0.04)


@pytest.mark.parametrize(("overlap", "upload_s"), [(1, 0.2), (4, 0.5), (4, 1.0)], ids=["fits", "thin", "thinner"])
def test_a_thin_uplink_makes_the_period_as_long_as_planned(overlap: int, upload_s: float) -> None:
    """Four fragments, each due every 1.6 s: a contribution that takes longer than 0.4 s is the limit."""
    values = {"sync_every": 8, "fragments": 4, "overlap": overlap, "quorum": "all", "grace_cap_steps": 0.0}
    planned = settings_from(values, learners=LEARNERS)
    elements = CONTRIBUTION_BYTES // 132 * 256
    bits_per_s = CONTRIBUTION_BYTES * 8 / upload_s
    job = Job(
        parameters=4 * elements, learners=LEARNERS, step_s=STEP_S, up_gbit=bits_per_s / 1e9, down_gbit=1.0, rtt_ms=2.0
    )
    period, _ = simulated(planned.sync, 1, bits_per_s)
    assert period == pytest.approx(effective_sync_every(planned, limits_of(job, planned)), rel=0.06)
