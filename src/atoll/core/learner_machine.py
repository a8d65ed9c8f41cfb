"""The learner as a pure machine: `handle(input, now_ns) -> effects`.

It counts steps and tokens per fragment, answers requests from snapshots, follows published versions and keeps the
token account of what was merged and discarded. TakeSnapshot and Adopt effects appear only in answers to Stepped and
Boundary, which the training thread sends; everything else is performed in the background. Nothing here waits:
`must_wait` tells a synchronous run (overlap 0) that a fragment which is due has not come back yet.
"""

from __future__ import annotations

import math

from atoll.core.config import SyncConfig, parse_adopt
from atoll.core.effects import (
    Adopt,
    Boundary,
    Closing,
    Contribute,
    DropSnapshot,
    Fetch,
    FetchBroken,
    Fetched,
    ForgetPrepared,
    ForgetResiduals,
    FromSyncer,
    GiveHeal,
    GiveInner,
    Joined,
    LearnerEffect,
    LearnerInput,
    Left,
    LinkDown,
    Note,
    PushAgain,
    PushBroken,
    PushDone,
    PushSeed,
    Settle,
    Stepped,
    Stopped,
    TakeInner,
    TakeSnapshot,
    ToSyncer,
)
from atoll.core.messages import (
    ASKED_TO_LEAVE,
    NO_VERSION,
    PROTOCOL_VERSION,
    STEP_MAX,
    Discard,
    DiscardCount,
    Donate,
    Fate,
    FetchKind,
    FragmentState,
    Heal,
    Hello,
    InnerOffer,
    Leave,
    Nothing,
    Outstanding,
    Progress,
    Published,
    PushHeader,
    PushKind,
    Ready,
    Refusal,
    Refused,
    Request,
    Reseed,
    Start,
    Stop,
    TensorSpec,
    Upcoming,
    Welcome,
)
from atoll.core.policy import first_due_step
from atoll.core.progress import Counters, FragmentProgress, Sent
from atoll.errors import LocalProtocolError

PREPARED_MAX = 2
"""Versions of a fragment that may wait for the next step boundary. A learner that pauses for minutes must not collect
hundreds; it catches up afterwards, from the ring or whole."""
_CAUSES: dict[str, Discard] = {
    Refusal.STALE_BASE: Discard.STALE,
    Discard.STALE: Discard.STALE,
    Refusal.NOT_FINITE: Discard.QUARANTINED,
    Refusal.NORM_OUTLIER: Discard.QUARANTINED,
}
"""Why a contribution was dropped -> what the ledger calls it; anything else is `refused`."""


