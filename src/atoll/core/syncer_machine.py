"""The syncer as a pure machine: `handle(input, now_ns) -> effects`.

It decides who is in, when a fragment is due, what enters a merge and with which weight, what is refused and why, and
what each learner is told. It never sees parameters: the shell keeps payloads by ContributionId, merges when told to,
and comes back with MergeFinished. Publishing follows the commit, never the other way round (invariant I4).

The machine routes inputs to its parts and gathers their effects. Each part owns what it decides about:

    SyncerState           the run, its members, ledger, RoundScheduler and LeaseBook, and what of them is durable
    SyncerRecovery        coming back after a restart, and what learners bring back
    RunSelection          which run this is: its own, a newcomer's, or one that learners hold
    HelloIntake           learners that say hello: may they join
    ProgressIntake        where learners are
    SeedIntake            the first parameters
    ContributionIntake    contributions as they come in
    InnerHandoff          inner optimizer state, from a peer to a joiner
    SilenceWatch          who is quiet, away, lost or deaf
    ExpectedLearners      too few have come for a round
    MergeWatch            nothing is merged: who is waited for

Parts know the state and at most the parts above them. What concerns several of them (a learner is gone, the run goes on
for a learner) they return, and the machine does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, assert_never

from atoll.core.admission import check_sender
from atoll.core.beginning import Begin, Beginning
from atoll.core.config import SECOND_NS, SyncConfig
from atoll.core.contribution_intake import ContributionIntake
from atoll.core.durable import FragmentRecord, Recovery
from atoll.core.effects import (
    Answer,
    Compared,
    EndSession,
    FetchOpened,
    Finished,
    FragmentsBack,
    FragmentsDown,
    FromLearner,
    HealCommitted,
    InnerTaken,
    KeepHeld,
    KeyRevoked,
    LeaveAsked,
    LookForNewer,
    Merge,
    MergeFinished,
    PushCompleted,
    PushOpened,
    SeedCommitted,
    SessionClosed,
    SessionOpened,
    StopRequested,
    SyncerEffect,
    SyncerInput,
    Tick,
    ToLearner,
)
from atoll.core.expected_learners import ExpectedLearners
from atoll.core.healing import Healing
from atoll.core.hello_intake import HelloIntake
from atoll.core.inner_handoff import InnerHandoff
from atoll.core.inner_slots import InnerSlot, InnerSlots
from atoll.core.layout import Layout
from atoll.core.leases import LeaseBook
from atoll.core.ledger import Ledger, Totals
from atoll.core.membership import Member, Membership, MemberState
from atoll.core.merge_watch import MergeWatch
from atoll.core.messages import (
    ASKED_TO_LEAVE,
    DataReport,
    HealedVersion,
    Hello,
    InlinePush,
    InnerPiece,
    Leave,
    Nothing,
    Progress,
    PushHeader,
    PushKind,
    PushReply,
    Ready,
    Refusal,
    Refused,
    SeedPart,
    Stop,
    meaning_of,
)
from atoll.core.progress_intake import ProgressIntake
from atoll.core.round_scheduler import RoundScheduler
from atoll.core.rounds import ContributionId, ContributionRecord
from atoll.core.run_selection import RunSelection
from atoll.core.seed_intake import SeedIntake
from atoll.core.silence import QUIET_NS, Silence, SilenceWatch
from atoll.core.syncer_recovery import FROM_LEARNERS, SyncerRecovery
from atoll.core.syncer_state import SyncerState, changed, warned
from atoll.core.values import replace
from atoll.errors import AtollError

REPORTS_BURST = 200.0
"""Reports on data that a learner may send at once: for all streams of a mixture, several times over."""
REPORT_NS = SECOND_NS // 20
"""And one more after this time: each may write a row of ten thousand chunks on the tape."""


class SyncerMachine:
    """All that a syncer decides has one entrance, and time comes in by it. So a run can be made again from its inputs:
    the simulator and every failing seed rest on that."""

    def __init__(self, config: SyncConfig, run: str, epoch: int = 1, begin: Begin | None = None) -> None:
        self._state = state = SyncerState(config, run, epoch)
        self._beginning = Beginning(begin or Begin())
        self._recovery = SyncerRecovery(state)
        self._seeding = SeedIntake(state, self._beginning)
        self._handoff = InnerHandoff(state)
        self._selection = RunSelection(
            state, self._beginning, recovery=self._recovery, seeding=self._seeding, handoff=self._handoff
        )
        self._contributions = ContributionIntake(state)
        self._silence = SilenceWatch(state, self._seeding)
        self._expected = ExpectedLearners(state)
        self._merges = MergeWatch(state)
        self._hellos = HelloIntake(state, self._selection)
        self._progress = ProgressIntake(state, self._recovery)
        self.stopping = ""
        """Why the run ends; empty: it does not yet."""
        self._finished = False

    # ------------------------------------------------------------ the one entrance

    def handle(self, event: SyncerInput, now_ns: int) -> list[SyncerEffect]:
        """Take one input in; returns what the shell must do, in this order."""
        out: list[SyncerEffect] = []
        match event:
            case FromLearner():
                self._message(event, now_ns, out)
            case PushOpened():
                self._push_opened(event.header, now_ns, out)
                return self._state.remembered(out)
            case PushCompleted():
                self._push_completed(event, now_ns, out)
            case Compared():
                self.book.compared(event, out)
            case MergeFinished():
                self.book.merge_finished(event, now_ns, out)
                if event.finite:
                    self._state.remember_version(event.fragment)
            case FetchOpened():
                member = self._current(event.learner, event.generation)
                if member is not None:
                    member.fetch_ns = now_ns
                return []
            case SessionOpened():
                self._open(event, now_ns, out)
            case SessionClosed():
                self._closed(event, now_ns, out)
            case SeedCommitted():
                self._begin_with(self._seeding.committed(event.checksums), out)
            case HealCommitted():
                self._recovery.put_in_place(event, out)
            case InnerTaken():
                self._handoff.taken(event, now_ns, out)
            case StopRequested():
                self._stop(event.reason, out)
            case LeaveAsked():
                self._ask_to_leave(event.learner, out)
            case KeyRevoked():
                self._revoke(event, out)
            case FragmentsDown():
                self.book.set_down(event.fragments | self._recovery.mending.fragments, event.resting)
            case FragmentsBack():
                self._recovery.shard_back(event, now_ns, out)
            case Tick():
                self._expire(now_ns, out)
                self.book.tick(now_ns, out)
            case _:
                assert_never(event)
        self._follow_up(now_ns, out)
        return self._state.remembered(out)

    def restore(self, recovery: Recovery, now_ns: int, load_ns: int = 0) -> list[SyncerEffect]:
        """Continue the run of an earlier syncer: see SyncerRecovery.restore."""
        return self._state.remembered([self._recovery.restore(recovery, now_ns, load_ns)])

    def next_wake_ns(self) -> int | None:
        """When to send the next Tick, if nothing else happens before."""
        healing, inner_slots = self._recovery.healing, self._handoff.inner_slots
        first_ns = self._state.book.next_wake_ns()
        for wake_ns in (
            inner_slots.next_wake_ns() if inner_slots.open else None,
            self._seeding.next_wake_ns(),
            healing.next_wake_ns() if healing is not None else self._recovery.mending.next_wake_ns(),
            self._silence.next_wake_ns(),
            self._expected.next_wake_ns(),
            self._merges.next_wake_ns(),
        ):
            if wake_ns is not None and (first_ns is None or wake_ns < first_ns):
                first_ns = wake_ns
        return first_ns

    def _follow_up(self, now_ns: int, out: list[SyncerEffect]) -> None:
        """What follows from any change: ask for what was lost, stop when the budget is spent, launch what is due, merge
        leftovers, finish."""
        if self._recovery.healing is not None:
            self._begin_with(self._recovery.heal(now_ns, out), out)
            if self._recovery.in_vain:
                self._selection.give_up_claimed(out)
        elif self._recovery.mending.fragments:
            self._recovery.mend(now_ns, out)
        self._seeding.watch(now_ns, out)
        state = self._state
        if not state.committed:
            self._expected.no_round_is_wanted()
            self._merges.no_round_is_wanted()
            return
        states = state.membership.states()
        self._expected.watch(now_ns, out)
        if MemberState.ACTIVE in states:
            state.book.launch_due(now_ns, out)
            self._stop_when_spent(out)
            if not self.stopping:
                self._merges.watch(now_ns, out)
                return
        elif MemberState.JOINING not in states and (self.stopping or MemberState.AWAY not in states):
            self.book.launch_leftovers(now_ns, out)
            if self.stopping and not self.book.in_flight:
                self._finish(out)
        self._merges.no_round_is_wanted()

    def _finish(self, out: list[SyncerEffect]) -> None:
        """Again for whoever came back afterwards and went (draw 2, seed 1048): the books must close."""
        for member in self.membership.members.values():
            if member.state is not MemberState.LEFT:
                # The run is over: what a learner that is away has not handed over will never be merged.
                self.ledger.set_gone(member.learner, member.generation, True)
        if not self._finished:
            self._finished = True
            out.append(Finished(self.stopping))

    def _stop_when_spent(self, out: list[SyncerEffect]) -> None:
        budget = self.config.tokens_budget
        if not budget or self.stopping or self.ledger.spent < budget:
            return
        if self.config.synchronous and self.book.in_flight:
            return  # the last boundary's merge belongs to the run: learners wait for it
        self._stop(f"the run's budget of {budget} tokens is processed", out)

    # ------------------------------------------------------------ sessions

    def _open(self, event: SessionOpened, now_ns: int, out: list[SyncerEffect]) -> None:
        hello, session = event.hello, event.session
        refusal = self._check_epoch(hello, out) or self._hellos.check(event, self.stopping, now_ns, out)
        if refusal is not None:
            out += [ToLearner(session, refusal), EndSession(session, refusal.detail)]
            again = refusal.code in (Refusal.BUSY, Refusal.STALE_EPOCH)  # it says hello every few seconds
            if refusal.code != Refusal.TENSORS and (not again or self._beginning.is_news(refusal.detail)):
                out.append(warned(refusal.detail))
            return
        known = self.membership.members.get(hello.learner)
        silent_ns = 0
        if known is not None and known.connected:
            silent_ns = now_ns - known.heard_ns
            _replace_session(known, hello, out)
            self.book.learner_gone(known.learner, now_ns, out)
        member, fenced = self._hellos.admit(event, now_ns)
        seed = not self._selection.begun
        if seed:
            self._seeding.ask(member)
        out.append(ToLearner(session, self._state.welcome(member, seed=seed)))
        out.append(changed(member, "joined" if fenced is None else "a newer process took over", silent_ns))
        self._hellos.compare_frozen(hello, out)
        self._recovery.hear(hello, claimed=self._hellos.claimed(hello) > 0, now_ns=now_ns)
        if self.committed and not self._recovery.must_wait_for_clock(member):
            self._begin_with([member], out)

    def _check_epoch(self, hello: Hello, out: list[SyncerEffect]) -> Refused | None:
        """A learner that says it was welcomed by a newer syncer of this run is refused for the time being: it goes on
        with that one, or comes back. If there is one, the disk knows; so that is looked at, and the snapshot location
        is watched anyhow. What learners say ends no syncer, however many say it: ids are free."""
        if hello.run != self.run or hello.epoch <= self.epoch:
            return None
        out.append(LookForNewer())
        detail = (
            f"learner {hello.learner!r} says that a newer syncer of this run has welcomed it (epoch {hello.epoch}, "
            f"this one is {self.epoch}); this one ends if its disk or snapshots say so, too. If there is no newer one, "
            "restart that learner"
        )
        return Refused(Refusal.STALE_EPOCH, detail)

    def _begin_with(self, members: list[Member], out: list[SyncerEffect]) -> None:
        """The run goes on, or begins, for these learners: what became of their contributions, then where the run is."""
        for member in members:
            hello = self._state.hellos.get(member.learner)
            if not self._recovery.may_begin(member, hello):
                continue
            self._state.hellos.pop(member.learner, None)
            if hello is not None:
                self._recovery.tell_fates(member, hello, out)
                member.recovered = False
            start = replace(self._state.start(), away=tuple(sorted(self._recovery.away)))
            member.start_step = start.step
            out.append(ToLearner(member.session, start))
            if hello is not None:
                self._selection.reseed(member, hello, out)

    def _closed(self, event: SessionClosed, now_ns: int, out: list[SyncerEffect]) -> None:
        member = self.membership.disconnect(event.session, now_ns)
        if member is not None and member.state is MemberState.AWAY:
            out.append(changed(member, event.reason, now_ns - member.heard_ns))
            self._gone(member, now_ns, out)

    def _gone(self, member: Member, now_ns: int, out: list[SyncerEffect]) -> None:
        """Nobody waits for this learner any more, nor for what it was to bring."""
        self.book.learner_gone(member.learner, now_ns, out)
        self._handoff.gone(member.learner, out)
        self._begin_with(self._recovery.gone(member.learner), out)
        self._seeding.gone(member.learner, out)

    def _end_for(self, member: Member, code: Refusal, what: str, out: list[SyncerEffect]) -> None:
        detail = f"learner {member.learner!r} (generation {member.generation}) {what}; restart that process"
        out += [ToLearner(member.session, Refused(code, detail)), EndSession(member.session, detail)]
        out.append(warned(detail))

    # ------------------------------------------------------------ control messages

    def _message(self, event: FromLearner, now_ns: int, out: list[SyncerEffect]) -> None:
        member = self._state.membership.by_session(event.session)
        if member is None:
            return
        member.heard_ns = now_ns
        if member.quiet:
            self.book.take_in(member, "heard again", out)
        match event.message:
            case Progress() as message:
                wrong = self._progress.take(member, message, now_ns, out)
                if wrong:
                    self._end_for(member, Refusal.COUNTERS, f"progress reported {wrong}", out)
            case Ready() as message:
                self._ready(member, message, now_ns, out)
            case Nothing() as message:
                if 0 <= message.fragment < self.config.fragments:
                    self.book.answer_nothing(member.learner, message, now_ns, out)
            case Leave() as message:
                self._leave(member, message, now_ns, out)
            case DataReport() as message:
                self._data_report(member, message, now_ns, out)
            case Hello() | InlinePush() as message:
                # A second Hello; or a contribution, which the shell takes out before it comes here.
                out.append(EndSession(event.session, f"unexpected {type(message).__name__} in an open session"))
            case message:
                assert_never(message)

    def _ready(self, member: Member, message: Ready, now_ns: int, out: list[SyncerEffect]) -> None:
        if not self.committed or len(message.bases) != self.config.fragments:
            self._end_for(member, Refusal.NOT_READY, "said ready before committed state was adopted", out)
            return
        wrong = self._progress.ready(member, message, now_ns, past=self._selection.has_past)
        if wrong:
            self._end_for(member, Refusal.COUNTERS, f"said ready at {wrong}", out)
            return
        back = not member.newcomer and self._recovery.source == FROM_LEARNERS
        self.membership.activate(member, now_ns, trusted=back)
        if self._recovery.holders:
            self._begin_with(self._recovery.hear_clock(message), out)
        out.append(changed(member, f"ready at step {message.step}"))
        self._progress.tell_upcoming(member, out)
        if self.stopping or member.dismissed:
            out.append(ToLearner(member.session, Stop(self.stopping or member.dismissed)))
        elif member.wants_inner and message.step > 0:
            self._handoff.offer(member, now_ns, out)
        member.wants_inner = False  # at step 0 nobody has made any inner state yet

    def _leave(self, member: Member, message: Leave, now_ns: int, out: list[SyncerEffect]) -> None:
        self.membership.mark(member, MemberState.LEFT)
        out.append(changed(member, message.reason))
        held = tuple(self.book.held_of(member.learner, member.generation))
        processed = self.ledger.account(member.learner, member.generation).processed
        out.append(KeepHeld(member.session, held, processed))
        self.membership.disconnect(member.session, now_ns)
        self._state.retire(member)
        self._state.remember_member(member)
        self.leases.release(member.learner)
        self._gone(member, now_ns, out)

    def _data_report(self, member: Member, message: DataReport, now_ns: int, out: list[SyncerEffect]) -> None:
        member.reports = min(REPORTS_BURST, member.reports + (now_ns - member.reports_ns) / REPORT_NS)
        member.reports_ns = now_ns
        if member.reports < 1.0:
            return  # as if it were lost: the next one says it again
        member.reports -= 1.0
        try:
            answer = self.leases.report(member.learner, member.generation, message)
        except AtollError as error:
            self._end_for(member, Refusal.BAD_REQUEST, f"asked for data that this run does not have: {error}", out)
            return
        out.append(ToLearner(member.session, answer))

    # ------------------------------------------------------------ bulk

    def _push_opened(self, header: PushHeader, now_ns: int, out: list[SyncerEffect]) -> None:
        refusal = self.check_sender(header.learner, header.generation, header.secret)
        if refusal is None:
            # Only what comes from the learner itself is a sign of its life, or an answer that a round waits for.
            self.membership.members[header.learner].heard_ns = now_ns
            refusal = self._check_push(header, now_ns)
            if refusal is not None:
                self._not_given(header, refusal, now_ns, out)
        out.append(Answer(refusal or PushReply(accepted=True)))

    def _check_push(self, header: PushHeader, now_ns: int) -> PushReply | None:
        push = meaning_of(header)
        if isinstance(push, InnerPiece):
            return self._handoff.check(push)
        if self.layout is None or not 0 <= push.fragment < self.config.fragments:
            who = f"learner {push.learner!r}, fragment {push.fragment}"
            return PushReply(False, Refusal.UNKNOWN_FRAGMENT, f"{who}: this run has no such fragment")
        match push:
            case HealedVersion():
                return self._recovery.check(push)
            case SeedPart():
                return self._seeding.check(push)
            case PushHeader() if self.healing is not None:
                who = f"learner {push.learner!r}, fragment {push.fragment}"
                return PushReply(False, Refusal.BUSY, f"{who}: the syncer is collecting what it lost; send it again")
            case PushHeader():
                return self._contributions.check(push, now_ns)
            case _:
                assert_never(push)

    def _push_completed(self, event: PushCompleted, now_ns: int, out: list[SyncerEffect]) -> None:
        header = event.header
        wrong = self.check_sender(header.learner, header.generation, header.secret)
        refusal = wrong or self._check_push(header, now_ns) or self._contributions.check_values(event)
        push = meaning_of(header)
        if refusal is None and isinstance(push, HealedVersion):
            refusal = self._recovery.check_values(push, event.norm)
        if refusal is not None:
            self._contributions.refuse(event, refusal, out)
            if wrong is None:
                self._not_given(header, refusal, now_ns, out)
            return
        match push:
            case PushHeader():
                self._contributions.accept(event, now_ns, out)
            case SeedPart():
                self._seeding.take(push, out)
            case HealedVersion():
                self._recovery.take(push, out)
            case InnerPiece():
                self._handoff.take(push, now_ns, out)
            case _:
                assert_never(push)

    def _not_given(self, header: PushHeader, refusal: PushReply, now_ns: int, out: list[SyncerEffect]) -> None:
        """Whoever waits for this push need not wait for it any more."""
        if header.kind is PushKind.HEAL:
            self._recovery.reject(HealedVersion.of(header))
        self._contributions.answer_for(header, refusal, now_ns, out)

    def check_sender(self, learner: str, generation: int, secret: str) -> PushReply | None:
        """None if a push or fetch comes from the process in whose name it comes."""
        return check_sender(self.membership.members.get(learner), learner, generation, secret)

    def of_session(self, session: int, header: PushHeader) -> PushHeader | PushReply:
        """A push that came inside a session needs no secret: the session itself says whose it is. A refusal, if that
        is not in whose name it came."""
        member = self.membership.by_session(session)
        if member is None or member.learner != header.learner:
            whose = f"learner {member.learner!r}" if member is not None else "nobody"
            detail = f"a contribution of learner {header.learner!r} in the session of {whose}; each sends its own"
            return PushReply(False, Refusal.NOT_ALLOWED if member is not None else Refusal.UNKNOWN_LEARNER, detail)
        return replace(header, secret=member.secret)

    def _current(self, learner: str, generation: int) -> Member | None:
        """This learner, if this generation is its newest."""
        member = self.membership.members.get(learner)
        return member if member is not None and member.generation == generation else None

    # ------------------------------------------------------------ stop and time

    def _stop(self, reason: str, out: list[SyncerEffect]) -> None:
        if self.stopping:
            return
        self.stopping = reason
        self.book.ending = len(self.membership.active())
        out += [ToLearner(member.session, Stop(reason)) for member in self.membership.connected()]

    def _ask_to_leave(self, learner: str, out: list[SyncerEffect]) -> None:
        """One that is away is told when it is back; a new process under the same id was not asked."""
        member = self.membership.members.get(learner)
        if member is None or member.state is MemberState.LEFT:
            return
        member.dismissed = ASKED_TO_LEAVE
        if member.connected:
            out.append(ToLearner(member.session, Stop(member.dismissed)))

    def _revoke(self, event: KeyRevoked, out: list[SyncerEffect]) -> None:
        """What was taken from it before stays; from here on nothing is."""
        member = self.membership.members.get(event.learner)
        if member is not None and not member.revoked:
            member.revoked = event.detail
            out.append(warned(event.detail))
            if member.connected:
                refused = Refused(Refusal.KEY_REVOKED, event.detail)
                out += [ToLearner(member.session, refused), EndSession(member.session, event.detail)]

    def _expire(self, now_ns: int, out: list[SyncerEffect]) -> None:
        self._silence.look_again()
        self._handoff.expire(now_ns, out)
        for _, member in sorted(self.membership.members.items()):
            silence = self._silence.judge(member, now_ns)
            if silence is Silence.NOTHING:
                continue
            silent_ns = now_ns - member.heard_ns
            match silence:
                case Silence.QUIET:
                    self.book.set_aside(member, f"silent for {QUIET_NS / 1e9:g} s", now_ns, out, quiet=True)
                case Silence.AWAY:
                    reason = f"silent for {self._silence.lease_ns(member) / 1e9:g} s"
                    self.membership.mark(member, MemberState.AWAY)
                    member.away_ns = now_ns
                    out.append(changed(member, reason, silent_ns))
                    self._gone(member, now_ns, out)
                case Silence.LOST:
                    self._lost(member, out)
                case Silence.UNPROVEN:
                    self.membership.end_patience(member)
                    self.book.tick(now_ns, out)
                case Silence.DEAF:
                    _end_deaf(member, out)
                case _:
                    assert_never(silence)

    def _lost(self, member: Member, out: list[SyncerEffect]) -> None:
        self.membership.mark(member, MemberState.LOST)
        self.ledger.set_gone(member.learner, member.generation, True)
        self.leases.release(member.learner)
        self._state.remember_member(member)
        out.append(changed(member, f"away for {self.config.lost_after_ns / 1e9:g} s"))

    # ------------------------------------------------------------ looking in

    @property
    def config(self) -> SyncConfig:
        """The run's settings; complete once the first learner has said what the model looks like."""
        return self._state.config

    @property
    def run(self) -> str:
        return self._state.run

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def layout(self) -> Layout | None:
        return self._state.layout

    @property
    def membership(self) -> Membership:
        return self._state.membership

    @property
    def ledger(self) -> Ledger:
        return self._state.ledger

    @property
    def book(self) -> RoundScheduler:
        return self._state.book

    @property
    def leases(self) -> LeaseBook:
        return self._state.leases

    @property
    def committed(self) -> bool:
        """True once version 0 exists, and again after a restart once nothing newer can be had from learners."""
        return self._state.committed

    @property
    def inner_slots(self) -> InnerSlots:
        return self._handoff.inner_slots

    @property
    def healing(self) -> Healing | None:
        """Set from a restart until it is clear that no learner holds anything newer."""
        return self._recovery.healing

    @property
    def recovered_from(self) -> str:
        return self._recovery.source

    @property
    def waits(self) -> str:
        """What the operator should know while the run cannot begin or a learner cannot be taken in."""
        return self._recovery.waits or self._beginning.waits

    @property
    def waits_unsaid(self) -> str:
        """The same, but for what was said when the syncer began."""
        return self._recovery.waits or self._beginning.unsaid

    @property
    def stalled(self) -> str:
        """Who keeps rounds from closing, once that has lasted for a while."""
        return self._merges.text

    def rows(self) -> dict[str, Any]:
        """All facts as they stand, for a snapshot."""
        return self._state.rows()

    def fragment_record(self, fragment: int) -> FragmentRecord:
        """The fragment's durable record as things stand; no merge of it may be under way."""
        return self._state.fragment_record(fragment)

    def record_after_merge(self, fragment: int, checksum: int) -> FragmentRecord:
        """The record that goes to disk with the merge that is under way."""
        return self._state.record_after_merge(fragment, checksum)

    def record_after_heal(self, fragment: int, version: int, checksum: int) -> FragmentRecord:
        """The record that goes to disk with a version that a learner brought back."""
        return {**self._state.fragment_record(fragment), "version": version, "checksum": checksum}

    def holds(self, identity: ContributionId) -> bool:
        """True while this contribution waits for a round, is in one, or is being merged."""
        return self.book.holds(identity)

    def keeps(self, identity: ContributionId) -> bool:
        """True while the payload of this contribution is needed: it is held, or later ones are compared with it."""
        return self.book.holds(identity) or self.book.agreement.is_witness(identity)

    def keeps_up(self, session: int, fragment: int, version: int) -> bool:
        """True if the update that leads to `version` may travel with its notice: this learner trains, and has adopted
        the version before it. So at most one update of a fragment is on its way, and none stands in front of requests
        on a link that is too thin for them; whoever is behind fetches what it needs when it needs it."""
        member = self.membership.by_session(session)
        if member is None or member.state is not MemberState.ACTIVE or len(member.bases) <= fragment:
            return False
        return member.bases[fragment] >= version - 1

    def learner_of(self, session: int) -> str:
        """Whose session this is; empty if nobody's."""
        member = self.membership.by_session(session)
        return member.learner if member is not None else ""

    def is_aside(self, learner: str) -> bool:
        """True if rounds do not wait for this learner although it is heard of."""
        member = self.membership.members.get(learner)
        return member is not None and bool(member.aside) and not member.quiet

    def inner_slot(self, slot: int, learner: str, generation: int) -> InnerSlot | None:
        """The hand-over of inner state from which this joiner may fetch."""
        return self.inner_slots.to_joiner(slot, learner, generation)

    @property
    def inner_slots_open(self) -> Set[int]:
        """Hand-overs of inner state that are under way."""
        return self.inner_slots.open.keys()

    def step_ns(self) -> float:
        """What a step of this run takes."""
        return self.book.step_ns()

    @property
    def rounds_started(self) -> int:
        return self.book.rounds_started

    @property
    def idle(self) -> bool:
        """True while no round is open and no merge is under way."""
        return not self.book.in_flight

    @property
    def versions(self) -> list[int]:
        """The newest committed one of each fragment."""
        return [track.version for track in self.book.tracks]

    @property
    def published(self) -> list[tuple[int, int]]:
        """Version and checksum of each fragment."""
        return [(track.version, track.checksum) for track in self.book.tracks]

    def fragment_totals(self, fragment: int) -> Totals:
        """The exact line of one fragment in the ledger."""
        return self.ledger.fragment_totals(fragment)

    def processed_by(self, member: Member) -> int:
        """Tokens that this learner's newest process is known to have processed."""
        return self.ledger.account(member.learner, member.generation).processed

    def merges(self, merge: Merge) -> bool:
        """True while this merge is under way."""
        return self.book.merges(merge)

    def merging(self, fragment: int) -> list[ContributionRecord]:
        """What is in the merge of this fragment that is under way."""
        return self.book.merging(fragment)

    def merging_discounts(self, fragment: int) -> list[tuple[int, float]]:
        """Of each of those: its age in versions, and what that, its way, its length and the run's end leave of its
        weight."""
        track, items = self.book.tracks[fragment], self.book.merging(fragment)
        return [(track.age(item), discount) for item, discount in zip(items, track.discounts, strict=True)]

    def is_down(self, fragment: int) -> bool:
        """True while the shard of this fragment is away."""
        return fragment in self.book.down

    def is_busy(self, fragment: int) -> bool:
        """True while a round of this fragment is open, or its merge under way."""
        return self.book.tracks[fragment].busy

    @property
    def is_healing(self) -> bool:
        """True while learners are asked for what this syncer does not have."""
        return self.healing is not None

    @property
    def away_since_start(self) -> frozenset[int]:
        """Fragments of which this syncer knows nothing: their shard was not there when it began."""
        return self._recovery.away

    def mends_in_vain(self, now_ns: int) -> bool:
        """True if a shard came back without a version that nobody who is there holds."""
        return self._recovery.mending.in_vain(now_ns)

    @property
    def members(self) -> Mapping[str, Member]:
        """Everybody who is or was in the run, by id. To be looked at only."""
        return self.membership.members

    @property
    def member_states(self) -> frozenset[MemberState]:
        """The states that there are."""
        return self.membership.states()

    def data_status(self) -> dict[str, Any]:
        """What has become of the chunks of each stream of data."""
        return self.leases.status()

    def data_fate(self, stream: str, chunk: int) -> str:
        """What became of one chunk."""
        return self.leases.fate(stream, chunk)[0]

    def data_lost(self, stream: str) -> int:
        """Chunks of this stream that were in the hands of learners that are lost."""
        return self.leases.lost(stream)

    def stats(self) -> dict[str, Any]:
        """The fields of a SyncerStats event that the machine knows."""
        totals = self.ledger.totals()
        return {
            "clock_step": self.book.clock_last,
            "active": len(self.membership.active()),
            "commits": self.book.commits,
            "rounds_open": self.book.in_flight,
            "contributions_merged": self.book.contributions_merged,
            "contributions_late": self.book.contributions_late,
            "tokens_processed": totals.processed,
            "tokens_merged": totals.merged,
            "tokens_pending": totals.pending,
            "tokens_discarded": totals.discarded,
            "tokens_spent": self.ledger.spent,
        }


def _replace_session(known: Member, hello: Hello, out: list[SyncerEffect]) -> None:
    """The id has an open session: the same process lost it without our noticing, or another process took the id."""
    if known.instance != hello.instance:
        detail = (
            f"another process joined as learner {hello.learner!r}, so this one may no longer contribute; "
            "give each learner its own id"
        )
        out.append(ToLearner(known.session, Refused(Refusal.FENCED, detail)))
    out.append(EndSession(known.session, "replaced by a newer session"))


def _end_deaf(member: Member, out: list[SyncerEffect]) -> None:
    member.behind_ns = 0
    detail = f"learner {member.learner!r} steps on but adopts nothing that was published; say hello again"
    out += [ToLearner(member.session, Refused(Refusal.BUSY, detail)), EndSession(member.session, detail)]
    out.append(warned(detail))
