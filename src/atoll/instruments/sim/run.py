"""Run one scenario to its end: faults, then a healed world that must make progress, then a close that loses nothing."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from atoll.core import MERGED_KEPT, SECOND_NS, Discard
from atoll.core import effects as fx
from atoll.instruments.check import BoundedTrust, Checkers, Liveness, Violation, facts
from atoll.instruments.sim.believed import steps_believed
from atoll.instruments.sim.data_reader import STREAM
from atoll.instruments.sim.learner_host import LearnerHost
from atoll.instruments.sim.liar import CROWD_MAX
from atoll.instruments.sim.scenario import LearnerSpec, Scenario, SimFault
from atoll.instruments.sim.syncer_host import SyncerHost
from atoll.instruments.sim.world import World

SETTLE_NS = 150 * SECOND_NS
"""Joining (120 s at most) and finding each other again after the last fault."""
CLOSE_NS = 60 * SECOND_NS
"""Leaving takes 20 s at most, then the syncer merges what is left."""
GLANCE_NS = SECOND_NS // 2
LOOK_NS = 5 * SECOND_NS
"""How often the books and sizes are looked at."""
CHUNKS_LOOKED_AT = 1000
"""Of the data: more than any scenario reads."""
HELD_MAX = 4
"""Contributions of one learner to one fragment: two in the air, and two of its process before."""


@dataclass(frozen=True, slots=True)
class RunReport:
    scenario: Scenario
    violations: tuple[Violation, ...]
    events: int
    facts: int
    simulated_ns: int
    faults: int
    commits: int
    last: tuple[str, ...]
    lines: tuple[str, ...]
    final: tuple[tuple[int, int], ...]
    """(version, checksum) of every fragment at the end."""
    undecidable: int = 0
    """Versions that a liar made up and the run went on from, since no two honest learners agreed on another."""

    @property
    def digest(self) -> str:
        """Of the trace: two runs of one scenario must agree on it, whatever machine they ran on."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:16]


def run_scenario(scenario: Scenario, *, tracing: bool = False, checkers: Checkers | None = None) -> RunReport:
    world = world_of(scenario, tracing=tracing, checkers=checkers)
    crash: list[Violation] = []
    try:
        _run(world)
    except AssertionError as error:
        crash.append(Violation("assert", f"{error or 'an assertion failed'} ({_where(error)})"))
    except Exception as error:  # a machine must never raise: that is a finding, with its seed, like any other
        crash.append(Violation("crash", f"{type(error).__name__}: {error} ({_where(error)})"))
    finally:
        world.close()
    syncer = world.syncer
    final: tuple[tuple[int, int], ...] = ()
    if syncer is not None:
        final = tuple(syncer.machine.published)
    return RunReport(
        scenario,
        (*crash, *world.checkers.violations),
        world.events,
        world.checkers.fed,
        world.now_ns,
        world.faults_done,
        sum(max(0, version) for version, _ in final),
        tuple(world.last),
        tuple(world.lines),
        final,
        world.undecidable,
    )


def world_of(scenario: Scenario, *, tracing: bool = False, checkers: Checkers | None = None) -> World:
    """The world in which this scenario takes place."""
    if not scenario.fabric:
        return World(scenario, tracing=tracing, checkers=checkers)
    from atoll.instruments.sim.fabric import FabricWorld  # production's shells take a second to import

    return FabricWorld(scenario, tracing=tracing, checkers=checkers)


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return place


def _run(world: World) -> None:
    scenario = world.scenario
    world.begin()
    world.clock.at(LOOK_NS, _look, world)
    if not world.clock.run(int(scenario.seconds * 1e9)):
        return
    world.heal()
    config = scenario.config
    slowest_ns = max(spec.step_ns for spec in world.specs.values())
    bound_ns = SETTLE_NS + 3 * config.quorum_timeout_ns + 8 * config.sync_every * slowest_ns
    until_ns = world.now_ns + bound_ns
    watch = _Watch(world, until_ns)
    _run_until(world, until_ns, watch.satisfied)
    if not world.broken:
        if not watch.satisfied() and not _is_lost(world):
            world.observe(facts.Ended(world.now_ns))
        _close(world)


def _run_until(world: World, until_ns: int, satisfied: Callable[[], bool]) -> None:
    """Run on, looking up now and then whether that is enough."""
    while world.now_ns < until_ns and not satisfied():
        if not world.clock.run(min(until_ns, world.now_ns + GLANCE_NS)):
            return


class _Watch:
    """The run must show that it goes on, every fragment and everybody's work, or that its budget is spent."""

    def __init__(self, world: World, until_ns: int) -> None:
        self._world = world
        names = tuple(
            name
            for name, spec in zip(world.scenario.names, world.scenario.learners, strict=True)
            if world.is_honest(name) and not spec.lies and _keeps_up(world, spec)
        )
        world.observe(facts.Calm(world.now_ns, until_ns, world.scenario.config.fragments, names))
        self._liveness = next(c for c in world.checkers.checkers if isinstance(c, Liveness))
        self._wanted = (set(range(world.scenario.config.fragments)), set(names))

    def satisfied(self) -> bool:
        if self._world.syncer is not None and self._world.syncer.machine.stopping:
            return True
        return self._wanted[0] <= self._liveness.fragments and self._wanted[1] <= self._liveness.learners


