"""A process that serves learners with production's code (`wire.SyncerService`) on a loop in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.core import FetchRequest, Hello, Identity, LearnerMessage, PushHeader, PushKind, PushReply, Refused, Role
from atoll.errors import RefusedError
from atoll.instruments.sim.connection import Connection
from atoll.instruments.sim.loop import LoopProcess
from atoll.instruments.sim.parties import Found
from atoll.instruments.sim.payloads import Payload
from atoll.instruments.sim.pipe import PipeEnd, guarded
from atoll.wire import ShardPeer, SyncerService, attach_handler

if TYPE_CHECKING:
    from atoll.instruments.sim.fabric import FabricWorld

SESSION_GRACE_NS = 5_000_000
"""A session ends after what was queued for it has gone out."""
LOOK_NS = 50_000
"""What a glance at bytes takes on a thread."""
Answering = Callable[[ShardPeer], Callable[..., Coroutine[Any, Any, Any]]]


class ServiceProcess(LoopProcess):
    """One process of the fabric: it listens at a place, for learners and for other parties."""

    world: FabricWorld

    def __init__(self, world: FabricWorld, place: str, name: str) -> None:
        super().__init__(world)
        self.place, self.name = place, name
        self.serving = False
        self.connections: dict[int, Connection] = {}
        self.accepted: dict[int, Connection] = {}
        self.service: SyncerService | None = None
        self.attached: dict[PipeEnd, None] = {}
        """Links of other parties that were accepted."""
        self.answering: Answering | None = None
        """Answers other parties that attach here."""

    def start(self) -> None:
        """Run until it ends by itself."""
        self.watch(self.spawn(self.main()))

    async def main(self) -> None:
        raise NotImplementedError

    def watch(self, task: Any) -> None:
        """A task that nobody waits for must not fail in silence."""
        task.add_done_callback(lambda done: None if done.cancelled() else done.result())

    def listen(self, service: SyncerService, answering: Answering | None) -> None:
        self.service, self.answering, self.serving = service, answering, True
        self.world.places[self.place].listener = self

    def stop_listening(self) -> None:
        """Every session breaks, and so does every link that was accepted."""
        self.serving = False
        if self.world.places[self.place].listener is self:
            self.world.places[self.place].listener = None
        for connection in [*self.connections.values(), *self.accepted.values()]:
            connection.cut()
        self.connections, self.accepted = {}, {}
        for end in list(self.attached):
            end.end()

    def ended(self, reason: str) -> None:
        """The process ends by itself, at this moment and outside of its own loop."""
        self.world.clock.after(0, self.world.process_ended, self, reason)

    def takes_ns(self, what: str) -> int:
        timing = self.world.timing
        match what:
            case "merge" | "compare" | "heal" | "commit_seed" | "reduce" | "_make_one":
                return timing.merge_ns
            case "commit" | "put":
                return self._disk_ns(timing.commit_ns)
            case "sync" | "_remember" | "_reopen" | "close":
                return self._disk_ns(timing.sync_ns)
        return LOOK_NS

    def _disk_ns(self, plain_ns: int) -> int:
        slow = self.world.places[self.place].disk.slow
        return int(plain_ns * slow * self.world.dice_disk.uniform(0.5, 1.5))

    # ------------------------------------------------------------ other parties

    def accept(self, end: PipeEnd) -> None:
        if self.answering is None:
            end.close()
        else:
            self.watch(self.spawn(self._attached(end, self.answering)))

    async def _attached(self, end: PipeEnd, answering: Answering) -> None:
        self.attached[end] = None
        try:
            await attach_handler(lambda peer: guarded(self, answering(peer)))(end)
        finally:
            self.attached.pop(end, None)
            end.close()

    # ------------------------------------------------------------ sessions

    def open_session(self, connection: Connection, hello: Hello) -> None:
        self.accepted.pop(connection.session, None)
        if self.service is None or not self.serving:
            connection.cut()
            return
        session = connection.session
        self.connections[session] = connection
        declared = self.world.specs[connection.key].tokens
        identity = Identity(connection.key, Role.LEARNER, declared) if self.world.scenario.keys else None
        try:
            self.service.open_session(session, hello, lambda message: self._send(session, message), identity)
        except RefusedError as error:
            self.connections.pop(session, None)
            connection.to_learner(Refused(error.code, error.detail))

    def _send(self, session: int, message: Any) -> None:
        connection = self.connections.get(session)
        if connection is None or self.dead:
            return
        self.said(message)
        connection.to_learner(message)
        if isinstance(message, Refused):
            self.end_session(session, message.detail)

    def said(self, message: Any) -> None:
        """A message leaves for a learner."""

    def end_session(self, session: int, reason: str) -> None:
        self.later(SESSION_GRACE_NS, self._end_session, session, reason)

    def _end_session(self, session: int, reason: str) -> None:
        connection = self.connections.pop(session, None)
        if connection is not None and self.service is not None:
            connection.ended_by_syncer(reason)
            self.service.close_session(session, reason)

    def receive(self, session: int, message: LearnerMessage) -> None:
        if session in self.connections and self.service is not None:
            try:
                self.service.receive(session, message)
            except RefusedError as error:
                self._send(session, Refused(error.code, error.detail))

    def session_broke(self, session: int, reason: str) -> None:
        if self.connections.pop(session, None) is not None and self.service is not None:
            self.service.close_session(session, reason)

    # ------------------------------------------------------------ bulk

    def begin_push(self, header: PushHeader, answered: Callable[[PushReply | None], None]) -> None:
        self.watch(self.spawn(self._begin_push(header, answered)))

    async def _begin_push(self, header: PushHeader, answered: Callable[[PushReply | None], None]) -> None:
        assert self.service is not None
        try:
            self.service.check_sender(header)
            await self.service.push_begin(header)
        except RefusedError as error:
            answered(PushReply(False, error.code, error.detail))
        else:
            answered(None)

    def end_push(self, header: PushHeader, payload: Payload, answered: Callable[[PushReply], None]) -> None:
        self.watch(self.spawn(self._end_push(header, payload, answered)))

    async def _end_push(self, header: PushHeader, payload: Payload, answered: Callable[[PushReply], None]) -> None:
        assert self.service is not None
        data = np.zeros(header.size, np.uint8) if header.kind is PushKind.INNER else np.frombuffer(payload, np.uint8)
        try:
            answered(await self.service.push_complete(header, data))
        except RefusedError as error:
            answered(PushReply(False, error.code, error.detail))

    def fetch(self, request: FetchRequest, done: Callable[[Found], None]) -> None:
        self.watch(self.spawn(self._fetch(request, done)))

    async def _fetch(self, request: FetchRequest, done: Callable[[Found], None]) -> None:
        assert self.service is not None
        try:
            header, content = await self.service.fetch_open(request)
        except RefusedError as error:
            done(str(error.code))
        else:
            done((header.version, np.frombuffer(content, np.uint8), int(content.nbytes)))
