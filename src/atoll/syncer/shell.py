"""The asyncio shell around the SyncerMachine: it performs the machine's effects and nothing else.

Everything here runs on one event loop; array work runs on worker threads and comes back as another input. Each fragment
has a lock that is held while its arrays change, so that a joiner never reads half a merge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.codec import needed_bytes_s
from atoll.core import effects as fx
from atoll.core.beginning import Begin
from atoll.core.config import SyncConfig
from atoll.core.durable import Recovery
from atoll.core.events import MemberAside
from atoll.core.messages import (
    INLINE_BYTES_MAX,
    NO_VERSION,
    Contribution,
    Hello,
    LearnerMessage,
    Published,
    PushKind,
    PushReply,
    Received,
    Refusal,
    Refused,
    SyncerMessage,
)
from atoll.core.rounds import ContributionId
from atoll.core.syncer_machine import SyncerMachine
from atoll.errors import AtollError, ConfigError, FencedSyncerError, PayloadError, RefusedError
from atoll.observe import Writer, events
from atoll.store import failpoints
from atoll.syncer.bulk import BulkService
from atoll.syncer.keeper import Keeper
from atoll.syncer.looks import look_in
from atoll.syncer.news import News
from atoll.syncer.state import Held, ModelState, Stored

T = TypeVar("T")
THIN_LOOK_S = 20.0
"""How long after a learner was set aside its traffic is looked at: twice the window of the rates."""
NAMED_MAX = 20
"""Learners that a message lists: a few lines of a terminal."""


class SyncerShell(BulkService):
    """Implements `atoll.wire.SyncerService`."""

    def __init__(
        self,
        config: SyncConfig,
        run: str,
        writer: Writer,
        *,
        epoch: int = 1,
        keeper: Keeper | None = None,
        begin: Begin | None = None,
    ) -> None:
        super().__init__(SyncerMachine(config, run, epoch, begin))
        self.keeper = keeper if keeper is not None else Keeper(None, "none", 0.0, writer)
        self.keeper.store_fragment = self._store_fragment
        self.keeper.failed = self._fail
        self.told_data: dict[str, object] = {}
        """What was last told of each data stream."""
        self.fenced = ""
        """Why this syncer must end: a newer one has taken over."""
        self.finished = asyncio.Event()
        self.failure: BaseException | None = None
        self.inline_up = 0
        self.inline_down = 0
        """Payload bytes that travelled inside control messages."""
        self.end_session: Callable[[int, str], None] = lambda session, reason: None
        self.peer_of: Callable[[int], str] = lambda session: ""
        """Set by whoever serves: from where a session comes."""
        self.more_status: Callable[[], dict[str, object]] = dict
        """Set by whoever serves: what else there is to say."""
        self.news = writer if isinstance(writer, News) else News(writer)
        self._writer: Writer = self.news
        self._began_s = time.monotonic()
        self._sends: dict[int, Callable[[SyncerMessage], None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

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
            self._say(effect.session, effect.message)
        elif isinstance(effect, fx.Note):
            self._writer.emit(effect.event)
            if isinstance(effect.event, MemberAside) and effect.event.aside:
                self._loop.call_later(THIN_LOOK_S, self._tell_thin, effect.event.learner)
        elif isinstance(effect, fx.Merge):
            self._start(self._merge(effect))
        elif isinstance(effect, fx.Forget):
            self._held.pop(effect.contribution, None)
            self.keeper.drop_handed(effect.contribution)
        elif isinstance(effect, fx.KeepHeld):
            self._start(self._keep_held(effect))
        elif isinstance(effect, fx.EndSession):
            self._loop.call_soon(self.end_session, effect.session, effect.reason)
        elif isinstance(effect, fx.CommitSeed):
            self._start(self._commit_seed())
        elif isinstance(effect, fx.Remember):
            self.keeper.remember(effect.rows, effect.first)
        elif isinstance(effect, fx.CommitHealed):
            self._start(self._commit_healed(effect))
        elif isinstance(effect, fx.ForgetRelay):
            buffer = self._relays.pop(effect.slot, None)
            if buffer is not None:
                self._start(buffer.close())
        elif isinstance(effect, fx.Fenced):
            self._fence(effect.reason)
        elif isinstance(effect, fx.Finished):
            self.finished.set()

    def _say(self, session: int, message: SyncerMessage) -> None:
        """Send, once everything that the message follows from is on disk. A refusal follows from nothing."""
        if isinstance(message, Refused):
            self._send_now(session, message)
        else:
            whole = self._with_update(session, message)
            self.keeper.say(lambda: self._send_now(session, whole))

    def _send_now(self, session: int, message: SyncerMessage) -> None:
        send = self._sends.get(session)
        if send is not None:
            if isinstance(message, Published) and message.update:
                self._flows_down(session, len(message.update))
            send(message)

    def _tell_thin(self, learner: str) -> None:
        """A learner was set aside some time ago: if so little came from or went to it since, its link is too thin."""
        member = self.machine.membership.members.get(learner)
        if member is None or not member.aside or member.quiet or self.machine.layout is None:
            return
        for direction, flow in (("up", self.flow_up), ("down", self.flow_down)):
            step_ns = self.machine.book.step_ns()
            needs = needed_bytes_s(self.machine.config, self.machine.layout, direction, step_ns)
            if 0.0 < (gets := flow.rate(learner)) < needs:
                self._writer.emit(events.LinkThin(learner, direction, needs, gets))

    def _flows_down(self, session: int, count: int) -> None:
        member = self.machine.membership.by_session(session)
        if member is not None:
            self.flow_down.add(member.learner, count)

    def overtaken(self, error: FencedSyncerError) -> None:
        """A newer syncer was seen where this one's disk does not show it: say nothing more, and end."""
        self.keeper.fence(error)
        self._fence(str(error))

    def _fence(self, reason: str) -> None:
        self.fenced = self.fenced or reason
        self.finished.set()

    def _with_update(self, session: int, message: SyncerMessage) -> SyncerMessage:
        """A small update goes out with its notice, which spares a learner that keeps up a bulk call."""
        if not isinstance(message, Published) or self._state is None:
            return message
        if self.machine.keeps_up(session, message.fragment, message.version):
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
        if not task.cancelled() and isinstance(task.exception(), FencedSyncerError):
            self._fence(str(task.exception()))
        elif not task.cancelled() and task.exception() is not None:
            # A merge that raises is a bug or a full memory: state may be half-changed, so the syncer must stop.
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        self.failure = error
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
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.keeper.close()
        self._workers.shutdown(wait=True)

    # ------------------------------------------------------------ array work

    async def _commit_seed(self) -> None:
        assert self._state is not None
        checksums = await self._loop.run_in_executor(self._workers, self._state.commit_seed)
        recorder = self.keeper.recorder
        recorder.begin(self.machine.run, self.machine.config, self._state.layout)
        for fragment, checksum in enumerate(checksums):
            await recorder.restate(fragment, self._state.fragments[fragment], "seed", 0)
            column = {**self.machine.column(fragment), "version": 0, "checksum": checksum}
            await self.keeper.commit(fragment, 0, self._state.durable(fragment), column, seed=True)
        self._tell_layout()
        self.apply(fx.SeedCommitted(checksums))

    async def _merge(self, effect: fx.Merge) -> None:
        assert self._state is not None
        state, recorder = self._state, self.keeper.recorder
        held = [self._held[identity] for identity in effect.contributions]
        async with self._locks[effect.fragment]:
            arrays = state.fragments[effect.fragment]
            await recorder.anchor(effect.fragment, arrays, "gap", effect.round - 1)
            writing = asyncio.ensure_future(recorder.payloads(effect, held))
            started_ns = time.monotonic_ns()
            result = await self._loop.run_in_executor(self._workers, state.merge, effect.fragment, held, effect.weights)
            merge_ns = time.monotonic_ns() - started_ns
            places = await writing
            assert not result.finite or arrays.version == effect.version, "the machine and the arrays disagree"
            self._copies.pop(effect.fragment, None)
            stored = None
            if result.finite:
                self.keeper.note(effect, arrays.checksum)
                await recorder.decision(effect, arrays.checksum, places)
                column = self.machine.column_after_merge(effect.fragment, arrays.checksum)
                named = state.durable(effect.fragment)
                stored = await self.keeper.commit(effect.fragment, effect.version, named, column)
                failpoints.hit("commit.before_publish")
        self.apply(
            fx.MergeFinished(
                fragment=effect.fragment,
                finite=result.finite,
                checksum=arrays.checksum,
                merge_ns=merge_ns,
                update_bytes=int(result.update.nbytes),
                gradient_norm=result.gradient_norm,
                rho=result.rho,
                store_ns=stored.write_ns + stored.sync_ns if stored is not None else 0,
                store_bytes=stored.bytes if stored is not None else 0,
            )
        )
        failpoints.hit("commit.after_publish")

    async def _keep_held(self, effect: fx.KeepHeld) -> None:
        """Let a leaving learner go when what it handed over is safe."""
        items = [(item, self._held[item.id].payload) for item in effect.contributions if item.id in self._held]
        await self.keeper.keep_handed(items, effect.processed)
        for item, _ in items:
            if not self.machine.holds(item.id):  # merged while it was being written
                self.keeper.drop_handed(item.id)
        # Its leaving is a fact on the tape, too: a syncer that forgot it would count the learner as lost.
        self.keeper.say(lambda: self.end_session(effect.session, "left"))

    async def _store_fragment(self, fragment: int) -> None:
        """Write one fragment as it stands. Whoever has its lock has also heard the machine's word on its last merge."""
        assert self._state is not None
        async with self._locks[fragment]:
            version = self._state.fragments[fragment].version
            if version == NO_VERSION:
                return  # a learner will bring it, and that is written then
            named, column = self._state.durable(fragment), self.machine.column(fragment)
            await self.keeper.commit(fragment, version, named, column, now=True)

    async def _commit_healed(self, effect: fx.CommitHealed) -> None:
        assert self._state is not None
        state, fragment = self._state, effect.fragment
        payload = self._heals.pop(fragment, None)
        async with self._locks[fragment]:
            if payload is None or effect.version <= state.fragments[fragment].version:
                return  # it came twice, or a newer one came first
            arrays, rounds = state.fragments[fragment], self.machine.book.rounds_started
            await self._anchor(fragment, rounds)
            await self._loop.run_in_executor(
                self._workers, state.heal, fragment, effect.version, effect.checksum, payload
            )
            self._copies.pop(fragment, None)
            await self.keeper.recorder.restate(fragment, arrays, "heal", rounds)
            column = self.machine.column_after_heal(fragment, effect.version, effect.checksum)
            await self.keeper.commit(fragment, effect.version, state.durable(fragment), column)
        self.apply(fx.HealCommitted(fragment, effect.version, effect.checksum))

    def lock_of(self, fragment: int) -> asyncio.Lock:
        """Held while the arrays of a fragment are written, or must not be."""
        return self._locks[fragment]

    async def on_a_worker(self, function: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._workers, function)

    # ------------------------------------------------------------ continuing an earlier run

    def restore(
        self,
        recovery: Recovery,
        stored: Stored,
        payloads: Mapping[ContributionId, NDArray[np.uint8]],
        load_ns: int = 0,
    ) -> None:
        """Continue the run that the disk or a snapshot holds. Raises before anything is said if it does not fit."""
        effects = self.machine.restore(recovery, time.monotonic_ns(), load_ns)
        assert self.machine.layout is not None
        self._state = ModelState(self.machine.layout, self.machine.config)
        self._state.restore(stored)
        self.keeper.recorder.begin(self.machine.run, self.machine.config, self.machine.layout)
        self.keeper.recorder.resume(recovery.columns)
        if self.keeper.recorder.on:
            self._start(self._anchor_restored())
        for item in recovery.handed:
            identity = item.contribution.id
            if self.machine.holds(identity):
                self._held[identity] = self._inspect_handed(identity, payloads[identity])
            else:
                self.keeper.drop_handed(identity)
        for effect in effects:
            self._perform(effect)
        self._schedule()

    def _inspect_handed(self, identity: ContributionId, payload: NDArray[np.uint8]) -> Held:
        """What a learner that left has handed over is in the codec of its time, and cannot be asked for again."""
        assert self._state is not None
        try:
            return self._state.inspect(identity.fragment, payload)[1]
        except AtollError as error:
            codec = self.machine.config.codec_up
            raise ConfigError(
                f"what {identity.learner!r} handed over when it left is not in {codec} ({error}); "
                "start the syncer with the --codec-up that the run had, and change it when nothing is pending"
            ) from error

    async def _anchor_restored(self) -> None:
        """Record where this syncer begins. A fragment that is merged before its turn is anchored by its merge."""
        assert self._state is not None
        for fragment in range(len(self._state.fragments)):
            async with self._locks[fragment]:
                await self._anchor(fragment, self.machine.book.rounds_started)

    async def _anchor(self, fragment: int, rounds: int) -> None:
        """Record where this syncer begins a fragment. A fragment that is on no disk begins when a learner brings it."""
        assert self._state is not None
        arrays = self._state.fragments[fragment]
        if arrays.version != NO_VERSION:
            await self.keeper.recorder.anchor(fragment, arrays, "restart", rounds)

    async def copy_fragment(self, fragment: int) -> tuple[int, dict[str, NDArray[np.float32]], dict[str, object]]:
        """A consistent copy of one fragment for a snapshot: version, arrays, column."""
        assert self._state is not None
        state = self._state
        async with self._locks[fragment]:
            column = self.machine.column(fragment)
            version = state.fragments[fragment].version
            copies = await self._loop.run_in_executor(
                self._workers, lambda: {name: array.copy() for name, array in state.durable(fragment).items()}
            )
        return version, copies, column

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
            self._make_state()

    def _make_state(self) -> None:
        """The run's model is known: arrays for it, which the seed or, of a run that was lost, the learners fill."""
        assert self.machine.layout is not None
        self._state = ModelState(self.machine.layout, self.machine.config)
        self._copies.clear()
        if self.machine.healing is not None:
            self._state.restore({})
            self.keeper.recorder.begin(self.machine.run, self.machine.config, self.machine.layout)
            self._tell_layout()

    def _tell_layout(self) -> None:
        assert self._state is not None
        layout = self._state.layout
        sizes = [fragment.parameters for fragment in layout.fragments]
        self._writer.emit(events.LayoutFixed(layout.parameters, len(layout.tensors), len(sizes), sizes))

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
            size_max = self._size_max(header)
        except RefusedError as error:
            return PushReply(False, error.code, error.detail)
        self.flow_up.add(header.learner, len(payload))
        if header.kind is not PushKind.CONTRIBUTION or not len(payload) == header.size <= size_max:
            detail = f"{len(payload)} bytes came of {header.size}, at most {size_max} are expected; send it again"
            return PushReply(False, Refusal.SIZE, detail)
        if xxhash.xxh3_64_intdigest(payload) != header.checksum:
            detail = "the bytes are not the ones that were sent; send them again"
            names = (header.fragment, header.learner, header.generation, header.seq, header.tokens)
            self._writer.emit(events.ContributionRefused(*names, str(Refusal.CHECKSUM), detail))
            return PushReply(False, Refusal.CHECKSUM, detail)
        assert self._state is not None
        try:
            finite, held = self._state.inspect(header.fragment, np.frombuffer(payload, np.uint8))
        except PayloadError as error:
            return PushReply(False, Refusal.SIZE, str(error))
        return self._take(header, finite, held)

    def close_session(self, session: int, reason: str) -> None:
        self._sends.pop(session, None)
        self.apply(fx.SessionClosed(session, reason))

    def ask_to_leave(self, learner: str) -> str:
        members = self.machine.membership.members
        if learner not in members:
            known = ", ".join(sorted(members)[:NAMED_MAX]) or "nobody yet"
            raise RefusedError(
                Refusal.UNKNOWN_LEARNER, f"no learner {learner!r} in this run ({known}); give one of those"
            )
        self.apply(fx.LeaveAsked(learner))
        return str(members[learner].state)

    def status(self) -> dict[str, object]:
        return {**look_in(self), **self.more_status()}

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._began_s
