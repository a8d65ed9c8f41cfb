"""Inner state from a healthy learner to a joiner, in pieces through the syncer: both ends of it.

Neither end may cost anybody the run: whatever goes wrong, the giver stops giving and the joiner trains without.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from atoll.core.effects import TakeInner
from atoll.core.learner_host import FetchAnswer, FetchedPayload, LearnerDriverHost, OutgoingPayload, Payload
from atoll.core.learner_machine import LearnerMachine
from atoll.core.learner_waits import INNER_TRIES, RETRY_NS
from atoll.core.messages import InnerPiece, InnerPieceRequest, PushReply, Refusal


class InnerTransfer:
    def __init__(self, machine: LearnerMachine, host: LearnerDriverHost) -> None:
        self._machine = machine
        self._host = host

    # ------------------------------------------------------------ giving

    def give(self, slot: int) -> None:
        """Copy it now; push it as fast as the joiner takes it."""
        self._host.copy_inner(lambda pieces: self._push(slot, pieces, 0, INNER_TRIES))

    def _push(self, slot: int, pieces: Sequence[OutgoingPayload], index: int, tries: int) -> None:
        if index == len(pieces):
            return
        piece = pieces[index]
        about = InnerPiece(
            learner=self._machine.learner,
            generation=self._machine.generation,
            slot=slot,
            piece=index,
            pieces=len(pieces),
            whole_bytes=sum(one.size for one in pieces),
            size=piece.size,
            checksum=piece.checksum,
            secret=self._machine.secret,
        )
        self._host.push(about.header(), piece.payload, partial(self._pushed, slot, pieces, index, tries))

    def _pushed(
        self, slot: int, pieces: Sequence[OutgoingPayload], index: int, tries: int, reply: PushReply | None
    ) -> None:
        if reply is not None and reply.accepted:
            self._push(slot, pieces, index + 1, INNER_TRIES)
        elif reply is not None and reply.code == Refusal.BUSY and tries > 1:
            self._host.later(RETRY_NS, self._push, slot, pieces, index, tries - 1)
        # Otherwise nobody waits for it any more.

    # ------------------------------------------------------------ taking

    def take(self, effect: TakeInner) -> None:
        if effect.pieces:
            self._fetch(effect, [], INNER_TRIES)
        else:
            self._host.inner_came([], effect.peer, effect.reason)

    def _fetch(self, effect: TakeInner, came: list[Payload], tries: int) -> None:
        machine = self._machine
        wanted = InnerPieceRequest(machine.learner, machine.generation, effect.slot, len(came), machine.secret)
        self._host.fetch(wanted.request(), partial(self._fetched, effect, came, tries))

    def _fetched(self, effect: TakeInner, came: list[Payload], tries: int, answer: FetchAnswer) -> None:
        if answer == Refusal.BUSY and tries > 1:
            self._host.later(RETRY_NS, self._fetch, effect, came, tries - 1)
        elif not isinstance(answer, FetchedPayload) or answer.payload is None:
            reason = f"the syncer refused it: {answer}" if isinstance(answer, str) else "it did not come through"
            self._host.inner_came([], effect.peer, reason)
        elif len(came) + 1 < effect.pieces:
            self._fetch(effect, [*came, answer.payload], INNER_TRIES)
        else:
            self._host.inner_came([*came, answer.payload], effect.peer, effect.reason)
