"""The parts of the virtual world by themselves, and whole small runs whose outcome is known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from atoll.core.config import SyncConfig
from atoll.instruments.chaos import chaos_plan, draw_faults, learner_names, load_plan, storm_plan
from atoll.instruments.sim.clock import Clock
from atoll.instruments.sim.disk import VirtualDisk
from atoll.instruments.sim.link import DOWN, RETRANSMIT_NS, UP, LinkWeather, Stream, VirtualLink, combined
from atoll.instruments.sim.run import run_scenario
from atoll.instruments.sim.scenario import LearnerSpec, Scenario, SimFault
from atoll.instruments.sim.world import World

MS = 1_000_000
SECOND = 1_000_000_000

# ---------------------------------------------------------------- the clock


def test_what_is_planned_for_one_moment_happens_in_the_order_of_planning() -> None:
    clock, seen = Clock(), list[object]()
    clock.at(10, seen.append, "b")
    clock.at(5, seen.append, "a")
    clock.at(10, seen.append, "c")
    clock.after(10, lambda: clock.at(3, seen.append, "d"))  # a moment that has passed is now
    clock.at(10, seen.append, "e")
    clock.at(11, seen.append, "never")
    assert clock.run(10)
    assert seen == ["a", "b", "c", "e", "d"] and clock.now_ns == 10


def test_a_clock_that_is_stopped_goes_on_from_there() -> None:
    clock, seen = Clock(), list[object]()
    clock.at(1, clock.stop)
    clock.at(1, seen.append, "later")
    assert not clock.run(50)
    assert clock.now_ns == 1 and seen == []
    assert clock.run(50)
    assert clock.now_ns == 50 and seen == ["later"]
    clock.after(20, seen.append, "last")
    assert clock.run(69) and seen == ["later"]
    assert clock.run(70) and seen == ["later", "last"]


# ---------------------------------------------------------------- links


class Ends:
    """A link, and what arrived when at its far end."""

    def __init__(self, weather: LinkWeather, seed: int = 0) -> None:
        self.clock = Clock()
        self.link = VirtualLink(self.clock, Random(seed), weather)
        self.arrived: list[tuple[int, object]] = []

    def send(self, what: object, stream: Stream, *, size: int = 100, way: int = UP) -> None:
        self.link.carry(way, size, stream, self._deliver, what)

    def _deliver(self, what: object) -> None:
        self.arrived.append((self.clock.now_ns, what))


def test_messages_take_the_latency_of_their_direction() -> None:
    ends = Ends(LinkWeather(latency_ns=(3, 7)))
    ends.send("up", Stream())
    ends.send("down", Stream(), way=DOWN)
    ends.clock.run(100)
    assert ends.arrived == [(3, "up"), (7, "down")]


@pytest.mark.parametrize(
    "weather", [LinkWeather(jitter_ns=50 * MS), LinkWeather(loss=0.3), LinkWeather(bits_per_s=(1e6, 1e6))]
)
def test_within_a_stream_nothing_is_lost_or_overtaken(weather: LinkWeather) -> None:
    ends, stream = Ends(weather, seed=5), Stream()
    for number in range(200):
        ends.clock.at(number * MS, ends.send, number, stream)
    ends.clock.run(3600 * SECOND)
    assert [what for _, what in ends.arrived] == list(range(200))
    moments = [at for at, _ in ends.arrived]
    assert moments == sorted(moments)


def test_streams_overtake_each_other() -> None:
    ends = Ends(LinkWeather(jitter_ns=50 * MS), seed=5)
    for number in range(200):
        ends.clock.at(number * MS, ends.send, number, Stream())
    ends.clock.run(3600 * SECOND)
    order = [what for _, what in ends.arrived]
    took = [at - number * MS for at, number in ends.arrived]  # type: ignore[operator]
    assert MS <= min(took) < 5 * MS and 45 * MS < max(took) <= 51 * MS, "the latency and up to the jitter"
    assert sorted(order) == list(range(200)) and order != list(range(200))  # type: ignore[type-var]


def test_a_lost_packet_comes_later() -> None:
    never, always = Ends(LinkWeather(loss=0.0)), Ends(LinkWeather(loss=1.0))
    for ends in (never, always):
        ends.send("x", Stream())
        ends.clock.run(3600 * SECOND)
    assert never.arrived == [(MS, "x")]
    assert always.arrived == [(MS + RETRANSMIT_NS * (2**6 - 1), "x")], "lost six times, and each wait is twice as long"


def test_more_packets_are_more_likely_to_lose_one() -> None:
    late = []
    for size in (100, 100_000):
        ends = Ends(LinkWeather(loss=0.02), seed=1)
        for _ in range(300):
            ends.send("x", Stream(), size=size)
        ends.clock.run(3600 * SECOND)
        late.append(sum(at > MS for at, _ in ends.arrived))
    assert late[0] < 30 and late[1] > 150


def test_a_rate_is_shared_by_all_streams_of_a_direction() -> None:
    ends = Ends(LinkWeather(latency_ns=(0, 0), bits_per_s=(8e6, 0.0)))  # a byte takes a microsecond
    for what in ("a", "b"):
        ends.send(what, Stream(), size=1000)
    ends.send("down", Stream(), size=10**9, way=DOWN)
    ends.clock.run(10 * SECOND)
    assert ends.arrived == [(0, "down"), (MS, "a"), (2 * MS, "b")]
    assert ends.link.bytes == [2000, 10**9] and ends.link.messages == 3


def test_a_blocked_direction_keeps_everything_and_lets_it_flow_afterwards() -> None:
    ends, stream = Ends(LinkWeather()), Stream()
    ends.send("before", stream)
    ends.link.set(LinkWeather(blocked=(True, False)))
    assert ends.link.blocked and ends.link.blocked_since == [0, -1]
    for what in ("a", "b"):
        ends.send(what, stream)
    ends.send("down", Stream(), way=DOWN)
    ends.clock.run(SECOND)
    assert [what for _, what in ends.arrived] == ["before", "down"], "what was under way arrives, and the other way"
    ends.link.set(LinkWeather(blocked=(True, True)))
    assert ends.link.blocked_since == [0, SECOND]
    ends.link.set(LinkWeather())
    assert not ends.link.blocked and ends.link.blocked_since == [-1, -1]
    ends.clock.run(2 * SECOND)
    assert ends.arrived[2:] == [(SECOND + MS, "a"), (SECOND + MS, "b")]


def test_damage_and_broken_calls_by_chance() -> None:
    link = VirtualLink(Clock(), Random(1), LinkWeather(corrupt=(0.5, 0.0), breaks=0.5))
    damaged = [link.damaged(UP) for _ in range(200)]
    assert 60 < sum(damaged) < 140 and not any(link.damaged(DOWN) for _ in range(200))
    assert 60 < sum(link.breaks() for _ in range(200)) < 140
    fair = VirtualLink(Clock(), Random(1), LinkWeather())
    assert not any(fair.damaged(UP) or fair.breaks() for _ in range(200))


def test_faults_on_a_link_add_up() -> None:
    fair = LinkWeather(latency_ns=(1, 1), bits_per_s=(0.0, 1e6), loss=0.05)
    assert combined(fair, []) == fair
    hit = combined(
        fair,
        [
            ("delay", "up", 2.0),
            ("delay", "both", 1.0),
            ("limit", "both", 5000.0),
            ("limit", "down", 10.0),
            ("partition", "up", 0.0),
            ("corrupt", "down", 10.0),
            ("lose", "both", 0.01),
            ("break", "both", 0.9),
        ],
    )
    assert hit == LinkWeather(
        latency_ns=(1 + 3 * MS, 1 + MS),
        bits_per_s=(5e6, 1e4),
        loss=0.05,
        blocked=(True, False),
        corrupt=(0.0, 0.1),
        breaks=0.9,
    )
    assert combined(fair, [("stall", "both", 0.0)]).blocked == (True, True)


# ---------------------------------------------------------------- the disk


def test_what_was_synced_survives_everything() -> None:
    for seed in range(20):
        disk = VirtualDisk()
        disk.append(0, {"a": 1, "b": [2]})
        disk.append(0, {"a": 3, "c": None})
        disk.sync()
        (disk.power_cut if seed % 2 else disk.process_died)(Random(seed))
        assert disk.read_rows() == {"a": 3, "b": [2]} and not disk.pending


def test_of_what_was_not_synced_a_prefix_survives() -> None:
    kept_by_power, kept_by_death = set(), set()
    for seed in range(200):
        for kept, cut in ((kept_by_power, VirtualDisk.power_cut), (kept_by_death, VirtualDisk.process_died)):
            disk = VirtualDisk()
            disk.append(0, {"first": 0})
            disk.sync()
            for number in range(3):
                disk.append(0, {f"row {number}": number})
            cut(disk, Random(seed))
            kept.add(tuple(disk.read_rows()))
    prefixes = {("first", *(f"row {number}" for number in range(count))) for count in range(4)}
    assert kept_by_power == kept_by_death == prefixes


def test_a_row_that_was_taken_away_stays_away() -> None:
    disk = VirtualDisk()
    disk.append(0, {"a": 1})
    disk.append(0, {"a": None})
    disk.sync()
    assert disk.read_rows() == {}


def test_two_slots_per_fragment_and_rot_takes_the_newer() -> None:
    disk = VirtualDisk()
    for version in range(4):
        disk.commit(0, version, 10 + version, {"round": version}, f"arrays {version}")
    assert disk.read_slots() == {0: (3, 13, {"round": 3}, "arrays 3")} and len(disk.slots[0]) == 2
    assert disk.lossless and disk.rot(Random(0)) and not disk.lossless
    assert disk.read_slots() == {0: (2, 12, {"round": 2}, "arrays 2")}
    assert not disk.rot(Random(0)), "the last copy of a fragment is never taken"


def test_every_opening_has_an_epoch_of_its_own() -> None:
    disk = VirtualDisk()
    assert [disk.open(Random(0)) for _ in range(3)] == [1, 2, 3]


def test_what_a_syncer_writes_after_a_newer_one_has_opened_is_read_by_nobody() -> None:
    found = set()
    for seed in range(50):
        disk = VirtualDisk()
        first = disk.open(Random(seed))
        disk.append(first, {"synced": 1})
        disk.sync()
        disk.append(first, {"written": 1})
        second = disk.open(Random(seed))
        disk.append(first, {"too late": 1})
        disk.append(second, {"new": 1})
        disk.sync()
        found.add(tuple(disk.read_rows()))
    assert found == {("new", "synced"), ("new", "synced", "written")}


# ---------------------------------------------------------------- whole runs

PLAIN = SyncConfig(sync_every=8, fragments=2, overlap=2, quorum="50%", learners_expected=3)


def scenario_of(*faults: SimFault, learners: int = 3, seconds: float = 60.0, arrays: bool = False) -> Scenario:
    return Scenario(5, PLAIN, (LearnerSpec(),) * learners, seconds=seconds, faults=faults, arrays=arrays)


def run_for(world: World, seconds: float) -> World:
    world.begin()
    world.clock.run(int(seconds * SECOND))
    assert not world.broken, world.checkers.violations
    return world


def test_without_faults_nobody_waits_for_anybody() -> None:
    """Every learner takes a step per step_ns from the moment it joined, whatever the others' pace."""
    paces = (100 * MS, 200 * MS, 700 * MS)
    specs = tuple(LearnerSpec(step_ns=pace, latency_ns=20 * MS, up_bits_per_s=1e6) for pace in paces)
    world = run_for(World(Scenario(5, PLAIN, specs, arrays=False)), 60.0)
    for host, pace in zip(world.hosts, paces, strict=True):
        host.count_able(True)
        assert host.able_ns > 54 * SECOND, "it joined soon"
        assert host.machine.steps == host.able_ns // pace


