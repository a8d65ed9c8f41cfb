"""The learner's world in production: one lock, one background thread with an event loop, and the arrays.

`LearnerDriver` says what is to be done; this does it. The training thread feeds the driver at step boundaries, takes
snapshots and adopts at once, and hands the rest to the background thread, which talks to the syncer, encodes, decodes
and prepares versions ahead of time. The lock is held only for the driver (tens of microseconds), for the training
thread's own copies and for small updates, never for the network or the kernels of a large one that could be prepared
ahead.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import xxhash

from atoll.codec import needed_bytes_s
from atoll.core import (
    INLINE_BYTES_MAX,
    INNER_PIECE_BYTES,
    DataLeases,
    DataReport,
    FetchAnswer,
    FetchedPayload,
    FetchKind,
    FetchRequest,
    Hello,
    Layout,
    LearnerDriver,
    LearnerDriverHost,
    LearnerMachine,
    LearnerMessage,
    OutgoingPayload,
    Payload,
    PreparedVersion,
    PushHeader,
    PushReply,
    Serving,
    Start,
    SyncConfig,
    SyncerMessage,
    Welcome,
    build_layout,
)
from atoll.core import effects as fx
from atoll.errors import (
    AtollError,
    ConfigError,
    PayloadError,
    RefusedError,
    RemoteProtocolError,
    UnreachableError,
)
from atoll.learner.arithmetic import U8
from atoll.learner.arrays import StepArrays, whole_payload
from atoll.learner.fault_hooks import encode_contribution, outgoing
from atoll.learner.parameters import Parameters
from atoll.learner.thin import LinkMeter
from atoll.learner.vault import HeldContribution, HeldVersion, Vault
from atoll.observe import Writer, events
from atoll.wire import SYNCER_ENDED, ClientOptions, RoutedBulk, run_sessions

WORKERS = 2
"""One thread encodes while another decodes."""
DATA_PROTOCOL = 2
"""The protocol that knows data leases."""


class AttachedData(Protocol):
    """What `atoll.data` attaches to a learner. `report` and `leases` may be called on the link's thread."""

    @property
    def stream(self) -> str: ...
    def report(self) -> DataReport: ...
    def leases(self, message: DataLeases) -> None: ...
    def stepped(self) -> None: ...
    def leaving(self) -> None: ...
    def dropped(self) -> None: ...


