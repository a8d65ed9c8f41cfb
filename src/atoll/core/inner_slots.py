"""Inner optimizer state for a joiner that has none: handed on from a healthy peer, through the syncer, in pieces.

A joiner that said `wants_inner` is served once it is ready, that is, once its bases (its vector clock) are known. The
peer is the active learner with the most steps that serves nobody yet (ties by id). It answers only when its own bases
have reached the joiner's, so that the state is never older than the parameters it is used with. The syncer holds a few
pieces at a time; the peer's next push is answered when there is room.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.core.config import SECOND_NS
from atoll.core.membership import Member, MemberState
from atoll.core.messages import INNER_SLOTS_MAX

INNER_LINGER_NS = 10 * SECOND_NS
"""How long the last piece of an inner state is kept after it was asked for, in case that the transfer breaks."""
INNER_SILENCE_NS = 30 * SECOND_NS
"""An inner slot in which nothing moves for this long is given up; the joiner goes on with a warm-up."""
INNER_PROTOCOL = 2
"""The protocol that knows inner state."""


@dataclass(slots=True)
class InnerSlot:
    """One hand-over under way: from one peer to one joiner, each of one generation."""

    slot: int
    joiner: str
    joiner_generation: int
    peer: str
    peer_generation: int
    moved_ns: int
    pieces: int = 0
    """Known with the first piece."""


class InnerSlots:
    """Bounded, because each open one holds pieces of a state in the syncer's memory."""

    def __init__(self) -> None:
        self.open: dict[int, InnerSlot] = {}

    def start(self, joiner: Member, members: Iterable[Member], now_ns: int) -> InnerSlot | str:
        """Open an inner slot for this joiner, or say why there is none."""
        free = [slot for slot in range(INNER_SLOTS_MAX) if slot not in self.open]
        if not free:
            return f"{INNER_SLOTS_MAX} other learners are being served"
        busy = {inner_slot.peer for inner_slot in self.open.values()}
        fit = [m for m in members if m.learner != joiner.learner and m.state is MemberState.ACTIVE and m.connected]
        fit = [m for m in fit if m.protocol >= INNER_PROTOCOL and not m.wants_inner and m.steps > 0]
        peers = sorted((m for m in fit if m.learner not in busy), key=lambda m: (not m.proven, -m.steps, m.learner))
        if not peers:
            return "no other learner has inner state to give" if not fit else "every healthy peer serves another"
        peer = peers[0]
        inner_slot = InnerSlot(free[0], joiner.learner, joiner.generation, peer.learner, peer.generation, now_ns)
        self.open[inner_slot.slot] = inner_slot
        return inner_slot

    def from_peer(self, slot: int, learner: str, generation: int) -> InnerSlot | None:
        """The inner slot into which this learner may push."""
        inner_slot = self.open.get(slot)
        fits = inner_slot is not None and (inner_slot.peer, inner_slot.peer_generation) == (learner, generation)
        return inner_slot if fits else None

    def to_joiner(self, slot: int, learner: str, generation: int) -> InnerSlot | None:
        """The inner slot from which this learner may fetch."""
        inner_slot = self.open.get(slot)
        fits = inner_slot is not None and (inner_slot.joiner, inner_slot.joiner_generation) == (learner, generation)
        return inner_slot if fits else None

    def of(self, learner: str) -> list[InnerSlot]:
        """InnerSlots that this learner takes part in."""
        return [inner_slot for inner_slot in self.open.values() if learner in (inner_slot.peer, inner_slot.joiner)]

    def silent(self, now_ns: int) -> list[InnerSlot]:
        return [inner_slot for inner_slot in self.open.values() if now_ns - inner_slot.moved_ns >= INNER_SILENCE_NS]

    def next_wake_ns(self) -> int | None:
        return min((inner_slot.moved_ns + INNER_SILENCE_NS for inner_slot in self.open.values()), default=None)