def test_a_run_without_faults_merges_everything() -> None:
    report = run_scenario(scenario_of(arrays=True), tracing=True)
    assert report.violations == () and report.faults == 0
    assert report.commits > 2 * 60 / (0.2 * 8) and report.lines and report.last
    assert run_scenario(scenario_of(arrays=True)).final == report.final, "looking changes nothing"


def test_a_frozen_learner_takes_no_step_and_goes_on_afterwards() -> None:
    world = World(scenario_of(SimFault("freeze", "learner-1", 10.0, 8.0)))
    run_for(world, 10.0)
    other, frozen = world.learners["learner-0"], world.learners["learner-1"]
    before = frozen.machine.steps, other.machine.steps
    assert before[0] > 30 and frozen.frozen
    world.clock.run(int(17.9 * SECOND))
    assert frozen.machine.steps == before[0] and other.machine.steps >= before[1] + 39
    world.clock.run(30 * SECOND)
    assert not frozen.frozen and frozen.machine.steps >= before[0] + 59 and not world.broken


def test_a_frozen_syncer_stops_no_learner() -> None:
    world = World(scenario_of(SimFault("freeze", "syncer", 10.0, 8.0)))
    run_for(world, 10.0)
    assert world.syncer is not None
    before = [host.machine.steps for host in world.hosts]
    commits = [track.version for track in world.syncer.machine.book.tracks]
    world.clock.run(int(17.9 * SECOND))
    assert [track.version for track in world.syncer.machine.book.tracks] == commits
    assert all(host.machine.steps >= steps + 39 for host, steps in zip(world.hosts, before, strict=True))
    world.clock.run(25 * SECOND)
    after = [track.version for track in world.syncer.machine.book.tracks]
    assert min(after) > max(commits) and not world.broken


