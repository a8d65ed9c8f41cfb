"""The bulk half of the syncer's shell: pushes come in, versions and pieces of inner state go out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.core import (
    INNER_LINGER_NS,
    FetchHeader,
    FetchKind,
    FetchRequest,
    InnerPiece,
    InnerPieceRequest,
    InnerSlot,
    PushHeader,
    PushKind,
    PushReply,
    Refusal,
)
from atoll.core import effects as fx
from atoll.errors import PayloadError, RefusedError
from atoll.syncer.fragment_work import copy_theta, find_update, theta_header
from atoll.syncer.inner_buffer import InnerBuffer
from atoll.syncer.platform import AsyncioPlatform
from atoll.syncer.state import InspectedPayload, ModelState, is_usable


class BulkService:
    """Everything here runs on the event loop; array work runs on worker threads."""

    def __init__(self, platform: AsyncioPlatform) -> None:
        self.platform = platform
        self.driver = platform.driver
        self.machine = platform.machine
        self.flow_up, self.flow_down = platform.flow_up, platform.flow_down

    @property
    def state(self) -> ModelState | None:
        """The run's arrays once version 0 is committed."""
        return self.platform.state if self.machine.committed else None

    # ------------------------------------------------------------ pushes

    async def push_begin(self, header: PushHeader) -> int:
        return self._size_max(header)

    def _size_max(self, header: PushHeader) -> int:
        """The most bytes that this push may have, or RefusedError if it may not come in."""
        reply = self.driver.open_push(header)
        if not reply.accepted:
            raise RefusedError(reply.code, reply.detail)
        state = self.platform.state
        assert state is not None
        if header.kind is PushKind.INNER:
            return header.size  # the machine has compared it with the piece that it names
        if header.kind is PushKind.CONTRIBUTION:
            return state.contribution_size_max(header.fragment, header.codec)
        whole = state.seed_size(header.fragment)
        if header.size < whole:
            raise RefusedError(
                Refusal.SIZE, f"fragment {header.fragment} has {whole} bytes, not {header.size}; send all"
            )
        return whole

    async def push_complete(self, header: PushHeader, payload: NDArray[np.uint8]) -> PushReply:
        state = self.platform.state
        assert state is not None
        self.flow_up.add(header.learner, payload.nbytes)
        if header.kind is PushKind.CONTRIBUTION:
            try:
                finite, held = await self.platform.on_a_worker(state.inspect, header.fragment, payload, header.codec)
            except PayloadError as error:
                return PushReply(False, Refusal.SIZE, str(error))
            return self._take(header, finite, held)
        if header.kind is PushKind.HEAL:
            values = payload.view(np.float32)
            finite = await self.platform.on_a_worker(is_usable, values)
            far = await self.platform.on_a_worker(state.distance, header.fragment, values) if finite else 0.0
            return self.driver.complete_push(header, payload, finite=finite, norm=far)
        reply = self.driver.open_push(header)  # another may have been asked while the bytes were on their way
        if not reply.accepted:
            return reply
        finite = True
        if header.kind is PushKind.SEED:
            finite = await self.platform.on_a_worker(state.put_seed, header.fragment, payload)
        elif not await self._put_piece(InnerPiece.of(header), payload):
            return PushReply(False, Refusal.BUSY, "the joiner has not taken the earlier pieces yet; send it again")
        return self.driver.complete_push(header, payload, finite=finite)

    def _take(self, header: PushHeader, finite: bool, held: InspectedPayload) -> PushReply:
        norm = float(np.sqrt(np.square(held.norms).sum())) if finite else 0.0
        return self.driver.complete_push(header, held, finite=finite, norm=norm)

    async def _put_piece(self, piece: InnerPiece, payload: NDArray[np.uint8]) -> bool:
        return await self._buffer(piece.slot).put(piece.piece, payload)

    def _buffer(self, slot: int) -> InnerBuffer:
        return self.platform.inner.setdefault(slot, InnerBuffer())

    async def _give_inner(self, wanted: InnerPieceRequest) -> tuple[FetchHeader, memoryview]:
        slot, piece = wanted.slot, wanted.piece
        inner_slot = self.machine.inner_slot(slot, wanted.learner, wanted.generation)
        if inner_slot is None or not 0 <= piece < inner_slot.pieces:
            raise RefusedError(Refusal.UNKNOWN_VERSION, f"inner slot {slot} has no piece {piece} for this learner")
        self.driver.apply(fx.InnerTaken(slot, done=False))
        found = await self._buffer(slot).get(piece)
        if found is None:
            raise RefusedError(Refusal.BUSY, f"piece {piece} has not come yet; ask again")
        payload, checksum = found
        if piece == inner_slot.pieces - 1:
            self.platform.later(INNER_LINGER_NS, lambda: self._end_slot(inner_slot))
        return FetchHeader(piece, "inner", payload.nbytes, checksum), payload.data

    def _end_slot(self, inner_slot: InnerSlot) -> None:
        if self.machine.inner_slot(inner_slot.slot, inner_slot.joiner, inner_slot.joiner_generation) is inner_slot:
            self.driver.apply(fx.InnerTaken(inner_slot.slot, done=True))

    # ------------------------------------------------------------ fetches

    async def fetch_open(self, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
        refusal = self.driver.open_fetch(request)
        if refusal is not None:
            raise RefusedError(refusal.code, refusal.detail)
        header, content = await self._find(request)
        self.flow_down.add(request.learner, request.length or max(0, content.nbytes - request.offset))
        return header, content

    async def _find(self, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
        if request.kind is FetchKind.INNER:
            return await self._give_inner(InnerPieceRequest.of(request))
        state = self.state
        if state is None or not 0 <= request.fragment < len(state.fragments):
            detail = f"fragment {request.fragment} has no committed state here; wait for Start"
            raise RefusedError(Refusal.UNKNOWN_FRAGMENT, detail)
        if request.kind is FetchKind.UPDATE:
            return find_update(state, request)
        return await self._theta(state, request)

    async def _theta(self, state: ModelState, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
        cached = self.platform.copies.get(request.fragment)
        if cached is None or cached[0] != state.fragments[request.fragment].version:
            async with self.platform.turn(request.fragment):
                cached = await copy_theta(self.platform, request.fragment)
        return theta_header(cached, request)
