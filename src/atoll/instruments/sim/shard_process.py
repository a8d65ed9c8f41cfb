"""One process of a shard in virtual time: production's `ShardService` and `ShardArrays` on a simulated disk."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from atoll.core import VersionToStore
from atoll.errors import FencedSyncerError, RefusedError, StoreError
from atoll.instruments.check import facts
from atoll.instruments.sim.service import ServiceProcess
from atoll.instruments.sim.store import open_virtual
from atoll.observe import NullWriter
from atoll.store import Loaded
from atoll.syncer import FragmentMoves, ShardArrays, ShardService

if TYPE_CHECKING:
    from atoll.instruments.sim.fabric import FabricWorld

LOOK_S = 1.0
"""How often a shard looks whether another one has taken its folder over."""


class ObservedMoves(FragmentMoves):
    """What a shard does with fragments that come and go, and somebody who watches."""

    def __init__(self, arrays: VirtualShardArrays) -> None:
        super().__init__(arrays)
        self.process = arrays.process
        self.coming: set[int] = set()
        """Fragments that are put on disk here while they are another's."""

    async def install(self, fragment: int, item: VersionToStore) -> None:
        self.coming.add(fragment)
        try:
            await super().install(fragment, item)
        except RefusedError:
            self.coming.discard(fragment)
            raise
        self.coming.discard(fragment)

    def forget(self) -> None:
        """The disk was opened anew. What was cut off before (a link broke) was written to its end until then, by a
        thread (draw 7, seed 526)."""
        super().forget()
        self.coming.clear()

    async def drop(self, fragment: int) -> None:
        await super().drop(fragment)
        self.process.world.observe(facts.Dropped(fragment, self.process.place))


class VirtualShardArrays(ShardArrays):
    """A shard's arrays whose folder is one of this world."""

    moves: ObservedMoves

    def __init__(self, process: ShardProcess) -> None:
        self.process = process
        super().__init__(None, NullWriter())
        self.moves = ObservedMoves(self)
        if "shard" not in self._loaded.rows:
            self.row["name"] = process.world.new_shard_name(process.place)

    def _open(self, take_over: bool) -> None:
        process = self.process
        store: Any = open_virtual(process.disk, process, process.committed, take_over=take_over)
        self._store, self._loaded = store, store.load() or Loaded()


class ShardProcess(ServiceProcess):
    world: FabricWorld
    arrays: VirtualShardArrays

    def __init__(self, world: FabricWorld, place: str, name: str) -> None:
        super().__init__(world, place, name)
        self.disk = world.places[place].disk

    async def main(self) -> None:
        overtaken = asyncio.Event()
        try:
            self.arrays = VirtualShardArrays(self)
            service = ShardService(self.arrays, lambda why: overtaken.set())
            service.say = lambda text: None
            self.listen(service, service.answering)
            while not overtaken.is_set():
                await asyncio.sleep(LOOK_S)
                await self.arrays.look_around()
        except (FencedSyncerError, StoreError, OSError) as error:
            self.ended(str(error))

    @property
    def held(self) -> int:
        return len(self.arrays.held) if self.serving else 0

    def committed(self, fragment: int, version: int, checksum: int) -> None:
        """A version is on this shard's disk: the run's, if it is led by the run's syncer."""
        if fragment in self.arrays.moves.coming:
            self.world.observe(facts.Arrived(fragment, self.place, version, checksum))
            return
        epoch = int(self.arrays.row["epoch"])
        epoch = self.world.counted_on.get(epoch, epoch)
        self.world.observe(facts.Owned(epoch, fragment, self.place, version, checksum))
        if epoch >= self.world.epoch_newest or self.world.scenario.durability == "none":
            self.world.is_made(fragment, version)
            self.world.observe(facts.Durable(epoch, fragment, version))