def test_what_a_full_disk_cannot_keep_is_caught_up() -> None:
    world = World(scenario_of(SimFault("disk_full", "syncer", 10.0, 10.0)))
    run_for(world, 19.9)
    assert world.syncer is not None and world.disk.broken and world.syncer.gate.degraded
    on_disk = {p: slot[0] for p, slot in world.disk.read_slots().items()}
    made = {track.index: track.version for track in world.syncer.machine.book.tracks}
    assert all(made[p] > version for p, version in on_disk.items()), "training went on without the disk"
    world.clock.run(40 * SECOND)
    assert not world.disk.broken and not world.syncer.gate.degraded and not world.broken
    now = {p: slot[0] for p, slot in world.disk.read_slots().items()}
    assert all(now[p] > version for p, version in made.items())


def test_a_killed_syncer_comes_back_with_every_version() -> None:
    world = World(scenario_of(SimFault("power", "syncer", 20.0), arrays=True))
    run_for(world, 19.99)
    assert world.syncer is not None
    first = world.syncer
    made = [track.version for track in first.machine.book.tracks]
    world.clock.run(30 * SECOND)
    assert first.dead and world.syncer is not None and world.syncer.epoch == 2
    assert all(track.version > version for track, version in zip(world.syncer.machine.book.tracks, made, strict=True))
    assert not world.broken


