"""The shell around the LearnerMachine: one lock, one background thread with an event loop, and the vault.

The training thread feeds the machine at step boundaries, performs TakeSnapshot and Adopt at once and hands the rest to
the background thread, which talks to the syncer, encodes, decodes and prepares versions ahead of time. The lock is held
only for the machine (tens of microseconds) and for the training thread's own copies, never for the network or a kernel.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from torch import nn

from atoll.core import effects as fx
from atoll.core.layout import build_layout
from atoll.core.learner_machine import LearnerMachine
from atoll.core.messages import (
    NO_VERSION,
    Contribution,
    FetchKind,
    FetchRequest,
    Hello,
    LearnerMessage,
    PushHeader,
    PushKind,
    PushReply,
    Received,
    Refusal,
    Reseed,
    SyncerMessage,
    Welcome,
)
from atoll.core.messages import Published as PublishedNotice
from atoll.errors import AtollError, PayloadError, RefusedError, RemoteProtocolError, UnreachableError
from atoll.learner.snapshot import Mover, Snapshot, Staged
from atoll.learner.tensors import ParameterSet
from atoll.learner.vault import AdoptKey, Published, Sending, Vault
from atoll.observe import Writer, events
from atoll.wire import BulkClient, ClientOptions, run_sessions

HEARTBEAT_S = 2.0
"""Said when nothing else is: well inside the 15 s lease, and small enough for any link."""
RETRY_S = 0.5
"""Pause after a transfer that the wire gave up on, before the machine is told to try again."""
WORKERS = 2
"""One thread encodes while another decodes."""


class Engine:
    """Owns machine, vault and link. `changed` is the lock and tells the training thread of news."""

    def __init__(self, model: nn.Module, machine: LearnerMachine, options: ClientOptions, writer: Writer) -> None:
        self.machine = machine
        self.changed = threading.Condition()
        self.writer = writer
        self.failure: Exception | None = None
        self.left = False
        self.ever_linked = False
        self.snapshot_ns = 0
        self.adopt_ns = 0
        self.reseeded = False
        self.parameters: ParameterSet | None = None
        self.vault: Vault | None = None
        self._mover: Mover | None = None
        self._model = model
        self._options = options
        self._snapshots: dict[int, Snapshot] = {}
        self._seeds: dict[int, np.ndarray[Any, np.dtype[np.float32]]] = {}
        self._seeding = False
        self._pushing: set[tuple[int, int]] = set()
        self._updates: dict[tuple[int, int], bytes] = {}
        """Small updates that came inside their Published notice and are not prepared yet."""
        self._sent: dict[tuple[int, int], int] = {}
        """Small contributions that were sent on the control connection and not answered yet, and when."""
        self._send: Callable[[LearnerMessage], None] | None = None
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._bulk: BulkClient | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="atoll-codec")
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
            await run_sessions(self._options, self, self._stop)
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
        self.changed.notify_all()

    def _apply_here(self, event: fx.LearnerInput) -> None:
        with self.changed:
            self.apply(event)

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
            self.writer.emit(getattr(events, effect.kind)(**effect.fields))
        elif isinstance(effect, fx.PushSeed):
            self._background(self._push_seed)
        elif isinstance(effect, fx.ForgetResiduals):
            assert self.vault is not None
            self.vault.residuals = [None] * len(self.vault.residuals)
            self.reseeded = True
        elif isinstance(effect, fx.ForgetPrepared):
            assert self.vault is not None
            self.vault.prepared = [{} for _ in self.vault.prepared]
        elif isinstance(effect, fx.Left):
            self.left = True

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
        assert self._mover is not None
        started_ns = time.perf_counter_ns()
        self._drop(fragment)
        self._snapshots[fragment] = self._mover.take(fragment)
        self.snapshot_ns += time.perf_counter_ns() - started_ns

    def _drop(self, fragment: int) -> None:
        snapshot = self._snapshots.pop(fragment, None)
        if snapshot is not None and self._mover is not None:
            self._mover.release(snapshot)

    def _adopt(self, effect: fx.Adopt) -> None:
        assert self.vault is not None and self.parameters is not None and self._mover is not None
        started_ns = time.perf_counter_ns()
        old = self.vault.current[effect.fragment]
        new = self.vault.prepared[effect.fragment].get(effect.version, old)
        assert new is not None and new.version == effect.version, "the machine and the vault disagree"
        key = AdoptKey(old.version if old is not None else NO_VERSION, effect.rule, effect.minus)
        if new.staged is not None and new.staged[0] == key:
            values = new.staged[1].tensor()
        else:
            sent = [self.vault.sending[effect.fragment, seq] for seq in effect.minus]
            values = self._mover.stage(self.vault.adopt_values(key, old, new, sent)).tensor()
        if effect.rule == "rebase":
            self.parameters.add(effect.fragment, values)
        elif effect.rule == "mix":
            self.parameters.mix(effect.fragment, values, effect.alpha)
        else:
            self.parameters.write(effect.fragment, values)
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
        assert self.vault is not None and self._mover is not None
        sending = self.vault.settle(effect.fragment, effect.seq, effect.merged)
        if sending is not None and sending.payload is not None:
            self._mover.release(sending.snapshot)

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

    def on_message(self, message: SyncerMessage) -> None:
        if isinstance(message, Received):
            self._received(message)
            return
        if isinstance(message, PublishedNotice) and message.update:
            self._updates[message.fragment, message.version] = message.update
        self._apply_here(fx.FromSyncer(message))

    def on_down(self, reason: str) -> None:
        self._send = None
        self._apply_here(fx.LinkDown(reason))
        self._updates.clear()
        for fragment, seq in list(self._sent):
            del self._sent[fragment, seq]
            self._apply_here(fx.PushBroken(fragment, seq))
        self.writer.emit(events.LearnerLink(self.machine.learner, False, reason))

    def _fix_layout(self, welcome: Welcome) -> None:
        if self.vault is None:
            layout = build_layout(self.machine.tensors, welcome.config.fragments)
            parameters = ParameterSet(self._model, layout)
            rounded = [parameters.fragment_dtypes(p) for p in range(len(layout.fragments))]
            self.parameters, self._mover = parameters, Mover(parameters)
            self.vault = Vault(layout, welcome.config, rounded)
        if self.vault.layout.fingerprint != welcome.fingerprint:
            raise RemoteProtocolError(
                "the syncer lays this model out differently; install the same version of atoll on both sides"
            )
        self.vault.config = welcome.config

    # ------------------------------------------------------------ contributions

    async def _encode(self, sending: Sending) -> None:
        assert self.vault is not None
        header = sending.header
        started_ns = time.perf_counter_ns()
        try:
            payload = await self._loop.run_in_executor(self._workers, self.vault.encode, sending)
        except PayloadError as error:
            self._not_finite(header, error)
            return
        checksum = xxhash.xxh3_64_intdigest(payload.data)
        sending.header = replace(header, size=int(payload.nbytes), checksum=checksum)
        await self._push(header.fragment, header.seq, time.perf_counter_ns() - started_ns)

    def _send_small(self, sending: Sending) -> None:
        """Encode and send a small contribution at once, on the loop: its kernel takes less than a thread switch."""
        assert self.vault is not None
        header = sending.header
        try:
            payload = self.vault.encode(sending)
        except PayloadError as error:
            self._not_finite(header, error)
            return
        sending.header = replace(header, size=int(payload.nbytes), checksum=xxhash.xxh3_64_intdigest(payload.data))
        self._transmit_small(sending)

    def _transmit_small(self, sending: Sending) -> None:
        key = (sending.header.fragment, sending.header.seq)
        assert self.vault is not None and sending.payload is not None
        if self._send is not None and key in self.vault.sending and key not in self._sent:
            self._sent[key] = time.perf_counter_ns()
            self._send(Contribution(sending.header, sending.payload.tobytes()))

    def _received(self, message: Received) -> None:
        assert self.vault is not None
        key = (message.fragment, message.seq)
        began_ns = self._sent.pop(key, 0)
        with self.changed:
            sending = self.vault.sending.get(key)
            if sending is not None:
                self._note_push(sending.header, message.reply, 0, time.perf_counter_ns() - began_ns)
            self.apply(fx.PushDone(message.fragment, message.seq, message.reply))

    def _not_finite(self, header: PushHeader, error: PayloadError) -> None:
        refusal = PushReply(False, Refusal.NOT_FINITE, str(error))
        self._apply_here(fx.PushDone(header.fragment, header.seq, refusal))
        detail = f"learner {header.learner!r} made a delta of fragment {header.fragment} that is not finite"
        self._apply_here(fx.FromSyncer(Reseed(detail)))

    async def _push(self, fragment: int, seq: int, encode_ns: int = 0) -> None:
        assert self.vault is not None and self._bulk is not None
        key = (fragment, seq)
        with self.changed:
            sending = self.vault.sending.get(key)
        if sending is None or sending.payload is None or key in self._pushing:
            return
        if self.vault.small(fragment):
            self._transmit_small(sending)
            return
        self._pushing.add(key)
        started_ns = time.perf_counter_ns()
        try:
            reply = await self._bulk.push(sending.header, sending.payload)
        except RefusedError as error:
            reply = PushReply(False, error.code, error.detail)
        except UnreachableError:
            await asyncio.sleep(RETRY_S)
            self._pushing.discard(key)
            self._apply_here(fx.PushBroken(fragment, seq))
            return
        finally:
            self._pushing.discard(key)
        self._note_push(sending.header, reply, encode_ns, time.perf_counter_ns() - started_ns)
        self._apply_here(fx.PushDone(fragment, seq, reply))

    def _note_push(self, header: PushHeader, reply: PushReply, encode_ns: int, push_ns: int) -> None:
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

    async def _push_seed(self) -> None:
        """Give the run its first parameters: the published ones if this learner holds any, else the model's own.
        The training thread is waiting to join in the second case, so the model does not move."""
        assert self.vault is not None and self._bulk is not None
        if self._seeding:
            return
        self._seeding = True
        try:
            await self._push_seeds()
        finally:
            self._seeding = False

    async def _push_seeds(self) -> None:
        assert self.vault is not None and self._bulk is not None
        for fragment in range(len(self.vault.layout.fragments)):
            values = await self._loop.run_in_executor(self._workers, self._seed_values, fragment)
            payload = values.view(np.uint8)
            checksum = xxhash.xxh3_64_intdigest(payload.data)
            header = PushHeader(
                kind=PushKind.SEED,
                learner=self.machine.learner,
                generation=self.machine.generation,
                fragment=fragment,
                round=0,
                attempt=0,
                seq=0,
                base_version=NO_VERSION,
                steps=0,
                tokens=0,
                codec="fp32",
                size=int(payload.nbytes),
                checksum=checksum,
            )
            try:
                reply = await self._bulk.push(header, payload)
            except (RefusedError, UnreachableError):
                return  # the syncer asks again, or asks somebody else
            if not reply.accepted:
                if reply.code == Refusal.NOT_FINITE:
                    raise RefusedError(reply.code, reply.detail)
                return
            self._seeds[fragment] = values

    def _seed_values(self, fragment: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        assert self.vault is not None and self._mover is not None
        current = self.vault.current[fragment]
        if current is not None:
            return current.theta
        return self._mover.take(fragment).values()

    # ------------------------------------------------------------ versions

    def _take_small(self, effect: fx.Fetch) -> None:
        """Prepare a small update that came with its notice, on the loop."""
        assert self.vault is not None
        fragment, version = effect.fragment, effect.version
        payload = self._updates.pop((fragment, version), b"")
        with self.changed:
            before = self.vault.newest(fragment)
            try:
                if before is None or before.version != version - 1:
                    raise PayloadError(f"version {version} of fragment {fragment} does not follow what is here")
                data = np.frombuffer(payload, np.uint8)
                published = self.vault.prepare_update(fragment, before, data, effect.checksum)
            except PayloadError as error:
                self._refetch(effect, error)
                return
            key, old, sent = self._plan(fragment, published)
            if key is not None:
                published.staged = (key, self._stage_values(key, old, published, sent))
            self._prepared(effect, published)
        self.writer.emit(events.LearnerFetched(self.machine.learner, fragment, version, len(payload), 0, whole=False))

    def _refetch(self, effect: fx.Fetch, error: PayloadError) -> None:
        """What came cannot be used: get the fragment whole. The caller holds `changed`."""
        self.writer.emit(events.Warned(self.machine.learner, f"{error}; fetching the fragment whole"))
        self.apply(fx.FetchBroken(effect.fragment, effect.version, gone=True))

    def _prepared(self, effect: fx.Fetch, published: Published) -> None:
        """Tell the machine; keep the version if it will be adopted. The caller holds `changed`."""
        assert self.vault is not None
        self.apply(fx.Fetched(effect.fragment, published.version, effect.version))
        if published.version in self.machine.fragments[effect.fragment].prepared:
            self.vault.prepared[effect.fragment][published.version] = published

    async def _fetch(self, effect: fx.Fetch) -> None:
        assert self.vault is not None
        started_ns = time.perf_counter_ns()
        try:
            published, size = await self._get(effect)
            await self._stage(effect.fragment, published)
        except RefusedError as error:
            await self._fetch_failed(effect, gone=error.code == Refusal.UNKNOWN_VERSION)
        except PayloadError as error:
            with self.changed:
                self._refetch(effect, error)
        except UnreachableError:
            await self._fetch_failed(effect, gone=False)
        else:
            fetch_ns = time.perf_counter_ns() - started_ns
            whole = effect.kind is FetchKind.THETA
            note = events.LearnerFetched(
                self.machine.learner, effect.fragment, published.version, size, fetch_ns, whole
            )
            self.writer.emit(note)
            with self.changed:
                self._prepared(effect, published)

    async def _fetch_failed(self, effect: fx.Fetch, gone: bool) -> None:
        if not gone:
            await asyncio.sleep(RETRY_S)
        self._apply_here(fx.FetchBroken(effect.fragment, effect.version, gone))

    async def _get(self, effect: fx.Fetch) -> tuple[Published, int]:
        """Get the bytes and make the version; returns it and the bytes that came."""
        assert self.vault is not None and self._bulk is not None
        fragment = effect.fragment
        whole = effect.kind is FetchKind.THETA
        seed = self._seeds.pop(fragment, None) if whole else None
        if seed is not None and xxhash.xxh3_64_intdigest(seed.data) == effect.checksum:
            # This learner's own seed came back as version 0: no need to fetch it.
            return self.vault.prepare_whole(fragment, effect.version, seed.view(np.uint8)), 0
        version = NO_VERSION if whole else effect.version
        request = FetchRequest(effect.kind, self.machine.learner, self.machine.generation, fragment, version)
        header, payload = await self._bulk.fetch(request)
        size = int(payload.nbytes)
        if whole:
            return self.vault.prepare_whole(fragment, header.version, payload), size
        with self.changed:
            before = self.vault.newest(fragment)
        if before is None or before.version != effect.version - 1:
            raise PayloadError(f"version {effect.version} of fragment {fragment} does not follow what is here")
        make = self.vault.prepare_update
        return await self._loop.run_in_executor(self._workers, make, fragment, before, payload, effect.checksum), size

    async def _stage(self, fragment: int, published: Published) -> None:
        """Make what the adopt will need while the training thread is still computing. If the guess is wrong (another
        version was adopted in between), the adopt makes it again."""
        with self.changed:
            key, old, sent = self._plan(fragment, published)
        if key is None:
            return
        try:
            values = await self._loop.run_in_executor(self._workers, self._stage_values, key, old, published, sent)
        except RuntimeError:  # no device memory to spare just now: the adopt will make them
            return
        published.staged = (key, values)

    def _plan(self, fragment: int, published: Published) -> tuple[AdoptKey | None, Published | None, list[Sending]]:
        """How this version will be adopted, as far as can be told now. The caller holds `changed`. Only the next
        version is worth preparing for: one behind it would be made anew anyway."""
        assert self.vault is not None
        if self.vault.prepared[fragment]:
            return None, None, []
        old = self.vault.current[fragment]
        plan = self.machine.plan_adopt(fragment, published.version)
        if old is None and plan.rule != "overwrite":
            return None, None, []
        sent = [self.vault.sending[fragment, seq] for seq in plan.minus]
        return AdoptKey(old.version if old is not None else NO_VERSION, plan.rule, plan.minus), old, sent

    def _stage_values(self, key: AdoptKey, old: Published | None, new: Published, sent: Sequence[Sending]) -> Staged:
        assert self.vault is not None and self._mover is not None
        return self._mover.stage(self.vault.adopt_values(key, old, new, list(sent)))
