"""All rounds of all fragments: launching when due, collecting, closing, aborting, committing.

The clock s is the K-th largest step among active learners (design section 4, syncer 1); fragment p is due when s has
reached its last launch + the period that `pacing` decided for it. At most `rounds_in_flight_max` rounds run at once, on
distinct fragments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

from atoll.core.adaptive import AdaptiveController
from atoll.core.agreement import AgreementWatch, Verdict
from atoll.core.config import CODECS, SECOND_NS, SyncConfig
from atoll.core.delivery import DeliveryWatch
from atoll.core.effects import Compare, Compared, Forget, Merge, MergeFinished, Note, Remember, SyncerEffect, ToLearner
from atoll.core.events import (
    ContributionRefused,
    PaceChanged,
    RoundAborted,
    RoundClosed,
    RoundLaunched,
    Warned,
)
from atoll.core.ledger import Ledger
from atoll.core.membership import MERGED_KEPT, PROOF_NS, Member, Membership, MemberState
from atoll.core.merging import HANDED_KEPT, MergeScales, handed_after, norms_after
from atoll.core.messages import Discard, Fate, Nothing, Refusal, Request, Reseed
from atoll.core.pacing import Pace, period
from atoll.core.plausible import PACE_FACTOR
from atoll.core.policy import (
    NORMS_NEEDED,
    age_limit,
    clock_step,
    crowd_outliers,
    first_due_step,
    grace_ns,
    may_set_aside,
    median,
    moving_average,
    quorum_count,
    round_steps,
)
from atoll.core.publication import committed, notices
from atoll.core.rounds import ContributionId, ContributionRecord, ContributionsById, FragmentTrack, Round
from atoll.core.sizes import LearnerSizes
from atoll.core.spending import Spending

STANDSTILL_NS = 15 * SECOND_NS
STANDSTILL_STEPS = 4
"""A synchronous run in which nothing moves for this long is asked for its next fragment: several steps of the slowest
learner, so that a long step is not mistaken for it."""
FAR_PERIODS = 2
"""If a quorum has gone so many periods since the last launch and the clock has not come to the next one, somebody holds
the clock who was ahead and has stopped: with a quorum of one that is whoever claims the largest step."""
USUAL_FACTOR = 3
"""How many times as long as usual a quorum may take before somebody is named or set aside for it."""
NEVER_NS = 2**63
ADAPTIVE_KEY = "adaptive"
"""Of the row on the tape that holds what was decided about what is sent."""


class RoundScheduler:
    """Owned by the SyncerMachine; appends its effects to the list it is given."""

    def __init__(self, config: SyncConfig, membership: Membership, ledger: Ledger) -> None:
        self.config = config
        self._synchronous = config.synchronous
        self._membership = membership
        self._ledger = ledger
        self._delivery = DeliveryWatch(config, membership)
        self.sizes = LearnerSizes(config, membership)
        self.spending = Spending(config, membership, ledger, self.sizes)
        self._scales = MergeScales(config, membership, ledger, self.sizes)
        self.agreement = AgreementWatch(config, membership)
        self.adaptive = AdaptiveController(config)
        membership.far_steps = FAR_PERIODS * config.sync_every
        self.tracks = [FragmentTrack(p, first_due_step(config, p), config.sync_every) for p in range(config.fragments)]
        self.clock_last = 0
        """The last clock there was: where a joiner starts while too few are active to have one."""
        self.rounds_started = 0
        self.commits = 0
        self.aborts = 0
        self.contributions_merged = 0
        self.contributions_late = 0
        self.ending = 0
        """Learners that were there when the run was told to stop; 0 before."""
        self.expected_waived = False
        """Nobody waits for learners that were expected and did not come."""
        self.down: frozenset[int] = frozenset()
        """Fragments whose shard is away."""
        self.resting: frozenset[int] = frozenset()
        """Fragments that are about to move to another shard."""
        self._quorum_ns = 0.0
        self._sync_ns = 0.0
        self._closed: dict[int, tuple[Round, list[ContributionRecord], int]] = {}
        """fragment -> the round being merged, what is in it, and when it closed."""
        self._moved = 0
        """Grows whenever a round begins or ends: what follows from the clock is worked out anew only then."""
        self._launched_for: tuple[int | None, int, int] = (None, -1, -1)
        self._disturbed_by = -1
        self._disturbed: set[int] = set()
        """Fragments that were not merged since the membership last changed."""
        self._changed_ns = 0
        """When the clock, a round or the membership last changed."""
        self._quorum_for = -1
        self._quorum = 0
        self._enough = False
        """Rounds count on a quorum."""
        self._spares_one = False
        self._upcoming_for: tuple[int, int] = (-1, -1)
        self._upcoming: dict[int, tuple[int, ...]] = {}

    # ------------------------------------------------------------ the clock

    def quorum(self) -> int:
        """K, for those whom rounds count on now. Kept while nobody comes, goes or is set aside: every message asks."""
        if self._quorum_for != self._membership.stamp:
            self._quorum_for, counted = self._membership.stamp, self._membership.counted()
            self._quorum = quorum_count(self.config, counted, self._joined_max)
            self._enough = counted >= self._quorum
            self._spares_one = may_set_aside(self.config, counted, self._joined_max)
        return self._quorum

    @property
    def _joined_max(self) -> int:
        """The most learners that were active at once; all that are expected, once nobody waits for them any more."""
        expected = self.config.learners_expected if self.expected_waived else 0
        return max(self._membership.joined_max, expected)

    def waits_for_expected(self) -> bool:
        """True while there would be rounds if those who are here were all that are expected."""
        if self._membership.joined_max >= self.config.learners_expected:  # for good: every message asks
            return False
        short = self._joined_max < self.config.learners_expected and self._membership.counted() > 0
        return short and self.quorum() > self._membership.counted()

    def waive_expected(self) -> None:
        """Go on with those who are here."""
        self.expected_waived = True
        self._quorum_for = -1
        self._moved += 1

    def clock(self) -> int | None:
        """s, or None while rounds count on fewer than a quorum."""
        clock = clock_step(self._membership.counted_steps(), self.quorum())
        self.clock_last = self.clock_last if clock is None else clock
        return clock

    def step_ns(self) -> float:
        """xi_step: the median of the step times of the learners that rounds count on."""
        return median(self._membership.counted_paces())

    def upcoming(self, steps: int) -> tuple[int, ...]:
        """The fragments that fall due within this many steps of the clock, soonest first."""
        self.clock()
        key = (self.clock_last, self._moved)
        if key != self._upcoming_for:
            self._upcoming_for, self._upcoming = key, {}
        known = self._upcoming.get(steps)
        if known is None:
            horizon = self.clock_last + steps
            ordered = sorted((t.due_step, t.index) for t in self._idle() if t.due_step <= horizon)
            known = self._upcoming[steps] = tuple(index for _, index in ordered)
        return known

    @property
    def in_flight(self) -> int:
        return sum(track.busy for track in self.tracks)

    def set_down(self, fragments: frozenset[int], resting: frozenset[int] = frozenset()) -> None:
        """No round of these is begun until they are served again, and none of the others waits for theirs to end. Of
        those that rest none is begun either."""
        self.down, self.resting = fragments, resting
        self._moved += 1

    def begin_anew(self, fragment: int, handed: Set[ContributionId], out: list[SyncerEffect]) -> None:
        """What was received of this fragment is lost, but for what leavers `handed` over: its learners give it again,
        and the round that was under way is launched again."""
        track, received = self.tracks[fragment], self.kept(fragment)
        closed = self._closed.pop(fragment, None)
        opened = track.round if closed is None else closed[0]
        if opened is not None:
            track.aborted = (opened.number, opened.attempt + 1)
            track.due_step = min(opened.due_step, opened.clock_step)
        track.round, track.merging, track.held = None, False, ContributionsById()
        out += [Forget(identity) for identity in self.agreement.forget(fragment)]
        for item in received:
            if item.id in handed:
                track.held[item.id] = item
            else:
                self.drop(item, Refusal.UNKNOWN_ROUND, out, "its shard went away")
        self._moved += 1

    def _idle(self) -> list[FragmentTrack]:
        """Fragments that a round may begin with."""
        away = self.down | self.resting
        return [track for track in self.tracks if not track.busy and track.index not in away]

    def _room(self) -> int:
        """Rounds that may begin beside those that are under way."""
        under_way = sum(track.busy and track.index not in self.down for track in self.tracks)
        return max(0, self.adaptive.in_flight_max - under_way)

    # ------------------------------------------------------------ launch

    def launch_due(self, now_ns: int, out: list[SyncerEffect]) -> None:
        """Launch what the clock says. Nothing can have changed unless the clock, a round or the membership did."""
        self.quorum()
        if not self._enough:
            self._take_all_in(now_ns, out)
        clock = self.clock()
        if clock is None:
            return
        self._adapt(now_ns, out)
        if not self._synchronous and self._membership.moved_far():
            self._keep_moving(clock)
        seen = (clock, self._moved, self._membership.stamp)
        if seen == self._launched_for and (not self._synchronous or now_ns < self._standstill_ns()):
            return
        if seen == self._launched_for:
            for track in sorted(self._idle(), key=lambda t: (t.last_round, t.index))[:1]:
                self._launch(track, clock, now_ns, out)
        self._launched_for, self._changed_ns = seen, now_ns
        for track in self.tracks:
            # When the fastest learner goes, the clock falls back to the others: nobody waits for it to catch up.
            if track.due_step > clock + track.period:
                track.due_step = clock + track.period
            if track.round is not None:
                self._ask_newcomers(track, track.round, clock, out)
        due = [t for t in self._idle() if t.due_step <= clock]
        if due:
            due.sort(key=lambda t: (t.due_step, t.index))
            for track in due[: self._room()]:
                self._launch(track, clock, now_ns, out)

    def _adapt(self, now_ns: int, out: list[SyncerEffect]) -> None:
        """What is sent follows what was measured; nothing does before the first merge."""
        if self.adaptive.on and self.commits:
            run = self.adaptive.measured(self.step_ns())
            asked = [(member.learner, member.codecs) for member in self._membership.active()]
            changes = self.adaptive.look(now_ns, self.clock_last, run, asked, any_update=self._reads_any_update())
            out += [Note(change) for change in changes]
            if any(change.what != "nothing" for change in changes):
                out.append(Remember({ADAPTIVE_KEY: self.adaptive.row(changes)}, first=False))

    def _reads_any_update(self) -> bool:
        """True if everybody who is here reads updates in another codec than the run's `codec_down`."""
        return all(member.any_update for member in self._membership.connected())

    def _codec_down(self) -> str:
        """What the next update is encoded in; empty: as the settings say."""
        codec = self.adaptive.codec_down
        return codec if codec != self.config.codec_down and self._reads_any_update() else ""

    def _keep_moving(self, clock: int) -> None:
        """Nobody's standing still stops the others: when enough of them have gone far without a round, all fragments
        are due. (Learners of a synchronous run do stand still, see `_standstill_ns`.)"""
        if self._membership.moved_far() < self._enough_movers():
            return
        if not self.in_flight and all(track.due_step > clock for track in self.tracks):
            self._moved += 1
            for track in self.tracks:
                track.due_step = clock

    def _enough_movers(self) -> int:
        """A quorum; before anybody has answered, one of those who are expected."""
        counted, expected = self._membership.counted(), self.config.learners_expected
        if self._membership.first_proof_ns >= 0 or counted <= expected:
            return self.quorum()
        return quorum_count(self.config, expected, expected)

    def _ask_newcomers(self, track: FragmentTrack, opened: Round, clock: int, out: list[SyncerEffect]) -> None:
        """A round that has waited a whole period for its quorum, and not asked everybody who is here by now, begins
        anew: those who were not asked need not wait with their progress for one whose link is slow."""
        if opened.quorum_ns >= 0 or clock < opened.clock_step + track.period:
            return
        newcomers = sum(member.learner not in opened.asked for member in self._membership.active())
        if opened.asked and newcomers:
            self._abort(track, opened, f"{newcomers} learners have joined since it was launched", out)

    def _standstill_ns(self) -> int:
        """From when on a synchronous run counts as standing still: nothing is in flight, and the clock has not moved
        for several of the slowest learner's steps. After somebody came or went, or a restart, a learner may wait for a
        fragment at an earlier step than the one at which the syncer wants to ask for it; asking then lets everybody go
        on. A fragment that has been merged since is not in doubt: long pauses of an undisturbed run change nothing."""
        if self._membership.stamp != self._disturbed_by:
            self._disturbed_by = self._membership.stamp
            self._disturbed = set(range(len(self.tracks)))
        paces = self._membership.counted_paces()
        if not self._synchronous or not self._disturbed or self.in_flight or not self.clock() or not paces:
            return NEVER_NS
        return self._changed_ns + max(STANDSTILL_NS, int(STANDSTILL_STEPS * self._slowest_step_ns()))

    def _slowest_step_ns(self) -> float:
        """What a step of the slowest learner takes that rounds count on, as far as that can be believed."""
        paces = self._membership.counted_paces()
        return min(paces[-1], PACE_FACTOR * median(paces)) if paces else 0.0

    def at_least_usual_ns(self, wait_ns: int) -> int:
        """How long an answer may take before something is wrong: `wait_ns`, or more where steps are long or links so
        thin that a quorum usually takes as long."""
        return max(wait_ns, int(STANDSTILL_STEPS * self._slowest_step_ns()), int(USUAL_FACTOR * self._quorum_ns))

    def unanswered(self) -> list[str]:
        """Whose answers the oldest open round waits for that has no quorum yet."""
        quorum = self.quorum()
        short = [t.round for t in self.tracks if t.round is not None and len(t.round.contributors()) < quorum]
        oldest = min(short, key=lambda opened: opened.number, default=None)
        return sorted(oldest.waiting) if oldest is not None else []

    def behind(self) -> list[str]:
        """Who keeps the next fragment from falling due while others have come to where it does."""
        due, clock = min((track.due_step for track in self._idle()), default=0), self.clock()
        if self.in_flight or clock is None or clock >= due or self._membership.counted_steps()[-1] < due:
            return []
        return sorted(
            m.learner for m in self._membership.active() if m.step < due and self._membership.counts(m.learner)
        )

    def launch_leftovers(self, now_ns: int, out: list[SyncerEffect]) -> None:
        """Nobody is left to ask: merge what is held, without a quorum, so that nothing handed over is lost."""
        for track in self._idle():
            if track.held:
                self._launch(track, track.due_step, now_ns, out)

    def _launch(self, track: FragmentTrack, clock: int, now_ns: int, out: list[SyncerEffect]) -> None:
        self._moved += 1
        number, attempt = track.aborted
        if attempt == 0:
            self.rounds_started += 1
            number = self.rounds_started
        active = self._membership.active()
        asked = [m.learner for m in active]
        waiting = {m.learner for m in active if self._membership.counts(m.learner)}
        before, (track.period, why) = track.period, period(self.config, self._pace(track, clock))
        if self.adaptive.period > max(track.period, self.config.sync_every):
            track.period, why = self.adaptive.period, "adaptive"
        if track.period != before:
            out.append(Note(PaceChanged(track.index, clock, track.period, why)))
        due_step, track.due_step = track.due_step, clock + track.period
        opened = Round(
            number, attempt, track.index, now_ns, clock, due_step, track.due_step, asked=asked, waiting=waiting
        )
        track.round, track.last_round = opened, self.rounds_started
        self._membership.launched(FAR_PERIODS * max(t.period for t in self.tracks))
        track.asked_last = len(asked) or track.asked_last
        out.append(
            Note(
                RoundLaunched(
                    round=opened.number,
                    attempt=opened.attempt,
                    fragment=track.index,
                    clock_step=clock,
                    asked=asked,
                    quorum=self.quorum(),
                )
            )
        )
        held, track.held = list(track.held.values()), ContributionsById()
        for contribution in sorted(held, key=lambda c: c.id):
            self._enter(track, contribution, now_ns, out)
        given = opened.contributors()
        said: dict[str, Request] = {}
        for member in active:
            if member.learner not in given:
                codec = self.adaptive.codec(member.learner)
                codec = codec if CODECS.family(codec) in member.codecs else ""  # it may have come back as another build
                if codec not in said:
                    away = tuple(sorted(self.down))
                    said[codec] = Request(opened.number, opened.attempt, track.index, codec, away)
                out.append(ToLearner(member.session, said[codec]))
                self.adaptive.asked(member.learner, track.index, opened.number, now_ns)
        self.try_close(track, now_ns, out)

    def _pace(self, track: FragmentTrack, clock: int) -> Pace:
        learners, step_ns = self._membership.counted(), self.step_ns()
        place = (track.index, track.version, clock, track.period, learners)
        return Pace(*place, step_ns, self._quorum_ns, self._sync_ns, track.rho)

    # ------------------------------------------------------------ collect

    def offer(self, contribution: ContributionRecord, now_ns: int, out: list[SyncerEffect]) -> None:
        """A complete contribution: into the open round, or held for the next one."""
        track = self.tracks[contribution.id.fragment]
        self.adaptive.links.answered(
            contribution.id.learner, track.index, contribution.round, contribution.bytes, now_ns
        )
        if contribution.late:
            self.contributions_late += 1
        if track.round is None:
            track.held[contribution.id] = contribution
            return
        self._enter(track, contribution, now_ns, out)
        self.try_close(track, now_ns, out)

    def answer_nothing(
        self, learner: str, answer: Nothing, now_ns: int, out: list[SyncerEffect], *, usable: bool = True
    ) -> None:
        """A learner has nothing for this round; or (not `usable`) what it had is too old."""
        track = self.tracks[answer.fragment]
        self.adaptive.links.answered(learner, track.index, answer.round, 0, now_ns)
        opened = track.round
        if opened is None or opened.number != answer.round or learner not in opened.asked:
            return
        if usable:
            track.missed.pop(learner, None)
            self._delivery.answered(learner, False, True, out)
        else:
            opened.unusable.add(learner)
        if learner in opened.waiting:
            opened.waiting.discard(learner)
            opened.nothing.add(learner)
            self.try_close(track, now_ns, out)

    def learner_gone(self, learner: str, now_ns: int, out: list[SyncerEffect]) -> None:
        """Open rounds no longer wait for this learner; what it gave stays."""
        member = self._membership.members.get(learner)
        left = member is None or member.state is MemberState.LEFT  # else it may come back, and miss the next ones, too
        if member is None or member.state is not MemberState.ACTIVE:
            self.adaptive.forget(learner) if left else self.adaptive.gone(learner)
        for track in self.tracks:
            if left:
                track.missed.pop(learner, None)
            if track.round is not None:
                track.round.waiting.discard(learner)
                track.round.nothing.discard(learner)
                self.try_close(track, now_ns, out)

    def _enter(self, track: FragmentTrack, item: ContributionRecord, now_ns: int, out: list[SyncerEffect]) -> None:
        opened = track.round
        assert opened is not None
        if track.version - item.base_version > age_limit(self.config, aside=True):
            self.drop(item, Discard.STALE, out)
            return
        opened.first_ns = now_ns if not opened.contributions else opened.first_ns
        opened.contributions[item.id] = item
        opened.waiting.discard(item.id.learner)
        self._note_quorum(opened, now_ns)

    def _note_quorum(self, opened: Round, now_ns: int) -> None:
        """From when on a round has a quorum: when enough have answered, or when fewer are enough (draw 4, seed 300256:
        ids that never answered counted no longer, and the round waited for them all the same)."""
        if opened.quorum_ns < 0 and len(opened.contributors()) >= self.quorum():
            opened.quorum_ns = now_ns - opened.launched_ns
            carried = opened.carried
            if not carried:  # else it says nothing about how long answers take
                self._quorum_ns = moving_average(self._quorum_ns, float(opened.quorum_ns))
            steps = round_steps(self.config.fragments, self.tracks[opened.fragment].period, self.adaptive.in_flight_max)
            times = (self.step_ns(), self._quorum_ns, self._sync_ns)
            grace, _ = grace_ns(self.config, *times, steps, carried=carried)
            # A learner that reports a step of an hour must not hold the round beyond the time that a quorum has.
            opened.grace_ns = min(grace, max(0, self.config.quorum_timeout_ns - opened.quorum_ns))

    # ------------------------------------------------------------ close or abort

    def try_close(self, track: FragmentTrack, now_ns: int, out: list[SyncerEffect]) -> None:
        """Close the open round if it may close, abort it if it is out of time, else leave it."""
        opened = track.round
        if opened is None or track.index in self.down:  # nobody is late whose shard cannot take anything
            return
        quorum = self.quorum() if opened.asked else 0  # leftovers ask nobody and need no quorum
        if opened.asked:
            self._note_quorum(opened, now_ns)
        reason = opened.close_reason(quorum, now_ns)
        if reason is not None:
            self._close(track, opened, reason, now_ns, out)
        elif now_ns >= opened.launched_ns + self.config.quorum_timeout_ns:
            self._abort(track, opened, f"no quorum of {quorum} in time", out)
            self._set_absent_aside(opened, now_ns, out)
        elif now_ns >= self._patient_until_ns(opened):
            opened.patience_over = True
            self._set_absent_aside(opened, now_ns, out)
        elif not opened.waiting:
            self._abort(track, opened, f"fewer than {quorum} learners are left to answer", out)

    def _close(self, track: FragmentTrack, opened: Round, reason: str, now_ns: int, out: list[SyncerEffect]) -> None:
        self._moved += 1
        track.round, track.aborted = None, (0, 0)
        items = self._without_outliers(track, opened, out)
        if not items:
            return
        out.append(
            Note(
                RoundClosed(
                    round=opened.number,
                    fragment=track.index,
                    contributors=sorted(opened.contributors()),
                    carried=sum(item.round != opened.number for item in items),
                    reason=reason,
                    quorum_ns=max(0, opened.quorum_ns),
                    grace_ns=opened.grace_ns,
                    close_ns=now_ns - opened.launched_ns,
                )
            )
        )
        track.merging = True
        self._closed[track.index] = (opened, items, now_ns)
        self._next(track, self.agreement.judge(items), out)
        for item in items:
            track.missed.pop(item.id.learner, None)
            fresh = track.age(item) <= self.config.carry_versions_max
            self._delivery.answered(item.id.learner, item.round != opened.number, fresh, out)
        for member, why in self._delivery.missed(track, opened):
            self.set_aside(member, why, now_ns, out)

    def _set_absent_aside(self, opened: Round, now_ns: int, out: list[SyncerEffect]) -> None:
        """Some have answered this round and others have kept it from closing: the next one does without those, as far
        as it can. They count again from their next answer on."""
        for learner in sorted(opened.waiting) if opened.contributions else ():
            member = self._membership.members.get(learner)
            if member is not None and member.state is MemberState.ACTIVE and not member.aside:
                waited_s = (now_ns - opened.launched_ns) / 1e9
                self.set_aside(member, f"did not answer a round within {waited_s:.0f} s", now_ns, out)

    def _patient_until_ns(self, opened: Round) -> int:
        """From when on a round does without those who have not answered it, if some have and it can: several of them
        at once would hold everybody until it is out of time."""
        if not opened.contributions or opened.patience_over:
            return NEVER_NS
        return opened.first_ns + self.at_least_usual_ns(PROOF_NS)

    def _without_outliers(
        self, track: FragmentTrack, opened: Round, out: list[SyncerEffect]
    ) -> list[ContributionRecord]:
        """What the round has, in the order of a merge. While too few norms are known, each is held against the rest."""
        items = [opened.contributions[identity] for identity in sorted(opened.contributions)]
        if len(track.norms) >= NORMS_NEEDED:
            return items
        learners, norms = [item.id.learner for item in items], [item.norm for item in items]
        far = crowd_outliers(self.config, learners, norms, [item.steps for item in items])
        for index in far:
            self.drop(items[index], Refusal.NORM_OUTLIER, out)
        return [item for index, item in enumerate(items) if index not in far]

    # ------------------------------------------------------------ who points against the others

    def compared(self, event: Compared, out: list[SyncerEffect]) -> None:
        """How far the contributions of a closed round agree: measure the rest of it, or merge."""
        track = self.tracks[event.fragment]
        if track.merging:
            self._next(track, self.agreement.heard(event, self._closed[event.fragment][1]), out)

    def _next(self, track: FragmentTrack, decided: Compare | Verdict, out: list[SyncerEffect]) -> None:
        if isinstance(decided, Compare):
            out.append(decided)
            return
        opened, items, closed_ns = self._closed[track.index]
        for item in items:
            if item.id.learner in decided.left_out:
                del opened.contributions[item.id]
                self.drop(item, Discard.QUARANTINED, out, decided.left_out[item.id.learner])
        out += [Note(Warned("syncer", text)) for text in decided.news]
        items = [item for item in items if item.id in opened.contributions]
        if not items:
            del self._closed[track.index]
            track.merging = False
            self._moved += 1
            if self.config.synchronous:  # everybody waits for it: ask again at once
                track.due_step = min(opened.due_step, opened.clock_step)
            return
        self._merge(track, opened, items, closed_ns, out)

    def _merge(
        self,
        track: FragmentTrack,
        opened: Round,
        items: list[ContributionRecord],
        now_ns: int,
        out: list[SyncerEffect],
    ) -> None:
        made = self._scales.weigh(track, opened, items, self.ending)
        track.merging, track.weights, track.discounts, track.share = True, made.weights, made.discounts, made.share
        self._closed[track.index] = (opened, items, now_ns)
        identities = tuple(item.id for item in items)
        version, weights = track.version + 1, tuple(made.weights)
        out.append(Merge(track.index, opened.number, version, identities, weights, self._codec_down()))

    def set_aside(
        self, member: Member, reason: str, now_ns: int, out: list[SyncerEffect], *, quiet: bool = False
    ) -> None:
        """Rounds go on without this member, if those who are left make a quorum. It is asked all the same."""
        if not member.aside and not self.spares_one():
            return
        self._delivery.set_aside(member, reason, out, quiet=quiet)
        self.learner_gone(member.learner, now_ns, out)

    def spares_one(self) -> bool:
        """True if rounds can do without one of those that they count."""
        self.quorum()
        return self._spares_one

    def take_in(self, member: Member, reason: str, out: list[SyncerEffect]) -> None:
        """Rounds count on this member again."""
        self._delivery.take_in(member, reason, out)

    def _take_all_in(self, now_ns: int, out: list[SyncerEffect]) -> None:
        """When others have gone, those who were set aside may be needed for a quorum, and those who have not answered
        yet."""
        self._delivery.take_all_in("too few others are left", out)
        self._membership.begin_patience(now_ns)

    def _abort(self, track: FragmentTrack, opened: Round, reason: str, out: list[SyncerEffect]) -> None:
        self.aborts += 1
        self._moved += 1
        track.round, track.aborted = None, (opened.number, opened.attempt + 1)
        for identity, item in opened.contributions.items():
            track.held[identity] = item
        track.due_step = min(opened.due_step, opened.clock_step)
        out.append(
            Note(
                RoundAborted(
                    round=opened.number,
                    attempt=opened.attempt,
                    fragment=track.index,
                    contributions=len(opened.contributions),
                    quorum=self.quorum(),
                    reason=reason,
                )
            )
        )

    def drop(self, item: ContributionRecord, reason: str, out: list[SyncerEffect], why: str = "") -> None:
        """A contribution that was accepted will not be merged: say so to its learner, loudly."""
        cause = str(reason) if reason == Discard.QUARANTINED else ""
        self._ledger.release(item.id.learner, item.id.generation, item.id.fragment, item.tokens, cause)
        out.append(Forget(item.id))
        detail = f"contribution {item.id.seq} of fragment {item.id.fragment} was dropped: {why or reason}"
        out.append(refused(item.id, item.tokens, reason, detail))
        if reason == Discard.UNCERTAIN:
            return  # only while healing: when the run goes on its learner hears it, with the version
        member = self._membership.members.get(item.id.learner)
        if member is not None and member.generation == item.id.generation and member.connected:
            out.append(ToLearner(member.session, Fate(item.id.fragment, item.id.seq, -1, reason)))
            if reason in (Refusal.NORM_OUTLIER, Refusal.NOT_FINITE):
                out.append(ToLearner(member.session, Reseed(detail)))

    def drop_handed(self, fragment: int, version: int, out: list[SyncerEffect]) -> None:
        """Contributions of learners that left, from before a crash, of a fragment that a learner brings back: they may
        be inside. They are dropped, and the record says so in case that their files outlive this syncer."""
        track = self.tracks[fragment]
        for item in list(track.held.values()):
            del track.held[item.id]
            self.drop(item, Discard.UNCERTAIN, out)
            known = (item.id.learner, item.id.generation, item.id.seq, version)
            track.handed = [*track.handed, known][-HANDED_KEPT:]

    # ------------------------------------------------------------ commit

    def merge_finished(self, done: MergeFinished, now_ns: int, out: list[SyncerEffect]) -> None:
        """The merge is on disk: count what was in it, and publish. One that was not finite changed nothing."""
        track = self.tracks[done.fragment]
        opened, items, closed_ns = self._closed.pop(done.fragment)
        track.merging = False
        self._moved += 1
        if done.lost:
            self._merge_without_lost(track, opened, items, done.lost, now_ns, out)
            return
        if not done.finite:
            self._merge_without_worst(track, opened, items, now_ns, out)
            return
        track.handed = handed_after(track, items, track.version + 1, self._membership)
        track.version += 1
        self._disturbed.discard(track.index)
        track.checksum = done.checksum
        self.commits += 1
        self.contributions_merged += len(items)
        track.contributions_merged += len(items)
        track.rho = done.rho if math.isfinite(done.rho) else 0.0
        track.norms_of = norms_after(self.config, track, items)
        self.sizes.merged(items)
        self._sync_ns = moving_average(self._sync_ns, float(now_ns - closed_ns))
        self.adaptive.published(track.index, track.version, opened.launched_ns, now_ns)
        for item in items:
            self._ledger.merge(item.id.learner, item.id.generation, item.id.fragment, item.tokens)
            self.adaptive.merged(item.id.learner, track.index, track.version)
            member = self._membership.members.get(item.id.learner)
            if member is not None and member.generation == item.id.generation:
                kept = member.merged[done.fragment][-MERGED_KEPT + 1 :]
                assert all(seq != item.id.seq for seq, _ in kept), f"I2: {item.id} was merged twice"
                member.merged[done.fragment] = [*kept, (item.id.seq, track.version)]
                if self.config.tokens_budget:
                    self.spending.judge(member, now_ns)
        out += [Forget(identity) for identity in self.agreement.merged(items)]
        out.append(Note(committed(track, opened, items, done)))
        out += notices(track, opened, self._membership.connected(), len(items))

    def _merge_without_worst(
        self,
        track: FragmentTrack,
        opened: Round,
        items: list[ContributionRecord],
        now_ns: int,
        out: list[SyncerEffect],
    ) -> None:
        """A merge was not finite and changed nothing. The longest contribution is dropped, and the rest is merged, as
        often as it takes: one learner's numbers must not cost everybody theirs."""
        worst = max(items, key=lambda item: (item.norm, item.id))
        self.drop(worst, Refusal.NOT_FINITE, out)
        rest = [item for item in items if item is not worst]
        if rest:
            self._merge(track, opened, rest, now_ns, out)

    def _merge_without_lost(
        self,
        track: FragmentTrack,
        opened: Round,
        items: list[ContributionRecord],
        lost: Iterable[ContributionId],
        now_ns: int,
        out: list[SyncerEffect],
    ) -> None:
        """The bytes of some contributions died with a relay, and nothing was changed. They are their learners' own
        again, who give them anew; the rest is merged."""
        gone = set(lost)
        for item in items:
            if item.id in gone:
                del opened.contributions[item.id]
                self.drop(item, Refusal.RELAY_GONE, out)
        rest = [item for item in items if item.id not in gone]
        if rest:
            self._merge(track, opened, rest, now_ns, out)
        elif self.config.synchronous:  # everybody waits for it: ask again at once
            track.due_step = min(opened.due_step, opened.clock_step)

    def kept(self, fragment: int) -> list[ContributionRecord]:
        """Everything of this fragment that was received and is not merged yet."""
        track = self.tracks[fragment]
        in_round = track.round.contributions.values() if track.round is not None else ()
        return [*track.held.values(), *in_round, *(self._closed[fragment][1] if track.merging else ())]

    def kept_counts(self, fragment: int, learner: str) -> tuple[int, int]:
        """How many of those are this learner's, and how many there are in all."""
        track = self.tracks[fragment]
        piles = [track.held] + ([track.round.contributions] if track.round is not None else [])
        piles += [self._closed[fragment][0].contributions] if track.merging else []
        return sum(pile.count_of.get(learner, 0) for pile in piles), sum(map(len, piles))

    def held_of(self, learner: str, generation: int) -> list[ContributionRecord]:
        """Everything of this learner that was received and is not merged yet."""
        items = [item for track in self.tracks for item in self.kept(track.index)]
        return [item for item in items if (item.id.learner, item.id.generation) == (learner, generation)]

    def merges(self, merge: Merge) -> bool:
        """True while this merge is under way."""
        track = self.tracks[merge.fragment]
        if not track.merging or merge.version != track.version + 1:
            return False
        return merge.contributions == tuple(item.id for item in self._closed[merge.fragment][1])

    def merging(self, fragment: int) -> list[ContributionRecord]:
        """What is in the merge of this fragment that is under way."""
        return self._closed[fragment][1]

    def holds(self, identity: ContributionId) -> bool:
        """True while this contribution waits for a round, is in one, or is being merged."""
        return any(item.id == identity for item in self.kept(identity.fragment))

    # ------------------------------------------------------------ time

    def tick(self, now_ns: int, out: list[SyncerEffect]) -> None:
        for track in self.tracks:
            self.try_close(track, now_ns, out)

    def next_wake_ns(self) -> int | None:
        wake_ns = self._standstill_ns() if self._synchronous else NEVER_NS
        for track in self.tracks:
            opened = track.round
            if opened is None or track.index in self.down:
                continue
            if opened.quorum_ns >= 0 and len(opened.contributors()) >= self.quorum():
                wake_ns = min(wake_ns, opened.grace_deadline_ns())
            else:
                wake_ns = min(wake_ns, opened.launched_ns + self.config.quorum_timeout_ns)
                wake_ns = min(wake_ns, self._patient_until_ns(opened))
        return wake_ns if wake_ns != NEVER_NS else None


def refused(identity: ContributionId, tokens: int, code: str, detail: str) -> Note:
    """A contribution that was not let in, or that is dropped."""
    fields = (identity.fragment, identity.learner, identity.generation, identity.seq, tokens)
    return Note(ContributionRefused(*fields, str(code), detail))
