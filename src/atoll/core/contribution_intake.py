"""Contributions as they come in: may this one enter, and what its learner and its round hear of it.

What can be told from the header is checked in `admission`, before any bytes are sent; the values are judged here.
"""

from __future__ import annotations

from atoll.core.admission import check_contribution
from atoll.core.effects import Answer, Note, PushCompleted, SyncerEffect, ToLearner
from atoll.core.events import ContributionReceived, NormGuardReset
from atoll.core.membership import Member
from atoll.core.messages import Fate, Nothing, PushHeader, PushKind, PushReply, Refusal, Reseed
from atoll.core.plausible import step_credit, steps_burst, steps_overtaking
from atoll.core.policy import low_median, norm_limit, norm_limit_absolute
from atoll.core.round_scheduler import refused
from atoll.core.rounds import ContributionId, ContributionRecord, FragmentTrack
from atoll.core.syncer_state import SyncerState, warned

OUTLIERS_IN_A_ROW = 4
"""How many contributions to a fragment, with none accepted between them, are refused as outliers before the guard may
take it for a change of scale."""
KEPT_PER_LEARNER_MAX = 4
"""Contributions of one learner to one fragment that wait for a merge: it has one in the air, two while it leaves, and
its process may have been restarted since."""
KEPT_LEARNERS_MIN = 16
"""For so many learners there is room at least, and for all that were expected or have answered before."""
OUTLIERS_EACH = 2
"""How many of those each of most learners must have had: the second after it was given the run's own state again."""