def test_a_killed_learner_is_started_again_as_another_process() -> None:
    world = run_for(World(scenario_of(SimFault("kill", "learner-1", 10.0))), 30.0)
    assert [host.name for host in world.hosts] == ["learner-0", "learner-1", "learner-2", "learner-1"]
    again = world.learners["learner-1"]
    assert world.hosts[1].dead and not again.dead and again.machine.joined and again.machine.steps > 50


def test_guests_come_and_go() -> None:
    world = run_for(World(scenario_of(SimFault("join", "guest-0", 10.0, 15.0))), 20.0)
    guest = world.learners["guest-0"]
    assert guest.machine.joined and not guest.dead
    world.clock.run(50 * SECOND)
    assert guest.dead and guest.ended == "left" and world.learners["guest-0"] is guest and not world.broken


def test_a_partition_is_noticed_and_mended() -> None:
    world = World(scenario_of(SimFault("partition", "learner-0", 10.0, 30.0)))
    run_for(world, 39.0)
    host = world.learners["learner-0"]
    assert host.connection is None and host.machine.steps > 180, "alone, it trains on"
    world.clock.run(60 * SECOND)
    assert host.connection is not None and not world.broken


def test_a_scenario_whose_learners_are_all_down_recovers() -> None:
    faults = [SimFault("kill", f"learner-{index}", 20.0) for index in range(3)]
    report = run_scenario(scenario_of(*faults, SimFault("kill", "syncer", 20.0)))
    assert report.violations == () and report.faults == 4


