"""What learners and the syncer say to each other, as data.

Rules of this file: frozen dataclasses only, no behaviour, no imports from outside `core`. The same objects travel over
gRPC (`wire` maps them to `atoll.proto`), through the simulator's virtual network and into tests. Integers that name a
version, round, step or counter are plain non-negative ints; times are nanoseconds.

A session, seen from the learner:

    Hello  ->                      who I am, what my model looks like, what I already hold
           <- Welcome              my generation, the run's settings; `seed` asks me for the first parameters
    (seed pushed over bulk)
           <- Start                committed state exists: fetch it
    Ready  ->                      I hold committed state and start stepping at `step`
    Progress ->                    after steps, coalesced
           <- Upcoming             which fragments to keep a snapshot of
           <- Request              a round wants fragment p
    (contribution pushed over bulk) or Nothing ->
           <- Published            a new version is committed; fetch it over bulk and adopt it
           <- Fate                 a contribution of mine will not be merged (or was, while I was away)
    Leave  ->                      I am done

Payloads of at most INLINE_BYTES_MAX travel inside the control messages themselves (InlinePush, answered by InlineReply;
the update inside Published): for small fragments a bulk call would cost more than the bytes it carries.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import assert_never

from atoll.core.config import SyncConfig
from atoll.core.values import dataclass

PROTOCOL_VERSION = 3
"""2 added healing, inner state from a peer, data leases and the epoch in Hello; 3 a secret for each session, and the
model's fingerprint in place of its tensors."""
PROTOCOL_OLDEST = 1
"""The oldest protocol that is still spoken, both ways. Nothing that a version does not know is ever sent to it."""
INNER_PIECE_BYTES = 8 * 1024 * 1024
"""Inner state travels in pieces of this size, a few at a time, so that the syncer never holds much of it."""
INNER_SLOTS_MAX = 16
"""InnerSlots of inner state at a time."""
CHUNKS_MAX = 10_000
"""Chunks that one DataReport or DataLeases may name."""
INLINE_BYTES_MAX = 64 * 1024
"""A payload up to this size may travel on the control connection: 52 ms of a 10 Mbit/s link."""
WHOLE_CODEC = "fp32"
"""How whole fragments travel (seeds, heals, Theta for joiners): as they are, whatever codecs the run has."""
INNER_CODEC = "inner"
"""What a piece of inner state is encoded as: opaque to everybody but learners."""
STEP_MAX = 10**12
"""A step that somebody may claim to be at: thirty years of a millisecond each."""
TOKENS_MAX = 10**17
"""Tokens that one process may claim to have processed: five thousand times the largest corpus, or a hundred thousand
steps of the most that `learner.step` takes. Sums over a run stay numbers that every reader of its books can read."""
NO_VERSION = -1
"""The base version of a learner that has not adopted anything, and "the current one" in a fetch."""


class Refusal(StrEnum):
    """Why something was refused. Stable names: they are on the wire, in events and in the ledger."""

    PROTOCOL = "protocol_version"
    LAYOUT = "wrong_layout"
    TOKEN = "wrong_token"
    FENCED = "fenced"
    UNKNOWN_LEARNER = "unknown_learner"
    STALE_GENERATION = "stale_generation"
    UNKNOWN_FRAGMENT = "unknown_fragment"
    UNKNOWN_ROUND = "unknown_round"
    UNKNOWN_VERSION = "unknown_version"
    NOT_READY = "not_ready"
    STALE_BASE = "stale_base"
    DUPLICATE = "duplicate"
    COUNTERS = "bad_counters"
    CODEC = "wrong_codec"
    SIZE = "wrong_size"
    CHECKSUM = "checksum_mismatch"
    NOT_FINITE = "not_finite"
    NORM_OUTLIER = "norm_outlier"
    BUSY = "busy"
    CLOSED = "run_closed"
    BAD_REQUEST = "bad_request"
    STALE_EPOCH = "stale_epoch"
    SECRET = "wrong_secret"
    """A push or fetch without the secret of its learner's session: it is of an earlier session, or somebody else's."""
    NOT_ALLOWED = "not_allowed"
    """This key does not let its owner do that."""
    KEY_REVOKED = "key_revoked"
    TENSORS = "tensors_wanted"
    """The fingerprint alone does not do: say hello again, with the list of tensors."""
    SHARDS = "shards_unknown"
    """The run has shards, and this learner knows of none."""
    RELAY_GONE = "relay_gone"
    """The relay that held the bytes of an accepted contribution is gone, and they with it: it is given again."""


