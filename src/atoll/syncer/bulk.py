"""The bulk half of the syncer's shell: pushes come in, versions and pieces of inner state go out."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from atoll.core import effects as fx
from atoll.core.messages import (
    NO_VERSION,
    FetchHeader,
    FetchKind,
    FetchRequest,
    PushHeader,
    PushKind,
    PushReply,
    Refusal,
)
from atoll.core.relays import Relay
from atoll.core.rounds import ContributionId
from atoll.core.syncer_machine import SyncerMachine
from atoll.errors import PayloadError, RefusedError
from atoll.syncer.news import Flow
from atoll.syncer.relay import RelayBuffer
from atoll.syncer.state import Held, ModelState, Update

THETA_COPIES_MAX = 8
"""Whole-fragment copies kept for joiners. Learners that join together fetch the same versions, so a few are enough;
each is 4 bytes per parameter of one fragment."""
RELAY_LINGER_S = 10.0
"""How long the last piece of an inner state is kept after it was asked for, in case that the transfer breaks."""
WORKERS = 2
"""Merges and inspections at a time: the kernels have threads of their own, two keep them fed."""


class BulkService(ABC):
    """Everything here runs on the event loop; array work runs on worker threads. Each fragment has a lock that is held
    while its arrays change, so that a joiner never reads half a merge."""

    def __init__(self, machine: SyncerMachine) -> None:
        self.machine = machine
        self._state: ModelState | None = None
        self._held: dict[ContributionId, Held] = {}
        self._heals: dict[int, NDArray[np.uint8]] = {}
        self._relays: dict[int, RelayBuffer] = {}
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._copies: OrderedDict[int, tuple[int, int, memoryview]] = OrderedDict()
        self.flow_up, self.flow_down = Flow(), Flow()
        """Payload bytes per second and learner."""
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="atoll-merge")
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    def apply(self, event: fx.SyncerInput) -> PushReply | None:
        """Feed the machine and perform what it says; returns the answer if the event was a push."""

    @property
    def state(self) -> ModelState | None:
        """The run's arrays once version 0 is committed."""
        return self._state if self.machine.committed else None

    # ------------------------------------------------------------ pushes

    async def push_begin(self, header: PushHeader) -> int:
        return self._size_max(header)

    def _size_max(self, header: PushHeader) -> int:
        """The most bytes that this push may have, or RefusedError if it may not come in."""
        reply = self.apply(fx.PushOpened(header))
        assert reply is not None
        if not reply.accepted:
            if reply.code == Refusal.DUPLICATE:
                # A duplicate is also how a learner whose reply was lost asks again: let the machine tell it the fate.
                self.apply(fx.PushCompleted(header, finite=True, norm=0.0))
            raise RefusedError(reply.code, reply.detail)
        assert self._state is not None
        if header.kind is PushKind.INNER:
            return header.size  # the machine has compared it with the piece that it names
        if header.kind is PushKind.CONTRIBUTION:
            return self._state.contribution_size_max(header.fragment)
        whole = self._state.seed_size(header.fragment)
        if header.size < whole:
            raise RefusedError(
                Refusal.SIZE, f"fragment {header.fragment} has {whole} bytes, not {header.size}; send all"
            )
        return whole

    async def push_complete(self, header: PushHeader, payload: NDArray[np.uint8]) -> PushReply:
        assert self._state is not None
        self.flow_up.add(header.learner, payload.nbytes)
        if header.kind is PushKind.SEED:
            reply = self.apply(fx.PushOpened(header))  # another may have been asked while the bytes were on their way
            if reply is not None and not reply.accepted:
                return reply
            finite = await self._loop.run_in_executor(self._workers, self._state.put_seed, header.fragment, payload)
            return self._answer(fx.PushCompleted(header, finite, 0.0))
        if header.kind is PushKind.HEAL:
            return self._take_heal(header, payload)
        if header.kind is PushKind.INNER:
            return await self._take_inner(header, payload)
        try:
            finite, held = await self._loop.run_in_executor(
                self._workers, self._state.inspect, header.fragment, payload
            )
        except PayloadError as error:
            return PushReply(False, Refusal.SIZE, str(error))
        return self._take(header, finite, held)

    def _take(self, header: PushHeader, finite: bool, held: Held) -> PushReply:
        identity = ContributionId(header.learner, header.generation, header.fragment, header.seq)
        taken = identity in self._held
        if not taken:
            self._held[identity] = held
        norm = float(np.sqrt(np.square(held.norms).sum())) if finite else 0.0
        reply = self._answer(fx.PushCompleted(header, finite, norm))
        if not reply.accepted and not taken:
            self._held.pop(identity, None)
        return reply

    def _answer(self, event: fx.PushCompleted) -> PushReply:
        reply = self.apply(event)
        assert reply is not None
        return reply

    def _take_heal(self, header: PushHeader, payload: NDArray[np.uint8]) -> PushReply:
        finite = bool(np.isfinite(payload.view(np.float32)).all())
        before = self._heals.get(header.fragment)
        self._heals[header.fragment] = payload
        reply = self._answer(fx.PushCompleted(header, finite, 0.0))
        if not reply.accepted:
            self._heals.pop(header.fragment)
            if before is not None:
                self._heals[header.fragment] = before
        return reply

    async def _take_inner(self, header: PushHeader, payload: NDArray[np.uint8]) -> PushReply:
        if self.machine.relays.from_peer(header.fragment, header.learner, header.generation) is None:
            return PushReply(False, Refusal.NOT_READY, "nobody waits for this inner state any more; forget it")
        buffer = self._relays.setdefault(header.fragment, RelayBuffer())
        if not await buffer.put(header.seq, payload):
            return PushReply(False, Refusal.BUSY, "the joiner has not taken the earlier pieces yet; send it again")
        return self._answer(fx.PushCompleted(header, True, 0.0))

    async def _give_inner(self, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
        slot, piece = request.fragment, request.version
        relay = self.machine.relays.to_joiner(slot, request.learner, request.generation)
        if relay is None or not 0 <= piece < relay.pieces:
            raise RefusedError(Refusal.UNKNOWN_VERSION, f"relay {slot} has no piece {piece} for this learner")
        self.apply(fx.RelayTaken(slot, done=False))
        found = await self._relays.setdefault(slot, RelayBuffer()).get(piece)
        if found is None:
            raise RefusedError(Refusal.BUSY, f"piece {piece} has not come yet; ask again")
        payload, checksum = found
        if piece == relay.pieces - 1:
            self._loop.call_later(RELAY_LINGER_S, self._end_relay, slot, relay)
        return FetchHeader(piece, "inner", payload.nbytes, checksum), payload.data

    def _end_relay(self, slot: int, relay: Relay) -> None:
        if self.machine.relays.open.get(slot) is relay:
            self.apply(fx.RelayTaken(slot, done=True))

    # ------------------------------------------------------------ fetches

    async def fetch_open(self, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
        header, content = await self._find(request)
        if request.learner in self.machine.membership.members:
            self.flow_down.add(request.learner, request.length or max(0, content.nbytes - request.offset))
        return header, content

    async def _find(self, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
        if request.kind is FetchKind.INNER:
            return await self._give_inner(request)
        state = self.state
        if state is None or not 0 <= request.fragment < len(state.fragments):
            detail = f"fragment {request.fragment} has no committed state here; wait for Start"
            raise RefusedError(Refusal.UNKNOWN_FRAGMENT, detail)
        self.apply(fx.FetchOpened(request.learner, request.generation))
        if request.kind is FetchKind.UPDATE:
            update = state.fragments[request.fragment].ring.get(request.version)
            if update is None:
                detail = f"version {request.version} of fragment {request.fragment} left the ring; fetch it whole"
                raise RefusedError(Refusal.UNKNOWN_VERSION, detail)
            return self._update_header(request.version, update), update.payload.data
        return await self._theta(state, request)

    def _update_header(self, version: int, update: Update) -> FetchHeader:
        return FetchHeader(version, self.machine.config.codec_down, update.payload.nbytes, update.checksum)

    async def _theta(self, state: ModelState, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
        cached = self._copies.get(request.fragment)
        if cached is None or cached[0] != state.fragments[request.fragment].version:
            async with self._locks[request.fragment]:
                arrays = state.fragments[request.fragment]
                cached = self._copies.get(request.fragment)  # another joiner may have made it in the meantime
                if cached is not None and cached[0] == arrays.version:
                    return self._theta_header(cached, request)
                copy = await self._loop.run_in_executor(self._workers, arrays.theta.tobytes)
                cached = (arrays.version, arrays.checksum, memoryview(copy))
                self._copies[request.fragment] = cached
                while len(self._copies) > THETA_COPIES_MAX:
                    self._copies.popitem(last=False)
        return self._theta_header(cached, request)

    def _theta_header(
        self, cached: tuple[int, int, memoryview], request: FetchRequest
    ) -> tuple[FetchHeader, memoryview]:
        version, checksum, data = cached
        if request.version not in (NO_VERSION, version):
            detail = f"fragment {request.fragment} is at version {version} now, not {request.version}; fetch that"
            raise RefusedError(Refusal.UNKNOWN_VERSION, detail)
        return FetchHeader(version, "fp32", data.nbytes, checksum), data
