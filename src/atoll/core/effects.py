"""What goes into a machine (inputs) and what comes out (effects), for both machines.

`machine.handle(input, now_ns)` returns effects in the order in which the shell must perform them. The shell performs
them and nothing else; whatever takes time comes back as another input. Payloads never pass through here: a contribution
is named by its ContributionId, and the shell keeps the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from atoll.core.events import CoreEvent
from atoll.core.identity import Identity
from atoll.core.messages import (
    FetchKind,
    Hello,
    LearnerMessage,
    PushHeader,
    PushReply,
    Refusal,
    SyncerMessage,
)
from atoll.core.rounds import ContributionId, ContributionRecord
from atoll.core.values import dataclass

# ---------------------------------------------------------------- shared


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the record."""

    event: CoreEvent


# ---------------------------------------------------------------- into the syncer machine


@dataclass(frozen=True, slots=True)
class SessionOpened:
    session: int
    hello: Hello
    secret: str = field(default="", repr=False)
    """What the pushes and fetches of this session must carry, drawn by the shell; empty: nothing."""
    identity: Identity | None = None
    """Whose key the learner has; None: the run's one token, or none."""


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The connection is gone, for whatever reason; the learner may be training on."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class FromLearner:
    session: int
    message: LearnerMessage


@dataclass(frozen=True, slots=True)
class PushOpened:
    """May this push come in? Answered with an Answer effect; nothing else changes."""

    header: PushHeader


@dataclass(frozen=True, slots=True)
class PushCompleted:
    """All bytes are here and their checksum is right. `finite` and `norm` are of the decoded values; of a healing push
    the norm is that of its difference to what is on disk."""

    header: PushHeader
    finite: bool
    norm: float


@dataclass(frozen=True, slots=True)
class SeedCommitted:
    """The seed is stored as version 0; one checksum per fragment."""

    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """The answer to Compare. By learner: the cosine of what it contributed with the sum of the voices' directions, its
    own left out; NaN where one of them is zero."""

    fragment: int
    cosines: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class MergeFinished:
    """The merge of a fragment is done and committed, or (`finite` False) nothing was changed."""

    fragment: int
    finite: bool
    checksum: int = 0
    merge_ns: int = 0
    update_bytes: int = 0
    gradient_norm: float = 0.0
    rho: float = 0.0
    store_ns: int = 0
    store_bytes: int = 0
    """What making it durable took."""
    lost: tuple[ContributionId, ...] = ()
    """Not merged, because the relay that held their bytes is gone: the rest may be. Only where `finite` is False."""


@dataclass(frozen=True, slots=True)
class HealCommitted:
    """A learner's parameters of a lost version are in place."""

    fragment: int
    version: int
    checksum: int


@dataclass(frozen=True, slots=True)
class InnerTaken:
    """The joiner has asked for a piece of the inner state in this slot; `done`: it has them all."""

    slot: int
    done: bool


@dataclass(frozen=True, slots=True)
class FetchOpened:
    """A learner has begun to fetch a version: it has heard of it."""

    learner: str
    generation: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    reason: str


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """Somebody wants this one learner to leave while the others train on."""

    learner: str


@dataclass(frozen=True, slots=True)
class KeyRevoked:
    """The operator has revoked this learner's key: it is out, at once."""

    learner: str
    detail: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; see `next_wake_ns`."""


@dataclass(frozen=True, slots=True)
class FragmentsDown:
    """Whoever serves these fragments (a shard) is away: no round of them is begun or ends, and the others do not wait
    for them. It replaces what was said before."""

    fragments: frozenset[int]
    resting: frozenset[int] = frozenset()
    """Of these no round is begun either, but those that are under way end: they are about to move."""


@dataclass(frozen=True, slots=True)
class FragmentsBack:
    """A shard that was away is there again, with these versions on its disk (NO_VERSION: none) and nothing else. What
    it had in memory is gone: its learners give it again. What its disk lacks is asked of them as well."""

    on_disk: Mapping[int, tuple[int, int]]
    """By fragment: version and checksum."""
    handed: frozenset[ContributionId] = frozenset()
    """What leavers handed over and its disk has."""


SyncerInput = (
    SessionOpened
    | SessionClosed
    | FromLearner
    | PushOpened
    | PushCompleted
    | SeedCommitted
    | Compared
    | MergeFinished
    | HealCommitted
    | InnerTaken
    | FetchOpened
    | StopRequested
    | LeaveAsked
    | KeyRevoked
    | FragmentsDown
    | FragmentsBack
    | Tick
)


# ---------------------------------------------------------------- out of the syncer machine


@dataclass(frozen=True, slots=True)
class ToLearner:
    session: int
    message: SyncerMessage


@dataclass(frozen=True, slots=True)
class EndSession:
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to a PushOpened or PushCompleted."""

    reply: PushReply