def _is_lost(world: World) -> bool:
    """Whether a part of the run is nowhere any more, and the syncer says so and waits for its operator's word: with
    nothing on disk, whoever held it has gone. Or its shard was given up, and then whoever held it died."""
    machine = world.syncer.machine if world.syncer is not None else None
    if machine is None:
        return False
    gone = bool(world.given_up) and any(map(machine.is_down, range(len(machine.versions))))
    return gone or (machine.is_healing and "--new-run" in machine.waits)


def _keeps_up(world: World, spec: LearnerSpec) -> bool:
    """Whether this learner's contributions can arrive before they are too old by the run's own settings. One on a thin
    and far link in a run with very short rounds cannot, and that is not a fault of the protocol's."""
    scenario, config = world.scenario, world.scenario.config
    fastest_ns = min(other.step_ns for other in scenario.learners)
    window_ns = config.carry_versions_max * config.sync_every * fastest_ns
    rate = min(spec.up_bits_per_s or 1e12, spec.down_bits_per_s or 1e12)
    bytes_moved = 40_000 if not scenario.inline else 2_500
    transfer_ns = int(config.fragments * bytes_moved * 8e9 / rate)
    lost_ns = int(spec.loss * 20 * SECOND_NS)
    turn_ns = 8 * (spec.latency_ns + spec.link_jitter_ns) + spec.encode_ns + spec.step_ns + transfer_ns + lost_ns
    return 2 * turn_ns < window_ns or len(scenario.learners) == 1


def _close(world: World) -> None:
    """Everybody leaves, the syncer merges what is left and ends."""
    world.finishing = True
    for phantom in world.phantoms:
        phantom.vanish()
    for host in world.learners.values():
        if not host.dead:
            host.call(host.close, "the run is over")
    until_ns = world.now_ns + CLOSE_NS
    _run_until(world, until_ns, lambda: all(host.dead for host in world.learners.values()))
    syncer = world.syncer
    if syncer is not None and not world.broken:
        syncer.call(syncer.hear, fx.StopRequested("the run is over"))
        _run_until(world, world.now_ns + CLOSE_NS, lambda: bool(syncer.finished))
    if not world.broken:
        _last_checks(world)


def _last_checks(world: World) -> None:
    syncer = world.syncer
    if _is_lost(world):
        return
    if syncer is None or not syncer.machine.committed:
        world.checkers.checkers[4].complain("the run was never begun again after the last fault")
        return
    if not syncer.finished:
        world.checkers.checkers[4].complain("the syncer did not come to an end after everybody had left")
    honest = [host for host in world.hosts if world.is_honest(host.name)]
    for host in honest:
        _lived(world, host)
    _books(world)
    whole = world.lossless and syncer.level == "commit"
    total = sum(host.machine.tokens for host in world.hosts)
    told = [host for host in honest if host.ended == "left"] if whole else []
    most = total if not world.scenario.liar else sys.maxsize  # what a liar claims is its own affair
    world.observe(facts.Processed(sum(host.machine.tokens for host in told), most))
    for host in told:
        if not host.machine.reseeding:  # one that leaves while its own progress is not trusted takes that with it
            _kept(world, host)
    if syncer.finished:
        world.observe(facts.Rested(whole and world.one_run))
        held = [identity for identity in syncer.driver.held if not syncer.machine.keeps(identity)]
        world.observe(facts.Sizes("contributions kept without need", len(held), 0))
        world.observe(
            facts.Sizes("inner states kept without need", len(syncer.inner.keys() - syncer.machine.inner_slots_open), 0)
        )
    if told:
        _compare(world)
    if whole and world.one_run:
        for replayed in world.tape.replay(dict(enumerate(syncer.machine.published))):
            world.observe(replayed)


def _lived(world: World, host: LearnerHost) -> None:
    host.count_able()
    longest_ns = int(host.spec.step_ns * (1 + host.spec.jitter / 2))
    waits = world.scenario.config.synchronous or host.slowed
    world.observe(facts.Lived(host.name, host.instance, host.machine.steps, host.able_ns, longest_ns, waits))


def _kept(world: World, host: LearnerHost) -> None:
    discards = host.reported.discarded if host.reported is not None else ()
    generation = host.machine.generation
    for fragment in range(world.scenario.config.fragments):
        causes = {count.cause: count.tokens for count in discards if count.fragment == fragment}
        discarded, refused = sum(causes.values()), world.refused[host.name, generation, fragment]
        overwritten = causes.get(Discard.OVERWRITTEN, 0)
        world.observe(facts.Kept(host.name, generation, fragment, host.machine.tokens, discarded, overwritten, refused))


