"""Production's side of `core.syncer_driver`: asyncio for time and links, numpy on worker threads for the arrays, the
keeper for the disk. It decides nothing.

Everything here runs on one event loop; array work and writes run on threads. Whoever reads or changes the arrays of a
fragment has its turn, so that a joiner never reads half a merge.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.codec import needed_bytes_s
from atoll.core import (
    INLINE_BYTES_MAX,
    ContributionId,
    ContributionRecord,
    Layout,
    MemberAside,
    Published,
    StoreOutcome,
    SyncerDriver,
    SyncerMachine,
    SyncerMessage,
    VersionToStore,
)
from atoll.core import effects as fx
from atoll.errors import FencedSyncerError
from atoll.observe import events
from atoll.store import failpoints
from atoll.syncer.fragment_work import (
    anchor_fragment,
    compare_contributions,
    heal_fragment,
    merge_contributions,
    store_version,
)
from atoll.syncer.inner_buffer import InnerBuffer
from atoll.syncer.news import Flow, News
from atoll.syncer.relay_links import RelayLinks
from atoll.syncer.relay_peers import AtRelay, Held
from atoll.syncer.state import InspectedPayload, ModelState
from atoll.syncer.state_writer import StateWriter

T = TypeVar("T")
WORKERS = 2
"""Merges and inspections at a time: the kernels have threads of their own, two keep them fed."""
THIN_LOOK_S = 20.0
"""How long after a learner was set aside its traffic is looked at: twice the window of the rates."""


class AsyncioPlatform:
    def __init__(self, machine: SyncerMachine, keeper: StateWriter, writer: News) -> None:
        self.machine = machine
        self.keeper = keeper
        self.driver = SyncerDriver(machine, self, keeper.gate)
        self.state: ModelState | None = None
        self.relays = RelayLinks(self.driver, lambda: self.state)
        self.copies: OrderedDict[int, tuple[int, int, memoryview]] = OrderedDict()
        """Whole fragments for joiners: version, checksum, bytes."""
        self.inner: dict[int, InnerBuffer] = {}
        self.sends: dict[int, Callable[[SyncerMessage], None]] = {}
        self.flow_up, self.flow_down = Flow(), Flow()
        """Payload bytes per second and learner."""
        self.relays.came = self.flow_up.add
        self.inline_down = 0
        """Payload bytes that travelled inside control messages."""
        self.close_link: Callable[[int, str], None] = lambda session, reason: None
        """Set by whoever serves: ends a session."""
        self.fenced = ""
        """Why this syncer must end: a newer one has taken over."""
        self.ended = asyncio.Event()
        self.failure: BaseException | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self._writer = writer
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="atoll-merge")
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        """Done once this syncer must end before its work is."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    # ------------------------------------------------------------ tasks, threads and turns

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, FencedSyncerError):
            self.driver.fence(str(error))
        elif error is not None:
            # A merge that raises is a bug or a full memory: state may be half-changed, so the syncer must stop.
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._stop()

    def _stop(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)
        self.ended.set()

    async def on_a_worker(self, function: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self._workers, function, *arguments)

    @asynccontextmanager
    async def turn(self, fragment: int) -> AsyncIterator[None]:
        """Have the turn of a fragment, in line with the merges."""
        granted: asyncio.Future[None] = self._loop.create_future()
        turns = self.driver.turns
        turns.take(fragment, lambda: turns.give_back(fragment) if granted.cancelled() else granted.set_result(None))
        try:
            if not granted.done():
                await asyncio.wait({granted, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not granted.done():
                await self._rest()  # a syncer that must end: whoever had the turn does not give it back
            yield
        finally:
            if not granted.cancel():
                turns.give_back(fragment)

    async def close(self) -> None:
        """Wait for what is under way, write what is left, in order, and let the threads go."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        await self._rest()
        if self.keeper.level != "none" and not self.driver.gate.fenced:
            self.driver.catch_up(lambda: None)
            await self._rest()
            if self.state is not None:
                await asyncio.to_thread(self.keeper.fill_slots, self.state)
        self.keeper.close()
        self._workers.shutdown(wait=True)

    async def _rest(self) -> None:
        while others := self.tasks - {asyncio.current_task()}:
            await asyncio.wait(others)

    # ------------------------------------------------------------ the platform: time, notes, the end

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        self._loop.call_later(delay_ns / 1e9, self._do, action)

    def _do(self, action: Callable[[], None]) -> None:
        """Whatever ends what nobody waits for must not end in silence."""
        if not self._closing:
            try:
                action()
            except Exception as error:
                self._fail(error)

    def wake_at(self, wake_ns: int | None) -> None:
        if self._timer is not None and self._timer_ns == wake_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_ns is not None:
            self._timer_ns = wake_ns
            self._timer = self._loop.call_later(max(0, wake_ns - self.now_ns()) / 1e9, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._do(self.driver.wake)

    def note(self, note: fx.Note) -> None:
        self._writer.emit(note.event)
        if isinstance(note.event, MemberAside) and note.event.aside:
            self._loop.call_later(THIN_LOOK_S, self._tell_thin, note.event.learner)

    def _tell_thin(self, learner: str) -> None:
        """A learner was set aside some time ago: if so little came from or went to it since, its link is too thin. It
        is asked and heard all the while, so that one from which nothing came at all has the thinnest of links. One that
        fetched nothing may not have needed anything."""
        layout = self.machine.layout
        if layout is None or not self.machine.is_aside(learner):
            return
        for direction, flow in (("up", self.flow_up), ("down", self.flow_down)):
            needs = needed_bytes_s(self.machine.config, layout, direction, self.machine.step_ns())
            gets = flow.rate(learner)
            if gets < needs and (gets > 0.0 or direction == "up"):
                self._writer.emit(events.LinkThin(learner, direction, needs, gets))

    def end_fenced(self, reason: str) -> None:
        self.fenced = reason
        self._stop()

    def end_finished(self, reason: str) -> None:
        self.ended.set()

    # ------------------------------------------------------------ the platform: links

    def send(self, session: int, message: SyncerMessage) -> None:
        send = self.sends.get(session)
        if send is None:
            return
        if isinstance(message, Published) and message.update:
            learner = self.machine.learner_of(session)
            if learner:
                self.flow_down.add(learner, len(message.update))
        send(message)

    def end_session(self, session: int, reason: str) -> None:
        self._loop.call_soon(self.close_link, session, reason)

    def forget_sender(self, learner: str) -> None:
        """Its key has ended. Nobody but this process knows of its session."""

    def forget_inner(self, slot: int) -> None:
        buffer = self.inner.pop(slot, None)
        if buffer is not None:
            self.start(buffer.close())

    # ------------------------------------------------------------ the platform: arrays

    def lay_out(self, layout: Layout, *, lost: bool) -> None:
        self.state = ModelState(layout, self.machine.config)
        self.copies.clear()
        if lost:
            self.state.restore({})
            self.keeper.begin(self.machine.run, self.machine.config, layout)
            self.tell_layout(layout)

    def tell_layout(self, layout: Layout) -> None:
        sizes = [fragment.parameters for fragment in layout.fragments]
        self._writer.emit(events.LayoutFixed(layout.parameters, len(layout.tensors), len(sizes), sizes))

    def commit_seed(self, done: Callable[[tuple[int, ...]], None]) -> None:
        self.start(self._commit_seed(done))

    async def _commit_seed(self, done: Callable[[tuple[int, ...]], None]) -> None:
        assert self.state is not None
        checksums = await self.on_a_worker(self.state.commit_seed)
        self.keeper.begin(self.machine.run, self.machine.config, self.state.layout)
        self.tell_layout(self.state.layout)
        done(checksums)

    def compare(
        self, compare: fx.Compare, payloads: list[InspectedPayload], done: Callable[[fx.Compared], None]
    ) -> None:
        self.start(self._compare(compare, payloads, done))

    async def _compare(
        self, compare: fx.Compare, held: list[InspectedPayload], done: Callable[[fx.Compared], None]
    ) -> None:
        done(await compare_contributions(self, compare, held))

    def merge(self, merge: fx.Merge, payloads: list[Held], done: Callable[[fx.MergeFinished], None]) -> None:
        self.start(self._merge(merge, payloads, done))

    async def _merge(self, merge: fx.Merge, held: list[Held], done: Callable[[fx.MergeFinished], None]) -> None:
        """Where relays hold some of it, theirs comes first; what is lost with one is told before anything is merged."""
        here = [item for item in held if not isinstance(item, AtRelay)]
        if len(here) == len(held):
            done(await merge_contributions(self, merge, here))
            return
        gathered = await self.relays.gather(merge, held)
        if isinstance(gathered, tuple):
            done(fx.MergeFinished(merge.fragment, finite=False, lost=gathered))
        else:
            done(await merge_contributions(self, merge, gathered.held, gathered))

    def publish(self, merge: fx.Merge, announce: Callable[[], None]) -> None:
        failpoints.hit("commit.before_publish")
        announce()
        failpoints.hit("commit.after_publish")

    def heal(self, heal: fx.CommitHealed, payload: NDArray[np.uint8], done: Callable[[], None]) -> None:
        self.start(self._heal(heal, payload, done))

    async def _heal(self, heal: fx.CommitHealed, payload: NDArray[np.uint8], done: Callable[[], None]) -> None:
        await heal_fragment(self, heal, payload, self.machine.rounds_started)
        done()

    async def anchor_restored(self) -> None:
        """Record where this syncer begins. A fragment that is merged before its turn is anchored by its merge."""
        assert self.state is not None
        for fragment in range(len(self.state.fragments)):
            async with self.turn(fragment):
                await anchor_fragment(self, fragment, self.machine.rounds_started)

    def version(self, fragment: int) -> int:
        assert self.state is not None
        return self.state.fragments[fragment].version

    def inline_update(self, fragment: int, version: int) -> bytes | None:
        assert self.state is not None
        payload = self.state.fragments[fragment].ring[version].payload
        if payload.nbytes > INLINE_BYTES_MAX:
            return None
        self.inline_down += payload.nbytes
        return payload.tobytes()

    # ------------------------------------------------------------ the platform: disk

    def append(self, rows: Mapping[str, Any]) -> None:
        self.keeper.append(rows)

    def sync(self, done: Callable[[str], None]) -> None:
        self.start(self._sync(done))

    async def _sync(self, done: Callable[[str], None]) -> None:
        done(await self.keeper.sync())

    def store(self, item: VersionToStore, done: Callable[[StoreOutcome], None]) -> None:
        self.start(self._store(item, done))

    async def _store(self, item: VersionToStore, done: Callable[[StoreOutcome], None]) -> None:
        done(await store_version(self, item))

    def check_epoch(self, done: Callable[[], None]) -> None:
        self.start(self._check_epoch(done))

    async def _check_epoch(self, done: Callable[[], None]) -> None:
        await self.keeper.look_around()
        done()

    def durability_lost(self, reason: str) -> None:
        text = f"{reason}; training goes on, and commits are not durable until this is mended"
        self._tell_durability("degraded", text)

    def durability_back(self, reason: str) -> None:
        self._tell_durability(self.keeper.level, f"everything is on disk again (it was not because {reason})")

    def _tell_durability(self, level: str, text: str) -> None:
        self._writer.emit(events.DurabilityChanged(level, self.keeper.level, text))
        print(f"atoll syncer: {text}", flush=True)

    def keep_handed(
        self,
        items: list[tuple[ContributionRecord, Held]],
        processed: int,
        done: Callable[[], None],
    ) -> None:
        self.start(self._keep_handed(items, processed, done))

    async def _keep_handed(
        self,
        items: list[tuple[ContributionRecord, Held]],
        processed: int,
        done: Callable[[], None],
    ) -> None:
        kept = [(item, await self._brought(item, held)) for item, held in items]
        if not self.driver.gate.fenced:
            here = [(item, held.payload) for item, held in kept if held is not None]
            await self.keeper.keep_handed(here, processed)
        done()

    async def _brought(self, item: ContributionRecord, held: Held) -> InspectedPayload | None:
        """What a leaving learner's relay holds comes here: nobody can give it again."""
        if not isinstance(held, AtRelay):
            return held
        brought = await self.relays.whole(item.id, held)
        if brought is not None and self.driver.held.get(item.id) is held:
            self.driver.held[item.id] = brought
        return brought

    def drop_handed(self, identity: ContributionId) -> None:
        self.relays.forget(identity)
        self.keeper.drop_handed(identity)
