"""Snapshots and contributions of one learner: what is copied, what is given to which round, and what comes back.

A contribution is made of a snapshot, taken at a step boundary, and of nothing newer. What becomes of it is told by the
answer to its push, by the version that holds it, or by the syncer's word (Fate).
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from atoll.core.config import CODECS
from atoll.core.effects import (
    Contribute,
    DropSnapshot,
    LearnerEffect,
    PushAgain,
    PushBroken,
    PushDone,
    Settle,
    TakeSnapshot,
    ToSyncer,
)
from atoll.core.learner_state import LearnerState
from atoll.core.messages import NO_VERSION, Discard, Fate, Nothing, PushHeader, PushKind, Refusal, Request
from atoll.core.progress import FragmentProgress, Sent

_CAUSES: dict[str, Discard] = {
    Refusal.STALE_BASE: Discard.STALE,
    Discard.STALE: Discard.STALE,
    Refusal.NOT_FINITE: Discard.QUARANTINED,
    Refusal.NORM_OUTLIER: Discard.QUARANTINED,
}
"""Why a contribution was dropped -> what the ledger calls it; anything else is `refused`."""

_CONTRIBUTED_STEP = attrgetter("contributed_step")


class ContributionMaker:
    """Takes counters out when a contribution is made and puts them back when it is dropped: so no token counts twice,
    whatever becomes of the push."""

    def __init__(self, state: LearnerState) -> None:
        self._state = state
        self.upcoming: tuple[int, ...] = ()
        """Fragments that may be asked for before the next step ends."""
        self._codec = ""
        """What the syncer last asked contributions to be encoded in; empty: as the settings say."""

    @property
    def unsent(self) -> bool:
        """True while some contribution is not on the syncer's host, as far as is known."""
        return any(not s.pushed for p in self._state.fragments for s in p.outstanding)

    @property
    def boundary_wanted(self) -> bool:
        """True if a fragment was asked for that can be copied only at a step boundary."""
        asked = [p for p in self._state.fragments if p.request is not None and p.snapshot is None]
        return any(p.may_contribute and p.local_steps > 0 for p in asked) and self._uplink_free

    # ------------------------------------------------------------ snapshots

    def give_before_overwritten(self, out: list[LearnerEffect]) -> None:
        """Under adopt policy overwrite, a learner whose steps take longer than the run's rounds would have nothing to
        give whenever it is asked. One that had to pass hands over its next progress before it is overwritten, for
        whichever round comes next."""
        for progress in self.overwritten_next():
            self.give_now(progress, out)

    def overwritten_next(self) -> Iterator[FragmentProgress]:
        """The fragments that are given before they are overwritten; looked at one by one, as the uplink fills."""
        if self._state.config.adopt != "overwrite" or not self._state.started:
            return
        for progress in self._state.fragments:
            free = not progress.outstanding and not progress.reseed and progress.base != NO_VERSION
            if progress.passed and progress.prepared and free and self._uplink_free:
                yield progress

    def give_now(self, progress: FragmentProgress, out: list[LearnerEffect]) -> None:
        """Copy a fragment and contribute the copy, for whichever round comes next."""
        out.append(TakeSnapshot(progress.index))
        progress.snapshot = progress.local
        self._contribute(progress, 0, 0, out)

    def take_snapshots(self, out: list[LearnerEffect]) -> None:
        """Copy what may be asked for before the next step ends, and answer what was asked already."""
        fragments, wanted = self._state.fragments, self.wanted()
        # Most fragments are neither wanted nor asked for after most steps.
        concerned = [p for p in fragments if p.index in wanted or p.request is not None or p.snapshot is not None]
        for progress in sorted(concerned, key=_CONTRIBUTED_STEP) if len(concerned) > 1 else concerned:
            asked = self.is_asked(progress)
            if (progress.index in wanted or asked) and progress.may_contribute and progress.local_steps > 0:
                if progress.snapshot != progress.local:
                    out.append(TakeSnapshot(progress.index))
                    progress.snapshot = progress.local
            elif progress.snapshot is not None and progress.index not in wanted:
                self.drop_snapshot(progress, out)
            if asked:
                self._answer(progress, out)

    def wanted(self) -> set[int]:
        """The fragments that may be asked for before the next step ends."""
        if not self._state.config.synchronous:
            return set(self.upcoming)
        # A learner behind the clock (it was away) is asked before it reaches the step itself.
        return {p.index for p in self._state.fragments if self._state.step >= p.due_step} | set(self.upcoming)

    def is_asked(self, progress: FragmentProgress) -> bool:
        return progress.request is not None and self._uplink_free

    def take_ordered(self, fragments: tuple[int, ...], out: list[LearnerEffect]) -> None:
        """Copy these and no others; drop what nobody will ask for, and answer what was asked."""
        wanted = self.wanted()
        for progress in sorted(self._state.fragments, key=lambda p: p.contributed_step):
            if progress.index in fragments:
                out.append(TakeSnapshot(progress.index))
                progress.snapshot = progress.local
            elif progress.snapshot is not None and progress.index not in wanted and progress.request is None:
                self.drop_snapshot(progress, out)
            if self.is_asked(progress):
                self._answer(progress, out)

    def drop_snapshot(self, progress: FragmentProgress, out: list[LearnerEffect]) -> None:
        if progress.snapshot is not None:
            progress.snapshot = None
            out.append(DropSnapshot(progress.index))

    # ------------------------------------------------------------ giving

    @property
    def _uplink_free(self) -> bool:
        """On a thin uplink, pushes that share it would all arrive too old. So only as many run at once as the run has
        rounds in flight; other requests stay open and are answered, with newer snapshots, as the uplink comes free."""
        return self._uplink_room > 0

    @property
    def _uplink_room(self) -> int:
        pushing = sum(not s.pushed and not s.stuck for p in self._state.fragments for s in p.outstanding)
        return self._state.config.rounds_in_flight_max - pushing

    def ask(self, request: Request, out: list[LearnerEffect]) -> None:
        """A round wants a fragment."""
        for other in self._state.fragments if request.away else ():
            if other.index in request.away:
                self.hold_back(other)
        progress = self._state.fragments[request.fragment]
        progress.request = request
        self._codec = request.codec if CODECS.family(request.codec) in CODECS.names() else ""
        self._answer(progress, out)

    def _answer(self, progress: FragmentProgress, out: list[LearnerEffect]) -> None:
        """Answer the open request now if that is possible; otherwise it stays open until the next boundary."""
        request = progress.request
        if request is None or not progress.may_contribute:
            return
        if progress.local_steps == 0:
            progress.request = None
            progress.passed = True
            self._pass(progress, request.round, out)
        elif progress.snapshot is not None and self._uplink_free:
            progress.request = None
            self._contribute(progress, request.round, request.attempt, out)

    def _contribute(
        self, progress: FragmentProgress, round_number: int, attempt: int, out: list[LearnerEffect]
    ) -> None:
        counters = progress.snapshot
        assert counters is not None
        progress.snapshot = None
        progress.passed = False
        progress.contributed_step = self._state.step
        progress.settle(counters)
        already_merged = tuple(s.seq for s in progress.outstanding if not s.overwritten)
        feedback = not progress.outstanding
        sent = Sent(progress.next_seq, round_number, counters)
        progress.next_seq += 1
        progress.outstanding.append(sent)
        header = PushHeader(
            kind=PushKind.CONTRIBUTION,
            learner=self._state.learner,
            generation=self._state.generation,
            fragment=progress.index,
            round=round_number,
            attempt=attempt,
            seq=sent.seq,
            base_version=progress.base,
            steps=counters.steps,
            tokens=counters.tokens,
            codec=self._codec or self._state.config.codec_up,
            size=0,
            checksum=0,
        )
        out.append(Contribute(header, already_merged, feedback))

    def flush(self, out: list[LearnerEffect]) -> None:
        """Hand over all progress that is in no contribution yet, for whichever round comes next. A fragment whose base
        was refused as too old (the link was down) first catches up; and one whose last contribution is still being
        pushed waits for it, because contribution numbers must arrive in order."""
        for progress in self.flushable():
            self.give_now(progress, out)

    def flushable(self) -> Iterator[FragmentProgress]:
        """The fragments of which progress can be handed over now: no more at once than the uplink carries. All of them
        side by side would, on a thin one, all be given up as too slow shortly before their end, and begin anew."""
        assert self._state.closing is not None
        if not self._state.closing.flush or not self._state.joined:
            return
        room = self._uplink_room
        for progress in sorted(self._state.fragments, key=_CONTRIBUTED_STEP):
            behind = progress.too_old and progress.announced > progress.base
            pushing = any(not sent.pushed for sent in progress.outstanding)
            based = progress.base != NO_VERSION
            if self._state.started and based and self.to_flush(progress) and not behind and not pushing and room > 0:
                room -= 1
                yield progress

    def to_flush(self, progress: FragmentProgress) -> bool:
        """True if a learner that leaves still has progress of this fragment to hand over."""
        return progress.local_steps > 0 and not progress.reseed and not progress.given_up

    # ------------------------------------------------------------ what becomes of it

    def push_done(self, event: PushDone, out: list[LearnerEffect]) -> None:
        """A push was answered. What was refused is the learner's own again; and the uplink may have room for the
        next."""
        if not 0 <= event.fragment < len(self._state.fragments):
            return  # a Received of the syncer's for a fragment that the run does not have
        progress = self._state.fragments[event.fragment]
        sent = progress.find(event.seq)
        if sent is None:
            return
        if event.reply.accepted or event.reply.code == Refusal.DUPLICATE or sent.merged_version != NO_VERSION:
            sent.pushed = True
        else:
            self.dropped(progress, sent, event.reply.code, out)
            progress.too_old = event.reply.code == Refusal.STALE_BASE
            # Bytes that broke on the way may arrive whole the next time (draw 5, seed 10122).
            mendable = progress.too_old or event.reply.code == Refusal.CHECKSUM
            progress.given_up = self._state.closing is not None and not mendable
            self._pass(progress, sent.round, out)
        self._answer_waiting(out)

    def _answer_waiting(self, out: list[LearnerEffect]) -> None:
        """The uplink has room."""
        for waiting in sorted(self._state.fragments, key=lambda p: p.contributed_step):
            self._answer(waiting, out)

    def _pass(self, progress: FragmentProgress, round_number: int, out: list[LearnerEffect]) -> None:
        """Tell a round that nothing will come from here, so that it does not wait; a synchronous learner then waits
        for the fragment's next round."""
        if round_number:
            out.append(ToSyncer(Nothing(round_number, progress.index)))
        progress.due_step = max(progress.due_step, self._state.step + progress.period)

    def push_broken(self, event: PushBroken, out: list[LearnerEffect]) -> None:
        """The bytes did not arrive, or their answer did not: the same contribution goes again, under the same
        number."""
        known = 0 <= event.fragment < len(self._state.fragments)
        sent = self._state.fragments[event.fragment].find(event.seq) if known else None
        if sent is not None and sent.merged_version == NO_VERSION and self._state.started:
            out.append(PushAgain(event.fragment, event.seq))
            if self._state.sharded and not sent.stuck:
                sent.stuck = True
                self._answer_waiting(out)

    def push_again(self, progress: FragmentProgress, out: list[LearnerEffect]) -> None:
        """The link is back: whatever was not answered is pushed once more."""
        again = [s for s in progress.outstanding if not s.pushed and s.merged_version == NO_VERSION]
        for sent in again:
            sent.stuck = False
        out += [PushAgain(progress.index, s.seq) for s in again]

    def hold_back(self, progress: FragmentProgress) -> None:
        """Its shard is away: what was not answered waits for it, and takes no place on the uplink meanwhile."""
        for sent in progress.outstanding:
            sent.stuck = sent.stuck or not sent.pushed

    def fate(self, message: Fate, out: list[LearnerEffect]) -> None:
        """The syncer's word on a contribution whose fate this learner could not follow."""
        progress = self._state.fragments[message.fragment]
        sent = progress.find(message.seq)
        if sent is None or sent.merged_version != NO_VERSION:
            return
        if message.reason == Discard.QUARANTINED:
            # It is taken out of the parameters at the next boundary, as if it were inside the base. A synchronous
            # learner waits for the version that was merged without it, as everybody does.
            self._settle_as_discarded(progress, sent, max(0, progress.base), Discard.QUARANTINED, out)
        elif message.version == NO_VERSION:
            self.dropped(progress, sent, message.reason, out)
            progress.due_step = max(progress.due_step, self._state.step + progress.period)
        elif message.reason == Discard.UNCERTAIN:
            self._settle_as_discarded(progress, sent, message.version, Discard.UNCERTAIN, out)
        else:
            sent.merged_version = message.version

    def _settle_as_discarded(
        self, progress: FragmentProgress, sent: Sent, version: int, cause: Discard, out: list[LearnerEffect]
    ) -> None:
        sent.merged_version, sent.discarded = version, True
        self._state.discard(progress, sent.counters.tokens, cause, out)

    def dropped(self, progress: FragmentProgress, sent: Sent, reason: str, out: list[LearnerEffect]) -> None:
        """The contribution will not be merged: its progress is local again, or (if overwritten) discarded."""
        progress.outstanding.remove(sent)
        out.append(Settle(progress.index, sent.seq, merged=False))
        if sent.discarded:
            return  # its tokens are discarded; what is left of it in the parameters is nobody's
        if sent.overwritten:
            self._state.discard(progress, sent.counters.tokens, _CAUSES.get(reason, Discard.REFUSED), out)
        else:
            progress.unsettle(sent.counters)
            self.drop_snapshot(progress, out)

    def lost_beyond(self, progress: FragmentProgress, version: int, out: list[LearnerEffect]) -> None:
        """The syncer lost its versions beyond this one; what was merged into them is the learner's own again."""
        for sent in list(progress.outstanding):
            if sent.merged_version > version:
                self.dropped(progress, sent, Refusal.UNKNOWN_VERSION, out)
