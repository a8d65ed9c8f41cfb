"""How a learner's contributions reach the syncer: on the control connection or over bulk, again and again.

encoded --small, quick link--> sent inline --Received--> answered
        --else--> pushed over bulk --reply--> answered
broken or busy: after a pause the machine hears PushBroken, and says PushAgain if it still matters
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from atoll.core.effects import Contribute, LearnerInput, NotFinite, PushBroken, PushDone
from atoll.core.learner_host import LearnerDriverHost, LinkState, OutgoingPayload, Payload
from atoll.core.learner_machine import LearnerMachine
from atoll.core.learner_waits import INLINE_NS_MAX, RETRY_NS
from atoll.core.messages import InlinePush, InlineReply, PushHeader, PushReply, Refusal
from atoll.core.values import replace


@dataclass(slots=True)
class OutgoingContribution:
    """One that the syncer has not decided about."""

    header: PushHeader
    began_ns: int
    payload: Payload = None
    """None until it is encoded."""
    encode_ns: int = 0


class ContributionPushes:
    """A push is safe to repeat: its number tells the syncer that it has it already."""

    def __init__(
        self,
        machine: LearnerMachine,
        host: LearnerDriverHost,
        link: LinkState,
        feed: Callable[[LearnerInput], None],
    ) -> None:
        self._machine = machine
        self._host = host
        self._link = link
        self._feed = feed
        self._outgoing: dict[tuple[int, int], OutgoingContribution] = {}
        self._pushing: set[tuple[int, int]] = set()
        self._sent_ns: dict[tuple[int, int], int] = {}
        """Sent on the control connection and not answered yet, and when."""
        self._quick = True
        """The link answers inline contributions soon enough for more of them."""

    def contribute(self, effect: Contribute) -> None:
        key = (effect.header.fragment, effect.header.seq)
        self._outgoing[key] = OutgoingContribution(effect.header, self._host.now_ns())
        self._host.contribute(effect, partial(self._encoded, key))

    def is_open(self, fragment: int, seq: int) -> bool:
        """Whether the fate of this contribution is still open."""
        return (fragment, seq) in self._outgoing

    def settle(self, fragment: int, seq: int) -> None:
        self._outgoing.pop((fragment, seq), None)

    def _encoded(self, key: tuple[int, int], made: OutgoingPayload | str) -> None:
        outgoing = self._outgoing.get(key)
        if outgoing is None:
            return  # its fate was decided meanwhile
        if isinstance(made, str):
            self._feed(NotFinite(*key, made))
            return
        outgoing.header = replace(outgoing.header, size=made.size, checksum=made.checksum)
        outgoing.payload, outgoing.encode_ns = made.payload, self._host.now_ns() - outgoing.began_ns
        self.push(key)

    def push(self, key: tuple[int, int]) -> None:
        outgoing = self._outgoing.get(key)
        if outgoing is None or outgoing.payload is None or key in self._pushing:
            return
        if self._quick and self._small(outgoing):
            self._send_inline(key, outgoing)
            return
        self._pushing.add(key)
        answered = partial(self._pushed, key, outgoing, self._host.now_ns())
        self._host.push(replace(outgoing.header, secret=self._machine.secret), outgoing.payload, answered)

    def _small(self, outgoing: OutgoingContribution) -> bool:
        return outgoing.header.size <= self._host.inline_bytes_max

    def _send_inline(self, key: tuple[int, int], outgoing: OutgoingContribution) -> None:
        if self._link.up and key not in self._sent_ns:
            self._sent_ns[key] = self._host.now_ns()
            self._host.send(InlinePush(outgoing.header, outgoing.payload))

    def _pushed(
        self, key: tuple[int, int], outgoing: OutgoingContribution, began_ns: int, reply: PushReply | None
    ) -> None:
        # A secret that is wrong is of an earlier session: the machine pushes it again in this one.
        if reply is None or reply.code in (Refusal.BUSY, Refusal.SECRET):
            self._host.later(RETRY_NS, self._broken, key)
            return
        self._pushing.discard(key)
        push_ns = self._host.now_ns() - began_ns
        self._quick = self._quick or (self._small(outgoing) and push_ns < INLINE_NS_MAX)
        self._answered(key, reply, push_ns)

    def _broken(self, key: tuple[int, int]) -> None:
        self._pushing.discard(key)
        self._feed(PushBroken(*key))

    def received(self, message: InlineReply) -> None:
        """The syncer's answer to an inline contribution."""
        key = (message.fragment, message.seq)
        began_ns = self._sent_ns.pop(key, None)
        push_ns = 0 if began_ns is None else self._host.now_ns() - began_ns
        self._quick = push_ns < INLINE_NS_MAX
        if message.reply.code == Refusal.BUSY:
            self._host.later(RETRY_NS, self._broken, key)
        else:
            self._answered(key, message.reply, push_ns)

    def _answered(self, key: tuple[int, int], reply: PushReply, push_ns: int) -> None:
        outgoing = self._outgoing.get(key)
        if outgoing is not None:
            self._host.pushed(outgoing.header, reply, outgoing.encode_ns, push_ns)
        self._feed(PushDone(*key, reply))

    def link_down(self) -> None:
        """What was sent inline died with the session."""
        for key in sorted(self._sent_ns):
            del self._sent_ns[key]
            self._feed(PushBroken(*key))
