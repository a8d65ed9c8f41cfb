"""The asyncio shell around the SyncerMachine: it performs the machine's effects and nothing else.

Everything here runs on one event loop; array work runs on worker threads and comes back as another input. Each fragment
has a lock that is held while its arrays change, so that a joiner never reads half a merge.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.core import effects as fx
from atoll.core.config import SyncConfig
from atoll.core.messages import (
    INLINE_BYTES_MAX,
    NO_VERSION,
    Contribution,
    FetchHeader,
    FetchKind,
    FetchRequest,
    Hello,
    LearnerMessage,
    Published,
    PushHeader,
    PushKind,
    PushReply,
    Received,
    Refusal,
    Refused,
    SyncerMessage,
)
from atoll.core.rounds import ContributionId
from atoll.core.syncer_machine import SyncerMachine
from atoll.errors import PayloadError, RefusedError
from atoll.observe import Writer, events
from atoll.syncer.state import Held, ModelState, Update

THETA_COPIES_MAX = 8
"""Whole-fragment copies kept for joiners. Learners that join together fetch the same versions, so a few are enough;
each is 4 bytes per parameter of one fragment."""
WORKERS = 2
"""Merges and inspections at a time: the kernels have threads of their own, two keep them fed."""


class SyncerShell:
    """Implements `atoll.wire.SyncerService`."""

    def __init__(self, config: SyncConfig, run: str, writer: Writer) -> None:
        self.machine = SyncerMachine(config, run)
        self.finished = asyncio.Event()
        self.failure: BaseException | None = None
        self.inline_up = 0
        self.inline_down = 0
        """Payload bytes that travelled inside control messages."""
        self.end_session: Callable[[int, str], None] = lambda session, reason: None
        self._writer = writer
        self._state: ModelState | None = None
        self._sends: dict[int, Callable[[SyncerMessage], None]] = {}
        self._held: dict[ContributionId, Held] = {}
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._copies: OrderedDict[int, tuple[int, int, memoryview]] = OrderedDict()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="atoll-merge")
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._loop = asyncio.get_running_loop()

    @property
    def state(self) -> ModelState | None:
        """The run's arrays once version 0 is committed."""
        return self._state if self.machine.committed else None

    # ------------------------------------------------------------ machine in, effects out

    def apply(self, event: fx.SyncerInput) -> PushReply | None:
        """Feed the machine and perform what it says; returns the answer if the event was a push."""
        answer: PushReply | None = None
        for effect in self.machine.handle(event, time.monotonic_ns()):
            if isinstance(effect, fx.Answer):
                answer = effect.reply
            else:
                self._perform(effect)
        self._schedule()
        return answer

    def _perform(self, effect: fx.SyncerEffect) -> None:
        if isinstance(effect, fx.ToLearner):
            send = self._sends.get(effect.session)
            if send is not None:
                send(self._with_update(effect.message))
        elif isinstance(effect, fx.Note):
            self._writer.emit(getattr(events, effect.kind)(**effect.fields))
        elif isinstance(effect, fx.Merge):
            self._start(self._merge(effect))
        elif isinstance(effect, fx.Forget):
            self._held.pop(effect.contribution, None)
        elif isinstance(effect, fx.EndSession):
            self._loop.call_soon(self.end_session, effect.session, effect.reason)
        elif isinstance(effect, fx.CommitSeed):
            self._start(self._commit_seed())
        elif isinstance(effect, fx.Finished):
            self.finished.set()

    def _with_update(self, message: SyncerMessage) -> SyncerMessage:
        """A small update goes out with its notice, which spares every learner a bulk call."""
        if isinstance(message, Published) and self._state is not None:
            update = self._state.fragments[message.fragment].ring[message.version]
            if update.payload.nbytes <= INLINE_BYTES_MAX:
                self.inline_down += update.payload.nbytes
                return replace(message, update=update.payload.tobytes())
        return message

    def _start(self, coroutine: object) -> None:
        task: asyncio.Task[None] = self._loop.create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # A merge that raises is a bug or a full memory: state may be half-changed, so the syncer must stop.
            self.failure = task.exception()
            self.finished.set()

    def _schedule(self) -> None:
        wake = self.machine.next_wake_ns()
        if self._timer is not None and self._timer_ns == wake:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake is not None:
            self._timer_ns = wake
            self._timer = self._loop.call_later(max(0, wake - time.monotonic_ns()) / 1e9, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.apply(fx.Tick())

    async def close(self) -> None:
        """Wait for merges under way and let the threads go."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._workers.shutdown(wait=True)

    # ------------------------------------------------------------ array work

    async def _commit_seed(self) -> None:
        assert self._state is not None
        checksums = await self._loop.run_in_executor(self._workers, self._state.commit_seed)
        layout = self._state.layout
        sizes = [fragment.parameters for fragment in layout.fragments]
        self._writer.emit(events.LayoutFixed(layout.parameters, len(layout.tensors), len(sizes), sizes))
        self.apply(fx.SeedCommitted(checksums))

    async def _merge(self, effect: fx.Merge) -> None:
        assert self._state is not None
        state = self._state
        held = [self._held[identity] for identity in effect.contributions]
        async with self._locks[effect.fragment]:
            started_ns = time.monotonic_ns()
            result = await self._loop.run_in_executor(self._workers, state.merge, effect.fragment, held, effect.weights)
            arrays = state.fragments[effect.fragment]
            assert not result.finite or arrays.version == effect.version, "the machine and the arrays disagree"
            self._copies.pop(effect.fragment, None)
        self.apply(
            fx.MergeFinished(
                fragment=effect.fragment,
                finite=result.finite,
                checksum=arrays.checksum,
                merge_ns=time.monotonic_ns() - started_ns,
                update_bytes=int(result.update.nbytes),
                gradient_norm=result.gradient_norm,
                rho=result.rho,
            )
        )

    # ------------------------------------------------------------ SyncerService: control

    def open_session(self, session: int, hello: Hello, send: Callable[[SyncerMessage], None]) -> None:
        refusals: list[Refused] = []

        def first(message: SyncerMessage) -> None:
            if isinstance(message, Refused):
                refusals.append(message)
            else:
                send(message)

        self._sends[session] = first
        self.apply(fx.SessionOpened(session, hello))
        self._sends[session] = send
        if refusals:
            del self._sends[session]
            raise RefusedError(refusals[0].code, refusals[0].detail)
        if self._state is None or self._state.layout is not self.machine.layout:
            assert self.machine.layout is not None
            self._state = ModelState(self.machine.layout, self.machine.config)

    def receive(self, session: int, message: LearnerMessage) -> None:
        if isinstance(message, Contribution):
            header = message.header
            reply = self._take_inline(message)
            send = self._sends.get(session)
            if send is not None:
                send(Received(header.fragment, header.seq, reply))
        else:
            self.apply(fx.FromLearner(session, message))

    def _take_inline(self, message: Contribution) -> PushReply:
        """A small contribution on the control connection: the same checks as for a push, without its round trips."""
        header, payload = message.header, message.payload
        self.inline_up += len(payload)
        try:
            expected = self._expected_size(header)
        except RefusedError as error:
            return PushReply(False, error.code, error.detail)
        if header.kind is not PushKind.CONTRIBUTION or not len(payload) == header.size == expected:
            return PushReply(False, Refusal.SIZE, f"{len(payload)} bytes came, {expected} were expected; send it again")
        if xxhash.xxh3_64_intdigest(payload) != header.checksum:
            return PushReply(False, Refusal.CHECKSUM, "the bytes are not the ones that were sent; send them again")
        assert self._state is not None
        finite, held = self._state.inspect(header.fragment, np.frombuffer(payload, np.uint8))
        return self._take(header, finite, held)

    def close_session(self, session: int, reason: str) -> None:
        self._sends.pop(session, None)
        self.apply(fx.SessionClosed(session, reason))

    def status(self) -> dict[str, object]:
        members = [
            {
                "learner": m.learner,
                "generation": m.generation,
                "state": str(m.state),
                "step": m.step,
                "tokens": m.tokens,
                "step_ms": round(m.step_ns / 1e6, 3),
                "loss": m.loss if m.loss == m.loss else None,
                "behind": sum(max(0, t.version - b) for t, b in zip(self.machine.book.tracks, m.bases, strict=False)),
            }
            for _, m in sorted(self.machine.membership.members.items())
        ]
        return {
            "run": self.machine.run,
            "epoch": self.machine.epoch,
            "committed": self.machine.committed,
            "stopping": self.machine.stopping,
            "config": self.machine.config.to_dict(),
            "members": members,
            "versions": [track.version for track in self.machine.book.tracks],
            **self.machine.stats(),
        }

    # ------------------------------------------------------------ SyncerService: bulk

    async def push_begin(self, header: PushHeader) -> int:
        return self._expected_size(header)

    def _expected_size(self, header: PushHeader) -> int:
        """The size that this push must have, or RefusedError if it may not come in."""
        reply = self.apply(fx.PushOpened(header))
        assert reply is not None
        if not reply.accepted:
            if reply.code == Refusal.DUPLICATE:
                # A duplicate is also how a learner whose reply was lost asks again: let the machine tell it the fate.
                self.apply(fx.PushCompleted(header, finite=True, norm=0.0))
            raise RefusedError(reply.code, reply.detail)
        assert self._state is not None
        seed = header.kind is PushKind.SEED
        return self._state.seed_size(header.fragment) if seed else self._state.contribution_size(header.fragment)

    async def push_complete(self, header: PushHeader, payload: NDArray[np.uint8]) -> PushReply:
        assert self._state is not None
        if header.kind is PushKind.SEED:
            finite = await self._loop.run_in_executor(self._workers, self._state.put_seed, header.fragment, payload)
            return self._answer(fx.PushCompleted(header, finite, 0.0))
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

    async def fetch_open(self, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
        state = self.state
        if state is None or not 0 <= request.fragment < len(state.fragments):
            detail = f"fragment {request.fragment} has no committed state here; wait for Start"
            raise RefusedError(Refusal.UNKNOWN_FRAGMENT, detail)
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
