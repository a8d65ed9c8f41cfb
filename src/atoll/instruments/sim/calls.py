"""One bulk call of a learner: bytes go up, an answer comes down, and either may never arrive.

A call that the learner has given up may still be under way: its bytes are completed at the syncer, and nobody hears the
answer. That is where duplicates come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atoll.core import FetchRequest, PushHeader, PushReply, Refusal
from atoll.instruments.sim.link import DOWN, UP, Stream, VirtualLink
from atoll.wire import BULK_DEADLINE_S_MIN

if TYPE_CHECKING:
    from atoll.instruments.sim.learner_host import LearnerHost
    from atoll.instruments.sim.parties import Server
    from atoll.instruments.sim.payloads import Payload
    from atoll.instruments.sim.relay_process import RelayProcess

DEADLINE_NS = int(BULK_DEADLINE_S_MIN * 1e9)
HEADER_BYTES = 200


class Call:
    def __init__(self, learner: LearnerHost | RelayProcess, size: int, fragment: int = -1) -> None:
        self._learner = learner
        self._syncer: Server | None
        self._syncer, self._link = learner.way(fragment)
        self._size = size
        self._stream = Stream()
        self._done: Callable[[Any], None] | None = None
        self._broken = self._link.breaks()
        self._reset = False
        self._open = False
        """A push whose header the syncer has let in."""
        self._asked = False
        """Its header is there, and has no answer yet."""
        self._ended: tuple[PushHeader, Payload] | None = None
        """Its bytes are there as well."""

    def push(self, header: PushHeader, payload: Payload, done: Callable[[PushReply | None], None]) -> None:
        """`done` hears the reply, or None when the call did not come through."""
        if self._begin(done):
            link = self._link
            link.carry(UP, HEADER_BYTES, self._stream, self._at_syncer, self._push_begins, header)
            link.carry(UP, self._size, self._stream, self._at_syncer, self._push_ends, header, payload)

    def fetch(self, request: FetchRequest, done: Callable[[tuple[int, Payload, int] | str | None], None]) -> None:
        """`done` hears version, bytes and size, or the code of a refusal, or None."""
        if self._begin(done):
            self._link.carry(UP, self._size, self._stream, self._at_syncer, self._fetch_here, request)

    def _begin(self, done: Callable[[Any], None]) -> bool:
        """False if nobody listens there: then no byte is sent. (What was tried again every half second for a shard that
        was away once kept the link to it busy for six minutes more: draw 7, seed 2981.)"""
        self._done = done
        self._learner.calls[self] = None
        self._learner.later(1_000_000 if self._syncer is None else DEADLINE_NS, self.give_up)
        return self._syncer is not None

    def goes_to(self, syncer: object) -> bool:
        return self._syncer is syncer

    def goes_over(self, link: VirtualLink) -> bool:
        return self._link is link

    def give_up(self, reset: bool = False) -> None:
        """The connection broke, or the deadline has passed."""
        self._reset = self._reset or reset
        self._finish(None)

    def _finish(self, result: Any) -> None:
        done, self._done = self._done, None
        self._learner.calls.pop(self, None)
        if done is not None:
            done(result)

    # ------------------------------------------------------------ at the syncer

    def _at_syncer(self, action: Callable[..., None], *arguments: Any) -> None:
        syncer = self._syncer
        if syncer is None or self._reset:
            return
        if syncer.dead or not syncer.serving:
            self._link.carry(DOWN, 40, self._stream, self._at_learner, None)
            return
        syncer.call(action, *arguments)

    def _push_begins(self, header: PushHeader) -> None:
        assert self._syncer is not None
        if self._broken and self._learner.dice.random() < 0.5:
            self._answer(None, 40)  # broken off before it did anything
            return
        self._asked = True
        self._syncer.begin_push(header, self._push_opened)

    def _push_opened(self, refusal: PushReply | None) -> None:
        self._asked, ended, self._ended = False, self._ended, None
        if refusal is not None:
            self._answer(refusal, HEADER_BYTES)
        self._open = refusal is None
        if ended is not None:
            self._push_ends(*ended)

    def _push_ends(self, header: PushHeader, payload: Payload) -> None:
        assert self._syncer is not None
        if self._asked:
            self._ended = (header, payload)
            return
        if not self._open:
            return  # nobody listens: it was answered when its header came
        if self._link.damaged(UP):
            # The checksum of a part does not fit: the transfer is refused before the syncer's machine hears of it.
            self._answer(PushReply(False, Refusal.CHECKSUM, "the bytes are not the ones that were sent"), HEADER_BYTES)
            return
        self._syncer.end_push(header, payload, self._push_done)

    def _push_done(self, reply: PushReply) -> None:
        self._answer(reply, HEADER_BYTES)

    def _fetch_here(self, request: FetchRequest) -> None:
        assert self._syncer is not None
        self._syncer.fetch(request, self._found)

    def _found(self, found: tuple[int, Payload, int] | str) -> None:
        self._answer(found, HEADER_BYTES if isinstance(found, str) else found[2])

    def _answer(self, result: Any, size: int) -> None:
        answer = None if self._broken else result
        self._link.carry(DOWN, size, self._stream, self._at_learner, answer)

    # ------------------------------------------------------------ back at the learner

    def _at_learner(self, result: Any) -> None:
        if self._reset or self._learner.dead:
            return
        if isinstance(result, tuple) and self._link.damaged(DOWN):
            result = (result[0], None, result[2])  # a checksum does not fit
        self._learner.call(self._finish, result)