class LearnerMachine:
    def __init__(self, learner: str, instance: str, tensors: tuple[TensorSpec, ...], frozen: int = 0) -> None:
        self.learner = learner
        self.instance = instance
        self.tensors = tensors
        self.frozen = frozen
        self.run = ""
        self.generation = 0
        self.config = SyncConfig()
        self.fragments: list[FragmentProgress] = []
        self.step = 0
        """The learner's place in the run: its own steps, counted from where the run was when it joined."""
        self.steps = 0
        self.tokens = 0
        self.joined = False
        self.stopped = ""
        self.epoch = 0
        """The highest epoch of this run that welcomed this process."""
        self.protocol = PROTOCOL_VERSION
        """What the session speaks."""
        self.rank = -1
        """What the syncer says: a number that no other learner has; -1 before it has said one."""
        self.wants_inner = False
        """Set by the shell before it joins, if this process has no inner optimizer state of its own."""
        self._started_epoch = 0
        """The epoch of the syncer with which the run last went on."""
        self._donate: Donate | None = None
        self._linked = False
        self._started = False
        self._upcoming: tuple[int, ...] = ()
        self._discarded: dict[tuple[int, str], int] = {}
        self._told_discarded: tuple[DiscardCount, ...] = ()
        self._discards_new = False
        self._step_ns = 0
        self._loss = math.nan
        self._closing: Closing | None = None
        self._left = False
        self._refused = False

    # ------------------------------------------------------------ the one entrance

    def handle(self, event: LearnerInput, now_ns: int) -> list[LearnerEffect]:
        out: list[LearnerEffect] = []
        if isinstance(event, Stepped):
            self._stepped(event, out)
        elif isinstance(event, Boundary):
            self._boundary(out)
        elif isinstance(event, FromSyncer):
            self._message(event.message, out)
        elif isinstance(event, PushDone):
            self._push_done(event, out)
        elif isinstance(event, PushBroken):
            self._push_broken(event, out)
        elif isinstance(event, Fetched):
            self._fetched(event, out)
        elif isinstance(event, FetchBroken):
            self._fetch_broken(event, out)
        elif isinstance(event, LinkDown):
            self._linked = self._started = False
            self._donate = None
            for progress in self.fragments:
                progress.request = None
                progress.fetching = NO_VERSION
        elif isinstance(event, Closing):
            self._close(event, out)
        self._maybe_leave(out)
        return out

    def hello(self) -> Hello:
        """The first message of a session. It lists every contribution whose fate is open, so that the syncer can tell
        what became of them while the link was down."""
        outstanding = tuple(Outstanding(p.index, s.seq) for p in self.fragments for s in p.outstanding)
        return Hello(
            self.learner,
            self.instance,
            PROTOCOL_VERSION,
            self.tensors,
            self.generation,
            self.run,
            tuple(p.newest for p in self.fragments) if self.joined else (),
            outstanding,
            self.epoch,
            tuple(p.newest_checksum for p in self.fragments) if self.joined else (),
            self.wants_inner and not self.joined,
            self.frozen,
        )

    @property
    def must_wait(self) -> bool:
        """True while a synchronous learner has reached a step at which a fragment is due and not yet adopted."""
        if not self.joined or not self.config.synchronous or self.stopped or self._closing:
            return False
        return any(self.step >= p.due_step or p.announced > p.base for p in self.fragments)

    @property
    def linked(self) -> bool:
        """True while a session is open in which the run goes on."""
        return self._started

    @property
    def adopt_ready(self) -> bool:
        incomplete = any(p.reseed and not p.prepared for p in self.fragments)
        return any(p.prepared and not (p.reseed and incomplete) for p in self.fragments)

    @property
    def boundary_wanted(self) -> bool:
        """True if a training thread that stands still at a step boundary (it joins, or waits for a merge) has something
        to do there: adopt, say that it is ready, or copy a fragment that was asked for."""
        if self.adopt_ready:
            return True
        if not self.joined:
            return self._started and all(p.base != NO_VERSION for p in self.fragments)
        if any(p.outstanding and not p.reseed and p.merged_in(p.base) for p in self.fragments):
            return True  # news of a merge that came after its version was adopted
        asked = [p for p in self.fragments if p.request is not None and p.snapshot is None]
        return any(p.may_contribute and p.local.steps > 0 for p in asked) and self._uplink_free

    @property
    def step_ns(self) -> int:
        """What the last step took."""
        return self._step_ns

    @property
    def versions_behind(self) -> int:
        return sum(max(0, p.announced - p.base) for p in self.fragments)

    # ------------------------------------------------------------ the training thread

    def _stepped(self, event: Stepped, out: list[LearnerEffect]) -> None:
        if not self.joined:
            raise LocalProtocolError("a step was reported before the learner joined; enter the Learner first")
        self.step += 1
        self.steps += 1
        self.tokens += event.tokens
        self._step_ns, self._loss = event.step_ns, event.loss
        for progress in self.fragments:
            steps, tokens = progress.local
            progress.local = Counters(steps + 1, tokens + event.tokens)
        self._give_before_overwritten(out)
        self._adopt_prepared(out)
        self._take_snapshots(out)
        self._give_inner(out)
        out.append(ToSyncer(self._progress()))

    def _give_before_overwritten(self, out: list[LearnerEffect]) -> None:
        """Under adopt policy overwrite, a learner whose steps take longer than the run's rounds would have nothing to
        give whenever it is asked. One that had to pass hands over its next progress before it is overwritten, for
        whichever round comes next."""
        if self.config.adopt != "overwrite" or not self._started:
            return
        for progress in self.fragments:
            free = not progress.outstanding and not progress.reseed and progress.base != NO_VERSION
            if progress.passed and progress.prepared and free and self._uplink_free:
                out.append(TakeSnapshot(progress.index))
                progress.snapshot = progress.local
                self._contribute(progress, 0, 0, out)

    def _boundary(self, out: list[LearnerEffect]) -> None:
        self._adopt_prepared(out)
        if not self.joined and self._started and all(p.base != NO_VERSION for p in self.fragments):
            self.joined = True
            out += [ToSyncer(Ready(self.step, self._bases())), Joined(self.generation, self.step)]
            return
        if self._closing is not None:
            self._flush(out)
        elif self.joined:
            self._take_snapshots(out)

    def _give_inner(self, out: list[LearnerEffect]) -> None:
        """A joiner needs inner state. It gets ours once our parameters are at least as new as the joiner's."""
        donate = self._donate
        if donate is not None and all(p.base >= b for p, b in zip(self.fragments, donate.bases, strict=False)):
            self._donate = None
            out.append(GiveInner(donate.slot))

    def _adopt_prepared(self, out: list[LearnerEffect]) -> None:
        # A re-seed is adopted at one boundary, whole: a fragment that is still poisoned would poison the healed ones.
        incomplete = False
        for progress in self.fragments:
            incomplete = incomplete or (progress.reseed != "" and not progress.prepared)
        for progress in self.fragments:
            if progress.reseed and incomplete:
                continue
            if not progress.prepared and not progress.outstanding and progress.announced <= progress.base:
                continue  # nothing new, which is so after most steps
            for version in progress.prepared:
                self._adopt(progress, version, out)
            progress.prepared = []
            self._take_late_news(progress, out)
            self._fetch_next(progress, out)

    def _take_late_news(self, progress: FragmentProgress, out: list[LearnerEffect]) -> None:
        """News of a merge came after its version had been adopted whole. Under rebase the progress is in theta twice
        now, and adopting the same version again takes one of them out; the other rules only settle the account."""
        late = progress.merged_in(progress.base)
        if late and parse_adopt(self.config.adopt)[0] == "rebase":
            self._adopt(progress, progress.base, out)
        else:
            for sent in late:
                progress.outstanding.remove(sent)
                out.append(Settle(progress.index, sent.seq, merged=not sent.uncertain))

    def _adopt(self, progress: FragmentProgress, version: int, out: list[LearnerEffect]) -> None:
        effect = self.plan_adopt(progress.index, version)
        rule = effect.rule
        out.append(effect)
        merged = progress.merged_in(version)
        for sent in merged:
            progress.outstanding.remove(sent)
            out.append(Settle(progress.index, sent.seq, merged=not sent.uncertain))
        if rule == "overwrite":
            cause = progress.reseed or Discard.OVERWRITTEN
            self._discard(progress, progress.local.tokens, cause, out)
            progress.local = Counters()
            for sent in progress.outstanding:
                sent.overwritten = True
        if progress.based:
            fields = {"learner": self.learner, "fragment": progress.index, "version": version, "step": self.step}
            out.append(Note("LearnerAdopted", {**fields, "merged": bool(merged)}))
        progress.reseed, progress.too_old = "", False
        assert version >= progress.base, f"I1: fragment {progress.index} went from {progress.base} to {version}"
        known = progress.base_checksum if version == progress.base else 0
        progress.base_checksum = progress.checksums.get(version, known)
        progress.base, progress.based = version, True
        progress.checksums = {v: c for v, c in progress.checksums.items() if v > version}
        self._drop_snapshot(progress, out)

    def plan_adopt(self, fragment: int, version: int, *, ahead: bool = False) -> Adopt:
        """How this version would be adopted now. The shell asks ahead of time, to have the values ready: by then a
        learner that does not wait has taken a step, so that there is progress of its own to keep."""
        progress = self.fragments[fragment]
        merged = progress.merged_in(version)
        rule, alpha = parse_adopt(self.config.adopt)
        if not progress.based or progress.reseed:
            rule = "overwrite"
        elif (
            rule == "rebase"
            and progress.local.steps == 0
            and len(merged) == len(progress.outstanding)
            and (not ahead or self.config.synchronous)
        ):
            rule = "overwrite"  # no progress of its own to keep: the same values, and exactly Theta
        minus = tuple(s.seq for s in merged if not s.overwritten) if rule == "rebase" else ()
        return Adopt(fragment, version, rule, alpha, minus)

    def _take_snapshots(self, out: list[LearnerEffect]) -> None:
        """Copy what may be asked for before the next step ends, and answer what was asked already."""
        if not self._upcoming and not self.config.synchronous:
            for progress in self.fragments:
                if progress.request is not None or progress.snapshot is not None:
                    break
            else:
                return
        if self.config.synchronous:
            # A learner behind the clock (it was away) is asked before it reaches the step itself.
            wanted = {p.index for p in self.fragments if self.step >= p.due_step} | set(self._upcoming)
        else:
            wanted = set(self._upcoming)
        for progress in sorted(self.fragments, key=lambda p: p.contributed_step):
            asked = progress.request is not None and self._uplink_free
            if (progress.index in wanted or asked) and progress.may_contribute and progress.local.steps > 0:
                if progress.snapshot != progress.local:
                    out.append(TakeSnapshot(progress.index))
                    progress.snapshot = progress.local
            elif progress.snapshot is not None and progress.index not in wanted:
                self._drop_snapshot(progress, out)
            if asked:
                self._answer(progress, out)

    def _drop_snapshot(self, progress: FragmentProgress, out: list[LearnerEffect]) -> None:
        if progress.snapshot is not None:
            progress.snapshot = None
            out.append(DropSnapshot(progress.index))

    # ------------------------------------------------------------ contributing

    @property
    def _uplink_free(self) -> bool:
        """On a thin uplink, pushes that share it would all arrive too old. So only as many run at once as the run has
        rounds in flight; other requests stay open and are answered, with newer snapshots, as the uplink comes free."""
        pushing = sum(not s.pushed for p in self.fragments for s in p.outstanding)
        return pushing < self.config.rounds_in_flight_max

    def _answer(self, progress: FragmentProgress, out: list[LearnerEffect]) -> None:
        """Answer the open request now if that is possible; otherwise it stays open until the next boundary."""
        request = progress.request
        if request is None or not progress.may_contribute:
            return
        if progress.local.steps == 0:
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
        progress.contributed_step = self.step
        progress.local = progress.local.minus(counters)
        minus = tuple(s.seq for s in progress.outstanding if not s.overwritten)
        feedback = not progress.outstanding
        sent = Sent(progress.next_seq, round_number, counters)
        progress.next_seq += 1
        progress.outstanding.append(sent)
        header = PushHeader(
            kind=PushKind.CONTRIBUTION,
            learner=self.learner,
            generation=self.generation,
            fragment=progress.index,
            round=round_number,
            attempt=attempt,
            seq=sent.seq,
            base_version=progress.base,
            steps=counters.steps,
            tokens=counters.tokens,
            codec=self.config.codec_up,
            size=0,
            checksum=0,
        )
        out.append(Contribute(header, minus, feedback))

    def _push_done(self, event: PushDone, out: list[LearnerEffect]) -> None:
        if not 0 <= event.fragment < len(self.fragments):
            return  # a Received of the syncer's for a fragment that the run does not have
        progress = self.fragments[event.fragment]
        sent = progress.find(event.seq)
        if sent is None:
            return
        if event.reply.accepted or event.reply.code == Refusal.DUPLICATE or sent.merged_version != NO_VERSION:
            sent.pushed = True
        else:
            self._dropped(progress, sent, event.reply.code, out)
            progress.too_old = event.reply.code == Refusal.STALE_BASE
            progress.given_up = self._closing is not None and not progress.too_old
            self._pass(progress, sent.round, out)
        for waiting in sorted(self.fragments, key=lambda p: p.contributed_step):
            self._answer(waiting, out)

    def _pass(self, progress: FragmentProgress, round_number: int, out: list[LearnerEffect]) -> None:
        """Tell a round that nothing will come from here, so that it does not wait; a synchronous learner then waits
        for the fragment's next round."""
        if round_number:
            out.append(ToSyncer(Nothing(round_number, progress.index)))
        progress.due_step = max(progress.due_step, self.step + self.config.sync_every)

    def _push_broken(self, event: PushBroken, out: list[LearnerEffect]) -> None:
        known = 0 <= event.fragment < len(self.fragments)
        sent = self.fragments[event.fragment].find(event.seq) if known else None
        if sent is not None and sent.merged_version == NO_VERSION and self._started:
            out.append(PushAgain(event.fragment, event.seq))

    def _dropped(self, progress: FragmentProgress, sent: Sent, reason: str, out: list[LearnerEffect]) -> None:
        """The contribution will not be merged: its progress is local again, or (if overwritten) discarded."""
        progress.outstanding.remove(sent)
        out.append(Settle(progress.index, sent.seq, merged=False))
        if sent.uncertain:
            return  # its tokens are discarded; what is left of it in the parameters is nobody's
        if sent.overwritten:
            self._discard(progress, sent.counters.tokens, _CAUSES.get(reason, Discard.REFUSED), out)
        else:
            progress.local = progress.local.plus(sent.counters)
            self._drop_snapshot(progress, out)

    def _discard(self, progress: FragmentProgress, tokens: int, cause: str, out: list[LearnerEffect]) -> None:
        if tokens:
            key = (progress.index, str(cause))
            self._discarded[key] = self._discarded.get(key, 0) + tokens
            self._discards_new = True
            fields = {"learner": self.learner, "fragment": progress.index, "tokens": tokens, "cause": str(cause)}
            out.append(Note("LearnerDiscarded", fields))

    # ------------------------------------------------------------ what the syncer says

    def _fits(self, message: object) -> bool:
        """False if a message speaks of fragments that this run does not have, or of a step from which nobody could
        count on. The wire only knows how much there may be at most."""
        if isinstance(message, Request | Published | Fate):
            return 0 <= message.fragment < len(self.fragments)
        if isinstance(message, Start):
            known = 0 < len(self.fragments) == len(message.fragments) == len(message.due_steps)
            return known and message.step <= STEP_MAX
        return True

    def _message(self, message: object, out: list[LearnerEffect]) -> None:
        if not self._fits(message):
            text = f"the syncer sent a {type(message).__name__} that does not fit this run; it is passed over"
            out.append(Note("Warned", {"source": self.learner, "text": text}))
        elif isinstance(message, Welcome):
            self._welcome(message, out)
        elif isinstance(message, Start):
            self._start(message, out)
        elif isinstance(message, Upcoming):
            self._upcoming = message.fragments
        elif isinstance(message, Request):
            progress = self.fragments[message.fragment]
            progress.request = message
            self._answer(progress, out)
        elif isinstance(message, Published):
            self._published(message, out)
        elif isinstance(message, Fate):
            self._fate(message, out)
        elif isinstance(message, Reseed):
            self._reseed(message.reason, out)
        elif isinstance(message, Heal):
            held = [(p, self.fragments[p].newest) for p in message.fragments if 0 <= p < len(self.fragments)]
            out.append(GiveHeal(tuple(held)))
        elif isinstance(message, Donate):
            self._donate = message
        elif isinstance(message, InnerOffer):
            out.append(TakeInner(message.slot, message.pieces, message.size, message.peer, message.reason))
        elif isinstance(message, Stop):
            self.stopped = message.reason
            out.append(Stopped(message.reason))
        elif isinstance(message, Refused):
            self.stopped, self._refused = message.detail, True
            out.append(Stopped(message.detail, message.code))

    @property
    def dismissed(self) -> bool:
        """Whether this learner alone was asked to leave; the others train on."""
        return self.stopped.startswith(ASKED_TO_LEAVE)

    def _welcome(self, message: Welcome, out: list[LearnerEffect]) -> None:
        self._linked = True
        if self.run and message.run != self.run:
            self._new_run(out)
            self.epoch = 0
        self.epoch, self.protocol = max(self.epoch, message.epoch), message.protocol
        self.run, self.generation, self.config = message.run, message.generation, message.config
        if self.rank < 0:  # a script has chosen its data by it: it stays what it was
            self.rank = message.rank
        if not self.fragments:
            self.fragments = [
                FragmentProgress(p, due_step=first_due_step(self.config, p)) for p in range(self.config.fragments)
            ]
        if message.seed:
            out.append(PushSeed())

    def _new_run(self, out: list[LearnerEffect]) -> None:
        """The syncer came back without its state, as a new run: contributions in the air are the learner's own again,
        versions count anew. Published parameters, which every learner still holds, become the new run's seed."""
        for progress in self.fragments:
            for sent in list(progress.outstanding):
                self._dropped(progress, sent, Refusal.UNKNOWN_ROUND, out)
            progress.prepared, progress.checksums = [], {}
            progress.announced = progress.base = NO_VERSION
            progress.base_checksum = 0
            self._drop_snapshot(progress, out)
            # What is neither local nor discarded was merged by the earlier run; its ledger is gone, ours adds up.
            discarded = sum(n for (fragment, _), n in self._discarded.items() if fragment == progress.index)
            earlier = (progress.index, str(Discard.EARLIER_RUN))
            self._discarded[earlier] = self._discarded.get(earlier, 0) + (
                self.tokens - progress.local.tokens - discarded
            )
            self._discards_new = True
        out.append(ForgetPrepared())

    def _start(self, message: Start, out: list[LearnerEffect]) -> None:
        self._started = True
        restarted, self._started_epoch = self._started_epoch not in (0, self.epoch), self.epoch
        if not self.joined:
            self.step = message.step
        for progress, state, due in zip(self.fragments, message.fragments, message.due_steps, strict=True):
            progress.due_step = due if not self.joined else max(due, progress.due_step)
            progress.request = None
            if progress.base != NO_VERSION and self._foreign(progress, state):
                self._roll_back(progress, state.version, out)
            elif progress.knows_beyond(state.version):
                self._forget_announced(progress, state.version, out)
            if state.version > progress.newest or progress.base == NO_VERSION:
                # A syncer that was restarted may have gone back and made other versions of the same numbers since:
                # its updates need not fit what is here.
                progress.whole = progress.whole or restarted
                progress.announced = state.version
                progress.checksums[state.version] = state.checksum
            progress.fetching = NO_VERSION
            self._fetch_next(progress, out)
            again = [s for s in progress.outstanding if not s.pushed and s.merged_version == NO_VERSION]
            out += [PushAgain(progress.index, s.seq) for s in again]
        if self.joined:
            out += [ToSyncer(Ready(self.step, self._bases())), ToSyncer(self._progress())]

    def _foreign(self, progress: FragmentProgress, state: FragmentState) -> bool:
        """True if the run no longer knows the version that this learner holds: the syncer lost it with its disk, and
        nobody could bring it back in time."""
        other = state.version == progress.newest and progress.newest_checksum not in (0, state.checksum)
        return state.version < progress.newest or other

    def _roll_back(self, progress: FragmentProgress, version: int, out: list[LearnerEffect]) -> None:
        """Take the run's older version, keeping what was trained since: contributions that were merged into a lost
        version and not adopted yet are the learner's own again."""
        text = f"fragment {progress.index} goes back from version {progress.newest} to {version}: the syncer lost it"
        out.append(Note("Warned", {"source": self.learner, "text": text}))
        for sent in list(progress.outstanding):
            if sent.merged_version > version:
                self._dropped(progress, sent, Refusal.UNKNOWN_VERSION, out)
        progress.prepared, progress.checksums = [], {}
        progress.announced = progress.base = NO_VERSION
        progress.base_checksum = 0
        self._drop_snapshot(progress, out)
        out.append(ForgetPrepared(progress.index))

    def _forget_announced(self, progress: FragmentProgress, version: int, out: list[LearnerEffect]) -> None:
        """The syncer lost versions that it had announced and that this learner had not fetched yet. They will never
        come; what was merged into them is the learner's own again."""
        for sent in list(progress.outstanding):
            if sent.merged_version > version:
                self._dropped(progress, sent, Refusal.UNKNOWN_VERSION, out)
        progress.announced = min(progress.announced, version)
        progress.checksums = {v: c for v, c in progress.checksums.items() if v <= version}

    def _published(self, message: Published, out: list[LearnerEffect]) -> None:
        progress = self.fragments[message.fragment]
        for sent in progress.outstanding:
            if sent.seq <= message.merged_seq and sent.merged_version == NO_VERSION:
                sent.merged_version = message.version
        progress.due_step = max(progress.due_step, message.clock_step + self.config.sync_every)
        if message.version > progress.newest:
            progress.announced = message.version
            progress.checksums[message.version] = message.checksum
            self._fetch_next(progress, out)

    def _fate(self, message: Fate, out: list[LearnerEffect]) -> None:
        progress = self.fragments[message.fragment]
        sent = progress.find(message.seq)
        if sent is None or sent.merged_version != NO_VERSION:
            return
        if message.version == NO_VERSION:
            self._dropped(progress, sent, message.reason, out)
            progress.due_step = max(progress.due_step, self.step + self.config.sync_every)
        else:
            sent.merged_version = message.version
            if message.reason == Discard.UNCERTAIN:
                sent.uncertain = True
                self._discard(progress, sent.counters.tokens, Discard.UNCERTAIN, out)

    def _reseed(self, reason: str, out: list[LearnerEffect]) -> None:
        out += [ForgetResiduals(), ForgetPrepared()]
        out.append(Note("Warned", {"source": self.learner, "text": f"re-seeded: {reason}"}))
        for progress in self.fragments:
            progress.reseed = Discard.QUARANTINED
            progress.prepared = []
            progress.announced = max(progress.announced, progress.base)
            progress.fetching = NO_VERSION
            self._fetch_next(progress, out)

    # ------------------------------------------------------------ fetching

    def _fetch_next(self, progress: FragmentProgress, out: list[LearnerEffect]) -> None:
        full = len(progress.prepared) >= (1 if progress.reseed else PREPARED_MAX)
        if progress.fetching != NO_VERSION or not self._linked or full:
            return
        # Updates that have left the ring are not worth asking for.
        behind = progress.announced - progress.newest > self.config.ring_versions
        whole = progress.newest == NO_VERSION or bool(progress.reseed) or progress.whole or behind
        if progress.announced == NO_VERSION or (not whole and progress.announced <= progress.newest):
            return
        version = progress.announced if whole else progress.newest + 1
        kind = FetchKind.THETA if whole else FetchKind.UPDATE
        progress.fetching = version
        out.append(Fetch(kind, progress.index, version, progress.checksums.get(version, 0)))

    def _fetched(self, event: Fetched, out: list[LearnerEffect]) -> None:
        progress = self.fragments[event.fragment]
        if progress.fetching != event.asked:
            return  # asked for before the link broke, and again since: the second answer counts
        progress.fetching, progress.whole = NO_VERSION, False
        if event.checksum:
            progress.checksums[event.version] = event.checksum
        if progress.reseed and event.version >= progress.base:
            progress.prepared = [event.version]
        elif not progress.reseed and event.version > progress.newest:
            progress.prepared.append(event.version)
        self._fetch_next(progress, out)

    def _fetch_broken(self, event: FetchBroken, out: list[LearnerEffect]) -> None:
        progress = self.fragments[event.fragment]
        if progress.fetching != event.version:
            return
        progress.fetching = NO_VERSION
        if event.gone and self._linked:
            progress.fetching = progress.announced
            checksum = progress.checksums.get(progress.announced, 0)
            out.append(Fetch(FetchKind.THETA, progress.index, progress.announced, checksum))
        elif self._started:
            self._fetch_next(progress, out)

    # ------------------------------------------------------------ leaving

    def _close(self, event: Closing, out: list[LearnerEffect]) -> None:
        self._closing = event
        self._adopt_prepared(out)
        self._flush(out)
        if self.joined:
            out.append(ToSyncer(self._progress()))

    def leave_again(self) -> None:
        """The link broke before the syncer had let this learner go: leave once more when it is back. A syncer that has
        the Leave on record refuses; one that was restarted says what is to be handed over again."""
        self._left = False

    def _flush(self, out: list[LearnerEffect]) -> None:
        """Hand over all progress that is in no contribution yet, for whichever round comes next. A fragment whose base
        was refused as too old (the link was down) first catches up; and one whose last contribution is still being
        pushed waits for it, because contribution numbers must arrive in order."""
        assert self._closing is not None
        if not self._closing.flush or not self.joined:
            return
        for progress in self.fragments:
            behind = progress.too_old and progress.announced > progress.base
            pushing = any(not sent.pushed for sent in progress.outstanding)
            based = progress.base != NO_VERSION
            if self._started and based and self._to_flush(progress) and not behind and not pushing:
                out.append(TakeSnapshot(progress.index))
                progress.snapshot = progress.local
                self._contribute(progress, 0, 0, out)

    def _to_flush(self, progress: FragmentProgress) -> bool:
        return progress.local.steps > 0 and not progress.reseed and not progress.given_up

    def _maybe_leave(self, out: list[LearnerEffect]) -> None:
        closing = self._closing
        if closing is None or self._left:
            return
        unsent = any(not s.pushed for p in self.fragments for s in p.outstanding)
        # While the link is down there may be nothing to hand over and still something to say: the last report.
        unheard = self.joined and not self._started
        if closing.flush and not self._refused and (unheard or unsent or any(map(self._to_flush, self.fragments))):
            return
        self._left = True
        out += [ToSyncer(self._progress()), ToSyncer(Leave(closing.reason)), Left()]

    def _progress(self) -> Progress:
        if len(self._told_discarded) != len(self._discarded) or self._discards_new:
            self._told_discarded = tuple(DiscardCount(f, c, n) for (f, c), n in sorted(self._discarded.items()))
            self._discards_new = False
        discarded = self._told_discarded
        pending = tuple([p.pending_tokens for p in self.fragments]) if self.protocol > 1 else ()
        return Progress(
            self.step, self.steps, self.tokens, self._step_ns, self._loss, self._bases(), discarded, pending
        )

    def heartbeat(self) -> Progress | None:
        """What to say when nothing else was said for a while."""
        return self._progress() if self.joined and self._started else None

    def _bases(self) -> tuple[int, ...]:
        return tuple([p.base for p in self.fragments])