def test_many_learners_without_arrays() -> None:
    config = SyncConfig(sync_every=24, fragments=4, overlap=2, quorum="50%", learners_expected=256)
    world = World(Scenario(1, config, (LearnerSpec(tokens=3),) * 256, arrays=False))
    run_for(world, 8.0)
    assert world.syncer is not None and world.syncer.machine.stats()["active"] == 256
    for host in world.hosts:
        host.count_able(True)
        assert host.machine.steps == host.able_ns // host.spec.step_ns > 35
    assert min(track.version for track in world.syncer.machine.book.tracks) >= 1


# ---------------------------------------------------------------- plans of atoll.instruments.chaos


def run_plan(faults: Sequence[SimFault], learners: int, seconds: float) -> None:
    scenario = scenario_of(*faults, learners=learners, seconds=seconds, arrays=True)
    report = run_scenario(scenario)
    assert report.violations == () and report.faults == len(faults) > 0


def test_a_storm_of_the_real_executor_runs_here_too() -> None:
    drawn = draw_faults(random.Random(3), learners=learner_names(4), seconds=120.0, count=20, down_max=2)
    assert len({fault.kind for fault in drawn}) > 8
    run_plan([SimFault.of_plan(fault, 120.0) for fault in drawn], 4, 120.0)
    run_plan([SimFault.of_plan(fault, 60.0) for fault in storm_plan(seed=1, learners=3, minutes=1.0)], 3, 60.0)


def test_the_demos_plan_runs_here_too() -> None:
    run_plan([SimFault.of_plan(fault, 60.0) for fault in chaos_plan("demo", 4)], 4, 60.0)


def test_a_plan_from_a_file_runs_here_too(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(
        'seed = 4\nfaults = 3\n[[fault]]\nkind = "partition"\ntarget = "learner-1"\nat = "30%"\nlasts = "20s"\n'
        'direction = "up"\n[[fault]]\nkind = "disk_full"\ntarget = "syncer"\nat = "12s"\nlasts = 8\n'
    )
    plan = load_plan(file, learners=3, seconds=90.0)
    assert len(plan.faults) == 5
    run_plan([SimFault.of_plan(fault, 90.0) for fault in plan.faults], 3, 90.0)


def test_small_messages_pass_a_large_one_where_connections_share_the_rate() -> None:
    for shares, expected in ((False, ["large", "small"]), (True, ["small", "large"])):
        clock, arrived = Clock(), []
        link = VirtualLink(clock, Random(1), LinkWeather(bits_per_s=(8000.0, 0.0)))
        link.shares = shares
        link.carry(UP, 10_000, Stream(), arrived.append, "large")
        link.carry(UP, 120, Stream(), arrived.append, "small")
        clock.run(11_000_000_000)
        assert arrived == expected
        assert clock.now_ns == 11_000_000_000, "both have crossed within the time of their bytes"
