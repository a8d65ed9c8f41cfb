"""The background half of a learner: how contributions go out and versions come in.

Small payloads are encoded, sent and prepared on the event loop itself and travel on the control connection; larger ones
use worker threads and the bulk connections. What the training thread will need for an adopt is made, and brought to the
model's device, before it asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import xxhash

from atoll.codec import needed_bytes_s
from atoll.core import effects as fx
from atoll.core.learner_machine import LearnerMachine
from atoll.core.messages import (
    INNER_PIECE_BYTES,
    NO_VERSION,
    Contribution,
    FetchKind,
    FetchRequest,
    LearnerMessage,
    PushHeader,
    PushKind,
    PushReply,
    Received,
    Refusal,
    Reseed,
)
from atoll.errors import AtollError, PayloadError, RefusedError, UnreachableError
from atoll.learner.encode_hook import encode_contribution
from atoll.learner.parameters import F32, Parameters
from atoll.learner.thin import LinkMeter
from atoll.learner.vault import U8, AdoptKey, HeldContribution, HeldVersion, Vault
from atoll.observe import Writer, events
from atoll.wire import BulkClient

RETRY_S = 0.5
"""Pause after a transfer that the wire gave up on, before the machine is told to try again."""
PUSH_AGAIN = (Refusal.BUSY, Refusal.CHECKSUM)
"""Refusals of something that the syncer asked for and still waits for: the bytes were damaged, or it had no room."""
INNER_TRIES = 10
"""Attempts for one piece of inner state while the other side is busy: each waits on the syncer for some 20 s."""
WORKERS = 2
"""One thread encodes while another decodes."""
FETCHES_MAX = 4
"""Fetches at a time: as many as fill a long link. All fragments side by side would all arrive as late as the last."""
SLOW_FETCH_NS = 1_000_000_000
"""A fetch that takes longer than any round trip says that the link is full: then there is one at a time."""
RATE_NS_MIN = 100_000_000
"""A fetch that takes less tells nothing of the link's rate, and the link is quick enough."""
INLINE_NS_MAX = 500_000_000
"""A contribution on the control connection that is answered later than this stands in front of everything that the
syncer must hear of this learner: 64 KiB take so long at 1 Mbit/s."""


@dataclass(slots=True)
class Arrival:
    """What has come over the link so far, and how fast."""

    count: int = 0
    bytes: int = 0
    rate: float = 0.0
    """Bytes/s of the last fetch that took long enough to tell; 0.0 before."""
    last_ns: int = 0
    """What the last fetch took."""

    def came(self, size: int, took_ns: int) -> None:
        self.count, self.last_ns = self.count + 1, took_ns
        self.bytes += size
        if size and took_ns >= RATE_NS_MIN:
            self.rate = size / (took_ns / 1e9)