def _compare(world: World) -> None:
    """Honest learners with a liar among them, with an honest one in its place, and without it, where little else goes
    wrong. (Who overwrites, or takes nothing that is late, loses more or less with everybody who comes or goes.)"""
    scenario, config = world.scenario, world.scenario.config
    faults = tuple(fault for fault in scenario.faults if fault.kind != "lie")
    strict = config.adopt == "overwrite" or config.carry_versions_max <= 1
    if not scenario.liar or strict or any(fault.target != "syncer" for fault in faults):
        return
    gone = SimFault("kill", scenario.liar, 0.0, scenario.seconds)
    twins = [_twin(scenario, faults), _twin(scenario, (gone, *faults))]
    shares = tuple(_trust(twin).merged_share for twin in twins)
    # A run that ends by itself has as many versions as its end lets it, and one whose syncer comes back may pause for a
    # minute, for what one learner says it holds.
    # A liar under as many ids as there are honest learners holds a beginning up for half a minute (`PROOF_NS`), and in
    # a run of one or two that is most of it (draw 4, seed 300256).
    crowd = max((fault.amount for fault in scenario.faults if fault.variant == "crowd"), default=0.0)
    undisturbed = not config.tokens_budget and not faults and crowd + 1 < len(scenario.learners)
    versions = tuple(each.versions_healed if undisturbed else 0 for each in (world, *twins))
    paces = [spec.step_ns for name, spec in world.specs.items() if world.is_honest(name)]
    spread, robust = max(paces) / min(paces), config.robust != "off"
    world.observe(facts.Unlied(_trust(world).merged_share, versions[0], shares, versions[1:], robust, spread))


def _twin(scenario: Scenario, faults: tuple[SimFault, ...]) -> World:
    twin = World(replace(scenario, faults=faults))  # no fabric has a liar
    _run(twin)
    return twin


def _trust(world: World) -> BoundedTrust:
    return next(checker for checker in world.checkers.checkers if isinstance(checker, BoundedTrust))


def _books(world: World) -> None:
    assert world.syncer is not None
    machine = world.syncer.machine
    for fragment in range(len(machine.versions)):
        line = machine.fragment_totals(fragment)
        world.observe(facts.Books(fragment, line.processed, line.merged, line.pending, line.discarded))


def _look(world: World) -> None:
    """Every few seconds: the books, and how much of everything there is."""
    syncer = world.syncer
    if syncer is not None and not syncer.dead and syncer.machine.layout is not None:
        _books(world)
        fragments, members = world.scenario.config.fragments, len(syncer.machine.members)
        generations = members + len(world.hosts)
        world.observe(facts.Sizes("contributions held", len(syncer.driver.held), 3 * fragments * generations))
        data_rows = members + 2 if world.reads_data else 0
        # Members of a syncer that died before it had a run, or lost it, stay on the tape until they come back: as many
        # as there were ids (draw 3, seeds 1071, 1739, 2677).
        ids = max(members, sum(key.startswith("member/") for key in world.disk.rows))
        ids = min(ids, members + (CROWD_MAX + len(world.scenario.learners) if world.scenario.liar else 0))
        world.observe(facts.Sizes("rows on the tape", len(world.disk.rows), ids + fragments + 8 + data_rows))
        kept = max((len(m) for x in syncer.machine.members.values() for m in x.merged), default=0)
        world.observe(facts.Sizes("merged contributions remembered", kept, MERGED_KEPT))
        world.look()
        _look_at_trust(world, syncer)
    for host in world.learners.values():
        outstanding, prepared = host.machine.waiting_most
        world.observe(facts.Sizes("contributions in the air of one fragment", outstanding, 2))
        world.observe(facts.Sizes("versions waiting to be adopted", prepared, 3))
    world.clock.after(LOOK_NS, _look, world)


def _look_at_trust(world: World, syncer: SyncerHost) -> None:
    """What a liar may have brought about: tokens in others' names, chunks of data that are gone, much of anything."""
    machine = syncer.machine
    for name, host in world.learners.items():
        member = machine.members.get(name)
        if world.is_honest(name) and member is not None and member.instance == host.instance:
            world.observe(facts.Charged(name, machine.processed_by(member), host.machine.tokens))
            world.observe(facts.Sizes(f"is the step that {name} has come to", host.machine.step, steps_believed(world)))
    waiting = [identity for identity in syncer.driver.held if machine.holds(identity)]  # and not only bears witness
    each = Counter((identity.learner, identity.fragment) for identity in waiting)
    world.observe(
        facts.Sizes("contributions held of one learner and fragment", max(each.values(), default=0), HELD_MAX)
    )
    lossless = world.lossless and world.one_run and syncer.level == "commit"
    if lossless and STREAM in machine.data_status():
        done = [chunk for chunk in range(CHUNKS_LOOKED_AT) if machine.data_fate(STREAM, chunk) == "done"]
        gone = set(done) - world.finished - world.leased_to_liar
        world.observe(facts.Sizes(f"chunks are done and nobody did them: {sorted(gone)[:5]}", len(gone), 0))
