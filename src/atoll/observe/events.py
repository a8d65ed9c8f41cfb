"""The typed events of a run: one frozen dataclass per kind, one JSON object per line on disk.

Every process of a run appends to its own file `RUN/events/<role>-<id>[-<pid>].jsonl`. A line holds `t_ns` (wall clock,
only a label: no decision is ever taken from it), `kind` (the class name in snake case) and the fields below. The
terminal view, the report and the goodput reducer read only these. A reader skips kinds and fields it does not know.
The events that the machines give out are defined in `atoll.core.events`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.core import (
    Adapted as Adapted,
)
from atoll.core import (
    Committed as Committed,
)
from atoll.core import (
    ContributionReceived as ContributionReceived,
)
from atoll.core import (
    ContributionRefused as ContributionRefused,
)
from atoll.core import (
    FragmentHealed as FragmentHealed,
)
from atoll.core import (
    LearnerAdopted as LearnerAdopted,
)
from atoll.core import (
    LearnerDiscarded as LearnerDiscarded,
)
from atoll.core import (
    MemberAside as MemberAside,
)
from atoll.core import (
    MemberChanged as MemberChanged,
)
from atoll.core import (
    NormGuardReset as NormGuardReset,
)
from atoll.core import (
    PaceChanged as PaceChanged,
)
from atoll.core import (
    RoundAborted as RoundAborted,
)
from atoll.core import (
    RoundClosed as RoundClosed,
)
from atoll.core import (
    RoundLaunched as RoundLaunched,
)
from atoll.core import (
    SyncerRecovered as SyncerRecovered,
)
from atoll.core import (
    Warned as Warned,
)


@dataclass(frozen=True, slots=True)
class GoodNews:
    """News that is good to know and asks for nothing, as a shard that is back."""

    source: str
    text: str


# ---------------------------------------------------------------- the launcher


@dataclass(frozen=True, slots=True)
class RunStarted:
    method: str
    learners: int
    parameters: int
    """Trainable parameters of the model; 0 when the launcher does not know (a user's own script)."""
    sync_every: int
    fragments: int
    codec_up: str
    codec_down: str
    tokens_budget: int
    title: str = ""


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    role: str
    id: str
    pid: int


@dataclass(frozen=True, slots=True)
class ProcessExited:
    role: str
    id: str
    pid: int
    code: int
    """Exit status; negative: the signal that ended it."""


@dataclass(frozen=True, slots=True)
class FaultInjected:
    """A fault that the chaos plan put in. `until_ns` is its planned wall-clock end (0: an instant, such as a kill)."""

    fault: str
    target: str
    detail: str = ""
    until_ns: int = 0
    lasts_s: float = 0.0
    """How long it was planned to last; 0: an instant, or until a share of the run."""
    amount: float = 0.0
    """How strong it is, in the unit of its kind; 0 for kinds without one."""
    direction: str = "both"
    variant: str = ""


@dataclass(frozen=True, slots=True)
class FaultEnded:
    fault: str
    target: str


@dataclass(frozen=True, slots=True)
class FaultSkipped:
    """A fault of the chaos plan that could not be put in, and why."""

    fault: str
    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunFinished:
    reason: str
    eval_loss: float
    wall_s: float


# ---------------------------------------------------------------- learners


@dataclass(frozen=True, slots=True)
class LearnerStarted:
    learner: str
    pid: int
    site: str = ""
    """Where its machine is, if whoever started it has said so."""


@dataclass(frozen=True, slots=True)
class LearnerJoined:
    learner: str
    generation: int
    step: int
    wait_ns: int


@dataclass(frozen=True, slots=True)
class LearnerSteps:
    """Steps since the last such event (at most about four a second). The `_ns` fields add up to the time since then."""

    learner: str
    generation: int
    step: int
    """The learner's own step count now."""
    steps: int
    """Steps in this event."""
    tokens: int
    """Tokens in this event."""
    tokens_total: int
    loss: float
    """Training loss, mean over the steps of this event; NaN if the loop did not report one."""
    compute_ns: int
    """Between calls of `learner.step`: forward, backward, optimizer, data."""
    stall_ns: int
    """Waiting on Atoll (only in synchronous mode)."""
    adopt_ns: int
    snapshot_ns: int
    overhead_ns: int
    """The rest of the time spent inside `learner.step`."""
    fragments_behind: int
    """Versions published but not adopted, summed over fragments."""


@dataclass(frozen=True, slots=True)
class LearnerPushed:
    learner: str
    fragment: int
    round: int
    seq: int
    bytes: int
    steps: int
    tokens: int
    encode_ns: int
    push_ns: int
    outcome: str
    """ "accepted", "late", or a refusal code."""


@dataclass(frozen=True, slots=True)
class LearnerFetched:
    learner: str
    fragment: int
    version: int
    bytes: int
    fetch_ns: int
    whole: bool


@dataclass(frozen=True, slots=True)
class IslandBytes:
    """Payload bytes over the connections of each rank of a learner that has several, since it began."""

    learner: str
    up: list[int]
    down: list[int]


@dataclass(frozen=True, slots=True)
class LearnerLink:
    learner: str
    up: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LearnerEvaluated:
    """Loss of the published model on held-out data (natural log, per token), after `tokens_seen` tokens of the run."""

    learner: str
    step: int
    eval_loss: float
    tokens_seen: int


@dataclass(frozen=True, slots=True)
class LearnerRecovered:
    """Where the inner optimizer state of a starting learner came from. `rung` is checkpoint (its own), peer (a healthy
    learner's, handed on), parameters (none: published parameters and a short warm-up) or fresh (the run itself is
    new)."""

    learner: str
    generation: int
    step: int
    rung: str
    detail: str
    wait_ns: int


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    learner: str
    step: int
    bytes: int
    capture_ns: int
    """What the training thread paid. It paid inside `learner.step`, so LearnerSteps.snapshot_ns holds it as well."""
    write_ns: int


@dataclass(frozen=True, slots=True)
class LearnerFinished:
    learner: str
    steps: int
    tokens: int
    reason: str
    unhanded: int = 0
    """Tokens that it could not hand over when it left."""


# ---------------------------------------------------------------- the syncer


@dataclass(frozen=True, slots=True)
class SyncerStarted:
    run: str
    address: str
    pid: int
    epoch: int = 1
    """Counts the syncers of this run: every restart takes the next and fences the earlier ones out."""
    durability: str = "none"
    """commit, interval or none."""


@dataclass(frozen=True, slots=True)
class DurabilityChanged:
    """`level` is what holds now (commit, interval, none or degraded), `wanted` what the run was started with."""

    level: str
    wanted: str
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    url: str
    label: int
    bytes: int
    write_ns: int
    versions: list[int]


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    url: str
    reason: str


@dataclass(frozen=True, slots=True)
class DataLedger:
    """The chunks of one data stream: issued = done + in_hand + pool. `reissued` counts chunks given out again after a
    loss, `repeated` those that were finished by two learners."""

    stream: str
    chunks: int
    """In total; 0: no end."""
    issued: int
    done: int
    in_hand: int
    pool: int
    reissued: int
    repeated: int
    lost: int = 0
    """Of the pool: chunks whose learner was lost with them. The rest was leased ahead and handed back."""


@dataclass(frozen=True, slots=True)
class LayoutFixed:
    parameters: int
    tensors: int
    fragments: int
    fragment_parameters: list[int]


@dataclass(frozen=True, slots=True)
class LinkThin:
    """A learner's link carries less than the run would need of it. Said again only when it changes by much."""

    learner: str
    direction: str
    """up (contributions) or down (published versions)."""
    needs_bytes_s: float
    gets_bytes_s: float


@dataclass(frozen=True, slots=True)
class SyncerStats:
    """Once a second and at the end. Token counts are apportioned over fragments by parameters and add up exactly:
    tokens_processed = tokens_merged + tokens_pending + sum(tokens_discarded)."""

    clock_step: int
    active: int
    commits: int
    rounds_open: int
    contributions_merged: int
    contributions_late: int
    bytes_up: int
    bytes_down: int
    tokens_processed: int
    tokens_merged: int
    tokens_pending: int
    tokens_discarded: dict[str, int] = field(default_factory=dict)
    tokens_spent: int = -1
    """What of the processed tokens counts for the budget: a claim alone does not. -1: an older syncer does not say."""


@dataclass(frozen=True, slots=True)
class SyncerStopped:
    reason: str
    commits: int
    steps: dict[str, int] = field(default_factory=dict)
    """Of each learner's newest process, as it told this syncer: learners elsewhere write their events elsewhere."""


@dataclass(frozen=True, slots=True)
class RoundsFolded:
    """The first line of a part of an event file that was folded (`folding`): what the events of single rounds that were
    in it add up to."""

    commits: int
    merged: int
    late: int
    stored: int
    """Commits that were written to disk."""
    store_ns: int
    store_bytes: int
    closed: dict[str, int] = field(default_factory=dict)
    """Rounds by why they were closed."""
    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    """Bytes by learner, pushed and fetched."""
    raw_bytes: int = 0
    """The size of the part before it was folded: who has read as far has read all of it."""


Event = (
    RunStarted
    | ProcessStarted
    | ProcessExited
    | FaultInjected
    | FaultEnded
    | FaultSkipped
    | RunFinished
    | LearnerStarted
    | LearnerJoined
    | LearnerSteps
    | LearnerAdopted
    | LearnerPushed
    | LearnerFetched
    | IslandBytes
    | LearnerLink
    | LearnerDiscarded
    | LearnerEvaluated
    | LearnerRecovered
    | CheckpointWritten
    | LearnerFinished
    | SyncerStarted
    | SyncerRecovered
    | FragmentHealed
    | DurabilityChanged
    | SnapshotWritten
    | SnapshotFailed
    | DataLedger
    | LayoutFixed
    | MemberChanged
    | MemberAside
    | LinkThin
    | RoundLaunched
    | PaceChanged
    | Adapted
    | ContributionReceived
    | ContributionRefused
    | NormGuardReset
    | RoundClosed
    | RoundAborted
    | Committed
    | SyncerStats
    | SyncerStopped
    | RoundsFolded
    | GoodNews
    | Warned
)
