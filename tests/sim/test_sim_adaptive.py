"""`adaptive` and sparse contributions in the virtual world: decisions outlive the syncer and break nothing."""

from __future__ import annotations

from dataclasses import replace

from atoll.core import SyncConfig
from atoll.instruments.sim import LearnerSpec, Scenario, SimFault, World, run_scenario

FAR = LearnerSpec(step_ns=100_000_000, latency_ns=800_000_000)
"""An answer takes 1.6 s, where a period has 0.4 s."""
DOWN_BITS_S = 8_000.0
FAULTS = (SimFault("kill", "learner-0", 20.0), SimFault("kill", "syncer", 60.0))


def scenario(**changes: object) -> Scenario:
    config = SyncConfig(sync_every=4, fragments=1, learners_expected=3, adaptive="network", **changes)  # type: ignore[arg-type]
    return Scenario(1, config, (FAR,) * 3, seconds=90.0, faults=FAULTS, arrays=True)


def test_a_period_that_was_decided_is_kept_over_the_syncer_s_restart() -> None:
    world = World(scenario(), tracing=True)
    world.begin()
    world.clock.run(59_000_000_000)
    assert world.syncer is not None and world.syncer.epoch == 1
    before = world.syncer.machine.book.adaptive.period
    assert before >= 16
    world.clock.run(75_000_000_000)
    assert world.syncer is not None and world.syncer.epoch == 2
    after = world.syncer.machine.book.adaptive
    assert after.period >= before and after.decided and world.disk.read_rows()["adaptive"]["period"] >= before
    assert sum("notes Adapted" in line for line in world.lines) >= 2


def test_adaptive_with_sparse_contributions_breaks_nothing_and_repeats_itself() -> None:
    for codec in ("topk:10%", "int4"):
        planned = scenario(codec_up=codec, codec_down="topk:10%")
        first, again = run_scenario(planned), run_scenario(planned)
        assert not first.violations and first.final == again.final
        fixed = run_scenario(replace(planned, config=replace(planned.config, adaptive="off")))
        assert not fixed.violations and fixed.final != first.final


def test_updates_follow_thin_downlinks_and_every_version_is_everybody_s_to_the_bit() -> None:
    """With a restart of the syncer, and replayed from the tape."""
    thin = LearnerSpec(step_ns=100_000_000, latency_ns=1_000_000, down_bits_per_s=DOWN_BITS_S)
    config = SyncConfig(sync_every=4, fragments=1, learners_expected=3, adaptive="network")
    planned = Scenario(1, config, (thin,) * 3, seconds=90.0, faults=FAULTS, arrays=True, inline=False)
    world = World(planned, tracing=True)
    world.begin()
    world.clock.run(50_000_000_000)
    assert world.syncer is not None and world.syncer.payloads is not None
    machine = world.syncer.machine
    assert machine.book.adaptive.codec_down == "int2"
    assert world.syncer.payloads.update_bytes(0, machine.versions[0]) == 2 * (4 + 64), "two blocks"
    outcome = run_scenario(planned)
    assert not outcome.violations, outcome.violations
