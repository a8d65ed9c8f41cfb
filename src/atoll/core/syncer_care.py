"""What the syncer does for those who lost something: itself after a restart, joiners without inner state, and for
readers of leased data.

`SyncerMachine` builds on this; the parts behind it are `healing`, `relays` and `leases`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from atoll.core.config import SyncConfig
from atoll.core.durable import Column, version_key
from atoll.core.effects import (
    Answer,
    EndSession,
    ForgetRelay,
    HealCommitted,
    MergeFinished,
    Note,
    RelayTaken,
    SyncerEffect,
    ToLearner,
)
from atoll.core.membership import Member
from atoll.core.messages import (
    INNER_PIECE_BYTES,
    DataReport,
    Donate,
    FragmentState,
    Heal,
    Hello,
    InnerOffer,
    PushHeader,
    PushReply,
    Refusal,
    Refused,
    Start,
)
from atoll.core.relays import Relay
from atoll.core.syncer_books import SyncerBooks
from atoll.errors import AtollError

INNER_BYTES_PER_PARAMETER = 64
"""Inner state that is relayed: AdamW keeps 8 bytes per parameter, the hungriest optimizers in use a few times that."""
INNER_BYTES_FIXED = 64 * 1024 * 1024
"""And step counters, names and the state of tiny models."""


VERSIONS_TOLD = 3
"""Versions of a fragment whose contributions are on the tape: what was published while its column was not written."""


class SyncerCare(SyncerBooks, ABC):
    def __init__(self, config: SyncConfig, run: str, epoch: int = 1) -> None:
        super().__init__(config, run, epoch)
        self._fenced = ""
        """Why this syncer may say nothing more: a newer one has taken over."""

    @abstractmethod
    def _begin_with(self, member: Member, out: list[SyncerEffect]) -> None:
        """The run goes on for this learner."""

    def _start(self) -> Start:
        tracks = self.book.tracks
        states = tuple(FragmentState(t.version, t.checksum) for t in tracks)
        self.book.clock()
        return Start(self.book.clock_last, states, tuple(t.due_step for t in tracks))

    def _end_for(self, member: Member, code: Refusal, what: str, out: list[SyncerEffect]) -> None:
        detail = f"learner {member.learner!r} (generation {member.generation}) {what}; restart that process"
        out += [ToLearner(member.session, Refused(code, detail)), EndSession(member.session, detail)]
        out.append(Note("Warned", {"source": "syncer", "text": detail}))

    def _compare_frozen(self, hello: Hello, out: list[SyncerEffect]) -> None:
        """Frozen parameters never travel: learners whose own differ train different models, and nothing else tells.
        Said once for each process, which has no generation yet when it first comes."""
        first, checksum = self._frozen
        if not checksum:
            self._frozen = (hello.learner, hello.frozen)
        elif hello.frozen not in (0, checksum) and not hello.generation:
            text = (
                f"the frozen parameters of learner {hello.learner!r} differ from those of {first!r}, and they are "
                "never sent, so these two train different models; load the same frozen weights in every learner "
                "before it makes its Learner"
            )
            out.append(Note("Warned", {"source": "syncer", "text": text}))

    # ------------------------------------------------------------ after a restart

    def _merge_finished(self, event: MergeFinished, now_ns: int, out: list[SyncerEffect]) -> None:
        self.book.merge_finished(event, now_ns, out)
        if event.finite:
            track = self.book.tracks[event.fragment]
            merged = [
                [member.learner, member.generation, seq, version]
                for _, member in sorted(self.membership.members.items())
                for seq, version in member.merged[event.fragment]
                if version > track.version - VERSIONS_TOLD
            ]
            row = {"version": track.version, "checksum": track.checksum, "merged": merged}
            self._rows_late[version_key(event.fragment)] = row

    def _heal(self, now_ns: int, out: list[SyncerEffect]) -> None:
        """Ask learners for what they hold and this syncer has lost; begin when there is nothing more to be had."""
        healing = self.healing
        if healing is None or self._fenced:
            return
        for learner, wanted in sorted(healing.ask(now_ns).items()):
            member = self.membership.members[learner]
            out.append(ToLearner(member.session, Heal(tuple(fragment for fragment, _ in wanted))))
        out += [Note("Warned", {"source": "syncer", "text": text}) for text in healing.warnings]
        healing.warnings = []
        if healing.over(now_ns):
            self.healing, self._healed = None, dict(healing.healed)
            self.committed = True
            self._go_on(out)

    def _go_on(self, out: list[SyncerEffect]) -> None:
        """Nothing newer is to be had: the run goes on."""
        for member in self.membership.connected():
            self._begin_with(member, out)

    def _check_heal(self, header: PushHeader) -> PushReply | None:
        claim = self.healing.asked(header.fragment, header.learner) if self.healing is not None else None
        if claim is None or claim.version != header.base_version or claim.checksum != header.checksum:
            detail = (
                f"learner {header.learner!r}: version {header.base_version} of fragment {header.fragment} was not "
                "asked for; wait for Start"
            )
            return PushReply(False, Refusal.NOT_READY, detail)
        return None

    def _heal_committed(self, event: HealCommitted, out: list[SyncerEffect]) -> None:
        track = self.book.tracks[event.fragment]
        if self.healing is None or event.version <= track.version:
            return  # it came twice
        giver = self.healing.giver(event.fragment)
        fields = {"fragment": event.fragment, "version_before": track.version, "version": event.version}
        out.append(Note("FragmentHealed", {**fields, "learner": giver}))
        self.book.commits += event.version - max(0, track.version)
        track.version, track.checksum = event.version, event.checksum
        self.healing.done(event.fragment, event.version)

    def column_after_heal(self, fragment: int, version: int, checksum: int) -> Column:
        """The column that goes to disk with a version that a learner brought back."""
        return {**self.column(fragment), "version": version, "checksum": checksum}

    # ------------------------------------------------------------ inner state and data, for learners

    def _relay_inner(self, joiner: Member, now_ns: int, out: list[SyncerEffect]) -> None:
        joiner.wants_inner = False
        relay = self.relays.start(joiner, self.membership.active(), now_ns)
        if isinstance(relay, str):
            out.append(ToLearner(joiner.session, InnerOffer(0, 0, 0, "", relay)))
            return
        peer = self.membership.members[relay.peer]
        out.append(ToLearner(peer.session, Donate(relay.slot, joiner.bases)))

    def _check_inner(self, header: PushHeader) -> PushReply | None:
        relay = self.relays.from_peer(header.fragment, header.learner, header.generation)
        if relay is None:
            detail = f"learner {header.learner!r}: nobody waits for its inner state any more; it may be forgotten"
            return PushReply(False, Refusal.NOT_READY, detail)
        size = min(INNER_PIECE_BYTES, header.tokens - header.seq * INNER_PIECE_BYTES)
        whole = -(-header.tokens // INNER_PIECE_BYTES)
        sound = header.steps == whole and 0 <= header.seq < whole and header.size == size and relay.pieces in (0, whole)
        if not sound or header.tokens > self._inner_bytes_max():
            detail = f"learner {header.learner!r}: piece {header.seq} of {header.steps} does not fit its inner state"
            return PushReply(False, Refusal.SIZE, detail)
        return None

    def _inner_bytes_max(self) -> int:
        assert self.layout is not None
        return INNER_BYTES_PER_PARAMETER * self.layout.parameters + INNER_BYTES_FIXED

    def _inner_piece(self, header: PushHeader, now_ns: int, out: list[SyncerEffect]) -> None:
        relay = self.relays.open[header.fragment]
        relay.moved_ns = now_ns
        out.append(Answer(PushReply(accepted=True)))
        if relay.pieces == 0:
            relay.pieces = header.steps
            joiner = self.membership.members[relay.joiner]
            out.append(ToLearner(joiner.session, InnerOffer(relay.slot, header.steps, header.tokens, relay.peer)))

    def _relay_taken(self, event: RelayTaken, now_ns: int, out: list[SyncerEffect]) -> None:
        relay = self.relays.open.get(event.slot)
        if relay is not None and event.done:
            self._end_relay(relay, "", out)
        elif relay is not None:
            relay.moved_ns = now_ns

    def _end_relay(self, relay: Relay, reason: str, out: list[SyncerEffect]) -> None:
        del self.relays.open[relay.slot]
        out.append(ForgetRelay(relay.slot))
        joiner = self.membership.members.get(relay.joiner)
        if reason and joiner is not None and joiner.connected and joiner.generation == relay.joiner_generation:
            out.append(ToLearner(joiner.session, InnerOffer(relay.slot, 0, 0, relay.peer, reason)))

    def _data_report(self, member: Member, message: DataReport, out: list[SyncerEffect]) -> None:
        try:
            answer = self.leases.report(member.learner, member.generation, message)
        except AtollError as error:
            self._end_for(member, Refusal.BAD_REQUEST, f"asked for data that this run does not have: {error}", out)
            return
        out.append(ToLearner(member.session, answer))