class Discard(StrEnum):
    """Why processed tokens will never be merged (ledger causes)."""

    OVERWRITTEN = "overwritten"
    """Progress after the snapshot, thrown away by adopt policy `overwrite`."""
    LOST = "learner_lost"
    """Progress that died with its learner before it was contributed."""
    STALE = "stale"
    """A contribution more than `carry_versions_max` versions old."""
    QUARANTINED = "quarantined"
    """Progress of a learner whose contribution was not finite or far too large, and which was re-seeded; or one that
    pointed against the others' and was left out of its merge."""
    EARLIER_RUN = "earlier_run"
    """Merged by a run whose syncer came back without its state: accounted for there, not here."""
    ROLLED_BACK = "rolled_back"
    """Merged into a version that was lost with the syncer's disk and that no learner could bring back."""
    UNCERTAIN = "uncertain"
    """Given to a syncer that lost its record of what it merged, for a fragment that a learner brought back: it may be
    inside, so it is not given again."""
    REFUSED = "refused"
    """A contribution that the syncer refused after its progress had been overwritten; the event has the reason."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One trainable tensor of the model, as a shape; `merge` is "rda" (as the run's setting says) or "mean"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    merge: str = "rda"


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A contribution that the learner has made and whose fate it does not know."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class DiscardCount:
    """Cumulative tokens of one fragment that the learner discarded, for one cause."""

    fragment: int
    cause: str
    tokens: int


@dataclass(frozen=True, slots=True)
class FragmentState:
    """A committed version of one fragment and the checksum (xxh3-64) of its fp32 parameters."""

    version: int
    checksum: int


# ---------------------------------------------------------------- learner -> syncer, control


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a session. `instance` is drawn once per process; the same instance coming back keeps its
    generation, another one with the same learner id gets the next generation and fences the old one out."""

    learner: str
    instance: str
    protocol: int
    tensors: tuple[TensorSpec, ...]
    generation: int = 0
    run: str = ""
    bases: tuple[int, ...] = ()
    """The newest version on this host, per fragment."""
    outstanding: tuple[Outstanding, ...] = ()
    epoch: int = 0
    """The highest epoch of this run that this process was welcomed in; a syncer with a lower one is out of date."""
    checksums: tuple[int, ...] = ()
    """Of the bases: what proves a version that a recovering syncer has lost. Empty, or as long as `bases`."""
    wants_inner: bool = False
    """This process has no inner optimizer state of its own; a healthy peer's would spare it a cold start."""
    frozen: int = 0
    """Checksum of the parameters that this learner does not train, which are never sent; 0: there are none."""
    fingerprint: str = ""
    """Of the tensors (`tensors_fingerprint`). On the wire it comes without them, until the syncer asks."""
    codecs: tuple[str, ...] = ()
    """The codecs that this process knows, without parameters. Empty: it is older than this list."""
    shards: bool = False
    """This learner goes to shards where Welcome names them."""
    any_update: bool = False
    """It reads updates in any codec that sends every value, not in `codec_down` alone."""
    moves: bool = False
    """And follows a fragment that moves to another one (Serving)."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The learner holds committed state (`bases` per fragment) and takes its next step from `step`."""

    step: int
    bases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the learner is. `steps`, `tokens` and `discarded` are cumulative over this generation."""

    step: int
    steps: int
    tokens: int
    step_ns: int
    loss: float
    bases: tuple[int, ...]
    discarded: tuple[DiscardCount, ...] = ()
    pending: tuple[int, ...] = ()
    """Tokens of this generation that are neither merged nor discarded, per fragment. From these a syncer that
    lost some of its record works out what an earlier one had merged."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """Answer to a Request: no step since the base, so there is nothing to contribute."""

    round: int
    fragment: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The learner takes no more steps. What it had to give was pushed before this."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lease:
    """One numbered chunk of a data stream, from its sample `start` on (0 unless somebody handed it back half done)."""

    chunk: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class DataReport:
    """All that a learner has to say about one data stream; it replaces earlier reports and may be repeated safely.

    `done` holds the finished chunks whose report was not answered yet. Chunks that the syncer has leased to this
    learner and that are in none of the three lists are granted again: their grant was lost on the way."""

    stream: str
    serial: int
    """Counts the reports of this process for this stream; the answer repeats it."""
    chunks: int
    """Chunks that the stream has in total, over all epochs; 0: no end. The same for every learner."""
    want: int
    """New leases asked for."""
    done: tuple[int, ...] = ()
    holding: tuple[int, ...] = ()
    returned: tuple[Lease, ...] = ()
    """Handed back; `start` is the first sample that was not processed."""


# ---------------------------------------------------------------- syncer -> learner, control


@dataclass(frozen=True, slots=True)
class Welcome:
    """The learner is in, under this generation; every push of an earlier one is refused from now on."""

    run: str
    epoch: int
    generation: int
    config: SyncConfig
    fingerprint: str
    seed: bool
    """True for the one learner whose parameters become version 0."""
    protocol: int = 1
    """What this session speaks: the lower of both sides."""
    rank: int = -1
    """A number that no other learner has, for those that were not given one; -1: a syncer that gives none."""
    secret: str = field(default="", repr=False)
    """Every push and fetch of this session carries it. Empty: the session's protocol is older."""
    shards: tuple[str, ...] = ()
    """host:port of each shard; none: the syncer serves every fragment itself."""
    shard_of: tuple[int, ...] = ()
    """By fragment: which of `shards` serves it."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A fragment has moved to another shard: this replaces what Welcome said."""

    shards: tuple[str, ...]
    shard_of: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The session is over. `detail` ends with what to do."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Start:
    """Committed state exists. `step` is the run's clock, where a joiner starts its own count; `due_steps` says at
    which clock step each fragment is next asked for."""

    step: int
    fragments: tuple[FragmentState, ...]
    due_steps: tuple[int, ...]
    away: tuple[int, ...] = ()
    """Fragments whose shard is away, so that nobody knows how they stand: what the learner holds of them stays."""


