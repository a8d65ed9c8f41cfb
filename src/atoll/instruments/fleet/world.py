"""The real SyncerMachine and one real LearnerMachine per island, joined by links of fixed delay, in virtual time.

Lighter than `sim`: no TCP, disk, checkers or arrays, so that hours of a run take seconds. Payloads are references (a
version is its number). What the machines say is done; what their shells would say back comes back after the
mechanics' times.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from atoll.core import SECOND_NS as NS
from atoll.core import (
    FetchAnswer,
    FetchedPayload,
    FetchKind,
    FetchRequest,
    LearnerMessage,
    PushHeader,
    PushReply,
    Refusal,
    SyncConfig,
    SyncerMessage,
    TensorSpec,
)
from atoll.core import effects as fx
from atoll.instruments.fleet.host import Host
from atoll.instruments.fleet.island import Island
from atoll.instruments.fleet.learner import FleetLearner
from atoll.instruments.fleet.mechanics import Mechanics
from atoll.instruments.fleet.parts import FailingParts
from atoll.instruments.fleet.syncer import FleetSyncer
from atoll.instruments.sim import Clock


def model(fragments: int) -> tuple[TensorSpec, ...]:
    """Tensors that make this many equal fragments: the machines want a layout, nobody holds the values."""
    return tuple(TensorSpec(f"w{i}", (256,), "float32") for i in range(fragments))


class FleetWorld:
    def __init__(self, config: SyncConfig, mechanics: Mechanics, *, keep_links: bool = False) -> None:
        self.config = config
        self.mechanics = mechanics
        self.keep_links = keep_links
        """A failure does not break its learner's session: the others wait for it, as in a collective."""
        self.clock = Clock()
        self.tensors = model(config.fragments)
        self.hosts: list[Host] = []
        self.events = 0
        """Inputs that a machine has handled."""
        self.finished = ""
        self.running = 0
        """Learners that step now."""
        self._up_since_ns = -1
        self._up_ns = 0
        self._sessions: dict[int, FleetLearner] = {}
        self._sessions_opened = 0
        self._message_ns = int(mechanics.message_s * NS)
        self._transfer_ns = int(mechanics.transfer_s * NS)
        self.parts: FailingParts | None = None
        """What of the fabric fails; None: nothing does."""
        self._syncer = FleetSyncer(self, int(mechanics.merge_s * NS))
        self.syncer = self._syncer.machine

    # ------------------------------------------------------------ members and time

    def add(self, island: Island, **settings: Any) -> Host:
        """A learner on this island joins now."""
        host = Host(self, f"l{len(self.hosts):04d}", island, **settings)
        self.hosts.append(host)
        host.start()
        return host

    def run(self, seconds: float) -> None:
        """Let so many more seconds pass."""
        self.clock.run(self.clock.now_ns + int(seconds * NS))

    @property
    def up_s(self) -> float:
        """Seconds so far in which at least one learner was stepping."""
        open_ns = self.clock.now_ns - self._up_since_ns if self.running else 0
        return (self._up_ns + open_ns) / NS

    def stepping(self, more: int) -> None:
        """A learner began (1) or ceased (-1) to step."""
        if self.running == 0:
            self._up_since_ns = self.clock.now_ns
        self.running += more
        if self.running == 0:
            self._up_ns += self.clock.now_ns - self._up_since_ns

    # ------------------------------------------------------------ parts that fail

    def reaches(self, host: Host) -> bool:
        return self.parts is None or self.parts.reaches(self.hosts.index(host))

    def serves(self, fragment: int) -> bool:
        return self.parts is None or self.parts.serves(fragment)

    def tell_syncer(self, event: fx.SyncerInput) -> None:
        self._syncer.driver.apply(event)

    def shard_back(self, event: fx.FragmentsBack) -> None:
        self._syncer.driver.shard_back(event)

    def version(self, fragment: int) -> int:
        return self._syncer.version(fragment)

    # ------------------------------------------------------------ the links

    def open(self, learner: FleetLearner) -> int:
        self._sessions_opened += 1
        session = self._sessions_opened
        self._sessions[session] = learner
        opened = partial(self._syncer.driver.open_session, session, learner.machine.hello(), secret=f"{session}")
        self.clock.after(self._message_ns, opened)
        return session

    def cut(self, session: int) -> None:
        """The link of this session is down: nothing arrives any more in either direction."""
        if self._sessions.pop(session, None) is not None:
            self.clock.after(self._message_ns, self._syncer.driver.apply, fx.SessionClosed(session, "link down"))

    def say(self, session: int, message: LearnerMessage) -> None:
        if session in self._sessions:
            self.clock.after(self._message_ns, self._syncer.driver.apply, fx.FromLearner(session, message))

    def push(self, session: int, header: PushHeader, done: Callable[[PushReply | None], None]) -> None:
        self.clock.after(self._transfer_ns, self._pushed, session, header, done)

    def _pushed(self, session: int, header: PushHeader, done: Callable[[PushReply | None], None]) -> None:
        if session not in self._sessions or not self.serves(header.fragment):
            done(None)  # the link broke on the way, or its shard is away
        else:
            reply = self._syncer.driver.complete_push(header, None, finite=True, norm=1.0)
            self.clock.after(self._message_ns, self._answer, session, reply, done)

    def _answer(self, session: int, reply: PushReply, done: Callable[[PushReply | None], None]) -> None:
        done(reply if session in self._sessions else None)

    def fetch(self, session: int, request: FetchRequest, done: Callable[[FetchAnswer], None]) -> None:
        self.clock.after(self._transfer_ns, self._fetched, session, request, done)

    def _fetched(self, session: int, request: FetchRequest, done: Callable[[FetchAnswer], None]) -> None:
        current = self._syncer.version(request.fragment)
        if session not in self._sessions or not self.serves(request.fragment):
            done(None)
        elif request.kind is FetchKind.UPDATE and request.version <= current - self.config.ring_versions:
            done(Refusal.UNKNOWN_VERSION)
        else:
            version = current if request.kind is FetchKind.THETA else request.version
            done(FetchedPayload(version, b"0", size=1))

    # ------------------------------------------------------------ what the syncer does to the world

    def count(self, event: fx.SyncerInput | fx.LearnerInput) -> None:
        self.events += 1

    def to_learner(self, session: int, message: SyncerMessage) -> None:
        self.clock.after(self._message_ns, self._hear, session, message)

    def _hear(self, session: int, message: SyncerMessage) -> None:
        learner = self._sessions.get(session)
        if learner is not None:
            learner.driver.heard(message)

    def end_session(self, session: int, *, left: bool) -> None:
        learner = self._sessions.get(session)
        if learner is not None:
            learner.session_ended(left=left)

    def end(self, reason: str) -> None:
        self.finished = reason
        self.clock.stop()
