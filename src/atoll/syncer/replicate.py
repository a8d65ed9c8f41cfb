"""The primary's side of `--replicate`: what is made durable here is made durable on the standby, too, before anybody
hears of it.

    the standby   versions and facts
    is here       wait for both disks
    is away       wait until it is back: it may have taken over, and then nothing may be published here
    has left      go on, degraded: a standby that ends in order has said that it will not take over
    refuses       are never published: it has taken over, and this syncer ends

With `--replicate-or-go-on` a standby that is away for `--standby-after` is no longer waited for. It may have taken over
meanwhile, so that there may be two histories of one run until both see each other: only whoever starts the syncer can
say that this is better than to wait.

When the standby is back it gets all facts first, and then each fragment that it does not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atoll.core import NO_VERSION, Refusal, VersionToStore
from atoll.errors import AtollError, FencedSyncerError, RefusedError, StoreError, UnreachableError
from atoll.syncer import replica_calls as calls
from atoll.wire import SHARD_ATTACH_S, Bytes, ClientOptions, ShardConnection, ShardPeer

if TYPE_CHECKING:
    from atoll.syncer.shell import SyncerShell

RETRY_S = 0.5
"""Between two attempts to reach the standby: it may be starting."""
BEAT_S = 1.0
"""How often the standby hears that this syncer lives."""
TELL_EVERY_S = 10.0
"""How often it is told that a syncer cannot begin without its standby."""
LOOK_S = 0.05
"""How often a syncer that begins looks whether its standby has everything."""
GOODBYE_S = 5.0
"""For the standby to hear that this syncer has ended in order."""
INSTANCE_BYTES = 8
STANDBY = "the standby at "
"""How a reason begins that is not the disk's."""

Arrays = Mapping[str, NDArray[np.float32]]


