"""A shard as the wire sees it: learners push to it and fetch from it, and one coordinator at a time leads it.

It decides nothing. Whether bytes may come in, what becomes of them, what is merged and what is published is the
coordinator's to say. While none leads it, learners are asked to come again, and train on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from atoll.core import (
    ContributionId,
    FetchHeader,
    FetchKind,
    FetchRequest,
    Hello,
    Identity,
    LearnerMessage,
    PushHeader,
    PushKind,
    PushReply,
    Refusal,
    SyncerMessage,
    VersionToStore,
    same_secret,
)
from atoll.core import effects as fx
from atoll.errors import FencedSyncerError, PayloadError, RefusedError, UnreachableError
from atoll.syncer import shard_calls as calls
from atoll.syncer.fragment_work import find_update, theta_header
from atoll.syncer.relay_calls import RELAY
from atoll.syncer.shard_arrays import ShardArrays
from atoll.syncer.state import ModelState, is_usable
from atoll.wire import Bytes, ShardPeer

NOBODY_LEADS = "no syncer leads this shard at the moment; ask again soon"
UNLED_S = 10.0
"""After so long without a coordinator a shard that has nothing on disk may begin another run."""
NO_BYTES = np.empty(0, np.uint8)
Reply = tuple[Mapping[str, Any], memoryview | bytes]


class ShardService:
    """Implements `atoll.wire.SyncerService` for payloads, and answers the coordinator."""

    def __init__(self, arrays: ShardArrays, overtaken: Callable[[str], None]) -> None:
        self.arrays = arrays
        self._overtaken = overtaken
        self.say: Callable[[str], None] = lambda text: print(text, flush=True)
        self._peer: ShardPeer | None = None
        self._senders: dict[str, tuple[int, str]] = {}
        """By learner: generation and secret of its session."""

    @property
    def led(self) -> bool:
        return self._peer is not None and not self._peer.closed

    # ------------------------------------------------------------ the coordinator

    def answering(self, peer: ShardPeer) -> Callable[[str, dict[str, Any], Bytes], Any]:
        """Answers what comes through this link; the first call on it must be `attach`, or `relay`."""

        async def answer(method: str, values: dict[str, Any], data: Bytes) -> Reply:
            try:
                if method == RELAY:
                    self.arrays.relays.take_in(peer, values)
                    return {}, b""
                if method == calls.ATTACH:
                    return await self._attach(peer, values), b""
                if peer is not self._peer:
                    raise RefusedError(Refusal.STALE_EPOCH, "another syncer leads this shard; let this one end")
                return await self._do(method, values, data)
            except FencedSyncerError as error:
                self._overtaken(str(error))
                raise RefusedError(Refusal.FENCED, str(error)) from error

        return answer

    async def _attach(self, peer: ShardPeer, values: dict[str, Any]) -> dict[str, Any]:
        if peer.may_not_lead:
            raise RefusedError(Refusal.NOT_ALLOWED, peer.may_not_lead)
        before, self._peer = self._peer, None
        try:
            told = await self.arrays.attach(values, unled=self._is_unled(before))
        except RefusedError:
            self._peer = before
            raise
        if before is not None:
            before.close(f"a newer syncer (epoch {values['epoch']}) leads this shard now")
        self._peer, self._senders = peer, {}
        self.arrays.relays.failed_here = self._relay_failed
        self.say(f"atoll shard {told['name']}: led by a syncer of epoch {values['epoch']}")
        return told

    @staticmethod
    def _is_unled(before: ShardPeer | None) -> bool:
        """Whether the coordinator that led this shard is gone: one that lives is back within seconds."""
        return before is None or bool(before.closed and asyncio.get_running_loop().time() - before.closed_s >= UNLED_S)

    async def _do(self, method: str, values: dict[str, Any], data: Bytes = NO_BYTES) -> Reply:
        arrays = self.arrays
        match method:
            case calls.SENDER:
                self._senders[values["learner"]] = (int(values["generation"]), str(values["secret"]))
            case calls.REVOKED:
                self.forget_sender(str(values["learner"]))
            case calls.FORGET:
                arrays.forget(calls.id_of(values["id"]))
            case calls.LAY_OUT:
                arrays.lay_out(values)
                for fragment in values["drop"]:
                    await arrays.moves.drop(int(fragment))
            case calls.COMMIT_SEED:
                return {"checksums": await arrays.commit_seed()}, b""
            case calls.COMPARE:
                return {"cosines": await arrays.compare(calls.compare_of(values))}, b""
            case calls.MERGE:
                return await arrays.merge(calls.merge_of(values), values["at"]), b""
            case calls.HEAL:
                learner, rounds = str(values.pop("learner")), int(values.pop("rounds"))
                await arrays.heal(fx.CommitHealed(**values), learner, rounds)
            case calls.STORE:
                return await arrays.store(VersionToStore(**values)), b""
            case calls.KEEP_HANDED:
                return {"brought": await arrays.keep_handed(values)}, b""
            case calls.COPY:
                return await arrays.copy(int(values["fragment"]))
            case calls.COPY_THETA:
                await arrays.copy_theta(int(values["fragment"]))
            case _:
                return await self._move(method, values, data)
        return {}, b""

    async def _move(self, method: str, values: dict[str, Any], data: Bytes) -> Reply:
        """What concerns fragments that go to another shard, or come from one."""
        moves = self.arrays.moves
        match method:
            case calls.DESCRIBE:
                return await moves.describe(int(values["fragment"]), [calls.id_of(one) for one in values["ids"]]), b""
            case calls.READ:
                where = (int(values["start"]), int(values["stop"]))
                return {}, moves.read(int(values["fragment"]), str(values["what"]), *where)
            case calls.RECEIVE:
                moves.receive(int(values["fragment"]), values)
            case calls.PUT:
                moves.put(int(values["fragment"]), str(values["what"]), int(values["start"]), data)
            case calls.INSTALL:
                await moves.install(int(values["fragment"]), calls.store_of(values))
            case calls.DROP:
                await moves.drop(int(values["fragment"]))
            case calls.ADOPT:
                moves.adopt([int(fragment) for fragment in values["fragments"]])
            case _:
                raise RefusedError(Refusal.BAD_REQUEST, f"this shard knows no {method!r}; update the older side")
        return {}, b""

    def _relay_failed(self, name: str, why: str) -> None:
        """The coordinator counts how often, and has its own link to that relay."""
        if self._peer is not None:
            self._peer.tell(calls.RELAY_FAILED, {"name": name, "why": why})

    def forget_sender(self, learner: str) -> None:
        """Its session is worth nothing here any more."""
        self._senders.pop(learner, None)

    async def _ask(self, method: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the coordinator. While there is none, whoever wants to know must come again."""
        if self._peer is None:
            raise RefusedError(Refusal.BUSY, NOBODY_LEADS)
        try:
            return (await self._peer.call(method, values))[0]
        except UnreachableError as error:
            raise RefusedError(Refusal.BUSY, NOBODY_LEADS) from error

    # ------------------------------------------------------------ SyncerService: there are no sessions here

    def open_session(
        self,
        session: int,
        hello: Hello,
        send: Callable[[SyncerMessage], None],
        identity: Identity | None = None,
    ) -> None:
        raise RefusedError(
            Refusal.NOT_ALLOWED, "this is a shard, which serves fragments; join the syncer (ATOLL_SYNCER) instead"
        )

    def receive(self, session: int, message: LearnerMessage) -> None:
        """Nobody has a session."""

    def close_session(self, session: int, reason: str) -> None:
        """Nobody has a session."""

    def ask_to_leave(self, learner: str) -> str:
        raise RefusedError(Refusal.UNKNOWN_LEARNER, "this is a shard; ask the syncer of the run")

    async def take_snapshot(self) -> str:
        raise RefusedError(Refusal.NOT_ALLOWED, "this is a shard; ask the syncer of the run")

    def status(self) -> dict[str, object]:
        state, row = self.arrays.state, self.arrays.row
        owned = sorted(state.owned) if state is not None and state.fragments else []
        versions = {str(f): state.fragments[f].version for f in owned} if state is not None else {}
        return {
            "shard": row["name"],
            "run": row["run"],
            "epoch": row["epoch"],
            "led": self.led,
            "versions": versions,
            "held": len(self.arrays.held),
        }

    # ------------------------------------------------------------ SyncerService: pushes

    def check_sender(self, header: PushHeader) -> None:
        self._check(header.learner, header.generation, header.secret)

    def _check(self, learner: str, generation: int, secret: str) -> None:
        """The coordinator decides who may push or fetch; this keeps strangers from disturbing those who do."""
        known = self._senders.get(learner)
        if known is None or generation > known[0]:  # or it is here before the syncer's word of it
            raise RefusedError(Refusal.BUSY, f"learner {learner!r} has no session with the syncer yet; ask again")
        if generation != known[0]:
            raise RefusedError(Refusal.STALE_GENERATION, f"learner {learner!r}: a newer process has replaced this one")
        if not same_secret(secret, known[1]):
            raise RefusedError(Refusal.SECRET, f"learner {learner!r}: not with the secret of its session; use that one")

    def _state_for(self, fragment: int) -> ModelState:
        state = self.arrays.state
        if state is not None and 0 <= fragment < len(state.layout.fragments) and fragment not in state.owned:
            # It has moved, and the syncer's word of it is on its way: by then the learner knows where to.
            raise RefusedError(
                Refusal.BUSY, f"fragment {fragment} is not on this shard any more; ask again where it is"
            )
        if state is None or fragment not in state.owned:
            raise RefusedError(Refusal.UNKNOWN_FRAGMENT, f"fragment {fragment} is not on this shard; see Welcome")
        return state

    async def push_begin(self, header: PushHeader) -> int:
        await self._open(header)
        state = self._state_for(header.fragment)
        if header.kind is PushKind.CONTRIBUTION:
            return state.contribution_size_max(header.fragment, header.codec)
        whole = state.seed_size(header.fragment)
        if header.size < whole:
            raise RefusedError(Refusal.SIZE, f"fragment {header.fragment} has {whole} bytes, not {header.size}; all")
        return whole

    async def _open(self, header: PushHeader) -> None:
        if header.kind is PushKind.INNER:
            raise RefusedError(Refusal.NOT_ALLOWED, "inner state goes through the syncer, not through a shard")
        reply = calls.reply_of(await self._ask(calls.PUSH_OPEN, {"header": calls.header_values(header)}))
        if not reply.accepted:
            raise RefusedError(reply.code, reply.detail)

    async def push_complete(self, header: PushHeader, payload: Bytes) -> PushReply:
        state = self._state_for(header.fragment)
        match header.kind:
            case PushKind.CONTRIBUTION:
                return await self._take(state, header, payload)
            case PushKind.HEAL:
                values = payload.view(np.float32)
                finite = await self.arrays.on_a_worker(is_usable, values)
                far = await self.arrays.on_a_worker(state.distance, header.fragment, values) if finite else 0.0
                self.arrays.heals[header.fragment, header.learner] = payload
                reply = await self._done(header, finite, far)
                if not reply.accepted:
                    self.arrays.heals.pop((header.fragment, header.learner), None)
                return reply
            case _:
                await self._open(header)  # another may have been asked while the bytes were on their way
                finite = await self.arrays.on_a_worker(state.put_seed, header.fragment, payload)
                return await self._done(header, finite, 0.0)

    async def _take(self, state: ModelState, header: PushHeader, payload: Bytes) -> PushReply:
        try:
            finite, item = await self.arrays.on_a_worker(state.inspect, header.fragment, payload, header.codec)
        except PayloadError as error:
            return PushReply(False, Refusal.SIZE, str(error))
        identity = ContributionId(header.learner, header.generation, header.fragment, header.seq)
        held = self.arrays.held
        taken = identity in held
        held.setdefault(identity, item)
        norm = float(np.sqrt(np.square(item.norms).sum())) if finite else 0.0
        reply = await self._done(header, finite, norm)
        if not reply.accepted and not taken:
            held.pop(identity, None)
        return reply

    async def _done(self, header: PushHeader, finite: bool, norm: float) -> PushReply:
        values = {"header": calls.header_values(header), "finite": finite, "norm": norm}
        try:
            return calls.reply_of(await self._ask(calls.PUSH_DONE, values))
        except RefusedError as error:
            return PushReply(False, error.code, error.detail)

    # ------------------------------------------------------------ SyncerService: fetches

    async def fetch_open(self, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
        self._check(request.learner, request.generation, request.secret)
        if request.kind is FetchKind.INNER:
            raise RefusedError(Refusal.NOT_ALLOWED, "inner state comes from the syncer, not from a shard")
        state = self._state_for(request.fragment)
        if not state.fragments:
            raise RefusedError(Refusal.UNKNOWN_FRAGMENT, f"fragment {request.fragment} has no committed state yet")
        header, content = await self._find(state, request)
        if self._peer is not None:
            left = max(0, content.nbytes - request.offset)
            size = min(request.length or left, left)  # who does not know the size yet asks for a first stripe of 4 MiB
            who = {"learner": request.learner, "generation": request.generation}
            self._peer.tell(calls.FETCHED, {**who, "bytes": size})
        return header, content

    async def _find(self, state: ModelState, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
        if request.kind is FetchKind.UPDATE:
            return find_update(state, request)
        cached = self.arrays.copies.get(request.fragment)
        if cached is None or cached[0] != state.fragments[request.fragment].version:
            # The coordinator has the turns: it says when no merge of the fragment is under way.
            await self._ask(calls.THETA, {"fragment": request.fragment})
            cached = self.arrays.copies.get(request.fragment)
        if cached is None:
            raise RefusedError(Refusal.BUSY, f"fragment {request.fragment} has just changed; ask again")
        return theta_header(cached, request)
