"""Islands around the real machines: nobody waits, failures break sessions and nothing else, every token has a fate."""

from __future__ import annotations

from random import Random

import pytest

from atoll.core.membership import MemberState
from atoll.core.messages import Discard
from atoll.instruments.fleet.host import STEP_TOKENS
from atoll.instruments.fleet.island import Island
from atoll.instruments.fleet.mechanics import YEAR_S, Mechanics
from atoll.instruments.fleet.runs import Islands, decoupled_config, synchronous_config
from atoll.instruments.fleet.world import FleetWorld

MECHANICS = Mechanics()


def fleet(
    chips: int, learners: int, *, synchronous: bool = False, mtbi_s: float = YEAR_S, **times: float
) -> FleetWorld:
    mechanics = Mechanics(**times)  # type: ignore[arg-type]
    config = synchronous_config(learners) if synchronous else decoupled_config(learners)
    world = FleetWorld(config, mechanics, keep_links=synchronous)
    Islands(chips, learners, mechanics, mtbi_s=mtbi_s, world=world).populate("test")
    return world


def check_ledger(world: FleetWorld) -> None:
    for fragment in range(world.config.fragments):
        line = world.syncer.ledger.fragment_totals(fragment)
        assert line.processed == line.merged + line.pending + sum(line.discarded.values())
        assert min(line.merged, line.pending, *line.discarded.values(), 0) == 0


def test_without_failures_everybody_steps_all_the_time_and_everything_is_merged() -> None:
    world = fleet(4096, 4, mtbi_s=1e15)
    world.run(2000.0)
    joining_s = 5.0
    for host in world.hosts:
        assert host.useful_s >= 2000.0 - joining_s - MECHANICS.step_s
    totals = world.syncer.ledger.totals()
    assert totals.discarded == {}
    assert totals.merged > 0.9 * totals.processed
    # One round per fragment and H steps.
    assert world.syncer.book.commits == pytest.approx(4 * 2000.0 / (24 * MECHANICS.step_s), rel=0.1)
    check_ledger(world)


def test_failures_cost_the_failed_learner_its_time_and_no_token() -> None:
    world = fleet(2_400_000, 4)
    world.run(3000.0)
    assert sum(host.island.counts.failures for host in world.hosts) > 100
    totals = world.syncer.ledger.totals()
    assert totals.discarded == {}  # shrinking keeps the state: what was not merged is still to come
    assert totals.merged > 0.9 * totals.processed
    assert {member.generation for member in world.syncer.membership.members.values()} == {1}
    useful_s = sum(host.useful_s for host in world.hosts)
    # A report may be on its way, or wait for a stalled learner's link.
    assert 0.0 <= useful_s - totals.processed / STEP_TOKENS * MECHANICS.step_s <= 4 * 4 * MECHANICS.step_s
    check_ledger(world)


def test_a_learner_of_one_slice_comes_back_as_another_process_and_its_unmerged_steps_are_lost() -> None:
    world = fleet(4, 4, mtbi_s=4000.0)
    world.run(20_000.0)
    assert max(member.generation for member in world.syncer.membership.members.values()) > 1
    totals = world.syncer.ledger.totals()
    lost_s = sum(host.lost_s for host in world.hosts)
    assert lost_s > 0.0
    assert totals.discarded[Discard.LOST] / STEP_TOKENS * MECHANICS.step_s == pytest.approx(lost_s, rel=0.02)
    check_ledger(world)


def test_synchronous_learners_wait_for_a_stalled_one_and_stay_members() -> None:
    world = fleet(600_000, 4, synchronous=True)
    world.run(5000.0)
    assert {m.state for m in world.syncer.membership.members.values()} == {MemberState.ACTIVE}
    steps = [host.machine.step for host in world.hosts]
    assert max(steps) - min(steps) <= 24
    alone = fleet(600_000, 4)
    alone.run(5000.0)
    assert sum(h.useful_s for h in world.hosts) < 0.92 * sum(h.useful_s for h in alone.hosts)
    check_ledger(world)


def test_joins_and_leaves_through_the_machines_hand_everything_over() -> None:
    world = fleet(4096, 2, mtbi_s=1e15)
    world.run(200.0)
    guest = world.add(Island(1.0, 1, MECHANICS, mtbi_s=1e15, rng=Random(1)), step_s=MECHANICS.step_s)
    world.run(200.0)
    assert len(world.syncer.membership.active()) == 3
    guest.leave()
    world.run(120.0)
    assert guest.gone
    ledger = world.syncer.ledger
    assert ledger.totals().discarded == {}
    assert ledger.processed >= (sum(host.steps for host in world.hosts) - 4) * STEP_TOKENS
    assert world.syncer.membership.members[guest.name].state is MemberState.LEFT


def test_the_same_seed_gives_the_same_run() -> None:
    runs = []
    for _ in range(2):
        world = fleet(1_200_000, 4)
        world.run(600.0)
        runs.append((world.events, [host.useful_s for host in world.hosts], world.syncer.ledger.totals()))
    assert runs[0] == runs[1]