@dataclass(frozen=True, slots=True)
class Upcoming:
    """Fragments that may be requested before the learner's next step ends: keep a snapshot of each."""

    fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A round wants this fragment. `attempt` counts how often the round was launched."""

    round: int
    attempt: int
    fragment: int
    codec: str = ""
    """How the contribution is to be encoded; empty: as the Welcome's settings say."""
    away: tuple[int, ...] = ()
    """Fragments whose shard is away: a push there may hang, and this one does not wait for it."""


@dataclass(frozen=True, slots=True)
class Published:
    """Version `version` of a fragment is committed. `merged_seq` is the receiver's own contribution that is in it, or
    -1; `contributors` counts all of them. `checksum` is that of the fp32 parameters at this version."""

    fragment: int
    version: int
    round: int
    checksum: int
    merged_seq: int
    contributors: int
    clock_step: int
    """The clock when the round was launched."""
    update: bytes = b""
    """The encoded update itself, if it is small; else it is fetched over bulk."""
    due_step: int = 0
    """The clock step at which the fragment is next asked for. 0: an older syncer, whose period is `sync_every`."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of the receiver's contribution `seq`: merged in `version`, or (-1) dropped for `reason`. With a
    version and the reason `uncertain` it may be in that version: it is discarded, and must not be given again."""

    fragment: int
    seq: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Reseed:
    """The learner's own parameters are not trusted: fetch all published state and overwrite."""

    reason: str


