"""The syncer as a pure machine: `handle(input, now_ns) -> effects`.

It decides who is in, when a fragment is due, what enters a merge and with which weight, what is refused and why, and
what each learner is told. It never sees parameters: the shell keeps payloads by ContributionId, merges when told to,
and comes back with MergeFinished. Publishing follows the commit, never the other way round (invariant I4).
"""

from __future__ import annotations

from typing import Any

from atoll.core.admission import check_contribution, check_hello, check_settings
from atoll.core.beginning import Begin
from atoll.core.config import SECOND_NS, SyncConfig, parse_quorum
from atoll.core.effects import (
    Answer,
    CommitHealed,
    CommitSeed,
    EndSession,
    Fenced,
    FetchOpened,
    Finished,
    FromLearner,
    HealCommitted,
    KeepHeld,
    LeaveAsked,
    MergeFinished,
    Note,
    PushCompleted,
    PushOpened,
    RelayTaken,
    SeedCommitted,
    SessionClosed,
    SessionOpened,
    StopRequested,
    SyncerEffect,
    SyncerInput,
    Tick,
    ToLearner,
)
from atoll.core.layout import build_layout, elements_of
from atoll.core.membership import CLAIMED_MAX, Member, MemberState
from atoll.core.messages import (
    ASKED_TO_LEAVE,
    NO_VERSION,
    PROTOCOL_VERSION,
    STEP_MAX,
    DataReport,
    Discard,
    Fate,
    Hello,
    Leave,
    Nothing,
    Outstanding,
    Progress,
    PushHeader,
    PushKind,
    PushReply,
    Ready,
    Refusal,
    Refused,
    Reseed,
    Stop,
    Upcoming,
    Welcome,
)
from atoll.core.policy import NORMS_KEPT, fragments_for, moving_average, norm_limit, upcoming_steps
from atoll.core.ranks import rank_of
from atoll.core.relays import INNER_PROTOCOL
from atoll.core.rounds import Contribution, ContributionId, FragmentTrack
from atoll.core.syncer_begin import SyncerBegin
from atoll.core.twins import EQUAL_IN_A_ROW, Twins
from atoll.errors import LayoutError

SEED_SILENCE_NS = 600 * SECOND_NS
"""How long one fragment of the seed may take: 750 MB at 10 Mbit/s. A dead connection is noticed much earlier."""

OUTLIERS_IN_A_ROW = 4
"""How many contributions to a fragment, with none accepted between them, are refused as outliers before the guard may
take it for a change of scale."""
OUTLIERS_EACH = 2
"""How many of those each of most learners must have had: the second after it was given the run's own state again."""

QUIET_NS = 6 * SECOND_NS
"""A learner says something every 2 s, whatever the length of its step. One that has missed three of those is no longer
counted on: a step that it reported long ago must not hold the clock until its lease is over."""
SHORT_SAY_NS = 10 * SECOND_NS
"""Too few learners for a round, for longer than it takes to start some: a person should know."""
SHORT_WAIT_NS = 60 * SECOND_NS
"""From then on those who are here go on without those who were expected (unless everybody's answer is asked for)."""

RANK_PROTOCOL = 2
"""The protocol whose Welcome knows ranks."""

DEAF_STEPS = 4
"""A learner adopts at step boundaries: one that takes this many of them past a published version does not hear."""

THIN_LINK_NS = 3200
"""What one parameter (fp32) takes at 10 Mbit/s: a learner that fetches everything whole adopts nothing for so long."""
THINNEST_LINK_NS = 2_000_000
"""The same at 16 kbit/s, below which a link is called dead: for the fragment that a learner is known to be fetching."""


