"""The shell around the LearnerMachine: one lock, one background thread with an event loop, and the vault.

The training thread feeds the machine at step boundaries, performs TakeSnapshot and Adopt at once and hands the rest to
the background thread, which talks to the syncer, encodes, decodes and prepares versions ahead of time. The lock is held
only for the machine (tens of microseconds), for the training thread's own copies and for small updates, never for the
network or the kernels of a large one that could be prepared ahead.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from atoll.core import effects as fx
from atoll.core.layout import build_layout
from atoll.core.learner_machine import LearnerMachine
from atoll.core.messages import (
    NO_VERSION,
    DataLeases,
    DataReport,
    Hello,
    LearnerMessage,
    Received,
    Start,
    SyncerMessage,
    Welcome,
)
from atoll.core.messages import Published as PublishedNotice
from atoll.errors import AtollError, ConfigError, RemoteProtocolError
from atoll.learner.exchange import Exchange
from atoll.learner.island import BoundaryOrder, RankCoordinator
from atoll.learner.parameters import Parameters, Snapshot, adopt
from atoll.learner.vault import U8, AdoptKey, Vault
from atoll.observe import Writer, events
from atoll.wire import SYNCER_ENDED, BulkClient, ClientOptions, run_sessions

HEARTBEAT_S = 2.0
"""Said when nothing else is: well inside the 15 s lease, and small enough for any link."""


UPDATES_KEPT = 4
"""Small updates of one fragment that came with their notices and wait to be prepared."""
DATA_PROTOCOL = 2
"""The protocol that knows data leases."""


class DataSource(Protocol):
    """What `atoll.data` attaches to a learner. `report` and `leases` may be called on the link's thread."""

    @property
    def stream(self) -> str: ...
    def report(self) -> DataReport: ...
    def leases(self, message: DataLeases) -> None: ...
    def stepped(self) -> None: ...
    def leaving(self) -> None: ...
    def dropped(self) -> None: ...


