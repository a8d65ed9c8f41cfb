"""What a world supplies so that a learner can live in it: a link, a clock, and the arrays.

`LearnerDriver` decides, a host does. What takes time ends with a call of `done`, at most once, never while another call
into the driver runs on another thread: production holds its lock, virtual worlds have one thread. `done` may be called
before the method returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from atoll.core.effects import Adopt, Contribute, Fetch, Note, Stopped
from atoll.core.messages import INLINE_BYTES_MAX, FetchRequest, LearnerMessage, PushHeader, PushReply
from atoll.core.values import dataclass

Payload = Any
"""Bytes, or what stands for them in this world. Nobody in here looks inside."""


@dataclass(slots=True)
class LinkState:
    """Whether a session is open, and which one."""

    up: bool = False
    session: int = 0


@dataclass(frozen=True, slots=True)
class OutgoingPayload:
    """Something that is ready to be pushed."""

    payload: Payload
    size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class FetchedPayload:
    """What came back from a fetch."""

    version: int
    payload: Payload
    """None: it was damaged on the way."""
    size: int
    checksum: int = 0


class PreparedVersion(Protocol):
    """A version on this host that can be adopted."""

    @property
    def version(self) -> int: ...
    @property
    def checksum(self) -> int:
        """Of its parameters; 0 if it was not computed."""


FetchAnswer = FetchedPayload | str | None
"""The bytes, or the code of a refusal, or nothing: the call did not come through."""


class HostArrays(Protocol):
    """What is done with parameters and copies at once, where the effect appears: on the training thread for most."""

    def take(self, fragment: int) -> None: ...
    def drop(self, fragment: int) -> None: ...
    def adopt(self, effect: Adopt) -> int:
        """Returns the checksum of what is held now; 0 where it is not known."""

    def settle(self, fragment: int, seq: int, merged: bool) -> None: ...
    def forget_residuals(self) -> None: ...
    def forget_prepared(self, fragment: int) -> None:
        """-1: of all fragments."""

    def keep(self, fragment: int, made: Any) -> None:
        """This prepared version will be adopted."""


class LearnerDriverHost(Protocol):
    @property
    def arrays(self) -> HostArrays: ...

    # ------------------------------------------------------------ the world

    def now_ns(self) -> int: ...
    def later(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Call this in the background after so long, if the process still lives."""

    def news(self) -> None:
        """The machine has heard something: a training thread that waits looks up."""

    def send(self, message: LearnerMessage) -> None:
        """On the control connection; nobody hears it while there is none."""

    def push(self, header: PushHeader, payload: Payload, done: Callable[[PushReply | None], None]) -> None:
        """Over bulk. None: the call did not come through."""

    def fetch(self, request: FetchRequest, done: Callable[[FetchAnswer], None]) -> None: ...
    @property
    def inline_bytes_max(self) -> int:
        """Contributions of at most this size may travel on the control connection."""
        return INLINE_BYTES_MAX

    # ------------------------------------------------------------ arrays, with what takes time

    def contribute(self, effect: Contribute, done: Callable[[OutgoingPayload | str], None]) -> None:
        """Take the snapshot over now, and encode it. A string says why it cannot be sent: it is not finite."""

    def prepare_whole(
        self, fragment: int, came: FetchedPayload, done: Callable[[PreparedVersion | str], None]
    ) -> None: ...
    def prepare_update(self, wanted: Fetch, payload: Payload, done: Callable[[PreparedVersion | str], None]) -> None:
        """A string says why it cannot be used: it does not follow what is here, or the bits are not the syncer's."""

    def read_seed(self, fragment: int, done: Callable[[OutgoingPayload], None]) -> None:
        """The published parameters if this learner holds any, else the model's own."""

    def read_held(self, fragment: int, version: int, done: Callable[[OutgoingPayload | None], None]) -> None: ...
    def find_own(self, wanted: Fetch, done: Callable[[FetchedPayload | None], None]) -> None:
        """What this host has already, if its checksum is the wanted one."""
        done(None)

    def copy_inner(self, done: Callable[[Sequence[OutgoingPayload]], None]) -> None:
        """Copy the inner state now, and cut it into pieces."""

    def inner_came(self, pieces: Sequence[Payload], peer: str, reason: str) -> None:
        """A peer's inner state is here, or (without pieces) why there is none."""

    # ------------------------------------------------------------ what is told

    def note(self, note: Note) -> None: ...
    def warn(self, text: str) -> None:
        return

    def pushed(self, header: PushHeader, reply: PushReply, encode_ns: int, push_ns: int) -> None:
        """A contribution was answered."""
        return

    def came(self, wanted: Fetch, version: int, size: int, fetch_ns: int) -> None:
        """A version is here and prepared."""
        return

    def moved_down(self, size: int, took_ns: int) -> None:
        """A fetch brought so many bytes."""
        return

    def adopted(self, effect: Adopt, checksum: int) -> None:
        return

    def went_back(self, fragment: int) -> None:
        """The next version of this fragment may have a smaller number (-1: of all fragments)."""
        return

    def reseeded(self) -> None:
        """The learner starts anew from published parameters."""
        return

    def stopped(self, effect: Stopped) -> None:
        """The run is over for this learner."""
        return

    def fail(self, code: str, detail: str) -> None:
        """The syncer will not have this learner: there is nothing to try again."""

    def let_go(self) -> None:
        """The syncer has everything that this learner handed over: end, and do not come back."""
