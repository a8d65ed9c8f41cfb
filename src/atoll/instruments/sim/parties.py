"""Who talks to whom: whoever opens sessions and calls, and whoever answers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from atoll.core import FetchRequest, Hello, LearnerMessage, PushHeader, PushReply

if TYPE_CHECKING:
    from atoll.instruments.sim.connection import Connection
    from atoll.instruments.sim.link import VirtualLink
    from atoll.instruments.sim.payloads import Payload

Found = tuple[int, "Payload", int] | str
"""Version, bytes and size, or the code of a refusal."""


class Party(Protocol):
    dead: bool

    def call(self, action: Callable[..., None], *arguments: Any) -> None: ...


class Caller(Party, Protocol):
    """A learner, or a relay in its name."""

    key: str

    @property
    def link(self) -> VirtualLink: ...
    def on_message(self, connection: Connection, message: Any) -> None: ...
    def on_down(self, connection: Connection, reason: str) -> None: ...


class Server(Party, Protocol):
    """A syncer, a shard, a relay or a standby, as its port is."""

    serving: bool
    connections: dict[int, Connection]
    accepted: dict[int, Connection]
    """Connections whose Hello this process has not read yet."""

    def open_session(self, connection: Connection, hello: Hello) -> None: ...
    def receive(self, session: int, message: LearnerMessage) -> None: ...
    def session_broke(self, session: int, reason: str) -> None: ...
    def begin_push(self, header: PushHeader, answered: Callable[[PushReply | None], None]) -> None: ...
    def end_push(self, header: PushHeader, payload: Payload, answered: Callable[[PushReply], None]) -> None: ...
    def fetch(self, request: FetchRequest, done: Callable[[Found], None]) -> None: ...