class Engine(Exchange):
    """Runs the machine and the link. `changed` is the lock, and tells the training thread of news."""

    def __init__(
        self,
        parameters: Parameters[Any],
        machine: LearnerMachine,
        options: ClientOptions,
        writer: Writer,
        ranks: RankCoordinator,
    ) -> None:
        super().__init__(parameters, machine, writer)
        self.failure: Exception | None = None
        self.left = False
        self.ever_linked = False
        self.last_down = ""
        """Why the last session ended, or could not be opened."""
        self.down_at_s = time.monotonic()
        """Since when there is no session, where there is none."""
        self.snapshot_ns = 0
        self.adopt_ns = 0
        self.reseeded = False
        self.give_inner: Callable[[], Callable[[], U8]] | None = None
        """Copies the inner state for a joiner, on the training thread; what it gives packs the copy, on another."""
        self._ranks = ranks
        self._orders: list[BoundaryOrder] = []
        """What was done to the parameters at this boundary."""
        self._sources: dict[str, DataSource] = {}
        self._poked: set[str] = set()
        self._options = options
        self._snapshots: dict[int, Snapshot] = {}
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="atoll-link", daemon=True)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the session and the thread."""
        if self._thread.is_alive():
            self._post(self._stop.set)
            self._thread.join(timeout_s)
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except Exception as error:  # whatever ends the link must reach the training thread
            self._fail(error)
        finally:
            self._loop.close()

    async def _main(self) -> None:
        self._bulk = BulkClient(self._options)
        beat = self._loop.create_task(self._heartbeat())
        try:
            await run_sessions(self._options, self, self._stop, self._bulk.move)
        except AtollError as error:
            self._fail(error)
        finally:
            beat.cancel()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(beat, *self._tasks, return_exceptions=True)
            await self._bulk.close()

    def _fail(self, error: Exception) -> None:
        with self.changed:
            self.failure = error
            self.changed.notify_all()

    def give_up(self, error: AtollError) -> None:
        """Any thread: trying on would not help."""
        self._fail(error)
        self._post(self._stop.set)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            with self.changed:
                message = self.machine.heartbeat()
            if message is not None and self._send is not None:
                self._send(message)

    # ------------------------------------------------------------ machine in, effects out

    def apply(self, event: fx.LearnerInput) -> None:
        """Feed the machine and perform what it says. The caller holds `changed`."""
        for effect in self.machine.handle(event, time.monotonic_ns()):
            self._perform(effect)
        if isinstance(event, fx.Stepped | fx.Boundary | fx.Closing):
            self._ranks.agree(self._orders)
            self._orders = []
        self.changed.notify_all()

    def _perform(self, effect: fx.LearnerEffect) -> None:
        if isinstance(effect, fx.ToSyncer):
            self._post(self._transmit, effect.message)
        elif isinstance(effect, fx.TakeSnapshot):
            self._take(effect.fragment)
        elif isinstance(effect, fx.DropSnapshot):
            self._drop(effect.fragment)
        elif isinstance(effect, fx.Adopt):
            self._adopt(effect)
        elif isinstance(effect, fx.Contribute):
            self._contribute(effect)
        elif isinstance(effect, fx.PushAgain):
            self._background(lambda: self._push(effect.fragment, effect.seq))
        elif isinstance(effect, fx.Settle):
            self._settle(effect)
        elif isinstance(effect, fx.Fetch):
            if (effect.fragment, effect.version) in self._updates:
                self._post(self._take_small, effect)
            else:
                self._background(lambda: self._fetch(effect))
        elif isinstance(effect, fx.Note):
            self.writer.emit(effect.event)
        elif isinstance(effect, fx.PushSeed):
            self._background(self._push_seed)
        elif isinstance(effect, fx.ForgetResiduals):
            assert self.vault is not None
            self.vault.residuals = [None] * len(self.vault.residuals)
            self.reseeded = True
        elif isinstance(effect, fx.ForgetPrepared):
            assert self.vault is not None
            for fragment in range(len(self.vault.prepared)):
                if effect.fragment in (-1, fragment):
                    self.vault.prepared[fragment] = {}
        elif isinstance(effect, fx.GiveHeal):
            self._background(lambda: self._give_heal(effect))
        elif isinstance(effect, fx.GiveInner):
            self._donate(effect.slot)
        elif isinstance(effect, fx.TakeInner):
            self._background(lambda: self._fetch_inner(effect))
        elif isinstance(effect, fx.Left):
            self.left = True

    def _donate(self, slot: int) -> None:
        """Copy the inner state for a joiner. Whatever is wrong with it must not cost this learner its run."""
        if self.give_inner is None:
            return
        try:
            pack = self.give_inner()
        except (AtollError, RuntimeError, MemoryError) as error:
            self.give_inner = None
            self.writer.emit(events.Warned(self.machine.learner, f"inner state cannot be given to others: {error}"))
            return
        self._background(lambda: self._push_inner(slot, pack))

    def _background(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._post(self._spawn, make)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run something on the link's loop. Once the link has ended (the run is over, or was refused) there is nobody
        to do it, and training goes on without."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _spawn(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(make())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            if isinstance(error, Exception):
                self._fail(error)

    def _transmit(self, message: LearnerMessage) -> None:
        if self._send is not None:
            self._send(message)

    # ------------------------------------------------------------ the training thread's effects

    def _take(self, fragment: int) -> None:
        started_ns = time.perf_counter_ns()
        self._drop(fragment)
        self._snapshots[fragment] = self.parameters.read(fragment)
        self._orders.append(fx.TakeSnapshot(fragment))
        self.snapshot_ns += time.perf_counter_ns() - started_ns

    def _drop(self, fragment: int) -> None:
        snapshot = self._snapshots.pop(fragment, None)
        if snapshot is not None:
            self.parameters.release(snapshot)

    def _adopt(self, effect: fx.Adopt) -> None:
        assert self.vault is not None
        started_ns = time.perf_counter_ns()
        old = self.vault.current[effect.fragment]
        new = self.vault.prepared[effect.fragment].get(effect.version, old)
        assert new is not None and new.version == effect.version, "the machine and the vault disagree"
        key = AdoptKey(old.version if old is not None else NO_VERSION, effect.rule, effect.minus)
        if new.staged is not None and new.staged[0] == key:
            values = new.staged[1]
        else:
            sent = [self.vault.sending[effect.fragment, seq] for seq in effect.minus]
            values = self._stage_values(effect.fragment, key, old, new, sent)
        self._orders.append(effect)
        adopt(self.parameters, effect.fragment, values, rule=effect.rule, alpha=effect.alpha)
        self.vault.adopted(effect.fragment, effect.version)
        for old_key in [k for k in self._updates if k[0] == effect.fragment and k[1] <= effect.version]:
            del self._updates[old_key]
        self.adopt_ns += time.perf_counter_ns() - started_ns

    def _contribute(self, effect: fx.Contribute) -> None:
        assert self.vault is not None
        snapshot = self._snapshots.pop(effect.header.fragment)
        sending = self.vault.start_sending(effect.header, snapshot, effect.minus, effect.feedback)
        if self.vault.small(effect.header.fragment):
            self._post(self._send_small, sending)
        else:
            self._background(lambda: self._encode(sending))

    def _settle(self, effect: fx.Settle) -> None:
        assert self.vault is not None
        sending = self.vault.settle(effect.fragment, effect.seq, effect.merged)
        if sending is not None and sending.payload is not None:
            self.parameters.release(sending.snapshot)

    # ------------------------------------------------------------ session callbacks (wire.SessionHandler)

    def hello(self) -> Hello:
        with self.changed:
            return self.machine.hello()

    def on_up(self, send: Callable[[LearnerMessage], None], welcome: Welcome) -> None:
        self._send = send
        with self.changed:
            self._fix_layout(welcome)
            self.ever_linked = True
            self.apply(fx.FromSyncer(welcome))
        self.writer.emit(events.LearnerLink(self.machine.learner, True))

    @property
    def linked(self) -> bool:
        """True while a session is open."""
        return self._send is not None

    def bytes_missing(self) -> list[int]:
        """The sizes of the fragments that have not come yet. The caller holds `changed`."""
        if self.vault is None:
            return []
        sizes = [4 * fragment.size for fragment in self.vault.layout.fragments]
        return [s for s, p in zip(sizes, self.machine.fragments, strict=False) if p.newest == NO_VERSION]

    def on_message(self, message: SyncerMessage) -> None:
        if isinstance(message, Received):
            self._received(message)
            return
        if isinstance(message, DataLeases):
            source = self._sources.get(message.stream)
            if source is not None:
                source.leases(message)
            return
        if isinstance(message, PublishedNotice) and message.update:
            kept = sum(fragment == message.fragment for fragment, _ in self._updates)
            if kept < UPDATES_KEPT:  # a learner that stands still fetches what it missed, when it goes on
                self._updates[message.fragment, message.version] = message.update
        self._apply_here(fx.FromSyncer(message))
        if isinstance(message, Start):
            for stream in list(self._sources):
                self._report_data(stream)

    def on_down(self, reason: str) -> None:
        linked, self._send = self.linked, None
        if linked:
            self.down_at_s = time.monotonic()
        self.last_down = reason
        if self.left and reason == SYNCER_ENDED:
            self._stop.set()  # the syncer has let this learner go: it must not come back
        elif self.left:
            self.left = False  # the link broke before that: hand over again what the syncer does not have
            self.machine.leave_again()
        self._apply_here(fx.LinkDown(reason))
        self._updates.clear()
        if linked:
            self._spawn(self._give_up_transfers)
        for fragment, seq in list(self._sent):
            del self._sent[fragment, seq]
            self._apply_here(fx.PushBroken(fragment, seq))
        self.writer.emit(events.LearnerLink(self.machine.learner, False, reason))

    # ------------------------------------------------------------ data leases

    def attach_data(self, source: DataSource) -> None:
        with self.changed:
            if source.stream in self._sources:
                raise ConfigError(f"two data sources use the stream {source.stream!r}; give each its own name")
            self._sources[source.stream] = source
        self.poke_data(source.stream)

    def poke_data(self, stream: str) -> None:
        """Send the source's report soon; several pokes before that make one report."""
        with self.changed:
            if stream in self._poked:
                return
            self._poked.add(stream)
        self._post(self._report_data, stream)

    def _report_data(self, stream: str) -> None:
        with self.changed:
            self._poked.discard(stream)
            ready = self.machine.linked and self.machine.protocol >= DATA_PROTOCOL
        if ready and self._send is not None:
            self._send(self._sources[stream].report())

    def data_sources(self) -> list[DataSource]:
        return list(self._sources.values())

    def _fix_layout(self, welcome: Welcome) -> None:
        if self.vault is None:
            layout = build_layout(self.machine.tensors, welcome.config.fragments)
            self.parameters.lay_out(layout)
            self.vault = Vault(layout, welcome.config, self.parameters.as_kept)
        if self.vault.layout.fingerprint != welcome.fingerprint:
            raise RemoteProtocolError(
                "the syncer lays this model out differently; install the same version of atoll on both sides"
            )
        self.vault.config = welcome.config
