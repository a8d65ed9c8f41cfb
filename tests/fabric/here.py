"""A coordinator and its shards on one thread of the test's own process: quick, and open to the test. Each of them can
be cut off as if it had died, and begun again from its disk by the code that does so in production."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import WAIT_S

from atoll.core import Begin, SyncConfig
from atoll.observe import NullWriter
from atoll.store import failpoints, open_store
from atoll.syncer.options import SyncerOptions
from atoll.syncer.shard import ShardService
from atoll.syncer.shard_arrays import ShardArrays
from atoll.syncer.shard_recover import find_rows, lead_shards, with_shards
from atoll.syncer.sharded import ShardedShell
from atoll.syncer.state_writer import StateWriter
from atoll.wire import RunningServer, ServerOptions, attach_handler, serve


class Died(Exception):
    """At a failpoint."""


class DieAt:
    """The coordinator says nothing more from this point on."""

    def __init__(self, point: str, die: Callable[[], None]) -> None:
        self._point, self._die = point, die

    def armed(self, name: str) -> bool:
        return False

    def hit(self, name: str) -> None:
        if name == self._point:
            failpoints.install(None)
            self._die()
            raise Died(name)


class ShardHere:
    def __init__(self, folder: Path) -> None:
        self._folder, self.address = folder, "127.0.0.1:0"

    async def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self.service = ShardService(ShardArrays(self._folder, NullWriter()), lambda why: None)
        attach = attach_handler(self.service.answering)
        self._server = await serve(self.service, ServerOptions(listen=self.address), attach=attach)
        self.address = self._server.address

    async def die(self) -> None:
        """What is in memory is gone."""
        await self._server.cut()
        await asyncio.to_thread(self.service.arrays._close_disk, self.service.arrays._keeper)

    @property
    def name(self) -> str:
        return str(self.service.arrays.row["name"])

    def on_disk(self) -> set[int]:
        state = self._folder / "state"
        return {int(path.stem.partition("-")[2]) for path in state.glob("epoch-*/fragment-*.slots")}


class ShardsHere:
    """`address` is where learners join."""

    def __init__(self, config: SyncConfig, folder: Path, count: int, *, level: str = "commit", run: str = "r1") -> None:
        self._run = run
        self._config, self._folder, self._level = config, folder, level
        self.shards = [ShardHere(folder / f"shard-{number}") for number in range(count)]
        self.address = "127.0.0.1:0"
        self._ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self.thread.start()
        assert self._ready.wait(WAIT_S), "the syncer did not start"

    async def _main(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        for shard in self.shards:
            await shard.start()
        await self.lead()
        self._ready.set()
        await self._stop.wait()
        await self.shell.close()
        await self._server.stop(0.1)
        for shard in self.shards:
            await shard.die()

    async def lead(self, lost_after_s: float = 0.0) -> None:
        """A coordinator begins the run, or goes on with it."""
        given = tuple(shard.address for shard in self.shards[:2])
        options = SyncerOptions(self.address, self._config, self._folder / "run", shards=given, durability=self._level)
        store = open_store(self._folder / "run" / "state") if self._level != "none" else None
        found = find_rows(store, None)[0]
        epoch = store.epoch if store is not None else 1
        fleet = await lead_shards(options, found[0] if found is not None else None, epoch, 2.0)
        keeper = StateWriter(store, self._level, 30.0, NullWriter())
        run = found[0].rows["run"]["run"] if found is not None else self._run
        self.shell = ShardedShell(
            self._config, run, NullWriter(), epoch=epoch, keeper=keeper, begin=Begin(), fleet=fleet
        )
        if found is not None:
            self.shell.restore(*with_shards(found[0], fleet, self._level), {})
        changes = self.shell.shards.changes
        changes.lost_after_s = lost_after_s
        self._server: RunningServer = await serve(
            self.shell, ServerOptions(listen=self.address), change_shards=changes.asked
        )
        self.shell.platform.close_link = self._server.close_session
        self.address = self._server.address
        self.shell.start()

    async def cut_off(self) -> None:
        """The coordinator dies."""
        await self._server.cut()
        await self.shell.shards.changes.close()
        await self.shell.fleet.close()
        await asyncio.to_thread(self.shell.keeper.close)

    async def add_shard(self) -> ShardHere:
        """Start one more, which the run does not know of."""
        shard = ShardHere(self._folder / f"shard-{len(self.shards)}")
        await shard.start()
        self.shards.append(shard)
        return shard

    def do(self, work: Any) -> Any:
        """Run a coroutine where the shards are."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def change(self, action: str, shard: str, *fragments: int) -> tuple[bool, str]:
        """Have it done, and wait until it is; returns whether it was, and what is said of it."""

        async def work() -> tuple[bool, str]:
            changes = self.shell.shards.changes
            await changes.asked(action, shard, fragments)
            await changes.rest()
            return not changes.failed, changes.text

        done, text = self.do(work())
        return done, text

    def dies_at(self, point: str) -> None:
        failpoints.install(DieAt(point, self.shell.driver.gate.fence))

    def status(self) -> dict[str, Any]:
        async def look() -> dict[str, Any]:
            return self.shell.status()

        return dict(self.do(look()))

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, f"never happened: {what}: {status}"
            time.sleep(0.02)
        return status

    def grows(self, by: int = 2) -> dict[str, Any]:
        """Every fragment gets versions."""
        first = self.wait_for(lambda s: len(s["versions"]) == 4, "the run goes on")["versions"]
        return self.wait_for(lambda s: all(s["versions"][f] >= first[f] + by for f in range(4)), "every fragment grows")

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