PREEMPTED = "SIGTERM"
"""Reason of a Leave whose learner got a signal: its machine is taken away, and it may come back on another."""
ASKED_TO_LEAVE = "asked to leave"
SYNCER_STOPPED = "the syncer was stopped"
"""The reason of a Stop that came from a signal to the syncer, and not from the run itself."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Take no more steps, hand over what is left, leave: the run's budget is spent, or (the reason begins with
    ASKED_TO_LEAVE) somebody wants this one learner to go while the others train on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Heal:
    """The syncer came back with older versions than this learner holds: push these fragments whole, as PushKind.HEAL,
    with the version and checksum that the last Hello claimed."""

    fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Donate:
    """A joiner needs inner optimizer state. Once your own bases have reached `bases` (the joiner's), copy yours at a
    step boundary and push it in pieces, as PushKind.INNER, into inner slot `slot`. Training does not stop for it."""

    slot: int
    bases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InnerOffer:
    """A peer's inner state is on its way: fetch its pieces, as FetchKind.INNER. `pieces` 0: there is none, see
    `reason`."""

    slot: int
    pieces: int
    size: int
    peer: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DataLeases:
    """Answer to a DataReport. Everything that the report said was done or returned is on record now."""

    stream: str
    serial: int
    granted: tuple[Lease, ...] = ()
    revoked: tuple[int, ...] = ()
    """Chunks that the report held and that were issued to somebody else meanwhile: drop what is left of them."""
    exhausted: bool = False
    """True when nothing is left to lease: every chunk is done or in somebody's hand."""


# ---------------------------------------------------------------- bulk


class PushKind(StrEnum):
    CONTRIBUTION = "contribution"
    SEED = "seed"
    """See SeedPart."""
    HEAL = "heal"
    """See HealedVersion."""
    INNER = "inner"
    """See InnerPiece."""


class FetchKind(StrEnum):
    UPDATE = "update"
    """The encoded update U that leads from `version - 1` to `version`."""
    THETA = "theta"
    """The fp32 parameters of a fragment at `version`."""
    INNER = "inner"
    """See InnerPieceRequest."""


@dataclass(frozen=True, slots=True)
class PushHeader:
    """Everything about a push but its bytes, as it is on the wire. `size` and `checksum` (xxh3-64) are those of the
    whole payload. The fields are a contribution's; what the other kinds put into them, `meaning_of` says."""

    kind: PushKind
    learner: str
    generation: int
    fragment: int
    round: int
    attempt: int
    seq: int
    base_version: int
    steps: int
    tokens: int
    codec: str
    size: int
    checksum: int
    secret: str = field(default="", repr=False)
    """Of the session. One inside a control message needs none."""


@dataclass(frozen=True, slots=True)
class SeedPart:
    """A push of kind SEED: one fragment of the run's first parameters, whole."""

    learner: str
    generation: int
    fragment: int
    size: int
    checksum: int
    secret: str = field(default="", repr=False)
    codec: str = WHOLE_CODEC

    @classmethod
    def of(cls, header: PushHeader) -> SeedPart:
        who = (header.learner, header.generation, header.fragment)
        return cls(*who, header.size, header.checksum, header.secret, header.codec)

    def header(self) -> PushHeader:
        place = (PushKind.SEED, self.learner, self.generation, self.fragment, 0, 0, 0)
        return PushHeader(*place, NO_VERSION, 0, 0, self.codec, self.size, self.checksum, self.secret)


@dataclass(frozen=True, slots=True)
class HealedVersion:
    """A push of kind HEAL: the parameters of one fragment at a committed version that a recovering syncer has lost."""

    learner: str
    generation: int
    fragment: int
    version: int
    size: int
    checksum: int
    secret: str = field(default="", repr=False)

    @classmethod
    def of(cls, header: PushHeader) -> HealedVersion:
        who = (header.learner, header.generation, header.fragment)
        return cls(*who, header.base_version, header.size, header.checksum, header.secret)

    def header(self) -> PushHeader:
        place = (PushKind.HEAL, self.learner, self.generation, self.fragment, 0, 0, 0)
        return PushHeader(*place, self.version, 0, 0, WHOLE_CODEC, self.size, self.checksum, self.secret)


@dataclass(frozen=True, slots=True)
class InnerPiece:
    """A push of kind INNER: one piece of a peer's inner optimizer state. On the wire its fields have the names of a
    contribution's, which they must keep."""

    learner: str
    generation: int
    slot: int
    piece: int
    pieces: int
    whole_bytes: int
    """Of all pieces."""
    size: int
    """Of this piece, as is the checksum."""
    checksum: int
    secret: str = field(default="", repr=False)

    @classmethod
    def of(cls, header: PushHeader) -> InnerPiece:
        return cls(
            learner=header.learner,
            generation=header.generation,
            slot=header.fragment,
            piece=header.seq,
            pieces=header.steps,
            whole_bytes=header.tokens,
            size=header.size,
            checksum=header.checksum,
            secret=header.secret,
        )

    def header(self) -> PushHeader:
        return PushHeader(
            kind=PushKind.INNER,
            learner=self.learner,
            generation=self.generation,
            fragment=self.slot,
            round=0,
            attempt=0,
            seq=self.piece,
            base_version=NO_VERSION,
            steps=self.pieces,
            tokens=self.whole_bytes,
            codec=INNER_CODEC,
            size=self.size,
            checksum=self.checksum,
            secret=self.secret,
        )


def meaning_of(header: PushHeader) -> PushHeader | SeedPart | HealedVersion | InnerPiece:
    """A push by what it is: a contribution is its header, the others have types of their own."""
    match header.kind:
        case PushKind.CONTRIBUTION:
            return header
        case PushKind.SEED:
            return SeedPart.of(header)
        case PushKind.HEAL:
            return HealedVersion.of(header)
        case PushKind.INNER:
            return InnerPiece.of(header)
        case _:
            assert_never(header.kind)


@dataclass(frozen=True, slots=True)
class PushReply:
    """`code` is empty when accepted, else a Refusal. `late`: accepted after its round closed, carried into the next."""

    accepted: bool
    code: str = ""
    detail: str = ""
    late: bool = False


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A byte range of something immutable. `length` 0 means to the end; `version` -1 means the current one."""

    kind: FetchKind
    learner: str
    generation: int
    fragment: int
    version: int
    offset: int = 0
    length: int = 0
    secret: str = field(default="", repr=False)
    """Of the session."""


@dataclass(frozen=True, slots=True)
class InnerPieceRequest:
    """A fetch of kind INNER: one piece of the inner state in a slot, whole. On the wire its fields have the names of a
    version's, which they must keep."""

    learner: str
    generation: int
    slot: int
    piece: int
    secret: str = field(default="", repr=False)

    @classmethod
    def of(cls, request: FetchRequest) -> InnerPieceRequest:
        return cls(request.learner, request.generation, request.fragment, request.version, request.secret)

    def request(self) -> FetchRequest:
        who = (self.learner, self.generation)
        return FetchRequest(FetchKind.INNER, *who, fragment=self.slot, version=self.piece, secret=self.secret)


@dataclass(frozen=True, slots=True)
class FetchHeader:
    """First part of a fetch: which version the bytes are of, their whole size, checksum and encoding."""

    version: int
    codec: str
    size: int
    checksum: int


# ---------------------------------------------------------------- small payloads, on control


@dataclass(frozen=True, slots=True)
class InlinePush:
    """Learner to syncer: a push whose payload is at most INLINE_BYTES_MAX."""

    header: PushHeader
    payload: bytes


@dataclass(frozen=True, slots=True)
class InlineReply:
    """Syncer to learner: what a bulk push would have been answered."""

    fragment: int
    seq: int
    reply: PushReply


LearnerMessage = Hello | Ready | Progress | Nothing | Leave | InlinePush | DataReport
SyncerMessage = (
    Welcome
    | Refused
    | Start
    | Upcoming
    | Request
    | Published
    | Fate
    | Reseed
    | Stop
    | InlineReply
    | Heal
    | Donate
    | InnerOffer
    | DataLeases
    | Serving
)
