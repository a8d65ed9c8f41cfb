"""One process of a fleet's learner: the real machine and the real driver on a link whose transfers take the mechanics'
time. What trains behind it is the island's business (`host`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atoll.core import (
    ArraylessHost,
    FetchAnswer,
    FetchRequest,
    LearnerDiscarded,
    LearnerDriver,
    LearnerMachine,
    LearnerMessage,
    Payload,
    PushHeader,
    PushReply,
)
from atoll.core import effects as fx

if TYPE_CHECKING:
    from atoll.instruments.fleet.host import Host
    from atoll.instruments.fleet.world import FleetWorld

NO_SESSION = -1


class FleetLearner(ArraylessHost):
    def __init__(self, world: FleetWorld, host: Host, instance: str) -> None:
        self.machine = LearnerMachine(host.name, instance, world.tensors)
        self.driver = LearnerDriver(self.machine, self)
        self.driver.watch = world.count
        self.session = NO_SESSION
        self.dead = False
        self._world = world
        self._host = host

    def connect(self) -> None:
        if self.session == NO_SESSION and self._host.reachable:
            self.session = self._world.open(self)

    def disconnect(self, reason: str, *, let_go: bool = False) -> None:
        if self.session != NO_SESSION:
            session, self.session = self.session, NO_SESSION
            self._world.cut(session)
            self.driver.link_down(reason, let_go=let_go)

    def session_ended(self, *, left: bool) -> None:
        """The syncer ended it: because it has all that this learner handed over, or to hear another hello."""
        self.disconnect("the syncer ended the session", let_go=left)
        if not left:
            self._host.session_ended()

    def beat(self) -> None:
        """Say that it is there, if its link is up."""
        progress = self.machine.heartbeat()
        if progress is not None:
            self.send(progress)

    # ------------------------------------------------------------ what the driver asks for

    def now_ns(self) -> int:
        return self._world.clock.now_ns

    def later(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        self._world.clock.after(delay_ns, self._unless_dead(action), *arguments)

    def news(self) -> None:
        self._host.look_up()

    def send(self, message: LearnerMessage) -> None:
        self._world.say(self.session, message)

    def push(self, header: PushHeader, payload: Payload, done: Callable[[PushReply | None], None]) -> None:
        self._world.push(self.session, header, self._unless_dead(done))

    def fetch(self, request: FetchRequest, done: Callable[[FetchAnswer], None]) -> None:
        self._world.fetch(self.session, request, self._unless_dead(done))

    def _unless_dead(self, action: Callable[..., None]) -> Callable[..., None]:
        def do(*arguments: Any) -> None:
            if not self.dead:
                action(*arguments)

        return do

    def note(self, note: fx.Note) -> None:
        if isinstance(note.event, LearnerDiscarded):
            self._host.discarded(note.event.tokens)

    def fail(self, code: str, detail: str) -> None:
        raise AssertionError(f"nothing in a fleet is not finite, and yet: {code}, {detail}")

    def let_go(self) -> None:
        self._host.gone = True