class ContributionIntake:
    """Judges one contribution by itself. When there are enough of them is the rounds' business."""

    def __init__(self, state: SyncerState) -> None:
        self._state = state

    def check(self, header: PushHeader, now_ns: int) -> PushReply | None:
        """Asked before the bytes come and again when they are here: the world may have moved on in between."""
        if not self._state.committed:
            who = f"learner {header.learner!r}, fragment {header.fragment}"
            return PushReply(False, Refusal.NOT_READY, f"{who}: the run has no committed state yet")
        member = self._state.membership.members.get(header.learner)
        track = self._state.book.tracks[header.fragment]
        refusal = check_contribution(header, self._state.config, member, track, self._state.book.rounds_started)
        return refusal or self._check_room(header) or self._check_counters(header, now_ns)

    def _check_room(self, header: PushHeader) -> PushReply | None:
        """Contributions wait for a merge in memory, each as large as its fragment."""
        own, kept = self._state.book.kept_counts(header.fragment, header.learner)
        expected = self._state.config.learners_expected
        most = KEPT_PER_LEARNER_MAX * max(KEPT_LEARNERS_MIN, expected, self._state.membership.proven())
        if own < KEPT_PER_LEARNER_MAX and kept < most:
            return None
        detail = (
            f"learner {header.learner!r}, fragment {header.fragment}: {own} of its contributions wait for a merge, and "
            f"{kept} in all; send it again when some are merged"
        )
        return PushReply(False, Refusal.BUSY, detail)

    def _check_counters(self, header: PushHeader, now_ns: int) -> PushReply | None:
        """A contribution is of steps that its learner has reported and not yet given, or of some that it has taken
        since: as many as there was time for. Of one that was in the run before this syncer, nothing is known before its
        first report."""
        member = self._state.membership.members[header.learner]
        if not member.newcomer and member.steps_before < 0:
            return None
        rest = self._state.ledger.account(header.learner, header.generation).rest(header.fragment)
        pace_ns = low_median(self._state.membership.counted_paces())
        possible = steps_burst(self._state.config) + member.credit + step_credit(now_ns - member.credit_ns, pace_ns)
        if steps_overtaking(header.steps, header.tokens, rest) <= possible:
            return None
        return PushReply(
            False,
            Refusal.COUNTERS,
            f"learner {header.learner!r}, fragment {header.fragment}, contribution {header.seq}: {header.tokens} "
            f"tokens in {header.steps} steps, and {rest} of its reported ones are in no contribution; restart that "
            "process",
        )

    def check_values(self, event: PushCompleted) -> PushReply | None:
        """One learner's NaN, or a vector a thousand times too long, must never reach the parameters of all."""
        header = event.header
        if not event.finite:
            detail = f"{_named(header)}: it holds NaN or Inf; its learner starts from the run's state"
            return PushReply(False, Refusal.NOT_FINITE, detail)
        if header.kind is not PushKind.CONTRIBUTION:
            return None
        limit = min(self._norm_limit_absolute(header.fragment), self._norm_limit(header))
        if event.norm > limit:
            above = f"norm {event.norm:.3g} is above the limit {limit:.3g}"
            detail = f"{_named(header)}: {above}; its learner starts from the run's state"
            return PushReply(False, Refusal.NORM_OUTLIER, detail)
        return None

    def _norm_limit(self, header: PushHeader) -> float:
        return norm_limit(self._state.config, self._state.book.tracks[header.fragment].norms, header.steps)

    def _norm_limit_absolute(self, fragment: int) -> float:
        assert self._state.layout is not None
        return norm_limit_absolute(self._state.config, self._state.layout.fragments[fragment].parameters)

    def accept(self, event: PushCompleted, now_ns: int, out: list[SyncerEffect]) -> None:
        """From here on this number of its learner's is used up, so that the same bytes cannot be merged twice (I2)."""
        header, book = event.header, self._state.book
        member = self._state.membership.members[header.learner]
        member.heard_ns = now_ns
        member.seq_seen[header.fragment] = header.seq
        self._state.membership.prove(member, now_ns)
        track = book.tracks[header.fragment]
        late = header.round > 0 and (track.round is None or track.round.number != header.round)
        contribution = ContributionRecord(
            _identity(header),
            header.round,
            header.base_version,
            header.steps,
            header.tokens,
            header.size,
            event.norm,
            late,
            header.codec,
            self._behind(member, header),
        )
        track.outliers.clear()
        self._state.ledger.hold(header.learner, header.generation, header.fragment, header.tokens)
        self._state.judge_tokens(member, now_ns)
        out.append(Answer(PushReply(accepted=True, late=late)))
        received = ContributionReceived(
            round=header.round,
            fragment=header.fragment,
            learner=header.learner,
            generation=header.generation,
            seq=header.seq,
            bytes=header.size,
            steps=header.steps,
            tokens=header.tokens,
            norm=event.norm,
            late=late,
        )
        out.append(Note(received))
        book.offer(contribution, now_ns, out)

    def _behind(self, member: Member, header: PushHeader) -> int:
        """How often the others may have been merged while these steps were made: since the contribution before. Of one
        that this syncer has seen nothing of, nothing is known; in an outage of the syncer nobody was merged."""
        rounds = self._state.book.rounds_started
        before = member.given.get(header.fragment, 0 if member.newcomer else rounds)
        member.given[header.fragment] = min(header.round or rounds, rounds)
        return max(0, rounds - before) // self._state.config.fragments

    # ------------------------------------------------------------ refusals

    def answer_for(self, header: PushHeader, refusal: PushReply, now_ns: int, out: list[SyncerEffect]) -> None:
        """A refused contribution is an answer too: its round must not wait for another."""
        known = 0 <= header.fragment < self._state.config.fragments
        if self._sender(header) is not None and known and refusal.code != Refusal.DUPLICATE:
            answer, usable = Nothing(header.round, header.fragment), refusal.code != Refusal.STALE_BASE
            self._state.book.answer_nothing(header.learner, answer, now_ns, out, usable=usable)

    def refuse(self, event: PushCompleted, refusal: PushReply, out: list[SyncerEffect]) -> None:
        """Say loudly why this push, of whichever kind, does not come in."""
        header = event.header
        out.append(Answer(refusal))
        tokens = header.tokens if header.kind is PushKind.CONTRIBUTION else 0
        out.append(refused(_identity(header), tokens, refusal.code, refusal.detail))
        member = self._sender(header)
        if member is not None and refusal.code == Refusal.DUPLICATE:
            self._tell_fate_again(member, header, out)
        elif member is not None and refusal.code in (Refusal.NOT_FINITE, Refusal.NORM_OUTLIER):
            self._quarantine(member, event, refusal, out)

    def _sender(self, header: PushHeader) -> Member | None:
        """Who made this contribution, if it is one and of a process that is still in the run."""
        member = self._state.membership.members.get(header.learner)
        current = member is not None and member.generation == header.generation
        return member if current and header.kind is PushKind.CONTRIBUTION else None

    def _tell_fate_again(self, member: Member, header: PushHeader, out: list[SyncerEffect]) -> None:
        version = dict(member.merged[header.fragment]).get(header.seq)
        if version is not None and member.connected:
            out.append(ToLearner(member.session, Fate(header.fragment, header.seq, version, "")))
        elif member.connected and not self._state.book.holds(_identity(header)):
            # It was refused or dropped before, and the word of that was lost.
            out.append(ToLearner(member.session, Fate(header.fragment, header.seq, -1, Refusal.UNKNOWN_ROUND)))

    def _quarantine(self, member: Member, event: PushCompleted, refusal: PushReply, out: list[SyncerEffect]) -> None:
        header = event.header
        member.seq_seen[header.fragment] = header.seq
        track = self._state.book.tracks[header.fragment]
        # What was refused tells nothing about the usual norm: one learner could raise the limit by repeating itself.
        if event.finite and event.norm <= self._norm_limit_absolute(header.fragment):
            self._judge_guard(track, header.learner, out)
        if member.connected:
            out.append(ToLearner(member.session, Reseed(refusal.detail)))
        out.append(warned(f"quarantined: {refusal.detail}"))

    def _judge_guard(self, track: FragmentTrack, learner: str, out: list[SyncerEffect]) -> None:
        """An outlier is what differs from the others. When most learners are refused, twice each, and nobody's
        contribution was accepted meanwhile, then it is the scale that has changed: the guard begins anew. (Something
        huge may have come in before the guard knew any norms; refusing what repairs it would keep it for ever.)"""
        track.outliers[learner] = track.outliers.get(learner, 0) + 1
        active = {member.learner for member in self._state.membership.active()}
        again = {name for name in active if track.outliers.get(name, 0) >= OUTLIERS_EACH}
        most = 2 * len(again) > len(active)
        if most and sum(track.outliers.values()) >= OUTLIERS_IN_A_ROW:
            out.append(Note(NormGuardReset(track.index, sum(track.outliers.values()))))
            track.norms_of, track.outliers = [], {}


def _named(header: PushHeader) -> str:
    return f"learner {header.learner!r}, fragment {header.fragment}, contribution {header.seq}"


def _identity(header: PushHeader) -> ContributionId:
    return ContributionId(header.learner, header.generation, header.fragment, header.seq)
