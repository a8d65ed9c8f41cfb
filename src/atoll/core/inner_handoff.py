"""A joiner without inner optimizer state gets that of a healthy peer: who gives, what comes, and when it is given up.

Which peer and which slot are chosen in `inner_slots`; the bytes pass through the shell, a few pieces at a time.
"""

from __future__ import annotations

from atoll.core.effects import Answer, ForgetInner, InnerTaken, SyncerEffect, ToLearner
from atoll.core.inner_slots import InnerSlot, InnerSlots
from atoll.core.membership import Member
from atoll.core.messages import INNER_PIECE_BYTES, Donate, InnerOffer, InnerPiece, PushReply, Refusal
from atoll.core.syncer_state import SyncerState

INNER_BYTES_PER_PARAMETER = 64
"""Inner state that is handed on: AdamW keeps 8 bytes per parameter, the hungriest optimizers a few times that."""
INNER_BYTES_FIXED = 64 * 1024 * 1024
"""And step counters, names and the state of tiny models."""


class InnerHandoff:
    """Without its moments AdamW's first steps have the wrong length; a peer's moments are better than none."""

    def __init__(self, state: SyncerState) -> None:
        self._state = state
        self.inner_slots = InnerSlots()

    def offer(self, joiner: Member, now_ns: int, out: list[SyncerEffect]) -> None:
        """Ask a peer for its state, or tell the joiner that there is none."""
        joiner.wants_inner = False
        inner_slot = self.inner_slots.start(joiner, self._state.membership.active(), now_ns)
        if isinstance(inner_slot, str):
            out.append(ToLearner(joiner.session, InnerOffer(0, 0, 0, "", inner_slot)))
            return
        peer = self._state.membership.members[inner_slot.peer]
        out.append(ToLearner(peer.session, Donate(inner_slot.slot, joiner.bases)))

    def check(self, piece: InnerPiece) -> PushReply | None:
        """A piece must be of the size that its place says: nobody can fill the syncer with what a joiner never asked
        for."""
        inner_slot = self.inner_slots.from_peer(piece.slot, piece.learner, piece.generation)
        if inner_slot is None:
            detail = f"learner {piece.learner!r}: nobody waits for its inner state any more; it may be forgotten"
            return PushReply(False, Refusal.NOT_READY, detail)
        size = min(INNER_PIECE_BYTES, piece.whole_bytes - piece.piece * INNER_PIECE_BYTES)
        pieces = -(-piece.whole_bytes // INNER_PIECE_BYTES)
        sound = (
            piece.pieces == pieces
            and 0 <= piece.piece < pieces
            and piece.size == size
            and inner_slot.pieces in (0, pieces)
        )
        if not sound or piece.whole_bytes > self._bytes_max():
            detail = f"learner {piece.learner!r}: piece {piece.piece} of {piece.pieces} does not fit its inner state"
            return PushReply(False, Refusal.SIZE, detail)
        return None

    def _bytes_max(self) -> int:
        assert self._state.layout is not None
        return INNER_BYTES_PER_PARAMETER * self._state.layout.parameters + INNER_BYTES_FIXED

    def take(self, piece: InnerPiece, now_ns: int, out: list[SyncerEffect]) -> None:
        """A piece is here; with the first one the joiner hears how many there are."""
        inner_slot = self.inner_slots.open[piece.slot]
        inner_slot.moved_ns = now_ns
        out.append(Answer(PushReply(accepted=True)))
        if inner_slot.pieces == 0:
            inner_slot.pieces = piece.pieces
            joiner = self._state.membership.members[inner_slot.joiner]
            offer = InnerOffer(inner_slot.slot, piece.pieces, piece.whole_bytes, inner_slot.peer)
            out.append(ToLearner(joiner.session, offer))

    def taken(self, event: InnerTaken, now_ns: int, out: list[SyncerEffect]) -> None:
        inner_slot = self.inner_slots.open.get(event.slot)
        if inner_slot is not None and event.done:
            self._end(inner_slot, "", out)
        elif inner_slot is not None:
            inner_slot.moved_ns = now_ns

    def gone(self, learner: str, out: list[SyncerEffect]) -> None:
        for inner_slot in self.inner_slots.of(learner):
            self._end(inner_slot, f"learner {learner!r} is gone", out)

    def expire(self, now_ns: int, out: list[SyncerEffect]) -> None:
        for inner_slot in self.inner_slots.silent(now_ns):
            self._end(inner_slot, "the inner state did not come in time", out)

    def clear(self, out: list[SyncerEffect]) -> None:
        """The run is given up, and everybody says hello again."""
        out += [ForgetInner(slot) for slot in sorted(self.inner_slots.open)]
        self.inner_slots = InnerSlots()

    def _end(self, inner_slot: InnerSlot, reason: str, out: list[SyncerEffect]) -> None:
        del self.inner_slots.open[inner_slot.slot]
        out.append(ForgetInner(inner_slot.slot))
        joiner = self._state.membership.members.get(inner_slot.joiner)
        if reason and joiner is not None and joiner.connected and joiner.generation == inner_slot.joiner_generation:
            out.append(ToLearner(joiner.session, InnerOffer(inner_slot.slot, 0, 0, inner_slot.peer, reason)))