class LearnerShell(LearnerDriverHost):
    """Runs the driver and the link. `changed` is the lock, and tells the training thread of news."""

    def __init__(
        self,
        parameters: Parameters[Any],
        machine: LearnerMachine,
        options: ClientOptions,
        writer: Writer,
    ) -> None:
        self.machine = machine
        self.writer = writer
        self.changed = threading.Condition()
        self.driver = LearnerDriver(machine, self)
        self.layout: Layout | None = None
        """Of the whole model; there once the syncer has said how it is laid out."""
        self._arrays: StepArrays | None = None
        self.failure: Exception | None = None
        self.ever_linked = False
        self.last_down = ""
        """Why the last session ended, or could not be opened."""
        self.down_at_s = time.monotonic()
        """Since when there is no session, where there is none."""
        self.healing = False
        """Re-seeded: once that is adopted, optimizer state that is not finite starts anew."""
        self.give_inner: Callable[[], Callable[[], U8]] | None = None
        """Copies the inner state for a joiner, on the training thread; what it gives packs the copy, on another."""
        self.inner: tuple[bytes, str, str] | None = None
        """A peer's inner state once it is here: bytes, peer, and (without bytes) why there are none."""
        self._sources: dict[str, AttachedData] = {}
        self._poked: set[str] = set()
        self._parameters = parameters
        self._options = options
        self._meter = LinkMeter(machine.learner, writer)
        self._bulk: RoutedBulk | None = None
        self._send: Callable[[LearnerMessage], None] | None = None
        self._loop = asyncio.new_event_loop()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="atoll-codec")
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
        self._bulk = RoutedBulk(self._options)
        self.driver.start()
        try:
            await run_sessions(self._options, self, self._stop, self._bulk.move)
        except AtollError as error:
            self._fail(error)
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._bulk.close()

    def _fail(self, error: Exception) -> None:
        with self.changed:
            self.failure = error
            self.changed.notify_all()

    def give_up(self, error: AtollError) -> None:
        """Any thread: trying on would not help."""
        self._fail(error)
        self._post(self._stop.set)

    # ------------------------------------------------------------ threads

    def _post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Run something on the link's loop. Once the link has ended (the run is over, or was refused) there is nobody
        to do it, and training goes on without. Its own thread need not wake the loop, which takes a write to a socket
        and a read."""
        own = threading.get_ident() == self._thread.ident
        try:
            (self._loop.call_soon if own else self._loop.call_soon_threadsafe)(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _call(self, action: Callable[..., None], *arguments: Any) -> None:
        """On the loop: into the driver, under the lock."""
        try:
            with self.changed:
                action(*arguments)
        except Exception as error:  # a defect here must reach the training thread, too
            self._fail(error)

    def _background(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        self._post(self._spawn, work, *arguments)

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        task = self._loop.create_task(work(*arguments))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            if isinstance(error, Exception):
                self._fail(error)

    async def _work(self, make: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Make something on a worker thread, and give it to the driver."""
        self._call(done, await self._loop.run_in_executor(self._workers, make))

    # ------------------------------------------------------------ session callbacks (wire.SessionHandler)

    def hello(self) -> Hello:
        with self.changed:
            return replace(outgoing(self.machine.hello())[0], shards=True, moves=True)

    def on_up(self, send: Callable[[LearnerMessage], None], welcome: Welcome) -> None:
        assert self._bulk is not None
        self._bulk.route(welcome.shards, welcome.shard_of)
        self._send = send
        with self.changed:
            self._fix_layout(welcome)
            self.ever_linked = True
            self.driver.heard(welcome)
        self.writer.emit(events.LearnerLink(self.machine.learner, True))

    @property
    def linked(self) -> bool:
        """True while a session is open."""
        return self._send is not None

    def on_message(self, message: SyncerMessage) -> None:
        if isinstance(message, DataLeases):
            source = self._sources.get(message.stream)
            if source is not None:
                source.leases(message)
            return
        if isinstance(message, Serving):
            self._reroute(message)
            return
        with self.changed:
            self.driver.heard(message)
        if isinstance(message, Start):
            for stream in list(self._sources):
                self._report_data(stream)

    def _reroute(self, serving: Serving) -> None:
        """A fragment has moved to another shard."""
        assert self._bulk is not None
        self._bulk.route(serving.shards, serving.shard_of)

    def on_down(self, reason: str) -> None:
        linked, self._send = self.linked, None
        if linked:
            self.down_at_s = time.monotonic()
            self._spawn(self._give_up_transfers)
        self.last_down = reason
        with self.changed:
            self.driver.link_down(reason, let_go=reason == SYNCER_ENDED)
        self.writer.emit(events.LearnerLink(self.machine.learner, False, reason))

    async def _give_up_transfers(self) -> None:
        """The session is over: what was under way belongs to it, and on a thin link it would be in the way of what the
        next one asks for."""
        assert self._bulk is not None
        await self._bulk.start_again()

    def _fix_layout(self, welcome: Welcome) -> None:
        if self.layout is None:
            self.layout = build_layout(self.machine.tensors, welcome.config.fragments)
            self._make_arrays(self.layout, welcome.config)
        if self.layout.fingerprint != welcome.fingerprint:
            raise RemoteProtocolError(
                "the syncer lays this model out differently; install the same version of atoll on both sides"
            )
        self._take_settings(welcome.config)

    def _make_arrays(self, layout: Layout, config: SyncConfig) -> None:
        self._arrays = StepArrays(self._parameters, layout, config)

    def _take_settings(self, config: SyncConfig) -> None:
        self.arrays.vault.config = config

    # ------------------------------------------------------------ what the training thread says and asks

    def apply(self, event: fx.Stepped | fx.Boundary | fx.Closing | fx.InnerMissing) -> None:
        """At a step boundary, or before the shell is started. The caller holds `changed`."""
        self.driver.handle(event)

    @property
    def vault(self) -> Vault | None:
        return self._arrays.vault if self._arrays is not None else None

    def bytes_missing(self) -> list[int]:
        """The sizes of the fragments that have not come yet. The caller holds `changed`."""
        if self.layout is None:
            return []
        return [4 * self.layout.fragments[fragment].size for fragment in self.machine.missing]

    # ------------------------------------------------------------ the driver's world

    @property
    def arrays(self) -> StepArrays:
        """There once the syncer has said how the model is laid out."""
        assert self._arrays is not None
        return self._arrays

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def later(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        if delay_ns:
            self._post(self._loop.call_later, delay_ns / 1e9, self._call, action, *arguments)
        else:
            self._post(self._call, action, *arguments)

    def news(self) -> None:
        self.changed.notify_all()

    def send(self, message: LearnerMessage) -> None:
        self._post(self._transmit, message)

    def _transmit(self, message: LearnerMessage) -> None:
        if self._send is not None:
            for told in outgoing(message):
                self._send(told)

    def push(self, header: PushHeader, payload: Payload, done: Callable[[PushReply | None], None]) -> None:
        if told := outgoing(header):
            self._background(self._push, told[0], payload, done)
        else:
            self.later(0, done, None)

    async def _push(self, header: PushHeader, payload: Payload, done: Callable[[PushReply | None], None]) -> None:
        assert self._bulk is not None
        reply = None
        try:
            reply = await self._bulk.push(header, payload)
        except RefusedError as error:
            reply = PushReply(False, error.code, error.detail)
        except UnreachableError:
            pass
        self._call(done, reply)

    def fetch(self, request: FetchRequest, done: Callable[[FetchAnswer], None]) -> None:
        self._background(self._fetch, request, done)

    async def _fetch(self, request: FetchRequest, done: Callable[[FetchAnswer], None]) -> None:
        assert self._bulk is not None
        answer: FetchAnswer = None
        try:
            header, payload = await self._bulk.fetch(request)
            answer = FetchedPayload(header.version, payload, int(payload.nbytes), header.checksum)
        except RefusedError as error:
            answer = error.code
        except PayloadError:
            answer = FetchedPayload(request.version, None, 0)
        except UnreachableError:
            pass
        self._call(done, answer)

    @property
    def inline_bytes_max(self) -> int:
        """Where shards serve the fragments, the syncer takes no payload."""
        return 0 if self._bulk is not None and self._bulk.routed else INLINE_BYTES_MAX

    # ------------------------------------------------------------ contributions

    def contribute(self, effect: fx.Contribute, done: Callable[[OutgoingPayload | str], None]) -> None:
        sending = self.arrays.start_sending(effect)
        if self.arrays.vault.small(effect.header.fragment):
            self._post(self._encode_here, sending, done)
        else:
            self._background(self._work, partial(self._encode, sending), done)

    def _encode_here(self, sending: HeldContribution, done: Callable[[OutgoingPayload | str], None]) -> None:
        """A small one is encoded on the loop: its kernel takes less than a thread switch."""
        self._call(done, self._encode(sending))

    def _encode(self, sending: HeldContribution) -> OutgoingPayload | str:
        try:
            payload = encode_contribution(self.arrays.vault, sending)
        except PayloadError as error:
            return str(error)
        size, checksum = int(payload.nbytes), xxhash.xxh3_64_intdigest(payload.data)
        return OutgoingPayload(payload.tobytes() if size <= INLINE_BYTES_MAX else payload, size, checksum)

    # ------------------------------------------------------------ versions

    def prepare_whole(self, fragment: int, came: FetchedPayload, done: Callable[[PreparedVersion | str], None]) -> None:
        make = partial(self.arrays.vault.prepare_whole, fragment, came.version, came.payload, came.checksum)
        self._background(self._prepare, fragment, make, done)

    def prepare_update(self, wanted: fx.Fetch, payload: Payload, done: Callable[[PreparedVersion | str], None]) -> None:
        fragment, here = wanted.fragment, self.arrays
        try:
            before, data = here.before(wanted), np.frombuffer(payload, np.uint8)
            make = partial(here.vault.prepare_update, fragment, before, data, wanted.checksum)
            if not isinstance(payload, bytes):
                self._background(self._prepare, fragment, make, done)
                return
            made = make()  # it came inside its notice, so it is small
        except PayloadError as error:
            done(str(error))
            return
        stage = here.stage_ahead(self.machine.plan_adopt, fragment, made)
        if stage is not None:
            stage()
        done(made)

    async def _prepare(
        self, fragment: int, make: Callable[[], HeldVersion], done: Callable[[PreparedVersion | str], None]
    ) -> None:
        try:
            made = await self._loop.run_in_executor(self._workers, make)
        except PayloadError as error:
            self._call(done, str(error))
            return
        with self.changed:
            stage = self.arrays.stage_ahead(self.machine.plan_adopt, fragment, made)
        if stage is not None:
            await self._loop.run_in_executor(self._workers, stage)
        self._call(done, made)

    # ------------------------------------------------------------ whole fragments

    def read_seed(self, fragment: int, done: Callable[[OutgoingPayload], None]) -> None:
        self._background(self._work, lambda: whole_payload(self.arrays.seed_values(fragment)), done)

    def read_held(self, fragment: int, version: int, done: Callable[[OutgoingPayload | None], None]) -> None:
        held = self.arrays.vault.held(fragment, version)
        if held is None:
            done(None)
        else:
            self._background(self._work, lambda: whole_payload(self.arrays.on_host(held.theta)), done)

    def find_own(self, wanted: fx.Fetch, done: Callable[[FetchedPayload | None], None]) -> None:
        self._background(self._work, partial(self._own, wanted), done)

    def _own(self, wanted: fx.Fetch) -> FetchedPayload | None:
        own = whole_payload(self.arrays.seed_values(wanted.fragment))
        return FetchedPayload(wanted.version, own.payload, 0, own.checksum) if own.checksum == wanted.checksum else None

    # ------------------------------------------------------------ inner state, for a joiner

    def copy_inner(self, done: Callable[[Sequence[OutgoingPayload]], None]) -> None:
        """Whatever is wrong with it must not cost this learner its run."""
        if self.give_inner is None:
            return
        try:
            pack = self.give_inner()
        except (AtollError, RuntimeError, MemoryError) as error:
            self.give_inner = None
            self.warn(f"inner state cannot be given to others: {error}")
            return
        self._background(self._work, partial(self._inner_pieces, pack), done)

    def _inner_pieces(self, pack: Callable[[], U8]) -> list[OutgoingPayload]:
        try:
            blob = pack()
        except AtollError as error:
            self.warn(f"inner state cannot be given to others: {error}")
            return []
        pieces = [blob[at : at + INNER_PIECE_BYTES] for at in range(0, blob.nbytes, INNER_PIECE_BYTES)]
        return [OutgoingPayload(one, int(one.nbytes), xxhash.xxh3_64_intdigest(one.data)) for one in pieces]

    def inner_came(self, pieces: Sequence[Payload], peer: str, reason: str) -> None:
        self.inner = (b"".join(piece.tobytes() for piece in pieces), peer, reason)
        self.changed.notify_all()

    # ------------------------------------------------------------ what is told

    def note(self, note: fx.Note) -> None:
        self.writer.emit(note.event)

    def warn(self, text: str) -> None:
        self.writer.emit(events.Warned(self.machine.learner, text))

    def pushed(self, header: PushHeader, reply: PushReply, encode_ns: int, push_ns: int) -> None:
        self._moved("up", header.size, push_ns)
        outcome = ("late" if reply.late else "accepted") if reply.accepted else reply.code
        self.writer.emit(
            events.LearnerPushed(
                learner=header.learner,
                fragment=header.fragment,
                round=header.round,
                seq=header.seq,
                bytes=header.size,
                steps=header.steps,
                tokens=header.tokens,
                encode_ns=encode_ns,
                push_ns=push_ns,
                outcome=str(outcome),
            )
        )

    def came(self, wanted: fx.Fetch, version: int, size: int, fetch_ns: int) -> None:
        whole = wanted.kind is FetchKind.THETA
        self.writer.emit(events.LearnerFetched(self.machine.learner, wanted.fragment, version, size, fetch_ns, whole))

    def moved_down(self, size: int, took_ns: int) -> None:
        self._moved("down", size, took_ns)

    @property
    def rate_up(self) -> float:
        """Bytes/s that contributions went out with, as far as is known; else 0."""
        return self._meter.rate("up")

    def _moved(self, direction: str, size: int, took_ns: int) -> None:
        assert self.layout is not None
        needs = needed_bytes_s(self.machine.config, self.layout, direction, self.machine.step_ns)
        self._meter.moved(direction, size, took_ns, needs)

    def reseeded(self) -> None:
        self.healing = True

    def fail(self, code: str, detail: str) -> None:
        self._fail(RefusedError(code, detail))

    def let_go(self) -> None:
        self._stop.set()  # it must not come back
        self.changed.notify_all()

    # ------------------------------------------------------------ data leases

    def attach_data(self, source: AttachedData) -> None:
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
        if ready:
            self._transmit(self._sources[stream].report())

    def data_sources(self) -> list[AttachedData]:
        return list(self._sources.values())