class Replicator:
    """One per syncer with a standby of its own. Everything here runs on the event loop."""

    def __init__(
        self, place: ClientOptions, after_s: float, *, goes_on: bool, tell: Callable[[str, str], None]
    ) -> None:
        self.degraded = ""
        """Why the standby does not have everything."""
        self.commits = 0
        """That the standby has answered for; `bytes` is their size."""
        self.bytes = 0
        self.ending = False
        """This syncer ends: a standby that goes away now is not waited for."""
        self._place, self._after_s, self._goes_on = place, after_s, goes_on
        self._tell = tell
        """Hears the level that holds from now on, and why."""
        self._shell: SyncerShell | None = None
        self._instance = secrets.token_hex(INSTANCE_BYTES)
        self._loop = asyncio.get_running_loop()
        self._peer: ShardPeer | None = None
        self._settled = asyncio.Event()
        """It is known whether to wait for the standby: it is here, or need not be."""
        self._armed = True
        """The standby may take over if it hears nothing more."""
        self._alone = False
        """Something was published that the standby does not have."""
        self._told = False
        """Somebody has heard that this syncer is degraded."""
        self._why = "it has not answered yet"
        self._refused: AtollError | None = None
        self._closed = self._attaching = False
        self.connect = ShardConnection
        """How the standby is reached."""
        self.say: Callable[[str], None] = lambda text: print(text, flush=True)
        self._patience: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._queue: list[Mapping[str, Any]] = []
        self._appended = self._acknowledged = 0
        self._speaking = asyncio.Lock()

    # ------------------------------------------------------------ beginning and ending

    async def begin(self, shell: SyncerShell) -> None:
        """Wait until the standby has everything, or need not be waited for. Raises what it refuses this syncer for;
        after that the shell hears of it."""
        self._shell = shell
        self.degraded = f"{STANDBY}{self._place.address} does not have everything yet"
        self._be_patient(self._why)
        linking = self._task = self._loop.create_task(self._keep_linked())
        told_s = self._loop.time()
        while self._refused is None and (self.waits or (self._peer is not None and self.degraded)):
            await asyncio.sleep(LOOK_S)
            if self._loop.time() - told_s >= TELL_EVERY_S:
                told_s = self._loop.time()
                self.say(f"atoll syncer: waits for its standby at {self._place.address} ({self._why})")
        if self._refused is not None:
            raise self._refused
        linking.add_done_callback(lambda _: shell.platform.start(self._end_if_refused()))

    async def _end_if_refused(self) -> None:
        """A task of the platform that fails ends the syncer."""
        if self._refused is not None:
            raise self._refused

    def end(self) -> None:
        """This syncer ends. What waits for a standby that is away is given up without a word: nobody may hear of it."""
        self.ending = True
        if self._peer is None and self._task is not None:
            self._give_up()

    async def close(self, *, goodbye: bool) -> None:
        """The link ends; with `goodbye` the standby hears that nobody is needed in this syncer's place."""
        if goodbye and self._peer is not None:
            with contextlib.suppress(AtollError, TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await self._peer.call(calls.ENDED, {})
        self._give_up()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _give_up(self) -> None:
        self._closed = True
        self._settled.set()
        if self._task is not None:
            self._task.cancel()

    @property
    def waits(self) -> bool:
        """What is to be made durable now has to wait for the standby."""
        return not self._settled.is_set()

    def status(self) -> dict[str, Any]:
        return {"address": self._place.address, "away": self.degraded, "commits": self.commits, "bytes": self.bytes}

    # ------------------------------------------------------------ what is made durable there

    def append(self, rows: Mapping[str, Any]) -> None:
        self._appended += 1
        if self._peer is not None or self.waits or self._attaching:
            self._queue.append(dict(rows))

    async def flush(self) -> None:
        """Everything that was appended so far is on the standby's disk, or need not be."""
        goal = self._appended
        async with self._speaking:
            while self._acknowledged < goal and (peer := await self._linked()) is not None:
                taken, self._queue, upto = self._queue, [], self._appended
                rows = {key: value for one in taken for key, value in one.items()}
                # If the link breaks the next one begins with all rows.
                if await self._ask(peer, calls.ROWS, {"rows": rows, "all": False}) is not None:
                    self._acknowledged = max(self._acknowledged, upto)

    async def commit(self, item: VersionToStore, arrays: Arrays) -> None:
        """This version is on the standby's disk, or need not be. Raises FencedSyncerError if that has taken over."""
        values, joined = await self._commit_values(item, arrays)
        told = await self._call(calls.COMMIT, values, joined)
        if told is not None:
            self.commits, self.bytes = self.commits + 1, self.bytes + joined.nbytes

    async def _commit_values(self, item: VersionToStore, arrays: Arrays) -> tuple[dict[str, Any], memoryview]:
        joined = await asyncio.to_thread(lambda: np.concatenate([array.view(np.uint8) for array in arrays.values()]))
        values = {"fragment": item.fragment, "version": item.version, "checksum": item.checksum, "names": list(arrays)}
        return {**values, "record": dict(item.fragment_record)}, joined.data

    async def confirm(self) -> None:
        """This syncer may go on. Raises FencedSyncerError if the standby has taken over."""
        await self._call(calls.BEAT, {})

    async def keep_handed(self, name: str, about: Mapping[str, Any], payload: NDArray[np.uint8]) -> None:
        await self._call(calls.HANDED, {"name": name, "about": dict(about)}, payload.data)

    def drop_handed(self, name: str) -> None:
        if self._peer is not None:
            self._peer.tell(calls.DROPPED, {"name": name})

    async def _call(self, method: str, values: Mapping[str, Any], data: Any = b"") -> dict[str, Any] | None:
        """Ask until there is an answer. None if the standby need not be waited for."""
        while (peer := await self._linked()) is not None:
            answer = await self._ask(peer, method, values, data)
            if answer is not None:
                return answer
        return None

    async def _ask(
        self, peer: ShardPeer, method: str, values: Mapping[str, Any], data: Any = b""
    ) -> dict[str, Any] | None:
        """None if the link has broken."""
        try:
            return (await peer.call(method, values, data))[0]
        except UnreachableError as error:
            self._lost(str(error), peer)
            return None
        except RefusedError as error:
            raise self._refuse(error) from error

    async def _linked(self) -> ShardPeer | None:
        await self._settled.wait()
        if self._refused is not None:
            raise self._refused
        if self._closed:
            raise asyncio.CancelledError  # as in a crash: whoever waits never hears that it is done
        return self._peer

    # ------------------------------------------------------------ the link

    async def _keep_linked(self) -> None:
        while self._refused is None:
            connection = self.connect(self._place, self._answer)
            try:
                async with connection:
                    await self._use(connection)
            except (UnreachableError, TimeoutError) as error:
                self._why = str(error) or "it does not answer"
                self._lost(self._why, connection.peer)
            except RefusedError as error:
                self._refuse(error)
            except AtollError as error:
                self._refused = error
                self._settled.set()
            if self._refused is None:
                await asyncio.sleep(RETRY_S)

    async def _use(self, connection: ShardConnection) -> None:
        """Until the link breaks."""
        told = await self._attach(connection.peer)

        async def watch() -> None:
            assert connection.running is not None
            raise UnreachableError(await asyncio.shield(connection.running))

        jobs = [self._fill(connection.peer, told), self._beat(connection.peer), watch()]
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _attach(self, peer: ShardPeer) -> dict[str, Any]:
        """From here on the standby follows this syncer, and has all facts. Says what else it has."""
        assert self._shell is not None
        machine, keeper = self._shell.machine, self._shell.keeper
        greeting = {"run": machine.run, "epoch": machine.epoch, "instance": self._instance, "alone": self._alone}
        try:
            async with asyncio.timeout(SHARD_ATTACH_S):
                told, _ = await peer.call(calls.REPLICATE, {**greeting, "link": calls.LINK_VERSION})
                self._attaching, self._queue, upto = True, [], self._appended
                await peer.call(calls.ROWS, {"rows": keeper.rows(), "all": True})
        finally:
            self._attaching = False
        if not peer.closed:
            self._acknowledged = max(self._acknowledged, upto)
            self._peer, self._armed = peer, bool(told["ready"])
            self._settled.set()
            if self._patience is not None:
                self._patience.cancel()
        return told

    async def _fill(self, peer: ShardPeer, told: dict[str, Any]) -> None:
        """Send what the standby does not have. Commits go on meanwhile, to it as well."""
        assert self._shell is not None
        await self.flush()
        for name, (about, payload) in (await asyncio.to_thread(self._shell.keeper.handed_over)).items():
            await peer.call(calls.HANDED, {"name": name, "about": about}, payload.data)
        # Also of a syncer that has come back and still asks learners for what is newer: it may tell what its disk has.
        state = self._shell.platform.state
        for fragment in range(len(state.fragments) if state is not None else 0):
            async with self._shell.lock_of(fragment):
                item, arrays = self._stored(fragment)
                if item.version != NO_VERSION and told["held"].get(str(fragment)) != [item.version, item.checksum]:
                    await peer.call(calls.COMMIT, *await self._commit_values(item, arrays))
        await self.flush()
        self._armed = True
        await peer.call(calls.FILLED, {})
        if self._peer is not peer:
            return
        self._alone, self.degraded = False, ""
        if self._told:
            self._told = False
            self._tell("commit", f"{STANDBY}{self._place.address} has everything")

    def _stored(self, fragment: int) -> tuple[VersionToStore, Arrays]:
        """A fragment as it stands. The caller has its turn."""
        assert self._shell is not None
        state = self._shell.platform.state
        assert state is not None
        record, arrays = self._shell.machine.fragment_record(fragment), state.fragments[fragment]
        return VersionToStore(fragment, arrays.version, int(record["checksum"]), record), arrays.named()

    async def _beat(self, peer: ShardPeer) -> None:
        while True:
            async with asyncio.timeout(self._after_s):
                await peer.call(calls.BEAT, {})
            await asyncio.sleep(BEAT_S)

    async def _answer(self, method: str, _values: dict[str, Any], _data: Bytes) -> Any:
        if method != calls.LEAVE:
            raise RefusedError(Refusal.BAD_REQUEST, f"this syncer knows no {method!r}; update the older side")
        self._go_alone("has ended in order, and will not take over: the run goes on, and nothing new is there")
        return {}, b""

    # ------------------------------------------------------------ a standby that is not here

    def _lost(self, why: str, peer: ShardPeer | None) -> None:
        if peer is not self._peer or self._closed:
            return
        self._peer = None
        if self.ending:
            self._give_up()
        elif not self._armed:
            self._go_alone(f"is away ({why}) before it had everything: the run goes on, and nothing new is there")
        else:
            self._settled.clear()
            self._degrade(f"is away ({why}) and may have taken over: nothing is published until it is back")
            self._be_patient(why)

    def _be_patient(self, why: str) -> None:
        if self._goes_on:
            self._patience = self._loop.call_later(self._after_s, self._go_on, why)

    def _go_on(self, why: str) -> None:
        if self.waits:
            self._go_alone(f"is away ({why}): the run goes on, as it was told to, also if that has taken over")

    def _go_alone(self, text: str) -> None:
        self._peer, self._queue, self._alone = None, [], True
        self._acknowledged = self._appended
        self._degrade(text)
        self._settled.set()

    def _degrade(self, text: str) -> None:
        self.degraded = f"{STANDBY}{self._place.address} {text}"
        self._told = True
        self._tell("degraded", self.degraded)

    def _refuse(self, error: RefusedError) -> AtollError:
        text = f"{STANDBY}{self._place.address} refuses this syncer: {error.detail}"
        taken = error.code in (Refusal.STALE_EPOCH, Refusal.FENCED)
        self._refused = self._refused or (FencedSyncerError(text) if taken else StoreError(text))
        self._settled.set()
        return self._refused
