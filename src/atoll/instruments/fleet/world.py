"""The real SyncerMachine and one real LearnerMachine per island, joined by links of fixed delay, in virtual time.

Lighter than `sim`: no TCP, disk, checkers or arrays, so that hours of a run take seconds. Payloads are references (a
version is its number). What the machines say is done; what their shells would say back comes back after the
mechanics' times.
"""

from __future__ import annotations

from typing import Any

from atoll.core import SECOND_NS as NS
from atoll.core import WHOLE_CODEC, FetchKind, PushHeader, PushKind, SyncConfig, TensorSpec
from atoll.core import effects as fx
from atoll.instruments.fleet.host import Host
from atoll.instruments.fleet.island import Island
from atoll.instruments.fleet.mechanics import Mechanics
from atoll.instruments.fleet.syncer import FleetSyncer, reference
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
        self._sessions: dict[int, Host] = {}
        self._sessions_opened = 0
        self._message_ns = int(mechanics.message_s * NS)
        self._transfer_ns = int(mechanics.transfer_s * NS)
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

    # ------------------------------------------------------------ the links

    def open(self, host: Host) -> int:
        self._sessions_opened += 1
        session = self._sessions_opened
        self._sessions[session] = host
        self.clock.after(self._message_ns, self._syncer.driver.open_session, session, host.machine.hello())
        return session

    def cut(self, session: int) -> None:
        """The link of this session is down: nothing arrives any more in either direction."""
        if self._sessions.pop(session, None) is not None:
            self.clock.after(self._message_ns, self._syncer.driver.apply, fx.SessionClosed(session, "link down"))

    def say(self, session: int, message: Any) -> None:
        """Learner to syncer."""
        if session in self._sessions:
            self.clock.after(self._message_ns, self._syncer.driver.apply, fx.FromLearner(session, message))

    def push(self, session: int, header: PushHeader) -> None:
        self.clock.after(self._transfer_ns, self._pushed, session, header)

    def fetch(self, session: int, effect: fx.Fetch) -> None:
        self.clock.after(self._transfer_ns, self._fetched, session, effect)

    def seed(self, session: int, generation: int, learner: str) -> None:
        for fragment in range(self.config.fragments):
            header = PushHeader(PushKind.SEED, learner, generation, fragment, 0, 0, 0, -1, 0, 0, WHOLE_CODEC, 1, 1)
            self.push(session, header)

    def _pushed(self, session: int, header: PushHeader) -> None:
        host = self._sessions.get(session)
        if host is None:
            return  # the link broke on the way; the machine pushes again when it is back
        reply = self._syncer.driver.complete_push(header, None, finite=True, norm=1.0)
        if header.kind is PushKind.CONTRIBUTION:
            self.to_learner(session, fx.PushDone(header.fragment, header.seq, reply))

    def _fetched(self, session: int, effect: fx.Fetch) -> None:
        host = self._sessions.get(session)
        if host is None:
            return
        current = self._syncer.version(effect.fragment)
        if effect.kind is FetchKind.UPDATE and effect.version <= current - self.config.ring_versions:
            host.hear(fx.FetchBroken(effect.fragment, effect.version, gone=True))
            return
        version = current if effect.kind is FetchKind.THETA else effect.version
        host.hear(fx.Fetched(effect.fragment, version, effect.version, reference(version)))

    def _hear(self, session: int, event: fx.LearnerInput) -> None:
        host = self._sessions.get(session)
        if host is not None:
            host.hear(event)

    # ------------------------------------------------------------ what the syncer does to the world

    def count(self, event: fx.SyncerInput) -> None:
        self.events += 1

    def to_learner(self, session: int, event: fx.LearnerInput) -> None:
        self.clock.after(self._message_ns, self._hear, session, event)

    def end_session(self, session: int, *, left: bool) -> None:
        host = self._sessions.get(session)
        if host is not None and left:
            host.let_go()
        elif host is not None:
            host.say_hello_again()

    def end(self, reason: str) -> None:
        self.finished = reason
        self.clock.stop()