class SyncerMachine(SyncerBegin):
    def __init__(self, config: SyncConfig, run: str, epoch: int = 1, begin: Begin | None = None) -> None:
        super().__init__(config, run, epoch, begin)
        self._finished = False
        self._lease_wake_ns = -1
        self._lease_wake_at = -1
        self._short_ns = -1
        """Since when there are learners, but too few of those who are expected for a round; -1: there are enough."""
        self._short_said = 0
        self._twins = Twins()

    # ------------------------------------------------------------ the one entrance

    def handle(self, event: SyncerInput, now_ns: int) -> list[SyncerEffect]:
        out: list[SyncerEffect] = []
        if isinstance(event, SessionOpened):
            self._open(event, now_ns, out)
        elif isinstance(event, FromLearner):
            self._message(event, now_ns, out)
        elif isinstance(event, PushOpened):
            refusal = self._check_push(event.header)
            if refusal is not None and event.header.kind is PushKind.HEAL and self.healing is not None:
                self.healing.reject(event.header.fragment, event.header.learner)
            if refusal is not None:
                self._no_contribution(event.header, refusal, now_ns, out)
            sender = self.membership.members.get(event.header.learner)
            if sender is not None and sender.generation == event.header.generation:
                sender.heard_ns = now_ns
            out.append(Answer(refusal or PushReply(accepted=True)))
            return self._remembered(out)
        elif isinstance(event, PushCompleted):
            self._complete(event, now_ns, out)
        elif isinstance(event, SeedCommitted):
            self._seed_committed(event.checksums, out)
        elif isinstance(event, MergeFinished):
            self._merge_finished(event, now_ns, out)
        elif isinstance(event, HealCommitted):
            self._heal_committed(event, out)
        elif isinstance(event, RelayTaken):
            self._relay_taken(event, now_ns, out)
        elif isinstance(event, FetchOpened):
            member = self.membership.members.get(event.learner)
            if member is not None and member.generation == event.generation:
                member.fetch_ns = now_ns
            return []
        elif isinstance(event, SessionClosed):
            self._closed(event, now_ns, out)
        elif isinstance(event, StopRequested):
            self._stop(event.reason, out)
        elif isinstance(event, LeaveAsked):
            self._ask_to_leave(event.learner, out)
        elif isinstance(event, Tick):
            self._expire(now_ns, out)
            self.book.tick(now_ns, out)
        self._heal(now_ns, out)
        self._watch_seed(now_ns, out)
        self._pump(now_ns, out)
        return self._remembered(out)

    def next_wake_ns(self) -> int | None:
        """When to send the next Tick, if nothing else happens before."""
        known = (self.book.next_wake_ns(), self.relays.next_wake_ns(), self._seed_wake_ns())
        wakes = [wake for wake in known if wake is not None]
        if self.healing is not None and (healing_ns := self.healing.next_wake_ns()) is not None:
            wakes.append(healing_ns)
        if self._lease_wake_at != self.membership.stamp:
            self._lease_wake_at = self.membership.stamp
            self._lease_wake_ns = self._next_lease_ns()
        if self._lease_wake_ns >= 0:
            wakes.append(self._lease_wake_ns)
        if self._short_ns >= 0 and self._short_said < 2:
            wakes.append(self._short_ns + (SHORT_WAIT_NS if self._short_said else SHORT_SAY_NS))
        return min(wakes) if wakes else None

    def _next_lease_ns(self) -> int:
        """When the first member's time runs out, if nothing is heard; -1 for none. Whoever is heard meanwhile has more
        time, so this stays good (if early) until somebody's state changes or a Tick has looked at everybody."""
        leased = [m.heard_ns + self._silence_ns(m) for m in self.membership.members.values() if self._on_lease(m)]
        away = [m.away_ns for m in self.membership.members.values() if m.state is MemberState.AWAY]
        return min([*leased, *(away_ns + self.config.lost_after_ns for away_ns in away)], default=-1)

    def _pump(self, now_ns: int, out: list[SyncerEffect]) -> None:
        """What follows from any change: stop when the budget is spent, launch what is due, merge leftovers, finish."""
        if not self.committed or self._fenced:
            return
        states = self.membership.states()
        self._wait_for_expected(now_ns, out)
        if MemberState.ACTIVE in states:
            self.book.launch_due(now_ns, out)
            self._stop_when_spent(out)
        elif MemberState.JOINING not in states and (self.stopping or MemberState.AWAY not in states):
            self.book.launch_leftovers(now_ns, out)
            if self.stopping and not self._finished and not self.book.in_flight:
                self._finished = True
                for member in self.membership.members.values():
                    if member.state is not MemberState.LEFT:
                        # The run is over: what a learner that is away has not handed over will never be merged.
                        self.ledger.set_gone(member.learner, member.generation, True)
                out.append(Finished(self.stopping))

    def _wait_for_expected(self, now_ns: int, out: list[SyncerEffect]) -> None:
        """Too few have come for a round: say so, and after a while go on without the others."""
        if not self.book.waits_for_expected():
            self._short_ns, self._short_said = -1, 0
            return
        self._short_ns = now_ns if self._short_ns < 0 else self._short_ns
        waited_ns, here = now_ns - self._short_ns, self.membership.counted()
        if waited_ns < (SHORT_WAIT_NS if self._short_said else SHORT_SAY_NS) or self._short_said >= 2:
            return
        needed, expected = self.book.quorum(), self.config.learners_expected
        text = (
            f"{here} of {expected} expected learners are here, and a round needs {needed} (quorum "
            f"{self.config.quorum}): nothing is merged yet"
        )
        self._short_said += 1
        share = parse_quorum(self.config.quorum)[1]
        if self._short_said == 2 and 0.0 < share < 1.0:
            self.book.waive_expected()
            text += "; the run goes on with those who are here, and takes the others in when they come"
        else:
            text += "; start the others, or a syncer that expects fewer (--learners, --quorum)"
        out.append(Note("Warned", {"source": "syncer", "text": text}))

    def _stop_when_spent(self, out: list[SyncerEffect]) -> None:
        budget = self.config.tokens_budget
        if not budget or self.stopping or self.ledger.processed < budget:
            return
        if self.config.synchronous and self.book.in_flight:
            return  # the last boundary's merge belongs to the run: learners wait for it
        self._stop(f"the run's budget of {budget} tokens is processed", out)

    # ------------------------------------------------------------ sessions

    def _open(self, event: SessionOpened, now_ns: int, out: list[SyncerEffect]) -> None:
        hello, session = event.hello, event.session
        refusal = self._check_hello(hello, now_ns, out)
        if refusal is not None:
            out += [ToLearner(session, refusal), EndSession(session, refusal.detail)]
            if refusal.code != Refusal.BUSY or self._is_news(refusal.detail):
                out.append(Note("Warned", {"source": "syncer", "text": refusal.detail}))
            if self._fenced:
                out.append(Fenced(self._fenced))
            return
        assert self.layout is not None
        known = self.membership.members.get(hello.learner)
        silent_ns = 0
        if known is not None and known.connected:
            silent_ns = now_ns - known.heard_ns
            self._replace_session(known, hello, out)
            self.book.learner_gone(known.learner, now_ns, out)
        claimed = hello.generation if hello.run == self.run and hello.generation <= CLAIMED_MAX else 0
        member, fenced = self.membership.admit(
            hello.learner, hello.instance, session, now_ns, self.config.fragments, claimed
        )
        member.protocol = min(hello.protocol, PROTOCOL_VERSION)
        if claimed and (fenced is not None or known is None):
            # It was in the run before, and the record that this syncer continues from is older than that.
            member.recovered = member.unbalanced = True
        expected = self.config.learners_expected
        member.rank = rank_of(member, known, self.membership.members.values(), expected)
        member.wants_inner = hello.wants_inner and member.protocol >= INNER_PROTOCOL
        if fenced is not None:
            self._retire(fenced)
            self.leases.release(fenced.learner, before_generation=member.generation)
        self._prune_members()
        self.ledger.set_gone(member.learner, member.generation, False)
        self._remember_member(member)
        self._hellos[member.learner] = hello
        seed = not self.committed and not self._seeder and self.healing is None
        if seed:
            self._seed_with(member)
        out.append(ToLearner(session, self._welcome(member, seed)))
        self._note_member(member, "joined" if fenced is None else "a newer process took over", out, silent_ns)
        self._compare_frozen(hello, out)
        if self.healing is not None:
            self.healing.hear(member.learner, hello.bases if claimed else (), hello.checksums, now_ns)
        if self.committed and not self._must_wait_for_clock(member):
            self._begin_with(member, out)

    def _check_hello(self, hello: Hello, now_ns: int, out: list[SyncerEffect]) -> Refused | None:
        if hello.run == self.run and hello.epoch > self.epoch:
            self._fenced = (
                f"learner {hello.learner!r} was welcomed by a newer syncer of this run (epoch {hello.epoch}, this one "
                f"is {self.epoch}); this one ends, nothing is to be done"
            )
            return Refused(Refusal.STALE_EPOCH, self._fenced)
        fresh = not self.committed and not self._committing and self.healing is None
        if fresh and not self.membership.connected():
            self.layout = None  # whoever fixed it is gone and gave no parameters
        gives_way = self._gives_way(hello)  # then neither its layout nor its members count
        layout, known = (None, None) if gives_way else (self.layout, self.membership.members.get(hello.learner))
        refusal = check_hello(hello, self.run, layout, known) or check_settings(hello, self.config)
        if refusal is not None:
            return refusal
        if self.stopping:
            return Refused(Refusal.CLOSED, f"the run is over ({self.stopping}); start a new one to train on")
        refusal = self._meet(hello, now_ns, out)
        if refusal is not None:
            return refusal
        if self.layout is None:
            try:
                self._fix_layout(hello)
            except LayoutError as error:
                return Refused(Refusal.LAYOUT, str(error))
        return None

    def _fix_layout(self, hello: Hello) -> None:
        parameters = sum(map(elements_of, hello.tensors))
        fragments = self._given.fragments or fragments_for(parameters, self._given.sync_every)
        self._lay_out(build_layout(hello.tensors, fragments))

    def _replace_session(self, known: Member, hello: Hello, out: list[SyncerEffect]) -> None:
        """The id has an open session: the same process lost it without our noticing, or another process took the id."""
        if known.instance != hello.instance:
            detail = (
                f"another process joined as learner {hello.learner!r}, so this one may no longer contribute; "
                "give each learner its own id"
            )
            out.append(ToLearner(known.session, Refused(Refusal.FENCED, detail)))
        out.append(EndSession(known.session, "replaced by a newer session"))

    def _welcome(self, member: Member, seed: bool) -> Welcome:
        assert self.layout is not None
        rank = member.rank if member.protocol >= RANK_PROTOCOL else -1
        place = (self.layout.fingerprint, seed, member.protocol, rank)
        return Welcome(self.run, self.epoch, member.generation, self.config, *place)

    def _begin_with(self, member: Member, out: list[SyncerEffect]) -> None:
        """The run goes on, or begins, for this learner: what became of its contributions, then where the run is."""
        hello = self._hellos.pop(member.learner, None)
        if hello is not None:
            self._tell_fates(member, hello, out)
            member.recovered = False
        out.append(ToLearner(member.session, self._start()))
        if hello is not None:
            self._reseed_from(member, hello, out)

    def _tell_fates(self, member: Member, hello: Hello, out: list[SyncerEffect]) -> None:
        """A learner that was away learns what became of the contributions it could not follow."""
        for item in hello.outstanding:
            if not 0 <= item.fragment < self.config.fragments:
                continue
            identity = ContributionId(member.learner, member.generation, item.fragment, item.seq)
            version = dict(member.merged[item.fragment]).get(item.seq, self._merged_on_tape(identity))
            if version is not None:
                member.seq_seen[item.fragment] = max(member.seq_seen[item.fragment], item.seq)
                out.append(ToLearner(member.session, Fate(item.fragment, item.seq, version, "")))
            elif self.book.holds(identity):
                continue
            elif item.seq <= member.seq_seen[item.fragment] or member.recovered:
                # Received and dropped, or received by an earlier syncer and lost with it: the learner has it still.
                # From here on its number is used up, so that a push of it that is under way cannot come in as well.
                member.seq_seen[item.fragment] = max(member.seq_seen[item.fragment], item.seq)
                out.append(ToLearner(member.session, self._fate_of_lost(member, item)))

    def _fate_of_lost(self, member: Member, item: Outstanding) -> Fate:
        """Of a contribution that this syncer knows nothing of: its learner gives it again. Unless a learner brought the
        fragment back in a version beyond the record of what was merged: then it may be in there."""
        recorded = self._tape_version.get(item.fragment, NO_VERSION)
        if member.recovered and recorded < self._healed.get(item.fragment, NO_VERSION):
            return Fate(item.fragment, item.seq, self.book.tracks[item.fragment].version, Discard.UNCERTAIN)
        return Fate(item.fragment, item.seq, -1, Refusal.UNKNOWN_ROUND)

    def _merged_on_tape(self, identity: ContributionId) -> int | None:
        """The version that holds this contribution, by the tape: a learner may have brought back a version whose column
        was never written."""
        version = self._tape_merged.get(identity)
        return version if version is not None and version <= self.book.tracks[identity.fragment].version else None

    def _closed(self, event: SessionClosed, now_ns: int, out: list[SyncerEffect]) -> None:
        member = self.membership.disconnect(event.session, now_ns)
        if member is None:
            return
        if member.state is MemberState.AWAY:
            self._note_member(member, event.reason, out, now_ns - member.heard_ns)
            self._gone(member, now_ns, out)

    def _gone(self, member: Member, now_ns: int, out: list[SyncerEffect]) -> None:
        self.book.learner_gone(member.learner, now_ns, out)
        for relay in self.relays.of(member.learner):
            self._end_relay(relay, f"learner {member.learner!r} is gone", out)
        if self.healing is not None:
            self.healing.forget(member.learner)
        self._holder_gone(member.learner, out)
        if self._seeder == member.learner and not self.committed and not self._committing:
            self._pass_seed_on(out)

    # ------------------------------------------------------------ control messages

    def _message(self, event: FromLearner, now_ns: int, out: list[SyncerEffect]) -> None:
        member = self.membership.by_session(event.session)
        if member is None:
            return
        member.heard_ns = now_ns
        if member.quiet:
            self.book.take_in(member, "heard again", out)
        message = event.message
        if isinstance(message, Progress):
            self._progress(member, message, now_ns, out)
        elif isinstance(message, Ready):
            self._ready(member, message, now_ns, out)
        elif isinstance(message, Nothing):
            if 0 <= message.fragment < self.config.fragments:
                self.book.answer_nothing(member.learner, message, now_ns, out)
        elif isinstance(message, Leave):
            self.membership.mark(member, MemberState.LEFT)
            self._note_member(member, message.reason, out)
            held = tuple(self.book.held_of(member.learner, member.generation))
            processed = self.ledger.account(member.learner, member.generation).processed
            out.append(KeepHeld(member.session, held, processed))
            self.membership.disconnect(event.session, now_ns)
            self._retire(member)
            self._remember_member(member)
            self.leases.release(member.learner)
            self._gone(member, now_ns, out)
        elif isinstance(message, DataReport):
            self._data_report(member, message, out)
        else:
            out.append(EndSession(event.session, f"unexpected {type(message).__name__} in an open session"))

    def _ready(self, member: Member, message: Ready, now_ns: int, out: list[SyncerEffect]) -> None:
        if not self.committed or len(message.bases) != self.config.fragments:
            self._end_for(member, Refusal.NOT_READY, "said ready before committed state was adopted", out)
            return
        if message.step > STEP_MAX:
            self._end_for(member, Refusal.COUNTERS, "said ready at a step that nobody can have reached", out)
            return
        member.bases, member.behind_ns = message.bases, 0
        self.membership.moved(member, message.step, member.step_ns)
        self.membership.activate(member, now_ns)
        if self._holders:
            self._hear_clock(message, out)
        self._note_member(member, f"ready at step {message.step}", out)
        self._send_upcoming(member, out)
        if self.stopping or member.dismissed:
            out.append(ToLearner(member.session, Stop(self.stopping or member.dismissed)))
        elif member.wants_inner and message.step > 0:
            self._relay_inner(member, now_ns, out)
        member.wants_inner = False  # at step 0 nobody has made any inner state yet

    def _progress(self, member: Member, message: Progress, now_ns: int, out: list[SyncerEffect]) -> None:
        backwards = message.steps < member.steps or message.tokens < member.tokens or message.step < member.step
        foreign = len(message.bases) != self.config.fragments
        unknown = any(not 0 <= d.fragment < self.config.fragments for d in message.discarded)
        beyond = message.step > STEP_MAX
        if backwards or foreign or unknown or beyond:
            what = "fragments that this run does not have" if foreign or unknown else "counters that cannot be"
            what = "counters that go backwards" if backwards else what
            self._end_for(member, Refusal.COUNTERS, f"progress reported {what}", out)
            return
        if member.state is MemberState.AWAY and member.bases:
            self.membership.activate(member, now_ns)  # it was only silent, its session never broke
            self._note_member(member, "heard again", out)
        elif member.state is MemberState.LOST and member.bases:
            self.ledger.set_gone(member.learner, member.generation, False)
            self.membership.activate(member, now_ns)
            self._remember_member(member)
            self._note_member(member, "came back", out)
        member.steps, member.tokens = message.steps, message.tokens
        if message.bases != member.bases:
            member.behind_ns = 0
        member.loss, member.bases = message.loss, message.bases
        if (pair := self._twins.report(member.learner, message.step, message.loss)) is not None:
            self._warn_of_twins(*pair, out)
        step_ns = moving_average(member.step_ns, float(message.step_ns)) if message.step_ns > 0 else member.step_ns
        self.membership.moved(member, message.step, step_ns)
        account = self.ledger.account(member.learner, member.generation)
        account.report(message.tokens, message.discarded)
        current = message.tokens >= account.processed  # not overtaken by a contribution, which implies a later count
        active = self.committed and member.state is MemberState.ACTIVE
        if member.unbalanced and message.pending and current and active:
            self._balance(member, message.pending)
        self._send_upcoming(member, out)

    def _warn_of_twins(self, one: str, other: str, out: list[SyncerEffect]) -> None:
        text = (
            f"learners {one!r} and {other!r} report {EQUAL_IN_A_ROW} losses in a row that are equal to the last digit, "
            "so that they seem to read the same data; choose it by learner.rank (or ATOLL_RANK, which must differ), or "
            "share it out with atoll.data"
        )
        out.append(Note("Warned", {"source": "syncer", "text": text}))

    def _send_upcoming(self, member: Member, out: list[SyncerEffect]) -> None:
        upcoming = self.book.upcoming(upcoming_steps(member.step_ns, self.book.step_ns()))
        if upcoming != member.upcoming and member.connected:
            member.upcoming = upcoming
            out.append(ToLearner(member.session, Upcoming(upcoming)))

    # ------------------------------------------------------------ bulk

    def _check_push(self, header: PushHeader) -> PushReply | None:
        who = f"learner {header.learner!r}, fragment {header.fragment}"
        if self._fenced:
            return PushReply(False, Refusal.STALE_EPOCH, self._fenced)
        if header.kind is PushKind.INNER:
            return self._check_inner(header)
        if self.layout is None or not 0 <= header.fragment < self.config.fragments:
            return PushReply(False, Refusal.UNKNOWN_FRAGMENT, f"{who}: this run has no such fragment")
        if header.kind is PushKind.HEAL:
            return self._check_heal(header)
        if header.kind is PushKind.SEED:
            if self.committed or self._committing or header.learner != self._seeder:
                return PushReply(False, Refusal.NOT_READY, f"{who}: not asked for the first parameters")
            if header.codec != "fp32":
                return PushReply(False, Refusal.CODEC, f"{who}: the first parameters must be sent as fp32")
            return None
        if self.healing is not None:
            return PushReply(False, Refusal.BUSY, f"{who}: the syncer is collecting what it lost; send it again")
        if not self.committed:
            return PushReply(False, Refusal.NOT_READY, f"{who}: the run has no committed state yet")
        member = self.membership.members.get(header.learner)
        track = self.book.tracks[header.fragment]
        return check_contribution(header, self.config, member, track, self.book.rounds_started)

    def _complete(self, event: PushCompleted, now_ns: int, out: list[SyncerEffect]) -> None:
        header = event.header
        refusal = self._check_push(header) or self._check_values(event)
        if refusal is not None:
            if header.kind is PushKind.HEAL and self.healing is not None:
                self.healing.reject(header.fragment, header.learner)
            self._refuse_push(event, refusal, out)
            self._no_contribution(header, refusal, now_ns, out)
            return
        if header.kind is PushKind.SEED:
            self._seeds.add(header.fragment)
            out.append(Answer(PushReply(accepted=True)))
            if len(self._seeds) == self.config.fragments:
                self._committing = True
                self._remember_run(seeded=False)
                out.append(CommitSeed())
            return
        if header.kind is PushKind.HEAL:
            assert self.healing is not None
            self.healing.take(header.fragment, header.learner)
            self.book.drop_handed(header.fragment, header.base_version, out)
            out.append(Answer(PushReply(accepted=True)))
            out.append(CommitHealed(header.fragment, header.base_version, header.checksum))
        elif header.kind is PushKind.INNER:
            self._inner_piece(header, now_ns, out)
        else:
            self._accept(event, now_ns, out)

    def _accept(self, event: PushCompleted, now_ns: int, out: list[SyncerEffect]) -> None:
        header = event.header
        member = self.membership.members[header.learner]
        member.heard_ns = now_ns
        member.seq_seen[header.fragment] = header.seq
        track = self.book.tracks[header.fragment]
        late = header.round > 0 and (track.round is None or track.round.number != header.round)
        identity = ContributionId(header.learner, header.generation, header.fragment, header.seq)
        contribution = Contribution(
            identity, header.round, header.base_version, header.steps, header.tokens, header.size, event.norm, late
        )
        track.outliers.clear()
        self.ledger.hold(header.learner, header.generation, header.fragment, header.tokens)
        out.append(Answer(PushReply(accepted=True, late=late)))
        fields = {name: getattr(header, name) for name in ("round", "fragment", "learner", "generation", "seq")}
        fields |= {
            "steps": header.steps,
            "tokens": header.tokens,
            "bytes": header.size,
            "norm": event.norm,
            "late": late,
        }
        out.append(Note("ContributionReceived", fields))
        self.book.offer(contribution, now_ns, out)

    def _check_values(self, event: PushCompleted) -> PushReply | None:
        header = event.header
        who = f"learner {header.learner!r}, fragment {header.fragment}, contribution {header.seq}"
        if not event.finite:
            return PushReply(
                False, Refusal.NOT_FINITE, f"{who}: it holds NaN or Inf; its learner starts from the run's state"
            )
        if header.kind is not PushKind.CONTRIBUTION:
            return None
        limit = norm_limit(self.config, self.book.tracks[header.fragment].norms, header.steps)
        if event.norm > limit:
            return PushReply(
                False, Refusal.NORM_OUTLIER, f"{who}: norm {event.norm:.3g} is above the limit {limit:.3g}"
            )
        return None

    def _no_contribution(self, header: PushHeader, refusal: PushReply, now_ns: int, out: list[SyncerEffect]) -> None:
        """A refused contribution is an answer too: its round must not wait for another."""
        member = self.membership.members.get(header.learner)
        current = member is not None and member.generation == header.generation
        known = 0 <= header.fragment < self.config.fragments
        if current and known and header.kind is PushKind.CONTRIBUTION and refusal.code != Refusal.DUPLICATE:
            answer, usable = Nothing(header.round, header.fragment), refusal.code != Refusal.STALE_BASE
            self.book.answer_nothing(header.learner, answer, now_ns, out, usable=usable)

    def _refuse_push(self, event: PushCompleted, refusal: PushReply, out: list[SyncerEffect]) -> None:
        header = event.header
        out.append(Answer(refusal))
        fields = {name: getattr(header, name) for name in ("fragment", "learner", "generation", "seq", "tokens")}
        out.append(Note("ContributionRefused", {**fields, "code": str(refusal.code), "detail": refusal.detail}))
        member = self.membership.members.get(header.learner)
        if member is None or member.generation != header.generation or header.kind is not PushKind.CONTRIBUTION:
            return
        if refusal.code == Refusal.DUPLICATE:
            version = dict(member.merged[header.fragment]).get(header.seq)
            identity = ContributionId(header.learner, header.generation, header.fragment, header.seq)
            if version is not None and member.connected:
                out.append(ToLearner(member.session, Fate(header.fragment, header.seq, version, "")))
            elif member.connected and not self.book.holds(identity):
                # It was refused or dropped before, and the word of that was lost.
                fate = Fate(header.fragment, header.seq, -1, Refusal.UNKNOWN_ROUND)
                out.append(ToLearner(member.session, fate))
        elif refusal.code in (Refusal.NOT_FINITE, Refusal.NORM_OUTLIER):
            member.seq_seen[header.fragment] = header.seq
            track = self.book.tracks[header.fragment]
            if event.finite:
                # The limit itself enters the median, so that a lasting change of scale is accepted in the end.
                limit = norm_limit(self.config, track.norms, header.steps)
                track.norms = [*track.norms[-NORMS_KEPT + 1 :], min(event.norm, limit)]
                self._judge_guard(track, header.learner, out)
            if member.connected:
                out.append(ToLearner(member.session, Reseed(refusal.detail)))
            out.append(Note("Warned", {"source": "syncer", "text": f"quarantined: {refusal.detail}"}))

    def _judge_guard(self, track: FragmentTrack, learner: str, out: list[SyncerEffect]) -> None:
        """An outlier is what differs from the others. When most learners are refused, twice each, and nobody's
        contribution was accepted meanwhile, then it is the scale that has changed: the guard begins anew. (Something
        huge may have come in before the guard knew any norms; refusing what repairs it would keep it for ever.)"""
        track.outliers[learner] = track.outliers.get(learner, 0) + 1
        active = {member.learner for member in self.membership.active()}
        again = {name for name in active if track.outliers.get(name, 0) >= OUTLIERS_EACH}
        most = 2 * len(again) > len(active)
        if most and sum(track.outliers.values()) >= OUTLIERS_IN_A_ROW:
            out.append(Note("NormGuardReset", {"fragment": track.index, "refused": sum(track.outliers.values())}))
            track.norms, track.outliers = [], {}

    def _seed_committed(self, checksums: tuple[int, ...], out: list[SyncerEffect]) -> None:
        self.committed, self._committing = True, False
        self._remember_run(seeded=True)
        for track, checksum in zip(self.book.tracks, checksums, strict=True):
            track.version, track.checksum = 0, checksum
        for member in self.membership.connected():
            self._begin_with(member, out)

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

    def _expire(self, now_ns: int, out: list[SyncerEffect]) -> None:
        self._lease_wake_at = -1
        for relay in self.relays.silent(now_ns):
            self._end_relay(relay, "the inner state did not come in time", out)
        for _, member in sorted(self.membership.members.items()):
            lease_ns = self._lease_ns(member)
            if self._on_lease(member) and now_ns - member.heard_ns >= lease_ns:
                self.membership.mark(member, MemberState.AWAY)
                member.away_ns = now_ns
                self._note_member(member, f"silent for {lease_ns / 1e9:g} s", out, now_ns - member.heard_ns)
                self._gone(member, now_ns, out)
            elif self._may_be_quiet(member) and now_ns - member.heard_ns >= QUIET_NS:
                self.book.set_aside(member, f"silent for {QUIET_NS / 1e9:g} s", now_ns, out, quiet=True)
            elif self._is_deaf(member, now_ns):
                member.behind_ns = 0
                detail = f"learner {member.learner!r} steps on but adopts nothing that was published; say hello again"
                out += [ToLearner(member.session, Refused(Refusal.BUSY, detail)), EndSession(member.session, detail)]
                out.append(Note("Warned", {"source": "syncer", "text": detail}))
            elif member.state is MemberState.AWAY and now_ns - member.away_ns >= self.config.lost_after_ns:
                self.membership.mark(member, MemberState.LOST)
                self.ledger.set_gone(member.learner, member.generation, True)
                self.leases.release(member.learner)
                self._remember_member(member)
                self._note_member(member, f"away for {self.config.lost_after_ns / 1e9:g} s", out)

    def _is_deaf(self, member: Member, now_ns: int) -> bool:
        """A learner that reports steps but has adopted nothing for long: what we send does not reach it."""
        if member.state is not MemberState.ACTIVE or not member.connected or not member.bases:
            return False
        behind = any(track.version > base for track, base in zip(self.book.tracks, member.bases, strict=True))
        if not behind or not member.behind_ns:
            member.behind_ns, member.behind_steps = now_ns if behind else 0, member.steps
            return False
        assert self.layout is not None
        fetches = member.fetch_ns >= member.behind_ns  # it has heard of something, and may be long in getting it
        largest = max(fragment.parameters for fragment in self.layout.fragments)
        thin_ns = THIN_LINK_NS * self.layout.parameters + (THINNEST_LINK_NS * largest if fetches else 0)
        waited_ns, steps = now_ns - max(member.behind_ns, member.fetch_ns), member.steps - member.behind_steps
        return waited_ns >= self.config.lost_after_ns + thin_ns and steps >= DEAF_STEPS

    def _on_lease(self, member: Member) -> bool:
        """Silence matters for learners that rounds wait for, and for the one that gives the first parameters."""
        seeding = member.state is MemberState.JOINING and member.learner == self._seeder and not self.committed
        return member.state is MemberState.ACTIVE or seeding

    def _may_be_quiet(self, member: Member) -> bool:
        """True if this member is set aside once it was silent for QUIET_NS."""
        counted = member.state is MemberState.ACTIVE and not member.aside
        return counted and self.config.lease_ns > QUIET_NS and self.book.spares_one()

    def _lease_ns(self, member: Member) -> int:
        """A seeding learner is silent while one fragment of the first parameters is on a thin link."""
        return self.config.lease_ns if member.state is MemberState.ACTIVE else SEED_SILENCE_NS

    def _silence_ns(self, member: Member) -> int:
        """The next length of its silence that matters."""
        return QUIET_NS if self._may_be_quiet(member) else self._lease_ns(member)

    def _note_member(self, member: Member, reason: str, out: list[SyncerEffect], silent_ns: int = 0) -> None:
        fields = {"learner": member.learner, "generation": member.generation, "silent_ns": silent_ns}
        out.append(Note("MemberChanged", {**fields, "state": str(member.state), "reason": reason}))

    # ------------------------------------------------------------ looking in

    def keeps_up(self, session: int, fragment: int, version: int) -> bool:
        """True if the update that leads to `version` may travel with its notice: this learner trains, and has adopted
        the version before it. So at most one update of a fragment is on its way, and none stands in front of requests
        on a link that is too thin for them; whoever is behind fetches what it needs when it needs it."""
        member = self.membership.by_session(session)
        if member is None or member.state is not MemberState.ACTIVE or len(member.bases) <= fragment:
            return False
        return member.bases[fragment] >= version - 1

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
        }
