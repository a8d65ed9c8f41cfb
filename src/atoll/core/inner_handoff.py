"""A joiner without inner optimizer state gets that of a healthy peer: who gives, what comes, and when it is given up.

Which peer and which slot are chosen in `relays`; the bytes pass through the shell, a few pieces at a time.
"""

from __future__ import annotations

from atoll.core.effects import Answer, ForgetRelay, RelayTaken, SyncerEffect, ToLearner
from atoll.core.membership import Member
from atoll.core.messages import INNER_PIECE_BYTES, Donate, InnerOffer, PushHeader, PushReply, Refusal
from atoll.core.relays import Relay, Relays
from atoll.core.syncer_state import SyncerState

INNER_BYTES_PER_PARAMETER = 64
"""Inner state that is relayed: AdamW keeps 8 bytes per parameter, the hungriest optimizers in use a few times that."""
INNER_BYTES_FIXED = 64 * 1024 * 1024
"""And step counters, names and the state of tiny models."""


class InnerHandoff:
    def __init__(self, state: SyncerState) -> None:
        self._state = state
        self.relays = Relays()

    def offer(self, joiner: Member, now_ns: int, out: list[SyncerEffect]) -> None:
        """Ask a peer for its state, or tell the joiner that there is none."""
        joiner.wants_inner = False
        relay = self.relays.start(joiner, self._state.membership.active(), now_ns)
        if isinstance(relay, str):
            out.append(ToLearner(joiner.session, InnerOffer(0, 0, 0, "", relay)))
            return
        peer = self._state.membership.members[relay.peer]
        out.append(ToLearner(peer.session, Donate(relay.slot, joiner.bases)))

    def check(self, header: PushHeader) -> PushReply | None:
        """A piece must be of the size that its place says: nobody can fill the syncer with what a joiner never asked
        for."""
        relay = self.relays.from_peer(header.fragment, header.learner, header.generation)
        if relay is None:
            detail = f"learner {header.learner!r}: nobody waits for its inner state any more; it may be forgotten"
            return PushReply(False, Refusal.NOT_READY, detail)
        size = min(INNER_PIECE_BYTES, header.tokens - header.seq * INNER_PIECE_BYTES)
        whole = -(-header.tokens // INNER_PIECE_BYTES)
        sound = header.steps == whole and 0 <= header.seq < whole and header.size == size and relay.pieces in (0, whole)
        if not sound or header.tokens > self._bytes_max():
            detail = f"learner {header.learner!r}: piece {header.seq} of {header.steps} does not fit its inner state"
            return PushReply(False, Refusal.SIZE, detail)
        return None

    def _bytes_max(self) -> int:
        assert self._state.layout is not None
        return INNER_BYTES_PER_PARAMETER * self._state.layout.parameters + INNER_BYTES_FIXED

    def take(self, header: PushHeader, now_ns: int, out: list[SyncerEffect]) -> None:
        """A piece is here; with the first one the joiner hears how many there are."""
        relay = self.relays.open[header.fragment]
        relay.moved_ns = now_ns
        out.append(Answer(PushReply(accepted=True)))
        if relay.pieces == 0:
            relay.pieces = header.steps
            joiner = self._state.membership.members[relay.joiner]
            out.append(ToLearner(joiner.session, InnerOffer(relay.slot, header.steps, header.tokens, relay.peer)))

    def taken(self, event: RelayTaken, now_ns: int, out: list[SyncerEffect]) -> None:
        relay = self.relays.open.get(event.slot)
        if relay is not None and event.done:
            self._end(relay, "", out)
        elif relay is not None:
            relay.moved_ns = now_ns

    def gone(self, learner: str, out: list[SyncerEffect]) -> None:
        for relay in self.relays.of(learner):
            self._end(relay, f"learner {learner!r} is gone", out)

    def expire(self, now_ns: int, out: list[SyncerEffect]) -> None:
        for relay in self.relays.silent(now_ns):
            self._end(relay, "the inner state did not come in time", out)

    def clear(self, out: list[SyncerEffect]) -> None:
        """The run is given up, and everybody says hello again."""
        out += [ForgetRelay(slot) for slot in sorted(self.relays.open)]
        self.relays = Relays()

    def _end(self, relay: Relay, reason: str, out: list[SyncerEffect]) -> None:
        del self.relays.open[relay.slot]
        out.append(ForgetRelay(relay.slot))
        joiner = self._state.membership.members.get(relay.joiner)
        if reason and joiner is not None and joiner.connected and joiner.generation == relay.joiner_generation:
            out.append(ToLearner(joiner.session, InnerOffer(relay.slot, 0, 0, relay.peer, reason)))