@dataclass(frozen=True, slots=True)
class CommitSeed:
    """Every fragment of the seed is here: make it version 0 and come back with SeedCommitted."""


@dataclass(frozen=True, slots=True)
class Compare:
    """Measure how far these contributions agree with those of the learners that have a voice, and come back with
    Compared. Nothing is changed."""

    fragment: int
    contributions: tuple[ContributionId, ...]
    voices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge these contributions, in this order and with these weights, into `version`, commit, and come back with
    MergeFinished. Only then is it published. The ratios of the weights matter, and where `policy.scales_steps`
    so does their sum: it is how much of the merged gradient counts (and is on tape and in recordings with them)."""

    fragment: int
    round: int
    version: int
    contributions: tuple[ContributionId, ...]
    weights: tuple[float, ...]
    codec_down: str = ""
    """What the update is encoded in (`adaptive`); empty: in the run's `codec_down`."""


@dataclass(frozen=True, slots=True)
class Forget:
    """The payload of this contribution is no longer needed. Merged ones may be compared with later ones before."""

    contribution: ContributionId


@dataclass(frozen=True, slots=True)
class Remember:
    """Put these facts on the tape (None forgets one). With `first`, nothing that comes after this effect may leave the
    process before they are on disk."""

    rows: Mapping[str, Any]
    first: bool


@dataclass(frozen=True, slots=True)
class CommitHealed:
    """The parameters that were pushed for this fragment become its committed `version`: come back with HealCommitted.
    Momentum is what the disk has; the downlink's residual starts from zero."""

    fragment: int
    version: int
    checksum: int


@dataclass(frozen=True, slots=True)
class KeepHeld:
    """This learner leaves: put its contributions that wait for a round on disk, then end its session. `processed` is
    its token count."""

    session: int
    contributions: tuple[ContributionRecord, ...]
    processed: int


@dataclass(frozen=True, slots=True)
class ForgetInner:
    """The pieces in this inner slot are no longer needed."""

    slot: int


@dataclass(frozen=True, slots=True)
class LookForNewer:
    """A learner says that a newer syncer has taken over this run: look where the epoch is kept. Its word alone ends
    nobody; what is found there does."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The run was stopped, every learner has left and everything held is merged."""

    reason: str


SyncerEffect = (
    Note
    | ToLearner
    | EndSession
    | Answer
    | CommitSeed
    | Compare
    | Merge
    | Forget
    | Remember
    | KeepHeld
    | CommitHealed
    | ForgetInner
    | LookForNewer
    | Finished
)


# ---------------------------------------------------------------- into the learner machine


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The connection is gone. Training goes on; what was under way is asked for, or pushed, again."""

    reason: str


@dataclass(frozen=True, slots=True)
class FromSyncer:
    message: SyncerMessage


@dataclass(frozen=True, slots=True)
class Stepped:
    """The training loop finished one inner step."""

    tokens: int
    step_ns: int
    loss: float


@dataclass(frozen=True, slots=True)
class Boundary:
    """The training thread stands at a step boundary without having stepped (it waits, joins or closes)."""


@dataclass(frozen=True, slots=True)
class PushDone:
    """The syncer has answered a push."""

    fragment: int
    seq: int
    reply: PushReply


@dataclass(frozen=True, slots=True)
class NotFinite:
    """What was to be sent is not finite: it is not pushed, and the learner starts anew from published parameters."""

    fragment: int
    seq: int
    detail: str

    @property
    def refusal(self) -> PushDone:
        """As if the syncer had refused it."""
        return PushDone(self.fragment, self.seq, PushReply(False, Refusal.NOT_FINITE, self.detail))


@dataclass(frozen=True, slots=True)
class PushBroken:
    """The push could not be completed; it is tried again when the link is up."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """A version is on this host and checked, ready to be adopted. `asked` is the one that the Fetch effect named."""

    fragment: int
    version: int
    asked: int
    checksum: int = 0
    """Of the version's parameters, where the shell knows it."""


