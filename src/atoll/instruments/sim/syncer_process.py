"""One process of a syncer in the fabric: production's shell, keeper, standby and coordinator, in virtual time.

The order in which a process opens its folder, finds what is left of the run, leads its shards, replicates and serves is
that of `syncer.serve`; every step is production's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core import ASKED_TO_LEAVE, Begin, Published, Recovery, Refusal, Start, Stop, SyncerMachine
from atoll.core import effects as fx
from atoll.errors import ConfigError, FencedSyncerError, RefusedError, StoreError, UnreachableError
from atoll.instruments.check import facts
from atoll.instruments.sim.link import DOWN, UP, Stream
from atoll.instruments.sim.merge_facts import MergeFacts
from atoll.instruments.sim.observed import ObservedShardedShell, ObservedShell
from atoll.instruments.sim.pipe import SimConnection
from atoll.instruments.sim.service import ServiceProcess
from atoll.instruments.sim.store import open_virtual
from atoll.observe import NullWriter
from atoll.syncer import (
    ENDED,
    PATIENCE_AGAIN_S,
    PATIENCE_S,
    SILENT_S,
    FolderWatch,
    InspectedPayload,
    Lead,
    MoveRecord,
    Replicator,
    ShardFleet,
    StandbyReplica,
    StateWriter,
    agree_on_settings,
    epoch_of,
    find_rows,
    forget_unbegun,
    mark_led,
    recover,
    refused_primary,
    watch_primary,
    with_shards,
)
from atoll.wire import ClientOptions

if TYPE_CHECKING:
    from atoll.instruments.sim.fabric import FabricWorld

LIVE_S = 0.25
"""How often a process looks whether it must end."""
WATCH_S = 0.5
"""Between two looks at a primary, as in production."""


class VirtualFolderWatch(FolderWatch):
    """Looks at a primary through a folder of this world."""

    def __init__(self, process: SyncerProcess, after_s: float) -> None:
        super().__init__(Path(process.disk.name), after_s, now_s=process.loop.time)
        self._process = process

    def _held(self) -> bool:
        return self._process.disk.held

    def _told(self) -> dict[str, Any] | None:
        return self._process.disk.told

    async def _answers(self, told: dict[str, Any]) -> bool:
        """Ask for its status."""
        process, answer = self._process, asyncio.get_running_loop().create_future()
        place = process.world.place_at(told["address"])
        link = process.world.way(process.place, place.name)

        def answered() -> None:
            if not answer.done():
                answer.set_result(True)

        def here() -> None:
            process.call(answered)

        def there() -> None:
            listener = place.listener
            if listener is not None and not listener.dead:
                listener.call(link.carry, DOWN, 1_000, Stream(), here)

        if place.listener is None:
            return False
        link.carry(UP, 200, Stream(), there)
        try:
            async with asyncio.timeout(SILENT_S):
                return bool(await answer)
        except TimeoutError:
            return False


class SyncerProcess(MergeFacts, ServiceProcess):
    world: FabricWorld
    shell: ObservedShell | ObservedShardedShell

    def __init__(self, world: FabricWorld, place: str, name: str, *, waits: bool) -> None:
        super().__init__(world, place, name)
        self.disk = world.places[place].disk
        self.level = world.scenario.durability
        self.epoch = self._began_as = 0
        self.counts = False
        self.finished = ""
        """Why it is over: everybody has left."""
        self.shards: ShardFleet | None = None
        self._waits = waits
        """It was started as a standby."""

    # ------------------------------------------------------------ what the world looks at

    @property
    def machine(self) -> SyncerMachine:  # type: ignore[override]
        return self.shell.machine

    @property
    def driver(self) -> Any:
        return self.shell.driver

    @property
    def inner(self) -> dict[int, Any]:
        return self.shell.platform.inner

    def hear(self, event: Any) -> None:
        self.shell.apply(event)

    def heard(self, event: fx.SyncerInput) -> None:
        if isinstance(event, fx.FragmentsBack):
            self.shell.platform.went_back(event)  # type: ignore[attr-defined]
        self.world.events += 1
        if self.world.tracing:
            self.world.trace(self.name, event)

    def said(self, message: Any) -> None:
        if self.machine.epoch > self.epoch:  # without a state it goes on from learners, above what they have seen
            self.world.counted_on[self._began_as] = self.epoch = self.machine.epoch
            self._begins_to_count(None)
        match message:
            case Published():
                self._told(message.fragment, message.version, message.checksum)
            case Start():
                for fragment, state in enumerate(message.fragments):
                    self._told(fragment, state.version, state.checksum)
            case Stop() if message.reason != ASKED_TO_LEAVE:
                self.world.stop_told()

    def _told(self, fragment: int, version: int, checksum: int) -> None:
        keeper = self.shell.keeper
        promised = self.level == "commit" and not keeper.gate.degraded and fragment not in keeper.gate.dirty
        # One whose shard is away, or came back without it, was told before; a full disk may have been in between.
        promised = promised and not self.machine.is_down(fragment)
        copied = keeper.replica is not None and not keeper.replica.degraded
        self.world.observe(facts.Told(self.epoch, fragment, version, checksum, promised, copied))

    def fenced(self, reason: str) -> None:
        if self.world.tracing:
            self.world.say(f"{self.name} is fenced: {reason}")
        if self.counts:  # one that replicates is refused by its standby, whatever the epochs of both
            replica, newest = self.shell.keeper.replica, max(self.world.epoch_newest, self.disk.epoch)
            refused = replica is not None and replica._refused is not None  # which may be about to open the run
            self.world.observe(facts.Overtaken(self.epoch, self.epoch + 1 if refused else newest))
        self.ended(f"fenced: {reason}")

    # ------------------------------------------------------------ arrays, wherever they are

    def theta(self, fragment: int) -> Any:
        """The parameters of a fragment as they are now; None: nobody here has them."""
        state = self.world.state_of(self, fragment)
        return state.fragments[fragment].theta if state is not None else None

    def version(self, fragment: int) -> tuple[int, int]:
        arrays = self.world.state_of(self, fragment).fragments[fragment]
        return arrays.version, arrays.checksum

    def durable(self, fragment: int) -> dict[str, Any]:
        state = self.world.state_of(self, fragment)
        return {name: array.copy() for name, array in state.durable(fragment).items()}

    def payloads_of(self, merge: fx.Merge, held: list[Any]) -> list[InspectedPayload] | None:
        """None: not all of them are known."""
        return self.world.payloads_of(self, merge, held)

    def recorded(self, merge: fx.Merge, checksum: int, given: list[InspectedPayload] | None) -> None:
        self.world.record_inspected(self.epoch, merge, checksum, given)

    # ------------------------------------------------------------ life

    async def main(self) -> None:
        scenario = self.world.scenario
        try:
            if self._waits and not await self._wait():
                self.ended("nobody is needed")
                return
            patience_s = PATIENCE_S
            while await self._serve(patience_s):
                patience_s, self._waits = PATIENCE_AGAIN_S, False
        except FencedSyncerError as error:
            self.ended(f"fenced: {error}")
        except (StoreError, ConfigError) as error:
            self.ended(f"refused: {error}")
        except UnreachableError as error:
            assert scenario.shards, error
            self.ended(f"lost: {error}")
        except OSError as error:  # while it was starting, or taking over
            self.ended(f"its disk fails: {error}")

    async def _wait(self) -> bool:
        """As a standby, until it is this one's turn."""
        after_s = self.world.scenario.standby_after_s
        if self.world.scenario.standby == "replicate":
            return await self._wait_as_replica(after_s)
        watch = VirtualFolderWatch(self, after_s)
        while not (gone := await watch.look()):
            await asyncio.sleep(WATCH_S)
        return gone != ENDED

    async def _wait_as_replica(self, after_s: float) -> bool:
        store: Any = open_virtual(self.disk, self, self.world.copied)
        replica = StandbyReplica(store, after_s, lambda text: None, self.loop.time)
        try:
            if replica.row["led"]:
                return True
            self.listen(replica, replica.answering)
            return await watch_primary(replica, asyncio.Event(), lambda text: None)
        finally:
            self.stop_listening()
            replica.close()

    async def _serve(self, patience_s: float) -> bool:
        """True if it is to begin anew, from what is on disk."""
        world, scenario = self.world, self.world.scenario
        store = self._open() if self.level != "none" else None
        mark_led(store)
        sharded = bool(scenario.shards)
        found = find_rows(store, None)[0] if sharded else recover(store, None, self.level)
        keeper = StateWriter(store, self.level, 0.0, NullWriter())
        run = str(found[0].rows["run"]["run"]) if found is not None else world.new_run()
        if found is None and store is not None:
            forget_unbegun(store)
            world.begins_anew()
        self.epoch = epoch = self._epoch(store, found[0] if found is not None else None)
        config, _ = agree_on_settings(scenario.config, found[0].rows if found is not None else None)
        begin = Begin(takes_strangers=True)
        if sharded:
            self.shards = fleet = await self._lead(found[0] if found is not None else None, epoch, patience_s)
            found = found and with_shards(found[0], fleet, self.level)
            self.shell = ObservedShardedShell(
                config, run, NullWriter(), epoch=epoch, keeper=keeper, begin=begin, fleet=fleet
            )
            self.shell.writes_model = False
        else:
            self.shell = ObservedShell(config, run, NullWriter(), epoch=epoch, keeper=keeper, begin=begin)
        self.shell.platform.observed_by(self)  # type: ignore[attr-defined]
        self._began_as = self.epoch = self.machine.epoch
        if not self._replicates:
            self._begins_to_count(found[1] if found is not None else None)
        if found is not None:
            self._restore(keeper, *found)
        if self._replicates:
            await self._replicate(keeper)
            self._begins_to_count(self._stored() if found is not None else None)
        keeper.check_epoch()
        self._listen()
        self.shell.start()
        return await self._live()

    def _open(self) -> Any:
        take_over = self._waits and self.world.scenario.standby == "folder"
        return open_virtual(self.disk, self, partial(self.world.stored, self), take_over=take_over)

    def _epoch(self, store: Any, found: Recovery | None) -> int:
        if store is None:
            return self.world.epoch_newest + 1
        return epoch_of(store, found, None, take_over=self._waits)

    def _restore(self, keeper: StateWriter, recovery: Recovery, stored: Any) -> None:
        handed, payloads, problems = keeper.load_handed()
        whole = replace(recovery, handed=[*recovery.handed, *handed], problems=[*recovery.problems, *problems])
        self.shell.restore(whole, stored, payloads)

    @property
    def _replicates(self) -> bool:
        return self.world.scenario.standby == "replicate" and not self._waits

    def _begins_to_count(self, stored: Any) -> None:
        """From here on this is the run's syncer. One that replicates is not before its standby has said so."""
        if self.level != "none" and self.epoch < self.world.epoch_newest:
            return  # it was overtaken while it started, and must find that out
        self.counts = True
        if self.level != "none":
            self.world.opened(self.epoch)
        if stored is not None:
            found = {fragment: (version, checksum) for fragment, (version, checksum, _) in stored.items()}
            if not self._replicates:
                self.world.made_of.clear()
            self.world.observe(facts.Restored(self.epoch, found, self.world.lossless))

    def _stored(self) -> Any:
        return {f: (version, checksum, None) for f, (version, checksum, _, _) in self.disk.read_slots().items()}

    async def _lead(self, found: Recovery | None, epoch: int, patience_s: float) -> ShardFleet:
        """As `shard_recover.lead_shards`."""
        run = str(found.rows["run"]["run"]) if found is not None else ""
        lead = Lead(run, epoch, self.level, 0.0, record=False)
        given = [self.world.places[name].address for name in self.world.shard_names[: self.world.scenario.shards]]
        moves = MoveRecord.of(found.rows if found is not None else {})
        places = [ClientOptions(address) for address in moves.places(given)]
        fleet = ShardFleet(places, lead, lambda text: None, moves, ClientOptions)
        fleet.connect = partial(SimConnection, self)  # type: ignore[assignment]
        await fleet.attach(patience_s if found is not None else None)
        return fleet

    async def _replicate(self, keeper: StateWriter) -> None:
        scenario, place = self.world.scenario, ClientOptions(self.world.places["standby"].address)
        replicator = Replicator(place, scenario.standby_after_s, goes_on=False, tell=lambda level, why: None)
        replicator.connect = partial(SimConnection, self)  # type: ignore[assignment]
        replicator.say = lambda text: None
        keeper.replica = replicator
        await replicator.begin(self.shell)

    async def change(self, action: str, address: str, fragments: Sequence[int]) -> bool:
        """What an operator asks for (`atoll shards`). True if it is to be asked again."""
        assert isinstance(self.shell, ObservedShardedShell)
        try:
            text, _ = await self.shell.shards.changes.asked(action, address, fragments)
        except RefusedError as error:
            self._say(f"refuses to {action} {address}: {error.detail}")
            return error.code == Refusal.BUSY
        self._say(f"begins: {text}")
        return False

    def _say(self, text: str) -> None:
        if self.world.tracing:
            self.world.say(f"{self.name} {text}")

    def _listen(self) -> None:
        machine, relays = self.machine, self.shell.platform.relays
        relays.refused = lambda method, values: refused_primary(machine.run, machine.epoch, method, values)
        self.listen(self.shell, relays.answering)
        self.disk.told = {"address": self.world.places[self.place].address}
        self.world.leads(self)

    async def _live(self) -> bool:
        while True:
            await asyncio.sleep(LIVE_S)
            if self.shell.failure is not None:
                raise self.shell.failure
            if isinstance(self.shell, ObservedShardedShell) and self.shell.must_begin_anew():
                self.world.leads_no_more(self)
                self.stop_listening()
                await self.shell.shards.changes.close()
                await self.shell.fleet.close()
                await asyncio.to_thread(self.shell.keeper.close)
                await self.loop.rest()
                return True
