"""What the wire needs from a syncer, and what it gives one: the seam between bytes in flight and decisions.

`SyncerService` is implemented by the syncer's shell (and by small fakes in tests). Every method is called on the event
loop that `serve` runs on. The plain ones must return at once; the `async` ones may await work on other threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.core import Identity
from atoll.core import messages as m
from atoll.errors import ConfigError
from atoll.wire import limits

Bytes = NDArray[np.uint8]
SendToLearner = Callable[[m.SyncerMessage], None]


class KeyBook(Protocol):
    """Whose tokens are whose, where each learner has its own."""

    def find(self, token: str) -> Identity | str:
        """The owner of this token, or why it is nobody's."""


class SyncerService(Protocol):
    """The syncer, as the wire sees it. A `RefusedError` raised by any method that may raise one goes back to the
    learner with its code and detail; any other exception is a bug and ends that one call only."""

    def open_session(self, session: int, hello: m.Hello, send: SendToLearner, identity: Identity | None = None) -> None:
        """A learner said Hello; the token was right, and `identity` says whose it is (None: everybody's). `session` is
        unique in this process. Check protocol version and layout here, before touching state; raise RefusedError to
        turn the learner away. `send` may be called at once and until `close_session`; it never blocks, and after a
        `Refused` went through it the session ends. The first message is Welcome: its `protocol` is what the session
        speaks, and what is newer does not go out after it."""

    def receive(self, session: int, message: m.LearnerMessage) -> None:
        """One validated message, in the order the learner sent them. A RefusedError ends the session with Refused."""

    def close_session(self, session: int, reason: str) -> None:
        """The session is over. Called exactly once for every `open_session` that did not raise."""

    def status(self) -> dict[str, object]:
        """The live state as JSON-compatible data."""

    def check_sender(self, header: m.PushHeader) -> None:
        """A push comes in this learner's name: raise RefusedError if it is not from there. Called before anything is
        held for it, or given up for it."""

    def ask_to_leave(self, learner: str) -> str:
        """Tell this one learner to leave, now or when it is back; returns its state, or raises RefusedError."""

    async def take_snapshot(self) -> str:
        """Write a snapshot of the whole run now; says within seconds what came of it so far, or raises RefusedError."""

    async def push_begin(self, header: m.PushHeader) -> int:
        """A transfer wants to start: return the most bytes that it may have or raise RefusedError. Called once per
        attempt of a transfer, before any buffer exists; the header's own size is only a claim until then. That of a
        piece of inner state is known to be at most INNER_PIECE_BYTES, so `header.size` is a fair answer there."""

    async def push_complete(self, header: m.PushHeader, payload: Bytes) -> m.PushReply:
        """All bytes are there and the checksum is right. The array is the service's to keep. A piece of inner state
        may be answered as late as PUSH_WAIT_S, when there is room for the next one; everything else soon. This runs to
        its end even if the learner is gone by then; one whose answer was lost pushes the same again (a duplicate)."""

    async def fetch_open(self, request: m.FetchRequest) -> tuple[m.FetchHeader, memoryview]:
        """The whole immutable content that `request` names (its offset and length are the wire's business), or raise
        RefusedError. Called per stripe and per resumption: `FetchHeader.checksum` should be known, not computed, and a
        piece of inner state must stay until the next one is asked for. If a piece is not there yet, wait for it up to
        FETCH_WAIT_S, then refuse as busy; the wait is cancelled when the learner goes away."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the syncer's port is opened and how much it may hold."""

    listen: str = "127.0.0.1:0"
    """host:port; port 0 takes a free one. Anything but loopback needs a token, a certificate and a key."""
    token: str = field(default="", repr=False)
    """The run token that every call must carry. Empty: no token is asked for (loopback only), or each has its own."""
    keys: KeyBook | None = None
    """Instead of one token: a token for each learner, observer and operator."""
    link_token: str = field(default="", repr=False)
    """What a shard's coordinator, or a standby's primary, must show. Empty: the run's token, which learners have, too,
    or the key of an operator."""
    tls_certificate: str = ""
    """Path of the PEM certificate chain."""
    tls_key: str = ""
    """Path of the PEM private key."""
    bulk_port: int | None = 0
    """The port for large payloads past gRPC, on the same host; 0 takes a free one, None opens none."""
    sessions_max: int = limits.SESSIONS_MAX
    """Control sessions at a time."""
    session_queue_bytes_max: int = limits.SESSION_QUEUE_BYTES_MAX
    """Bytes that may wait for one slow reader before its session is closed."""
    transfers_max: int = limits.TRANSFERS_MAX
    """Pushes that may be under way at a time, all learners together."""
    transfers_per_learner_max: int = limits.TRANSFERS_PER_LEARNER_MAX
    """Pushes that may be under way at a time for one learner."""
    transfer_bytes_max: int = 0
    """Bytes of pushes that may be under way at a time, all learners together. 0: a share of the machine's memory."""
    transfer_idle_s: float = limits.TRANSFER_IDLE_S
    """A transfer for which nothing arrives for this long is given up and its buffer freed."""

    def __post_init__(self) -> None:
        if self.token and self.keys is not None:
            raise ConfigError("a run has one token for everybody or a key for each; give --token or --keys, not both")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError("TLS needs both a certificate and a key: give --tls-certificate and --tls-key together")
