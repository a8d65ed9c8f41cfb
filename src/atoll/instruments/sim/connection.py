"""One control session between a learner's process and a syncer's, as the link lets it be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.core import Hello, InlinePush, Published
from atoll.instruments.sim.link import DOWN, UP, Stream, VirtualLink
from atoll.wire import SYNCER_ENDED

if TYPE_CHECKING:
    from atoll.instruments.sim.parties import Caller, Server

MESSAGE_BYTES = 120
"""A small control message with its frames."""
INLINE_BYTES = 2_000
"""A contribution or an update that travels inside one."""
HELLO_BYTES = 1_000
BROKE = "the connection broke"


class Connection:
    """Each side notices the end by itself; what is under way when a connection is reset is lost."""

    __slots__ = ("_learner", "_link", "_stream", "_syncer", "key", "learner_open", "reset", "session", "syncer_open")

    def __init__(self, session: int, learner: Caller, syncer: Server, link: VirtualLink | None = None) -> None:
        self.session = session
        self.key = learner.key
        """Whose key the connection was made with, in runs with keys."""
        self._learner = learner
        self._syncer = syncer
        self._link = link or learner.link
        self._stream = Stream()
        self.learner_open = True
        self.syncer_open = True
        self.reset = False

    @property
    def link(self) -> VirtualLink:
        return self._link

    # ------------------------------------------------------------ messages

    def to_syncer(self, message: Any) -> None:
        if self.learner_open:
            size = INLINE_BYTES if type(message) is InlinePush else MESSAGE_BYTES
            self._link.carry(UP, size, self._stream, self._at_syncer, message)

    def _at_syncer(self, message: Any) -> None:
        if self.reset or not self.syncer_open or self._syncer.dead:
            return
        if self._link.damaged(UP):
            self.cut()  # what cannot be parsed ends the session
            return
        self._syncer.call(self._syncer.receive, self.session, message)

    def to_syncer_hello(self, hello: Hello) -> None:
        self._link.carry(UP, HELLO_BYTES, self._stream, self._hello_at_syncer, hello)

    def _hello_at_syncer(self, hello: Hello) -> None:
        if self.reset or not self.syncer_open:
            return
        if self._syncer.dead or not self._syncer.serving:
            self.cut()
        else:
            self._syncer.call(self._syncer.open_session, self, hello)

    def to_learner(self, message: Any) -> None:
        if self.syncer_open:
            size = INLINE_BYTES if type(message) is Published else MESSAGE_BYTES
            self._link.carry(DOWN, size, self._stream, self._at_learner, message)

    def _at_learner(self, message: Any) -> None:
        if self.reset or not self.learner_open or self._learner.dead:
            return
        if self._link.damaged(DOWN):
            self.cut()
            return
        self._learner.call(self._learner.on_message, self, message)

    # ------------------------------------------------------------ the end

    def cut(self) -> None:
        """A reset: both sides notice at once, and what is under way is gone."""
        self.reset = True
        self.learner_side_down(BROKE)
        self.syncer_side_down(BROKE)

    def learner_side_down(self, reason: str) -> None:
        if self.learner_open:
            self.learner_open = False
            if not self._learner.dead:
                self._learner.call(self._learner.on_down, self, reason)

    def syncer_side_down(self, reason: str) -> None:
        if self.syncer_open:
            self.syncer_open = False
            if not self._syncer.dead:
                self._syncer.call(self._syncer.session_broke, self.session, reason)

    def closed_by_learner(self) -> None:
        """In order: the syncer hears of it after everything that was sent before."""
        if self.learner_open:
            self.learner_open = False
            self._link.carry(UP, 40, self._stream, self.syncer_side_down, "the learner closed its stream")

    def ended_by_syncer(self, reason: str) -> None:
        """In order: the learner hears of it after everything that was sent before."""
        if self.syncer_open:
            self.syncer_open = False
            self._link.carry(DOWN, 40, self._stream, self._ended_at_learner)

    def _ended_at_learner(self) -> None:
        if not self.reset:
            self.learner_side_down(SYNCER_ENDED)

    def process_died(self, *, learner: bool) -> None:
        """The kernel of the dead process's machine closes the connection; the other side hears of it, if it can."""
        if learner:
            self.learner_open = False
            self._link.carry(UP, 40, Stream(), self.syncer_side_down, BROKE)
        else:
            self.syncer_open = False
            self._link.carry(DOWN, 40, Stream(), self.learner_side_down, BROKE)