@dataclass(frozen=True, slots=True)
class FetchBroken:
    """A fetch failed: `gone` means the syncer no longer has that update, so the whole fragment is needed."""

    fragment: int
    version: int
    gone: bool


@dataclass(frozen=True, slots=True)
class Closing:
    """The training loop is over: hand over everything that is left (`flush`), then leave."""

    flush: bool
    reason: str


@dataclass(frozen=True, slots=True)
class InnerMissing:
    """Before joining: this process has no inner optimizer state of its own, so it asks for a peer's."""


LearnerInput = (
    LinkDown
    | FromSyncer
    | Stepped
    | Boundary
    | PushDone
    | NotFinite
    | PushBroken
    | Fetched
    | FetchBroken
    | Closing
    | InnerMissing
)


# ---------------------------------------------------------------- out of the learner machine


@dataclass(frozen=True, slots=True)
class ToSyncer:
    message: LearnerMessage


@dataclass(frozen=True, slots=True)
class PushSeed:
    """Push the parameters (of the fragments not yet pushed) as the run's version 0."""


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Training thread: copy this fragment's parameters as they are now."""

    fragment: int


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """The copy is not wanted any more, so that its memory is free."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Contribute:
    """Background: encode snapshot - base - (progress of `already_merged`) (+ residual if `feedback`) and push it."""

    header: PushHeader
    already_merged: tuple[int, ...]
    feedback: bool


@dataclass(frozen=True, slots=True)
class PushAgain:
    """Background: push the kept payload of this contribution again."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class Settle:
    """The fate of contribution `seq` is known: forget its payload; if merged, its residual becomes the fragment's."""

    fragment: int
    seq: int
    merged: bool


@dataclass(frozen=True, slots=True)
class Fetch:
    """Background: get a version and prepare it. An UPDATE continues from the newest prepared version."""

    kind: FetchKind
    fragment: int
    version: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Training thread: bring the fragment's parameters to the prepared `version`.

    rule "overwrite": theta = Theta_new; "mix": alpha*theta + (1-alpha)*Theta_new; "rebase": theta + (Theta_new -
    Theta_base) - progress of the contributions in `already_merged`, which are the ones that are inside Theta_new."""

    fragment: int
    version: int
    rule: str
    alpha: float
    already_merged: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForgetResiduals:
    """The learner was re-seeded: error feedback starts from zero."""


@dataclass(frozen=True, slots=True)
class ForgetPrepared:
    """Versions that were prepared and not adopted are of no use any more (`fragment` -1: of all fragments).
    `went_back`: nor is the one that was adopted; the next may have a smaller number."""

    fragment: int = -1
    went_back: bool = False


@dataclass(frozen=True, slots=True)
class GiveHeal:
    """Background: push the whole parameters of these (fragment, version) pairs, which this host holds."""

    versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class GiveInner:
    """Training thread: copy the inner state now; background: push it in pieces into this inner slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class TakeInner:
    """Background: fetch a peer's inner state (`pieces` 0: there is none, for `reason`)."""

    slot: int
    pieces: int
    size: int
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The learner holds committed state and may step."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The run is over for this learner: because its budget is spent, or (`code` set) because it was refused."""

    reason: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """Everything that could be handed over was; the session may be closed."""


LearnerEffect = (
    Note
    | ToSyncer
    | PushSeed
    | TakeSnapshot
    | DropSnapshot
    | Contribute
    | PushAgain
    | Settle
    | Fetch
    | Adopt
    | ForgetResiduals
    | ForgetPrepared
    | GiveHeal
    | GiveInner
    | TakeInner
    | Joined
    | Stopped
    | Left
)
