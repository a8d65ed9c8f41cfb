"""The syncer as the wire sees it: sessions, small messages, and looking in. What they lead to is decided by the machine
and performed by `core.syncer_driver` on production's platform.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.core import (
    Begin,
    ContributionId,
    ContributionRecord,
    Hello,
    Identity,
    InlinePush,
    LearnerMessage,
    PushHeader,
    PushKind,
    PushReply,
    Recovery,
    Refusal,
    Refused,
    SyncConfig,
    SyncerMachine,
    SyncerMessage,
)
from atoll.core import effects as fx
from atoll.errors import AtollError, ConfigError, FencedSyncerError, PayloadError, RefusedError
from atoll.observe import Writer, events
from atoll.syncer.bulk import BulkService
from atoll.syncer.looks import look_in
from atoll.syncer.news import News
from atoll.syncer.platform import AsyncioPlatform
from atoll.syncer.state import InspectedPayload, ModelState, Stored
from atoll.syncer.state_writer import StateWriter

T = TypeVar("T")
SECRET_BYTES = 16
"""Of a session: 128 bits cannot be guessed while it lasts."""
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
        keeper: StateWriter | None = None,
        begin: Begin | None = None,
    ) -> None:
        self.keeper = keeper if keeper is not None else StateWriter(None, "none", 0.0, writer)
        self.news = writer if isinstance(writer, News) else News(writer)
        machine = SyncerMachine(config, run, epoch, begin)
        super().__init__(self._platform(machine))
        self.told_data: dict[str, object] = {}
        """What was last told of each data stream."""
        self.inline_up = 0
        """Payload bytes that came inside control messages."""
        self.peer_of: Callable[[int], str] = lambda session: ""
        """Set by whoever serves: from where a session comes."""
        self.more_status: Callable[[], dict[str, object]] = dict
        """Set by whoever serves: what else there is to say."""
        self.snapshot_now: Callable[[], Awaitable[str]] | None = None
        """Set by whoever serves, where there is a place for snapshots."""
        self._began_s = time.monotonic()
        self.platform.relays.peers.refusal = self._needs_single

    def _needs_single(self) -> str:
        """Why every contribution must come here as it is; empty: relays may merge some."""
        config = self.machine.config
        if config.robust != "off" or config.correction != "none":
            return "this run looks at single contributions (--robust, --correction); they are passed on one by one"
        return "this run is recorded (--record), contribution by contribution" if self.keeper.recorder.on else ""

    def _platform(self, machine: SyncerMachine) -> AsyncioPlatform:
        return AsyncioPlatform(machine, self.keeper, self.news)

    def start(self) -> None:
        """Begin to write in the background what is not written at once."""
        self.driver.look_after_disk()

    async def close(self) -> None:
        """Wait for merges under way, write what is left and let the threads go."""
        await self.platform.close()

    def apply(self, event: fx.StopRequested | fx.LeaveAsked | fx.KeyRevoked) -> None:
        self.driver.apply(event)

    def overtaken(self, error: FencedSyncerError) -> None:
        """A newer syncer was seen where this one's disk does not show it: say nothing more, and end."""
        self.driver.fence(str(error))

    # ------------------------------------------------------------ how things stand

    @property
    def fenced(self) -> str:
        """Why this syncer must end: a newer one has taken over."""
        return self.platform.fenced

    @property
    def finished(self) -> asyncio.Event:
        return self.platform.ended

    @property
    def failure(self) -> BaseException | None:
        return self.platform.failure

    @property
    def inline_down(self) -> int:
        """Payload bytes that went out inside control messages."""
        return self.platform.inline_down

    def lock_of(self, fragment: int) -> AbstractAsyncContextManager[None]:
        """Held while the arrays of a fragment are written, or must not be."""
        return self.platform.turn(fragment)

    async def on_a_worker(self, function: Callable[[], T]) -> T:
        return await self.platform.on_a_worker(function)

    # ------------------------------------------------------------ continuing an earlier run

    def restore(
        self,
        recovery: Recovery,
        stored: Stored,
        payloads: Mapping[ContributionId, NDArray[np.uint8]],
        load_ns: int = 0,
    ) -> None:
        """Continue the run that the disk or a snapshot holds. Raises before anything is said if it does not fit."""
        effects = self.driver.restore(recovery, load_ns)
        machine, recorder = self.machine, self.keeper.recorder
        assert machine.layout is not None
        state = self.platform.state = ModelState(machine.layout, machine.config)
        state.restore(stored)
        self.keeper.begin(machine.run, machine.config, machine.layout)
        recorder.resume(recovery.fragment_records)
        if recorder.on:
            self.platform.start(self.platform.anchor_restored())
        for item in recovery.handed:
            identity = item.contribution.id
            if machine.holds(identity):
                self.driver.held[identity] = self._inspect_handed(state, item.contribution, payloads[identity])
            else:
                self.keeper.drop_handed(identity)
        self.driver.perform(effects)

    def take_in(self, rows: Mapping[str, Any], fragments: Iterable[int]) -> None:
        """What came from a snapshot is not in this syncer's state folder: put it there."""
        self.driver.take_in(rows, fragments)

    def _inspect_handed(
        self, state: ModelState, item: ContributionRecord, payload: NDArray[np.uint8]
    ) -> InspectedPayload:
        """What a learner that left has handed over is in the codec of its time, and cannot be asked for again."""
        try:
            return state.inspect(item.id.fragment, payload, item.codec)[1]
        except AtollError as error:
            codec = item.codec or self.machine.config.codec_up
            raise ConfigError(
                f"what {item.id.learner!r} handed over when it left is not in {codec} ({error}); "
                "start the syncer with the --codec-up that the run had, and change it when nothing is pending"
            ) from error

    @property
    def published(self) -> ModelState | None:
        """The model as it may be written to a file."""
        return self.state

    async def gather(self) -> None:
        """Bring the published parameters here, if they are elsewhere."""

    async def copy_fragment(self, fragment: int) -> tuple[int, dict[str, NDArray[np.float32]], dict[str, object]]:
        """A consistent copy of one fragment for a snapshot: version, arrays, record."""
        state = self.platform.state
        assert state is not None
        async with self.platform.turn(fragment):
            fragment_record = self.machine.fragment_record(fragment)
            version = state.fragments[fragment].version
            copies = await self.on_a_worker(
                lambda: {name: array.copy() for name, array in state.durable(fragment).items()}
            )
        return version, copies, fragment_record

    # ------------------------------------------------------------ SyncerService: control

    def open_session(
        self,
        session: int,
        hello: Hello,
        send: Callable[[SyncerMessage], None],
        identity: Identity | None = None,
    ) -> None:
        refusals: list[Refused] = []
        sends = self.platform.sends

        def first(message: SyncerMessage) -> None:
            if isinstance(message, Refused):
                refusals.append(message)
            else:
                send(message)

        sends[session] = first
        self.driver.open_session(session, hello, secret=secrets.token_hex(SECRET_BYTES), identity=identity)
        sends[session] = send
        if refusals:
            del sends[session]
            raise RefusedError(refusals[0].code, refusals[0].detail)

    def receive(self, session: int, message: LearnerMessage) -> None:
        if isinstance(message, InlinePush):
            self.driver.answer_inline(session, message.header, self._take_inline(session, message))
        else:
            self.driver.apply(fx.FromLearner(session, message))

    def _take_inline(self, session: int, message: InlinePush) -> PushReply:
        """A small contribution on the control connection: the same checks as for a push, without its round trips."""
        header, payload = self.machine.of_session(session, message.header), message.payload
        if isinstance(header, PushReply):
            return header
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
            self.news.emit(events.ContributionRefused(*names, str(Refusal.CHECKSUM), detail))
            return PushReply(False, Refusal.CHECKSUM, detail)
        assert self.platform.state is not None
        try:
            finite, held = self.platform.state.inspect(header.fragment, np.frombuffer(payload, np.uint8), header.codec)
        except PayloadError as error:
            return PushReply(False, Refusal.SIZE, str(error))
        return self._take(header, finite, held)

    def close_session(self, session: int, reason: str) -> None:
        self.platform.sends.pop(session, None)
        self.driver.apply(fx.SessionClosed(session, reason))

    def check_sender(self, header: PushHeader) -> None:
        refusal = self.machine.check_sender(header.learner, header.generation, header.secret)
        if refusal is not None:
            raise RefusedError(refusal.code, refusal.detail)

    def ask_to_leave(self, learner: str) -> str:
        members = self.machine.members
        if learner not in members:
            known = ", ".join(sorted(members)[:NAMED_MAX]) or "nobody yet"
            raise RefusedError(
                Refusal.UNKNOWN_LEARNER, f"no learner {learner!r} in this run ({known}); give one of those"
            )
        self.apply(fx.LeaveAsked(learner))
        return str(members[learner].state)

    async def take_snapshot(self) -> str:
        if self.snapshot_now is None:
            raise RefusedError(
                Refusal.NOT_READY,
                "this syncer has no place for snapshots; start it with --run-folder or --snapshots, which keep the run",
            )
        return await self.snapshot_now()

    def status(self) -> dict[str, object]:
        return {**look_in(self), **self.more_status()}

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._began_s