class Exchange(ABC):
    """Everything that moves bytes. All of it runs on the link's event loop; `changed` guards machine and vault."""

    def __init__(self, parameters: Parameters[Any], machine: LearnerMachine, writer: Writer) -> None:
        self.parameters = parameters
        self.machine = machine
        self.writer = writer
        self.changed = threading.Condition()
        self.vault: Vault | None = None
        self._bulk: BulkClient | None = None
        self._loop = asyncio.new_event_loop()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="atoll-codec")
        self._send: Callable[[LearnerMessage], None] | None = None
        self._seeds: dict[int, F32] = {}
        self._seeding = False
        self._seed_wanted = False
        self._pushing: set[tuple[int, int]] = set()
        self._updates: dict[tuple[int, int], bytes] = {}
        """Small updates that came inside their Published notice and are not prepared yet."""
        self.inner: tuple[bytes, str, str] | None = None
        """A peer's inner state once it is here: bytes, peer, and (without bytes) why there are none."""
        self._sent: dict[tuple[int, int], int] = {}
        """Small contributions that were sent on the control connection and not answered yet, and when."""
        self._inline = True
        """Small contributions travel on the control connection: the link is quick enough."""
        self._fetches = asyncio.Semaphore(FETCHES_MAX)
        self._one_fetch = asyncio.Semaphore(1)
        self.arriving = Arrival()
        self._meter = LinkMeter(machine.learner, writer)

    @abstractmethod
    def apply(self, event: fx.LearnerInput) -> None:
        """Feed the machine and perform what it says. The caller holds `changed`."""

    @abstractmethod
    def _spawn(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin something on the link's loop. Called on it."""

    def _apply_here(self, event: fx.LearnerInput) -> None:
        with self.changed:
            self.apply(event)

    # ------------------------------------------------------------ contributions

    async def _encode(self, sending: HeldContribution) -> None:
        assert self.vault is not None
        header = sending.header
        started_ns = time.perf_counter_ns()
        try:
            payload = await self._loop.run_in_executor(self._workers, self._encoded, sending)
        except PayloadError as error:
            self._not_finite(header, error)
            return
        checksum = xxhash.xxh3_64_intdigest(payload.data)
        sending.header = replace(header, size=int(payload.nbytes), checksum=checksum)
        await self._push(header.fragment, header.seq, time.perf_counter_ns() - started_ns)

    def _encoded(self, sending: HeldContribution) -> U8:
        assert self.vault is not None
        return encode_contribution(self.vault, sending)

    def _send_small(self, sending: HeldContribution) -> None:
        """Encode and send a small contribution at once, on the loop: its kernel takes less than a thread switch."""
        assert self.vault is not None
        header, started_ns = sending.header, time.perf_counter_ns()
        try:
            payload = self._encoded(sending)
        except PayloadError as error:
            self._not_finite(header, error)
            return
        sending.header = replace(header, size=int(payload.nbytes), checksum=xxhash.xxh3_64_intdigest(payload.data))
        sending.encode_ns = time.perf_counter_ns() - started_ns
        if self._inline:
            self._transmit_small(sending)
        else:
            self._spawn(lambda: self._push(header.fragment, header.seq, sending.encode_ns))

    def _transmit_small(self, sending: HeldContribution) -> None:
        key = (sending.header.fragment, sending.header.seq)
        assert self.vault is not None and sending.payload is not None
        if self._send is not None and key in self.vault.sending and key not in self._sent:
            self._sent[key] = time.perf_counter_ns()
            self._send(Contribution(sending.header, sending.payload.tobytes()))

    def _received(self, message: Received) -> None:
        assert self.vault is not None
        key = (message.fragment, message.seq)
        began_ns = self._sent.pop(key, 0)
        self._inline = time.perf_counter_ns() - began_ns < INLINE_NS_MAX
        if message.reply.code == Refusal.BUSY:
            self._loop.call_later(RETRY_S, self._apply_here, fx.PushBroken(*key))
            return
        with self.changed:
            sending = self.vault.sending.get(key)
            if sending is not None:
                self._note_push(sending.header, message.reply, sending.encode_ns, time.perf_counter_ns() - began_ns)
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
        small = self.vault.small(fragment)
        if small and self._inline:
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
        if reply.code == Refusal.BUSY:
            await asyncio.sleep(RETRY_S)
            self._apply_here(fx.PushBroken(fragment, seq))
            return
        push_ns = time.perf_counter_ns() - started_ns
        self._inline = self._inline or (small and push_ns < INLINE_NS_MAX)
        self._note_push(sending.header, reply, encode_ns, push_ns)
        self._apply_here(fx.PushDone(fragment, seq, reply))

    def _note_push(self, header: PushHeader, reply: PushReply, encode_ns: int, push_ns: int) -> None:
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

    async def _push_seed(self) -> None:
        """Give the run its first parameters: the published ones if this learner holds any, else the model's own.
        The training thread is waiting to join in the second case, so the model does not move."""
        assert self.vault is not None and self._bulk is not None
        self._seed_wanted = True
        if self._seeding:
            return  # asked again, by a syncer that has forgotten what came: it begins anew
        self._seeding = True
        try:
            while self._seed_wanted:
                self._seed_wanted = False
                await self._push_seeds()
        finally:
            self._seeding = False

    async def _push_seeds(self) -> None:
        assert self.vault is not None and self._bulk is not None
        for fragment in range(len(self.vault.layout.fragments)):
            values = await self._loop.run_in_executor(self._workers, self._seed_values, fragment)
            payload = values.view(np.uint8)
            checksum = xxhash.xxh3_64_intdigest(payload.data)
            header = self._whole_header(PushKind.SEED, fragment, NO_VERSION, int(payload.nbytes), checksum)
            reply = await self._push_whole(header, payload)
            if reply is None or self._seed_wanted:
                return  # the syncer asks again, or asks somebody else
            if not reply.accepted:
                if reply.code == Refusal.NOT_FINITE:
                    raise RefusedError(reply.code, reply.detail)
                return
            self._seeds[fragment] = values

    async def _give_heal(self, effect: fx.GiveHeal) -> None:
        """Give a syncer that lost them the published parameters that this host holds."""
        assert self.vault is not None and self._bulk is not None
        for fragment, version in effect.versions:
            with self.changed:
                held = self.vault.held(fragment, version)
            if held is None:
                continue
            payload = np.ascontiguousarray(held.theta).view(np.uint8)
            checksum = xxhash.xxh3_64_intdigest(payload.data)
            header = self._whole_header(PushKind.HEAL, fragment, version, int(payload.nbytes), checksum)
            if await self._push_whole(header, payload) is None:
                return  # the link is gone: the next Hello says what this host holds

    async def _push_whole(self, header: PushHeader, payload: U8) -> PushReply | None:
        """Push something that the syncer waits for. While the session lasts it asks nobody else, so a push that broke
        is tried again; None once the session is over."""
        assert self._bulk is not None
        session = self._send
        while self._send is not None and self._send is session:
            reply = None
            try:
                reply = await self._bulk.push(header, payload)
            except RefusedError as error:
                reply = PushReply(False, error.code, error.detail)
            except UnreachableError:
                pass
            if reply is not None and reply.code not in PUSH_AGAIN:
                return reply
            await asyncio.sleep(RETRY_S)
        return None

    def _whole_header(self, kind: PushKind, fragment: int, version: int, size: int, checksum: int) -> PushHeader:
        return PushHeader(
            kind=kind,
            learner=self.machine.learner,
            generation=self.machine.generation,
            fragment=fragment,
            round=0,
            attempt=0,
            seq=0,
            base_version=version,
            steps=0,
            tokens=0,
            codec="fp32",
            size=size,
            checksum=checksum,
        )

    def _seed_values(self, fragment: int) -> F32:
        assert self.vault is not None
        current = self.vault.current[fragment]
        if current is not None:
            return current.theta
        return self.parameters.read(fragment).values()

    # ------------------------------------------------------------ inner state, for a joiner

    async def _push_inner(self, slot: int, pack: Callable[[], U8]) -> None:
        """Give a joiner this learner's inner state, piece by piece, as fast as it takes them."""
        assert self._bulk is not None
        try:
            blob = await self._loop.run_in_executor(self._workers, pack)
        except AtollError as error:  # a joiner must not cost this learner its run
            self.writer.emit(events.Warned(self.machine.learner, f"inner state cannot be given to others: {error}"))
            return
        whole = self._whole_header(PushKind.INNER, slot, NO_VERSION, 0, 0)
        pieces = -(-blob.nbytes // INNER_PIECE_BYTES)
        for index in range(pieces):
            piece = blob[index * INNER_PIECE_BYTES : (index + 1) * INNER_PIECE_BYTES]
            header = replace(
                whole,
                seq=index,
                steps=pieces,
                tokens=int(blob.nbytes),
                codec="inner",
                size=int(piece.nbytes),
                checksum=xxhash.xxh3_64_intdigest(piece.data),
            )
            if not await self._push_piece(header, piece):
                return  # nobody waits for it any more

    async def _push_piece(self, header: PushHeader, piece: U8) -> bool:
        assert self._bulk is not None
        for _ in range(INNER_TRIES):
            try:
                reply = await self._bulk.push(header, piece)
            except RefusedError as error:
                reply = PushReply(False, error.code, error.detail)
            except UnreachableError:
                return False
            if reply.accepted or reply.code != Refusal.BUSY:
                return reply.accepted
            await asyncio.sleep(RETRY_S)
        return False

    async def _fetch_inner(self, effect: fx.TakeInner) -> None:
        """Get a peer's inner state; the training thread waits for it at the start, for a while."""
        blob, reason = b"", effect.reason
        if effect.pieces:
            try:
                blob = await self._fetch_pieces(effect)
            except (RefusedError, UnreachableError, PayloadError) as error:
                reason = str(error)
        with self.changed:
            self.inner = (blob, effect.peer, reason)
            self.changed.notify_all()

    async def _fetch_pieces(self, effect: fx.TakeInner) -> bytes:
        assert self._bulk is not None
        pieces = []
        for index in range(effect.pieces):
            request = FetchRequest(
                FetchKind.INNER, self.machine.learner, self.machine.generation, effect.slot, version=index
            )
            for attempt in range(INNER_TRIES):
                try:
                    _, payload = await self._bulk.fetch(request)
                    break
                except RefusedError as error:
                    if error.code != Refusal.BUSY or attempt == INNER_TRIES - 1:
                        raise
                    await asyncio.sleep(RETRY_S)
            pieces.append(payload.tobytes())
        return b"".join(pieces)

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
                with contextlib.suppress(RuntimeError):  # no device memory to spare just now: the adopt will make them
                    published.staged = (key, self._stage_values(fragment, key, old, published, sent))
            self._prepared(effect, published)
        self.writer.emit(events.LearnerFetched(self.machine.learner, fragment, version, len(payload), 0, whole=False))

    def _refetch(self, effect: fx.Fetch, error: PayloadError) -> None:
        """What came cannot be used: get the fragment whole. The caller holds `changed`."""
        self.writer.emit(events.Warned(self.machine.learner, f"{error}; fetching the fragment whole"))
        self.apply(fx.FetchBroken(effect.fragment, effect.version, gone=True))

    def _prepared(self, effect: fx.Fetch, published: HeldVersion) -> None:
        """Tell the machine; keep the version if it will be adopted. The caller holds `changed`."""
        assert self.vault is not None
        self.apply(fx.Fetched(effect.fragment, published.version, effect.version, published.checksum))
        if published.version in self.machine.fragments[effect.fragment].prepared:
            self.vault.prepared[effect.fragment][published.version] = published

    async def _fetch(self, effect: fx.Fetch) -> None:
        assert self.vault is not None
        started_ns = time.perf_counter_ns()
        try:
            # One after the other, each comes as soon as it can; all others wait for it either way.
            thin = not self.machine.joined or self.arriving.last_ns > SLOW_FETCH_NS
            async with self._one_fetch if thin else self._fetches:
                started_ns = time.perf_counter_ns()
                published, size = await self._get(effect)
                took_ns = time.perf_counter_ns() - started_ns
                self.arriving.came(size, took_ns)
                self._moved("down", size, took_ns)
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

    async def _get(self, effect: fx.Fetch) -> tuple[HeldVersion, int]:
        """Get the bytes and make the version; returns it and the bytes that came."""
        assert self.vault is not None and self._bulk is not None
        fragment = effect.fragment
        whole = effect.kind is FetchKind.THETA
        own = await self._own_first(fragment) if whole and effect.version == 0 else None
        if own is not None and xxhash.xxh3_64_intdigest(own.data) == effect.checksum:
            return self.vault.prepare_whole(fragment, effect.version, own.view(np.uint8), effect.checksum), 0
        version = NO_VERSION if whole else effect.version
        request = FetchRequest(effect.kind, self.machine.learner, self.machine.generation, fragment, version)
        header, payload = await self._bulk.fetch(request)
        size = int(payload.nbytes)
        if whole:
            return self.vault.prepare_whole(fragment, header.version, payload, header.checksum), size
        with self.changed:
            before = self.vault.newest(fragment)
        if before is None or before.version != effect.version - 1:
            raise PayloadError(f"version {effect.version} of fragment {fragment} does not follow what is here")
        make = self.vault.prepare_update
        return await self._loop.run_in_executor(self._workers, make, fragment, before, payload, effect.checksum), size

    def _moved(self, direction: str, size: int, took_ns: int) -> None:
        assert self.vault is not None
        needs = needed_bytes_s(self.vault.config, self.vault.layout, direction, self.machine.step_ns)
        self._meter.moved(direction, size, took_ns, needs)

    async def _own_first(self, fragment: int) -> F32 | None:
        """The parameters with which this learner came. If they are the run's first ones (it gave them, or everybody
        begins with the same) there is nothing to fetch. The training thread waits to join, so they do not move."""
        seed = self._seeds.pop(fragment, None)
        if seed is not None or self.machine.joined:
            return seed
        return await self._loop.run_in_executor(self._workers, self._seed_values, fragment)

    async def _give_up_transfers(self) -> None:
        """The session is over: what was under way belongs to it, and on a thin link it would be in the way of what the
        next one asks for."""
        assert self._bulk is not None
        await self._bulk.start_again()

    async def _stage(self, fragment: int, published: HeldVersion) -> None:
        """Make what the adopt will need while the training thread is still computing. If the guess is wrong (another
        version was adopted in between), the adopt makes it again."""
        with self.changed:
            key, old, sent = self._plan(fragment, published)
        if key is None:
            return
        try:
            make = partial(self._stage_values, fragment, key, old, published, sent)
            values = await self._loop.run_in_executor(self._workers, make)
        except RuntimeError:  # no device memory to spare just now: the adopt will make them
            return
        published.staged = (key, values)

    def _plan(
        self, fragment: int, published: HeldVersion
    ) -> tuple[AdoptKey | None, HeldVersion | None, list[HeldContribution]]:
        """How this version will be adopted, as far as can be told now. The caller holds `changed`. Only the next
        version is worth preparing for: one behind it would be made anew anyway."""
        assert self.vault is not None
        if self.vault.prepared[fragment]:
            return None, None, []
        old = self.vault.current[fragment]
        plan = self.machine.plan_adopt(fragment, published.version, ahead=True)
        if old is None and plan.rule != "overwrite":
            return None, None, []
        sent = [self.vault.sending[fragment, seq] for seq in plan.minus]
        return AdoptKey(old.version if old is not None else NO_VERSION, plan.rule, plan.minus), old, sent

    def _stage_values(
        self, fragment: int, key: AdoptKey, old: HeldVersion | None, new: HeldVersion, sent: list[HeldContribution]
    ) -> Any:
        assert self.vault is not None
        return self.parameters.stage(fragment, partial(self.vault.adopt_values, key, old, new, sent))
