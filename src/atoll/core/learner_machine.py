"""The learner as a pure machine: `handle(input, now_ns) -> effects`.

It counts steps and tokens per fragment, answers requests from snapshots, follows published versions and keeps the
token account of what was merged and discarded. TakeSnapshot and Adopt effects appear only in answers to Stepped and
Boundary, which the training thread sends; everything else is performed in the background. Nothing here waits:
`must_wait` tells a synchronous run (overlap 0) that a fragment which is due has not come back yet.

The machine joins, leaves and routes; its parts do the rest:

    LearnerState         place in the run and token account
    ContributionMaker    snapshots and contributions
    VersionFollower      fetching and adopting what is published
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from atoll.core.config import CODECS, SyncConfig
from atoll.core.contribution_maker import ContributionMaker
from atoll.core.effects import (
    Adopt,
    Boundary,
    Closing,
    FetchBroken,
    Fetched,
    FromSyncer,
    GiveHeal,
    GiveInner,
    InnerMissing,
    Joined,
    LearnerEffect,
    LearnerInput,
    Left,
    LinkDown,
    Note,
    NotFinite,
    PushBroken,
    PushDone,
    PushSeed,
    Stepped,
    Stopped,
    TakeInner,
    ToSyncer,
)
from atoll.core.events import Warned
from atoll.core.layout import tensors_fingerprint
from atoll.core.learner_state import LearnerState
from atoll.core.messages import (
    ASKED_TO_LEAVE,
    NO_VERSION,
    PROTOCOL_VERSION,
    STEP_MAX,
    DataLeases,
    Donate,
    Fate,
    Heal,
    Hello,
    InlineReply,
    InnerOffer,
    Leave,
    Outstanding,
    Progress,
    Published,
    Ready,
    Refused,
    Request,
    Reseed,
    Serving,
    Start,
    Stop,
    SyncerMessage,
    TensorSpec,
    Upcoming,
    Welcome,
)
from atoll.core.orders_ahead import BoundaryOrders, OrdersAhead
from atoll.core.policy import first_due_step
from atoll.core.progress import FragmentProgress
from atoll.core.version_follower import VersionFollower
from atoll.errors import LocalProtocolError


class LearnerMachine:
    """All that a learner decides has one entrance. So what comes first (a version, a request, a step) is settled in one
    place, and alike in every world."""

    def __init__(
        self,
        learner: str,
        instance: str,
        tensors: tuple[TensorSpec, ...],
        frozen: int = 0,
        *,
        orders_ahead: bool = False,
    ) -> None:
        """`orders_ahead`: the learner has several processes, and `fix_orders` says what each boundary does."""
        self._state = state = LearnerState(learner)
        self._contributions = ContributionMaker(state)
        self._versions = VersionFollower(state, self._contributions)
        self._ahead = OrdersAhead(state, self._contributions, self._versions) if orders_ahead else None
        self.instance = instance
        self.tensors = tensors
        self.frozen = frozen
        self._fingerprint = tensors_fingerprint(tensors)
        self.run = ""
        self.stopped = ""
        self.epoch = 0
        """The highest epoch of this run that welcomed this process."""
        self.rank = -1
        """What the syncer says: a number that no other learner has; -1 before it has said one."""
        self._wants_inner = False
        self._started_epoch = 0
        """The epoch of the syncer with which the run last went on."""
        self._donate: Donate | None = None
        self._left = False
        self._refused = False

    # ------------------------------------------------------------ the one entrance

    def handle(self, event: LearnerInput, now_ns: int) -> list[LearnerEffect]:
        """Take one input in; returns what the shell must do, in this order."""
        out: list[LearnerEffect] = []
        if self._ahead is None or not self._ahead.holds_back(event):
            self._handle(event, out)
        if self._ahead is not None and isinstance(event, Stepped | Boundary):
            for held in self._ahead.released():
                self._handle(held, out)
        self._maybe_leave(out)
        return out

    def _handle(self, event: LearnerInput, out: list[LearnerEffect]) -> None:
        match event:
            case Stepped():
                self._stepped(event, out)
            case Boundary():
                self._boundary(out)
            case FromSyncer():
                self._message(event.message, out)
            case PushDone():
                self._contributions.push_done(event, out)
            case NotFinite():
                self._contributions.push_done(event.refusal, out)
                self._versions.reseed(f"it made a delta of fragment {event.fragment} that is not finite", out)
            case PushBroken():
                self._contributions.push_broken(event, out)
            case Fetched():
                self._versions.fetched(event, out)
            case FetchBroken():
                self._versions.fetch_broken(event, out)
            case LinkDown():
                self._link_down()
            case Closing():
                self._close(event, out)
            case InnerMissing():
                self._wants_inner = True
            case _:
                assert_never(event)

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
            self._wants_inner and not self.joined,
            self.frozen,
            self._fingerprint,
            CODECS.names(),
            any_update=True,
        )

    def heartbeat(self) -> Progress | None:
        """What to say when nothing else was said for a while."""
        return self._state.report() if self.joined and self._state.started else None

    # ------------------------------------------------------------ looking in

    @property
    def wants_inner(self) -> bool:
        """A peer's inner state is asked for with the first Hello."""
        return self._wants_inner

    @property
    def learner(self) -> str:
        return self._state.learner

    @property
    def generation(self) -> int:
        return self._state.generation

    @property
    def config(self) -> SyncConfig:
        return self._state.config

    @property
    def fragments(self) -> list[FragmentProgress]:
        return self._state.fragments

    @property
    def to_fetch_first(self) -> list[int]:
        """Fragments of which nothing can be given before the newer version that was announced has come."""
        return [
            progress.index for progress in self.fragments if progress.too_old and progress.announced > progress.base
        ]

    @property
    def unanswered_tokens(self) -> list[int]:
        """Of each fragment: tokens that the syncer does not have, as far as it has answered."""
        return [p.unanswered_tokens for p in self.fragments]

    @property
    def handed_over(self) -> list[tuple[int, int]]:
        """Of each fragment: contributions that the syncer has answered, ever, and those that it has not."""
        return [(p.answered, p.to_give) for p in self.fragments]

    @property
    def pending_tokens(self) -> list[int]:
        """Of each fragment: tokens that are in no published version."""
        return [p.pending_tokens for p in self.fragments]

    @property
    def step(self) -> int:
        """The learner's place in the run: its own steps, counted from where the run was when it joined."""
        return self._state.step

    @property
    def steps(self) -> int:
        return self._state.total.steps

    @property
    def tokens(self) -> int:
        return self._state.total.tokens

    @property
    def step_ns(self) -> int:
        """What the last step took."""
        return self._state.step_ns

    @property
    def joined(self) -> bool:
        return self._state.joined

    @property
    def protocol(self) -> int:
        """What the session speaks."""
        return self._state.protocol

    @property
    def secret(self) -> str:
        """What the pushes and fetches of the session carry."""
        return self._state.secret

    @property
    def linked(self) -> bool:
        """True while a session is open in which the run goes on."""
        return self._state.started

    @property
    def versions_behind(self) -> int:
        return self._versions.behind

    @property
    def adopt_ready(self) -> bool:
        return self._versions.adopt_ready

    @property
    def dismissed(self) -> bool:
        """Whether this learner alone was asked to leave; the others train on."""
        return self.stopped.startswith(ASKED_TO_LEAVE)

    @property
    def must_wait(self) -> bool:
        """True while a synchronous learner has reached a step at which a fragment is due and not yet adopted."""
        state = self._state
        if state.config.overlap or not state.joined or self.stopped or state.closing:  # most runs do not wait
            return False
        return any(state.step >= p.due_step or p.announced > p.base for p in self.fragments)

    @property
    def boundary_wanted(self) -> bool:
        """True if a training thread that stands still at a step boundary (it joins, or waits for a merge) has something
        to do there: adopt, say that it is ready, or copy a fragment that was asked for."""
        if self._versions.adopt_ready:
            return True
        if not self.joined:
            return self._holds_all()
        if any(p.outstanding and not p.reseed and p.merged_in(p.base) for p in self.fragments):
            return True  # news of a merge that came after its version was adopted
        return self._contributions.boundary_wanted

    def will_adopt(self, fragment: int, version: int) -> bool:
        """Whether this version waits for the next step boundary."""
        return version in self.fragments[fragment].prepared

    @property
    def bases(self) -> tuple[int, ...]:
        """The version of each fragment that this learner has adopted."""
        return self._state.bases()

    def held(self, fragment: int) -> tuple[int, int]:
        """The newest version of a fragment that is on this host, and its checksum."""
        progress = self.fragments[fragment]
        return progress.newest, progress.newest_checksum

    @property
    def waiting_most(self) -> tuple[int, int]:
        """Of any fragment, at most: contributions whose fate is open, and versions that wait to be adopted."""
        outstanding = max((len(p.outstanding) for p in self.fragments), default=0)
        return outstanding, max((len(p.prepared) for p in self.fragments), default=0)

    @property
    def missing(self) -> list[int]:
        """Fragments of which nothing has come yet."""
        return [p.index for p in self.fragments if p.newest == NO_VERSION]

    @property
    def reseeding(self) -> bool:
        """True from a re-seed until all of it is adopted."""
        return any(p.reseed for p in self.fragments)

    def plan_adopt(self, fragment: int, version: int, *, ahead: bool = False) -> Adopt:
        """How this version would be adopted now: see VersionFollower."""
        return self._versions.plan_adopt(fragment, version, ahead=ahead)

    # ------------------------------------------------------------ several processes

    def wanted_adopts(self, *, standing: bool) -> list[Adopt]:
        """What could be adopted at the next boundary: its values should be brought to where they are needed."""
        assert self._ahead is not None
        return self._ahead.wanted(standing=standing)

    def fix_orders(self, ready: Callable[[Adopt], bool], *, standing: bool) -> BoundaryOrders:
        """Fix what the next Stepped or Boundary does. `standing`: there is no step before it."""
        assert self._ahead is not None
        return self._ahead.fix(ready, standing=standing)

    def correct_tokens(self, tokens: int) -> None:
        """So many more (or, below 0, fewer) were processed than was counted, by other processes of this learner. They
        join what is in no contribution yet; where something of that is missing, they stay uncounted."""
        self._state.correct_tokens(tokens)

    # ------------------------------------------------------------ the training thread

    def _stepped(self, event: Stepped, out: list[LearnerEffect]) -> None:
        if not self.joined:
            raise LocalProtocolError("a step was reported before the learner joined; enter the Learner first")
        self._state.stepped(event.tokens, event.step_ns, event.loss)
        if self._ahead is not None:
            self._ahead.carry_out(out, stepped=True)
        else:
            self._contributions.give_before_overwritten(out)
            self._versions.adopt_prepared(out)
            self._contributions.take_snapshots(out)
        self._give_inner(out)
        out.append(ToSyncer(self._state.report()))

    def _boundary(self, out: list[LearnerEffect]) -> None:
        if self._ahead is not None:
            self._ahead.carry_out(out, stepped=False)
        else:
            self._versions.adopt_prepared(out)
        if not self.joined and self._holds_all():
            self._state.joined = True
            out += [ToSyncer(Ready(self.step, self._state.bases())), Joined(self.generation, self.step)]
        elif self._ahead is None and self._state.closing is not None:
            self._contributions.flush(out)
        elif self._ahead is None and self.joined:
            self._contributions.take_snapshots(out)

    def _holds_all(self) -> bool:
        """Everything that a joiner needs is in its parameters."""
        return self._state.started and all(p.base != NO_VERSION for p in self.fragments)

    def _give_inner(self, out: list[LearnerEffect]) -> None:
        """A joiner needs inner state. It gets ours once our parameters are at least as new as the joiner's."""
        donate = self._donate
        if donate is not None and all(p.base >= b for p, b in zip(self.fragments, donate.bases, strict=False)):
            self._donate = None
            out.append(GiveInner(donate.slot))

    # ------------------------------------------------------------ what the syncer says

    def _message(self, message: SyncerMessage, out: list[LearnerEffect]) -> None:
        if not self._fits(message):
            text = f"the syncer sent a {type(message).__name__} that does not fit this run; it is passed over"
            out.append(Note(Warned(self.learner, text)))
            return
        match message:
            case Welcome():
                self._welcome(message, out)
            case Start():
                self._start(message, out)
            case Upcoming():
                self._contributions.upcoming = message.fragments
            case Request():
                self._contributions.ask(message, out)
            case Published():
                self._versions.published(message, out)
            case Fate():
                self._contributions.fate(message, out)
            case Reseed():
                self._versions.reseed(message.reason, out)
            case Heal():
                held = [(p, self.fragments[p].newest) for p in message.fragments if 0 <= p < len(self.fragments)]
                out.append(GiveHeal(tuple(held)))
            case Donate():
                self._donate = message
            case InnerOffer():
                out.append(TakeInner(message.slot, message.pieces, message.size, message.peer, message.reason))
            case Stop():
                self.stopped = message.reason
                out.append(Stopped(message.reason))
            case Refused():
                self.stopped, self._refused = message.detail, True
                out.append(Stopped(message.detail, message.code))
            case InlineReply() | DataLeases() | Serving():
                pass  # the shell makes a PushDone of the first, gives the second to its reader, and follows the third
            case _:
                assert_never(message)

    def _fits(self, message: SyncerMessage) -> bool:
        """False if a message speaks of fragments that this run does not have, or of a step from which nobody could
        count on. The wire only knows how much there may be at most."""
        if isinstance(message, Upcoming | InlineReply):
            return True
        if isinstance(message, Request | Published | Fate):
            return 0 <= message.fragment < len(self._state.fragments)
        if isinstance(message, Start):
            known = 0 < len(self.fragments) == len(message.fragments) == len(message.due_steps)
            return known and message.step <= STEP_MAX
        return True

    def _welcome(self, message: Welcome, out: list[LearnerEffect]) -> None:
        state = self._state
        state.linked = True
        if self.run and message.run != self.run:
            self._versions.new_run(out)
            self.epoch = 0
        self.epoch, state.protocol = max(self.epoch, message.epoch), message.protocol
        state.secret, state.sharded = message.secret, bool(message.shards)
        self.run, state.generation, state.config = message.run, message.generation, message.config
        if self.rank < 0:  # a script has chosen its data by it: it stays what it was
            self.rank = message.rank
        if not state.fragments:
            state.fragments = [
                FragmentProgress(p, due_step=first_due_step(self.config, p), total=state.total)
                for p in range(self.config.fragments)
            ]
        for progress in state.fragments:
            progress.period = self.config.sync_every
        if message.seed:
            out.append(PushSeed())

    def _start(self, message: Start, out: list[LearnerEffect]) -> None:
        self._state.started, self._state.away = True, frozenset(message.away)
        restarted, self._started_epoch = self._started_epoch not in (0, self.epoch), self.epoch
        if not self.joined:
            self._state.step = message.step
        for progress, state, due in zip(self.fragments, message.fragments, message.due_steps, strict=True):
            progress.due_step = due if not self.joined else max(due, progress.due_step)
            progress.request = None
            if progress.index in message.away:
                self._contributions.hold_back(progress)
                continue
            self._versions.start(progress, state, restarted, out)
            self._contributions.push_again(progress, out)
        if self.joined:
            out += [ToSyncer(Ready(self.step, self._state.bases())), ToSyncer(self._state.report())]

    def _link_down(self) -> None:
        self._state.linked = self._state.started = False
        self._donate = None
        for progress in self.fragments:
            progress.request = None
            progress.fetching = NO_VERSION

    # ------------------------------------------------------------ leaving

    def _close(self, event: Closing, out: list[LearnerEffect]) -> None:
        self._state.closing = event
        if self._ahead is None:
            self._versions.adopt_prepared(out)
            self._contributions.flush(out)
        if self.joined:
            out.append(ToSyncer(self._state.report()))

    def leave_again(self) -> None:
        """The link broke before the syncer had let this learner go: leave once more when it is back. A syncer that has
        the Leave on record refuses; one that was restarted says what is to be handed over again."""
        self._left = False

    def _maybe_leave(self, out: list[LearnerEffect]) -> None:
        closing = self._state.closing
        if closing is None or self._left:
            return
        # While the link is down there may be nothing to hand over and still something to say: the last report.
        unheard = self.joined and not self._state.started
        left = unheard or self._contributions.unsent or any(map(self._contributions.to_flush, self.fragments))
        if closing.flush and not self._refused and left:
            return
        self._left = True
        out += [ToSyncer(self._state.report()), ToSyncer(Leave(closing.reason)), Left()]
