"""The world of a run that is more than one syncer: a standby, shards, relays. Each is a process of its own at a place
of its own, with a disk of its own, and runs production's code on a loop in virtual time.

Learners are those of the smaller world. Between any two places there is a link, and any of them may be cut.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.core import NO_VERSION, SECOND_NS
from atoll.core import effects as fx
from atoll.instruments.check import facts
from atoll.instruments.sim.arrays import encoded_in
from atoll.instruments.sim.connection import Connection
from atoll.instruments.sim.fabric_learner import FabricLearner
from atoll.instruments.sim.learner_host import CONNECT_NS, LearnerHost
from atoll.instruments.sim.link import VirtualLink
from atoll.instruments.sim.parties import Server
from atoll.instruments.sim.relay_process import RelayProcess
from atoll.instruments.sim.scenario import SimFault
from atoll.instruments.sim.service import ServiceProcess
from atoll.instruments.sim.shard_process import ShardProcess
from atoll.instruments.sim.store import FolderDisk
from atoll.instruments.sim.syncer_process import SyncerProcess
from atoll.instruments.sim.ways import FAIR, Ways, targets_of
from atoll.instruments.sim.world import START_NS, SYNCER_RESTART_NS
from atoll.syncer import ACTIONS, SHARDS_ROW, InspectedPayload

if TYPE_CHECKING:
    from atoll.instruments.sim.scenario import Scenario

WEATHER = ("partition", "stall", "delay", "limit", "corrupt", "lose", "break")
ASKED_MAX = 30
"""How often an operator asks for one thing."""
HOST_BACK_NS = 5_000_000_000
"""Until somebody has started a host again whose process ended by itself."""


@dataclass(slots=True)
class FabricPlace:
    """Where a process of the fabric runs: its disk stays when it dies."""

    name: str
    disk: FolderDisk
    process: ServiceProcess | None = None
    listener: ServiceProcess | None = None
    down: int = 0
    """How many faults keep it down."""

    @property
    def address(self) -> str:
        return f"{self.name}:7077"


class FabricWorld(Ways):
    learner_host = FabricLearner

    def __init__(self, scenario: Scenario, **named: Any) -> None:
        super().__init__(scenario, **named)
        self.shard_names = [f"shard-{index}" for index in range(scenario.shards + scenario.spares)]
        self.relay_names = ["relay-0"] if scenario.relayed else []
        self.made_of: dict[int, facts.Committed] = {}
        """By fragment: a merge that is on no disk yet, and was told to nobody."""
        self.epoch_newest = 0
        self.counted_on: dict[int, int] = {}
        """By the epoch under which a coordinator leads its shards: the one under which it goes on from learners."""
        self.moves = 0
        """Fragments that have moved."""
        self._shard_at: dict[str, str] = {}
        """By the name that a shard has given itself: its place."""
        self._owners: dict[int, str] = {}
        """By fragment: the place of the shard that has it, as the coordinator's tape says."""
        self._runs = self._processes = self._shards_named = 0
        self._ways: dict[tuple[str, str], VirtualLink] = {}
        self._faults: list[SimFault] = []
        """Weather that lasts at the moment."""
        names = ["syncer", *(["standby"] if scenario.standby else []), *self.shard_names, *self.relay_names]
        self.places = {name: FabricPlace(name, FolderDisk(name=name)) for name in names}
        if scenario.standby == "folder":
            self.places["standby"].disk = self.places["syncer"].disk
        self.disk = self.places["syncer"].disk
        for name in self.upstream_names:
            self.places[name].disk.mapped = self._mapped
        logging.getLogger("atoll.wire.shard_peer").setLevel(logging.CRITICAL)  # `crashed` tells what matters

    # ------------------------------------------------------------ places and ways

    def place_at(self, address: str) -> FabricPlace:
        return self.places[address.rpartition(":")[0]]

    def addresses_of(self, learner: str) -> list[str]:
        """The relay first, where there is one before this learner, then every place where a syncer may be."""
        own = [name for name in self.relay_names if self._is_relayed(learner)]
        return [*own, *self.upstream_names]

    def _is_relayed(self, learner: str) -> bool:
        return learner in self.scenario.names[: self.scenario.relayed]

    def _servers(self) -> list[ServiceProcess]:
        return [place.process for place in self.places.values() if place.process is not None]

    def _relays(self) -> list[RelayProcess]:
        return [process for process in self._servers() if isinstance(process, RelayProcess)]

    def way_to(self, learner: LearnerHost, fragment: int) -> tuple[Server | None, VirtualLink]:
        assert isinstance(learner, FabricLearner)
        name = learner.found
        if learner.shard_of and 0 <= fragment < len(learner.shard_of):
            name = self.place_at(learner.shards[learner.shard_of[fragment]]).name
        listener = self.places[name].listener
        return listener, self.way(learner.name, name)

    def answers(self, learner: str, name: str) -> bool:
        """Whether a learner that asks for the status of this place hears it."""
        listener = self.places[name].listener
        return listener is not None and not listener.dead and listener.serving and not self.way(learner, name).blocked

    def connect(self, learner: Any) -> None:
        link = self.way(learner.name, learner.places[0])
        wait_ns = CONNECT_NS if link.blocked else sum(link.weather.latency_ns)
        learner.later(wait_ns, self._connect, learner)

    def _connect(self, learner: Any) -> None:
        place = self.places[learner.places[0]]
        server, link = place.listener, self.way(learner.name, place.name)
        if server is None or server.dead or not server.serving or link.blocked:
            learner.not_connected()
            return
        learner.connected(self.new_connection(learner, server, link))

    # ------------------------------------------------------------ what is seen

    @property
    def lossless(self) -> bool:
        return all(place.disk.lossless for place in self.places.values())

    def lossless_of(self, fragments: Mapping[int, object]) -> bool:
        return self.lossless

    def durability_lost(self) -> None:
        for place in self.places.values():
            place.disk.lossless = False

    def is_made(self, fragment: int, version: int = NO_VERSION) -> None:
        """A merge counts from here on: it is on a disk, or somebody hears of it."""
        fact = self.made_of.get(fragment)
        if fact is not None and version in (NO_VERSION, fact.version):
            del self.made_of[fragment]
            self.observe(fact)

    def stored(self, process: SyncerProcess, fragment: int, version: int, checksum: int) -> None:
        """A syncer's own disk has this version. What one that was overtaken still writes to a disk of its own is
        nobody's: it must not be published."""
        overtaken = process.epoch < self.epoch_newest and self.scenario.standby == "replicate"
        if process.counts and not overtaken:
            self.is_made(fragment, version)
            self.observe(facts.Durable(process.epoch, fragment, version))

    def copied(self, fragment: int, version: int, checksum: int) -> None:
        """A standby's disk has it."""
        self.is_made(fragment, version)
        self.observe(facts.Copied(fragment, version, checksum))

    def opened(self, epoch: int) -> None:
        self.epoch_newest = max(self.epoch_newest, epoch)
        self.observe(facts.Opened(epoch))
        for fragment, shard in self._owners.items():
            self.observe(facts.Moved(fragment, shard))

    def begins_anew(self) -> None:
        """A coordinator finds a run that never began: what shards have of it goes nowhere, whatever the tape says while
        the disk is full (draw 7, seeds 1855 and 2935)."""
        self._owners.clear()

    def _mapped(self, disk: FolderDisk) -> None:
        """The tape says anew who has what."""
        names = json.loads(disk.rows.get(SHARDS_ROW, "[]"))
        # A full disk keeps for later what could not be synced, and that it was set back (draw 7, seed 3197).
        moves = bool(self._owners) and not disk.broken
        for fragment, name in enumerate(names):
            shard = self._shard_at.get(name, "")
            if self._owners.get(fragment) != shard:
                self._owners[fragment] = shard
                self.observe(facts.Moved(fragment, shard, moves and self.lossless))

    def crashed(self, error: Exception) -> None:
        """What fails inside a process where nobody would see it is a finding."""

        def tell() -> None:
            raise error

        self.clock.after(0, tell)

    def new_run(self) -> str:
        self._runs += 1
        return f"run-{self._runs}"

    def state_of(self, process: SyncerProcess, fragment: int) -> Any:
        shard = self.shard_with(process, fragment)
        return process.shell.platform.state if process.shards is None else shard and shard.arrays.state

    def shard_with(self, process: SyncerProcess, fragment: int) -> ShardProcess | None:
        """The shard that this coordinator takes for the fragment's."""
        if process.shards is None:
            return None
        found = self.place_at(process.shards.link_of(fragment).address).process
        return found if isinstance(found, ShardProcess) else None

    def payloads_of(self, process: SyncerProcess, merge: fx.Merge, held: list[Any]) -> list[InspectedPayload] | None:
        shard = self.shard_with(process, merge.fragment)
        if shard is not None:
            there = shard.arrays.held  # None where a relay has some of it
            return [there[one] for one in merge.contributions] if there.keys() >= set(merge.contributions) else None
        return held if all(isinstance(item, InspectedPayload) for item in held) else None

    def record_inspected(
        self, epoch: int, merge: fx.Merge, checksum: int, given: list[InspectedPayload] | None
    ) -> None:
        if given is None:
            self.tape.forget()
            return
        for item in given:
            encoded_in(item.payload, item.codec.name)
        self.record_merge(epoch, merge, checksum, [item.payload for item in given])

    # ------------------------------------------------------------ processes

    def begin(self) -> None:
        for name in self.places:
            self.start_place(name)
        for name, spec in zip(self.scenario.names, self.scenario.learners, strict=True):
            self.add_learner(name, spec)
        for fault in self.scenario.faults:
            self.clock.at(int(fault.at_s * 1e9), self._begin_fault, fault)

    def new_connection(self, caller: Any, server: Any, link: VirtualLink) -> Connection:
        self._sessions += 1
        connection = Connection(self._sessions, caller, server, link)
        server.accepted[self._sessions] = connection
        return connection

    @property
    def upstream_names(self) -> list[str]:
        """Where a syncer may be."""
        return ["syncer", *(["standby"] if self.scenario.standby else [])]

    def new_shard_name(self, place: str) -> str:
        self._shards_named += 1
        name = f"s{self._shards_named:03d}"
        self._shard_at[name] = place
        return name

    def start_syncer(self) -> None:
        self.start_place("syncer")

    def start_place(self, name: str) -> None:
        place = self.places[name]
        if (place.process is not None and not place.process.dead) or place.down:
            return
        self._processes += 1
        place.process = process = self._new_process(place, f"{name}-{self._processes}")
        self.clock.after(START_NS, process.call, process.start)

    def _new_process(self, place: FabricPlace, name: str) -> ServiceProcess:
        if place.name in self.shard_names:
            return ShardProcess(self, place.name, name)
        if place.name in self.relay_names:
            return RelayProcess(self, place.name, name)
        waits = place.name == "standby"
        if self.scenario.standby == "folder" and self.now_ns:
            # Whoever starts a syncer again gives --standby, unless the folder tells of none that could be waited for.
            waits = place.disk.told is not None
        return SyncerProcess(self, place.name, name, waits=waits)

    def leads(self, process: SyncerProcess) -> None:
        """This syncer serves now."""
        if self.syncer is None or self.syncer.dead or process.epoch >= self.syncer.epoch:
            self.syncer = process  # type: ignore[assignment]
            self.disk = process.disk

    def leads_no_more(self, process: SyncerProcess) -> None:
        leader: object = self.syncer
        if leader is process:
            self.syncer = None

    def process_ended(self, process: ServiceProcess, reason: str) -> None:
        """By itself. Somebody starts it again, later than one that died."""
        if process.dead:
            return
        if self.tracing:
            self.say(f"{process.name} ends, {reason}")
        self._dies(process)
        self.clock.after(HOST_BACK_NS, self.start_place, process.place)

    def _dies(self, process: ServiceProcess) -> None:
        connections = [*process.connections.values(), *process.accepted.values()]
        pipes = list(process.pipes)
        process.die()
        process.serving = False
        place = self.places[process.place]
        place.process = None
        if place.listener is process:
            place.listener = None
        self.leads_no_more(process)  # type: ignore[arg-type]
        for connection in connections:
            connection.process_died(learner=False)
        for end in pipes:
            end.process_died()
        for learner in self.learners.values():
            for call in list(learner.calls):
                if call.goes_to(process):
                    learner.later(sum(learner.link.weather.latency_ns), call.give_up)
        for relay in self._relays():
            for call in [call for call in relay.calls if call.goes_to(process)]:
                relay.later(sum(FAIR.latency_ns), call.give_up)

    # ------------------------------------------------------------ faults

    def _begin_fault(self, fault: SimFault) -> None:
        if fault.kind in WEATHER and not self.healed:
            self.faults_done += 1
            if self.tracing:
                self.say(f"fault {fault.kind} on {fault.target} begins")
            self._faults.append(fault)
            self._set_weather(fault.target)
            self.clock.after(int(fault.lasts_s * 1e9), self._fault_is_over, fault)
        elif fault.kind == "cut" and not self.healed:
            self.faults_done += 1
            for link in [link for key, link in self._ways.items() if fault.target in targets_of(key)]:
                self._break_way(link, lambda: 0)
        elif fault.kind in ACTIONS and not self.healed:
            self.faults_done += 1
            self._ask(fault, ASKED_MAX)
        elif fault.target in self.places and not self.healed:
            self.faults_done += 1
            if self.tracing:
                self.say(f"fault {fault.kind} on {fault.target} begins")
            self._hit_place(self.places[fault.target], fault)
            if fault.lasts_s:
                self.clock.after(int(fault.lasts_s * 1e9), self._fault_is_over, fault)
        else:
            super()._begin_fault(fault)

    def _ask(self, fault: SimFault, times: int) -> None:
        """An operator has fragments moved, or a shard taken in or out; whoever is not heard, or told to come again,
        asks again a second later."""
        leader: Any = self.syncer
        if leader is not None and leader.serving and not leader.dead:
            leader.call(lambda: leader.spawn(self._asked(leader, fault, times)))
        else:
            self._ask_again(fault, times)

    async def _asked(self, leader: SyncerProcess, fault: SimFault, times: int) -> None:
        if self.tracing:
            self.say(f"the operator asks {leader.name}: {fault.kind} {fault.target} {fault.variant}")
        fragments = [int(one) for one in fault.variant.split(",") if one]
        if await leader.change(fault.kind, self.places[fault.target].address, fragments):
            self._ask_again(fault, times)

    def _ask_again(self, fault: SimFault, times: int) -> None:
        if times > 1 and not self.healed:
            self.clock.after(SECOND_NS, self._ask, fault, times - 1)
        else:
            self.skipped += 1

    def _hit_place(self, place: FabricPlace, fault: SimFault) -> None:
        process, disk = place.process, place.disk
        if fault.kind == "disk_full":
            disk.broken = "full"
        elif fault.kind == "disk_slow":
            disk.slow = fault.amount
        elif process is None:
            self.skipped += 1
        elif fault.kind == "freeze":
            process.freeze()
        else:
            self._kill(place, process, fault)

    def _kill(self, place: FabricPlace, process: ServiceProcess, fault: SimFault) -> None:
        """kill, power, rot, wipe."""
        self._dies(process)
        disk = place.disk
        if disk.holder in (None, process):  # another one may write there
            if fault.kind == "power":
                disk.power_cut(self.dice_disk)
            else:
                disk.process_died(self.dice_disk)
            if fault.kind == "rot":
                disk.rot(self.dice_disk)
            elif fault.kind == "wipe":
                disk.wipe()
        self.clock.after(int(fault.lasts_s * 1e9) or SYNCER_RESTART_NS, self.start_place, place.name)

    def _end_fault(self, fault: SimFault) -> None:
        if fault in self._faults:
            if self.tracing:
                self.say(f"fault {fault.kind} on {fault.target} ends")
            self._faults.remove(fault)
            self._set_weather(fault.target)
        elif fault.target in self.places:
            if self.tracing:
                self.say(f"fault {fault.kind} on {fault.target} ends")
            self._end_at_place(self.places[fault.target], fault)
        else:
            super()._end_fault(fault)

    def _end_at_place(self, place: FabricPlace, fault: SimFault) -> None:
        if fault.kind == "disk_full":
            place.disk.broken = ""
        elif fault.kind == "disk_slow":
            place.disk.slow = 1.0
        elif fault.kind == "freeze" and place.process is not None and place.process.frozen:
            place.process.thaw()

    def look(self) -> None:
        most = 3 * self.scenario.config.fragments * (len(self.learners) + len(self.hosts))
        for relay in self._relays():
            self.observe(facts.Sizes(f"contributions held at {relay.place}", relay.held, most))
        for process in self._servers():
            if isinstance(process, ShardProcess):
                self.observe(facts.Sizes(f"contributions held at {process.place}", process.held, most))

    def close(self) -> None:
        """Nothing happens any more: coroutines that wait are unwound here, and not by the garbage collector."""
        for process in self._servers():
            process.die()

    def heal(self) -> None:
        super().heal()
        self._faults.clear()
        self._set_weather("")
        for place in self.places.values():
            place.disk.broken, place.disk.slow = "", 1.0
            if place.process is None:
                self.clock.after(SYNCER_RESTART_NS, self.start_place, place.name)
