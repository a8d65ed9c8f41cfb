"""The whole virtual world of one scenario: processes, links, a disk, faults, and everything that is observed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from random import Random

from atoll.core import (
    BLOCK,
    ContributionId,
    ContributionRefused,
    Layout,
    NormGuardReset,
    PushHeader,
    SyncConfig,
    SyncerMachine,
    TensorSpec,
    elements_of,
    norm_limit_absolute,
    step_factor_min,
)
from atoll.core import effects as fx
from atoll.instruments.check import Checkers, all_checkers, facts
from atoll.instruments.sim.believed import tokens_believed
from atoll.instruments.sim.clock import Clock
from atoll.instruments.sim.connection import Connection
from atoll.instruments.sim.disk import VirtualDisk
from atoll.instruments.sim.learner_host import CONNECT_NS, LearnerHost
from atoll.instruments.sim.liar import LyingLearner, Phantom
from atoll.instruments.sim.link import LinkWeather, VirtualLink, combined
from atoll.instruments.sim.parties import Server
from atoll.instruments.sim.payloads import LearnerPayloads, Payload, SyncerPayloads
from atoll.instruments.sim.references import WHOLE_BYTES, ReferenceLearner, ReferenceSyncer
from atoll.instruments.sim.scenario import LearnerSpec, Scenario, SimFault
from atoll.instruments.sim.syncer_host import SyncerHost, Timing
from atoll.instruments.sim.tape import SimTape
from atoll.instruments.sim.words import describe_event
from atoll.wire import CONTROL_KEEPALIVE_TIMEOUT_MS, KEEPALIVE_TIME_MS

SECOND = 1_000_000_000
RESTART_NS = 3 * SECOND
"""The supervisor's pause before it starts a dead learner again."""
SYNCER_RESTART_NS = SECOND
START_NS = SECOND // 2
"""A process needs time to start."""
KEEPALIVE_NS = (KEEPALIVE_TIME_MS + CONTROL_KEEPALIVE_TIMEOUT_MS) * 1_000_000
"""A connection over which nothing comes through is given up after this."""
LAST_EVENTS = 40


class World:
    given_up = 0
    """Shards whose fragments were left to the learners."""
    learner_host: type[LearnerHost] = LearnerHost
    """What a learner's process is. The lab's train real models."""

    def __init__(self, scenario: Scenario, *, tracing: bool = False, checkers: Checkers | None = None) -> None:
        self.scenario = scenario
        self.clock = Clock()
        self.disk = VirtualDisk()
        self.timing = Timing(scenario.merge_ns, scenario.sync_ns, scenario.commit_ns)
        self.dice = Random(f"world/{scenario.seed}")
        self.dice_disk = Random(f"disk/{scenario.seed}")
        config = scenario.config
        self.tensors = tensors_for(config.fragments)
        self.checkers = checkers or all_checkers(
            outlier_factor=config.norm_outlier_factor,
            sync_every=config.sync_every,
            step_factor_min=step_factor_min(config),
            share_max=config.share_max,
            norm_max=norm_limit_absolute(config, sum(map(elements_of, self.tensors))),
            liar=scenario.liar,
        )
        self.whole_bytes = WHOLE_BYTES
        self.tape = SimTape(scenario)
        self.events = 0
        self.faults_done = 0
        self.skipped = 0
        self.tracing = tracing
        self.lines: list[str] = []
        self.last: deque[str] = deque(maxlen=LAST_EVENTS)
        self.syncer: SyncerHost | None = None
        self.older: list[SyncerHost] = []
        """Syncers that a newer one has taken over from and that may still live."""
        self.learners: dict[str, LearnerHost] = {}
        self.links: dict[str, VirtualLink] = {}
        self.specs: dict[str, LearnerSpec] = {}
        self.hosts: list[LearnerHost] = []
        """Every process of a learner that there ever was."""
        self.lies: list[SimFault] = []
        """Those that are told at the moment."""
        self.phantoms: list[Phantom] = []
        """Every id that the liar made up or took."""
        self.forged: set[int] = set()
        """Checksums of parameters that the liar has made up."""
        self.made: set[tuple[int, int, int]] = set()
        """Fragment, version and checksum of all that was ever committed."""
        self.undecidable = 0
        """Versions of the liar's that the run went on from, since no two honest learners agreed on another."""
        self.steps_true: dict[ContributionId, int] = {}
        """Of what the liar has contributed."""
        self.lies_merged = 0
        """Contributions of the liar that were merged."""
        self.reads_data = any(fault.variant == "chunks" for fault in scenario.faults)
        self.finished: set[int] = set()
        """Chunks of data that honest learners have finished."""
        self.leased_to_liar: set[int] = set()
        self.refused: Counter[tuple[str, int, int]] = Counter()
        """By learner, generation and fragment: tokens of contributions that were refused."""
        self.healed = False
        self.versions_healed = 0
        self._fair: dict[str, LinkWeather] = {}
        self._weather: dict[str, list[SimFault]] = {}
        self._sessions = 0
        self._seeds = 0
        self._instances = 0
        self._down: dict[str, int] = {}
        """Learners that are kept down on purpose, and by how many faults."""
        self._refusals_noted = 0
        self._refusals_seen = 0

    @property
    def one_run(self) -> bool:
        """False once a syncer has come back without its state and begun anew."""
        return self._seeds == 1

    @property
    def lossless(self) -> bool:
        """False once anything was lost on a disk."""
        return self.disk.lossless

    @property
    def now_ns(self) -> int:
        return self.clock.now_ns

    # ------------------------------------------------------------ what is seen

    def observe(self, fact: facts.Fact) -> None:
        if isinstance(fact, facts.Committed):
            self.made.add((fact.fragment, fact.version, fact.checksum))
        self.checkers.feed(fact)
        if self.checkers.broken:
            self.clock.stop()

    @property
    def broken(self) -> bool:
        """There is nothing more to check."""
        return self.checkers.broken

    def is_undecidable(self, syncer: SyncerHost, heal: fx.CommitHealed) -> bool:
        """Whether the liar has made this version up and no syncer could tell: no two honest learners that have a
        session hold one and the same. (What the liar has trained may by chance be a version that was made: draw 3, seed
        3326. One that is frozen tells nobody what it holds: draw 4, seed 100099.)"""
        if heal.checksum not in self.forged or (heal.fragment, heal.version, heal.checksum) in self.made:
            return False
        there = {member.learner for member in syncer.machine.members.values() if member.connected}
        hosts = [host for name, host in self.learners.items() if self.is_honest(name) and name in there]
        held = Counter(host.machine.held(heal.fragment) for host in hosts if host.machine.joined)
        return max((count for (version, _), count in held.items() if version >= 0), default=0) < 2

    def note(self, source: str, note: fx.Note) -> None:
        event = note.event
        if isinstance(event, ContributionRefused):
            self._refusals_noted += 1
            self.refused[event.learner, event.generation, event.fragment] += event.tokens
        elif isinstance(event, NormGuardReset):
            self.observe(facts.GuardReset(event.fragment))
        if self.tracing:
            self.say(f"{source} notes {type(note.event).__name__}")

    def refusal_noted(self, header: PushHeader) -> bool:
        """Whether an event was written since the last refusal."""
        seen, self._refusals_seen = self._refusals_seen, self._refusals_noted
        return self._refusals_noted > seen

    def trace(self, actor: str, event: object) -> None:
        self.say(f"{actor} {describe_event(event)}")

    def say(self, text: str) -> None:
        line = f"{self.now_ns / 1e9:14.9f} {text}"
        self.last.append(line)
        self.lines.append(line)

    def stop_told(self) -> None:
        """The syncer ends the run, for its budget's sake as long as nobody else has asked for it."""
        scenario = self.scenario
        if not scenario.config.tokens_budget or self.finishing:
            return
        did = sum(host.machine.tokens for host in self.hosts)
        if not scenario.liar:
            self.observe(facts.Spent(scenario.config.tokens_budget, did))
        else:
            self.observe(facts.Spent(scenario.config.tokens_budget, did + tokens_believed(self)))

    def merged(self, effect: fx.Merge) -> None:
        """A merge is committed: progress for its fragment and for everybody in it."""
        self.observe(facts.Progressed(self.now_ns, effect.fragment))
        for identity in effect.contributions:
            self.observe(facts.Progressed(self.now_ns, learner=identity.learner))

    def record_seed(self, epoch: int, payloads: SyncerPayloads, machine: SyncerMachine) -> None:
        self._seeds += 1
        self.tape.seed(epoch, payloads, machine)

    def record_merge(self, epoch: int, effect: fx.Merge, checksum: int, payloads: Sequence[Payload]) -> None:
        self.tape.merge(epoch, effect, checksum, payloads)

    # ------------------------------------------------------------ making things

    def new_syncer_payloads(self, layout: Layout, config: SyncConfig) -> SyncerPayloads:
        if not self.scenario.arrays:
            return ReferenceSyncer(len(layout.fragments), config)
        from atoll.instruments.sim.arrays import ArraySyncer

        return ArraySyncer(layout, config)

    def new_learner_payloads(self, layout: Layout, config: SyncConfig, learner: str) -> LearnerPayloads:
        if not self.scenario.arrays:
            return ReferenceLearner(len(layout.fragments), learner)
        from atoll.instruments.sim.arrays import ArrayLearner

        return ArrayLearner(layout, config, learner)

    def begin(self) -> None:
        """Start everybody and plan the faults."""
        self.start_syncer()
        for name, spec in zip(self.scenario.names, self.scenario.learners, strict=True):
            self.add_learner(name, spec)
        for fault in self.scenario.faults:
            self.clock.at(int(fault.at_s * 1e9), self._begin_fault, fault)

    def start_syncer(self) -> None:
        if self.syncer is None:
            self.syncer = SyncerHost(self, f"syncer-{self.disk.epoch + 1}")
            self.clock.after(START_NS, self.syncer.call, self.syncer.start)

    def add_learner(self, name: str, spec: LearnerSpec) -> None:
        fair = LinkWeather(
            latency_ns=(spec.latency_ns, spec.latency_ns),
            jitter_ns=spec.link_jitter_ns,
            bits_per_s=(spec.up_bits_per_s, spec.down_bits_per_s),
            loss=spec.loss,
        )
        self.specs[name], self._fair[name], self._weather[name] = spec, fair, []
        self.links[name] = VirtualLink(self.clock, Random(f"link/{self.scenario.seed}/{name}"), fair)
        self.start_learner(name)

    def guest_spec(self, name: str) -> LearnerSpec:
        """What a learner that joins is like: as the first one. The lab's have speeds of their own."""
        return self.scenario.learners[0]

    def start_learner(self, name: str) -> None:
        """Start a process of this learner, unless one runs or it is kept down."""
        old = self.learners.get(name)
        if (old is not None and not old.dead) or self._down.get(name):
            return
        self._instances += 1
        again = "+" if old is not None else ""
        kind = self.learner_host if self.is_honest(name) else LyingLearner
        host = kind(self, name, f"{name}#{self._instances}{again}", self.specs[name], self.links[name])
        self.learners[name] = host
        self.hosts.append(host)
        self.clock.after(START_NS, host.call, host.start)

    def versions(self) -> int:
        """Of all fragments."""
        return sum(max(0, version) for version in self.syncer.machine.versions) if self.syncer is not None else 0

    def is_honest(self, name: str) -> bool:
        return name != self.scenario.liar

    def add_phantom(self, name: str) -> None:
        """The liar says hello under this name, too."""
        number = len(self.phantoms)
        phantom = Phantom(self, self.learners[self.scenario.liar], name, f"phantom-{number} as {name}")
        self.phantoms.append(phantom)
        self.connect(phantom)

    # ------------------------------------------------------------ connections

    def reachable(self) -> SyncerHost | None:
        """The syncer that listens on the run's address."""
        syncer = self.syncer
        return syncer if syncer is not None and not syncer.dead and syncer.serving else None

    def way_to(self, learner: LearnerHost, fragment: int) -> tuple[Server | None, VirtualLink]:
        """Who serves this fragment (-1: who serves the rest), and the link there."""
        return self.reachable(), learner.link

    def connect(self, learner: LearnerHost | Phantom) -> None:
        link = learner.link
        if link.blocked:
            learner.later(CONNECT_NS, learner.not_connected)
            return
        round_trip_ns = sum(link.weather.latency_ns)
        learner.later(round_trip_ns, self._connect, learner)

    def _connect(self, learner: LearnerHost | Phantom) -> None:
        syncer = self.reachable()
        if syncer is None or learner.link.blocked:
            learner.not_connected()
            return
        self._sessions += 1
        connection = Connection(self._sessions, learner, syncer)
        syncer.accepted[self._sessions] = connection
        learner.connected(connection)

    def _give_up_silent(self, name: str, since_ns: int) -> None:
        """Nothing has come through for so long that both sides give the connections up, each by itself."""
        link, host = self.links[name], self.learners[name]
        if since_ns not in link.blocked_since:
            return
        connection = host.connection
        if connection is not None:
            connection.reset = True
            self.clock.after(int(self.dice.uniform(0, 5e9)), connection.learner_side_down, "no answer to pings")
            self.clock.after(int(self.dice.uniform(0, 10e9)), connection.syncer_side_down, "no answer to pings")
        for call in list(host.calls):
            call.give_up(reset=self.dice.random() < 0.5)
        # A connection that was made while the link was going away is silent as well.
        self.clock.after(KEEPALIVE_NS, self._give_up_silent, name, since_ns)

    # ------------------------------------------------------------ ends

    def syncer_ended(self, host: SyncerHost) -> None:
        """A fenced syncer ends by itself."""
        self._syncer_dies(host)

    def _syncer_dies(self, host: SyncerHost) -> None:
        connections = [*host.connections.values(), *host.accepted.values()]
        host.die()
        if self.syncer is host:
            self.syncer = None
        for connection in connections:
            connection.process_died(learner=False)
        for learner in self.learners.values():
            for call in list(learner.calls):
                if call.goes_to(host):
                    learner.later(sum(learner.link.weather.latency_ns), call.give_up)

    def learner_ended(self, host: LearnerHost) -> None:
        left = host.ended.startswith("left") or "run_closed" in host.ended or self.finishing
        if self.learners.get(host.name) is host and not left:
            self.clock.after(RESTART_NS, self.start_learner, host.name)

    finishing = False

    # ------------------------------------------------------------ faults

    def _begin_fault(self, fault: SimFault) -> None:
        if self.healed:
            return
        self.faults_done += 1
        if self.tracing:
            self.say(f"fault {fault.kind} on {fault.target} begins")
        if fault.target == "syncer":
            self._hit_syncer(fault)
        elif fault.kind == "join":
            self._down.pop(fault.target, None)
            self.add_learner(fault.target, self.guest_spec(fault.target))
        else:
            self._hit_learner(fault)
        if fault.lasts_s:
            self.clock.after(int(fault.lasts_s * 1e9), self._fault_is_over, fault)

    def _hit_syncer(self, fault: SimFault) -> None:
        syncer = self.syncer
        if fault.kind == "disk_full":
            self.disk.broken = "full"
        elif fault.kind == "disk_slow":
            self.disk.slow = fault.amount
        elif fault.kind == "freeze" and syncer is not None:
            syncer.freeze()
        elif fault.kind == "takeover" and self.scenario.durability == "none":
            self.skipped += 1  # without a state folder there is nothing to take over
        elif fault.kind == "takeover" and syncer is not None:
            self.older.append(syncer)
            self.syncer = None
            self.start_syncer()
        elif syncer is not None and fault.kind in ("kill", "power", "rot", "wipe"):
            self._syncer_dies(syncer)
            if fault.kind == "power":
                self.disk.power_cut(self.dice_disk)
            else:
                self.disk.process_died(self.dice_disk)
            if fault.kind == "rot":
                self.disk.rot(self.dice_disk)
            elif fault.kind == "wipe":
                self.disk.wipe()
            self.clock.after(SYNCER_RESTART_NS, self.start_syncer)
        elif syncer is None:
            self.skipped += 1

    def _hit_learner(self, fault: SimFault) -> None:
        host = self.learners[fault.target]
        if fault.kind == "lie":
            self.lies.append(fault)
            if isinstance(host, LyingLearner):
                host.call(host.lie_begins, fault)
            return
        if fault.kind in ("partition", "stall", "delay", "limit", "corrupt", "lose", "break"):
            self._weather[fault.target].append(fault)
            self._set_weather(fault.target)
        elif host.dead:
            self.skipped += 1
        elif fault.kind == "kill":
            host.die()
            self.clock.after(int(fault.lasts_s * 1e9) or RESTART_NS, self.start_learner, fault.target)
        elif fault.kind == "freeze":
            host.freeze()
        elif fault.kind == "slow":
            host.slow, host.slowed = fault.amount, True
        elif fault.kind == "poison":
            host.poison = fault.variant
        elif fault.kind == "mute":
            host.mute = True
        elif fault.kind == "away":
            self._down[fault.target] = self._down.get(fault.target, 0) + 1
            host.call(host.close, "asked to leave")
        elif fault.kind in ("dismiss", "revoke") and self.syncer is None:
            self.skipped += 1
        elif fault.kind == "dismiss":
            self._down[fault.target] = self._down.get(fault.target, 0) + 1
            self._tell_syncer(fx.LeaveAsked(fault.target))
        elif fault.kind == "revoke":
            self._tell_syncer(fx.KeyRevoked(fault.target, f"the key of {fault.target} was revoked"))
            if host.connection is None:  # with the old key it would not come in any more
                host.die()
                self.clock.after(RESTART_NS, self.start_learner, fault.target)
        elif fault.kind == "cut":
            if host.connection is not None:
                host.connection.cut()
            for call in list(host.calls):
                call.give_up(reset=self.dice.random() < 0.5)

    def _tell_syncer(self, event: fx.SyncerInput) -> None:
        """What an operator says, on the syncer's machine."""
        if self.syncer is not None:
            self.syncer.call(self.syncer.hear, event)

    def _set_weather(self, name: str) -> None:
        link = self.links[name]
        blocked = link.weather.blocked
        link.set(combined(self._fair[name], [(f.kind, f.direction, f.amount) for f in self._weather[name]]))
        for direction in (0, 1):
            if link.weather.blocked[direction] and not blocked[direction]:
                self.clock.after(KEEPALIVE_NS, self._give_up_silent, name, link.blocked_since[direction])

    def _fault_is_over(self, fault: SimFault) -> None:
        if not self.healed or fault.kind == "lie":
            self._end_fault(fault)

    def _end_fault(self, fault: SimFault) -> None:
        if self.tracing:
            self.say(f"fault {fault.kind} on {fault.target} ends")
        if fault.kind == "disk_full":
            self.disk.broken = ""
        elif fault.kind == "disk_slow":
            self.disk.slow = 1.0
        elif fault.target == "syncer":
            for syncer in [self.syncer, *self.older]:
                if syncer is not None and syncer.frozen:
                    syncer.thaw()
        elif fault.kind == "join":
            self._down[fault.target] = 1
            host = self.learners[fault.target]
            host.call(host.close, "asked to leave")
        elif fault in self._weather[fault.target]:
            self._weather[fault.target].remove(fault)
            self._set_weather(fault.target)
        elif fault.kind == "lie":
            self._end_lie(fault)
        elif fault.kind in ("away", "dismiss"):
            self._down[fault.target] = max(0, self._down.get(fault.target, 0) - 1)
            self._start_when_gone(fault.target)
        else:
            host = self.learners[fault.target]
            if fault.kind == "freeze" and host.frozen:
                host.thaw()
            elif fault.kind == "slow":
                host.slow = 1.0
            elif fault.kind == "poison":
                host.poison = host.spec.lies
            elif fault.kind == "mute":
                host.mute = False

    def _end_lie(self, fault: SimFault) -> None:
        self.lies.remove(fault)
        for phantom in self.phantoms if fault.variant in ("crowd", "ids") else ():
            phantom.vanish()

    def _start_when_gone(self, name: str) -> None:
        host = self.learners[name]
        if self._down.get(name) or self.finishing:
            return
        if host.dead:
            self.start_learner(name)
        else:
            self.clock.after(SECOND, self._start_when_gone, name)

    def look(self) -> None:
        """Every few seconds, while a syncer leads: what else there is, and how much of it."""

    def close(self) -> None:
        """Nothing happens any more."""

    def heal(self) -> None:
        """End everything that is wrong, but not the lies: the others must do without the liar. Whoever is down is
        started again."""
        if self.tracing:
            self.say("the world is healed")
        for fault in self.scenario.faults:
            if fault.kind == "lie":
                continue
            if fault.lasts_s and fault.at_s * 1e9 <= self.now_ns < (fault.at_s + fault.lasts_s) * 1e9:
                self._end_fault(fault)
        self.healed = True
        self.versions_healed = self.versions()
        self.disk.broken, self.disk.slow = "", 1.0
        for name in self.links:
            self._weather[name] = []
            self._set_weather(name)
        if self.syncer is None:
            self.clock.after(SYNCER_RESTART_NS, self.start_syncer)
        for name in self.scenario.names:
            self._down.pop(name, None)
            self._start_when_gone(name)


def tensors_for(fragments: int) -> tuple[TensorSpec, ...]:
    """A small model that fills so many fragments: odd sizes, so that there is padding; one tensor merges by mean."""
    count = max(2, fragments)
    return tuple(
        TensorSpec(f"w{index}", (BLOCK - 7 * (index % 3),), "float32", "mean" if index == 0 else "rda")
        for index in range(count)
    )
