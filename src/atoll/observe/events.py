"""The typed events of a run: one frozen dataclass per kind, one JSON object per line on disk.

Every process of a run appends to its own file `RUN/events/<role>-<id>[-<pid>].jsonl`. A line holds `t_ns` (wall clock,
only a label: no decision is ever taken from it), `kind` (the class name in snake case) and the fields below. The
terminal view, the report and the goodput reducer read only these. A reader skips kinds and fields it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
class LearnerAdopted:
    learner: str
    fragment: int
    version: int
    merged: bool
    step: int


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
class LearnerLink:
    learner: str
    up: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LearnerDiscarded:
    learner: str
    fragment: int
    tokens: int
    cause: str


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
    learner's, relayed), parameters (none: published parameters and a short warm-up) or fresh (the run itself is
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
class SyncerRecovered:
    """The syncer continues an earlier one's run. `source` is the rung of the ladder: slots, or the snapshot's name."""

    source: str
    exact: bool
    """True if no version can have been lost; else learners that hold newer ones bring them back."""
    versions: list[int]
    tokens_merged: int
    load_ns: int
    problems: list[str] = field(default_factory=list)
    """What was damaged or missing, in words."""


@dataclass(frozen=True, slots=True)
class FragmentHealed:
    """A learner brought back a version that the syncer had lost; the momentum is older, from the disk."""

    fragment: int
    version_before: int
    version: int
    learner: str


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
class MemberChanged:
    """`state` is joining, active, away, lost or left."""

    learner: str
    generation: int
    state: str
    reason: str
    silent_ns: int = 0
    """How long nothing had been heard of it, where that is over now or why it is away."""


@dataclass(frozen=True, slots=True)
class MemberAside:
    """An active learner that rounds no longer wait for and do not count (`aside`), or that they count again. What it
    sends is merged all the same, whenever it comes."""

    learner: str
    generation: int
    aside: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LinkThin:
    """A learner's link carries less than the run would need of it. Said again only when it changes by much."""

    learner: str
    direction: str
    """up (contributions) or down (published versions)."""
    needs_bytes_s: float
    gets_bytes_s: float


@dataclass(frozen=True, slots=True)
class RoundLaunched:
    round: int
    attempt: int
    fragment: int
    clock_step: int
    asked: list[str]
    quorum: int


@dataclass(frozen=True, slots=True)
class ContributionReceived:
    round: int
    fragment: int
    learner: str
    generation: int
    seq: int
    bytes: int
    steps: int
    tokens: int
    norm: float
    late: bool


@dataclass(frozen=True, slots=True)
class NormGuardReset:
    """The contributions of most learners to a fragment were refused as outliers, so the guard takes it for a change of
    scale and begins anew."""

    fragment: int
    refused: int


@dataclass(frozen=True, slots=True)
class ContributionRefused:
    fragment: int
    learner: str
    generation: int
    seq: int
    tokens: int
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """`reason` is "all answered" or "quorum and grace"; times are since the launch."""

    round: int
    fragment: int
    contributors: list[str]
    carried: int
    """How many of the contributions were made for an earlier round."""
    reason: str
    quorum_ns: int
    grace_ns: int
    close_ns: int


@dataclass(frozen=True, slots=True)
class RoundAborted:
    round: int
    attempt: int
    fragment: int
    contributions: int
    quorum: int
    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    fragment: int
    version: int
    round: int
    contributors: list[str]
    tokens: int
    """Tokens of the merged contributions."""
    merge_ns: int
    update_bytes: int
    gradient_norm: float
    rho: float
    """Cosine between this and the previous merged gradient of the fragment; NaN the first time."""
    checksum: int
    steps: list[int] = field(default_factory=list)
    """Inner steps behind each contribution, in the order of `contributors`."""
    weights: list[float] = field(default_factory=list)
    """Normalised weight of each contribution."""
    store_ns: int = 0
    store_bytes: int = 0
    """What making the commit durable took; 0 where nothing was written."""
    share: float = 1.0
    """How much of the merged step was taken; the rest is for contributions that are still to come."""


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


@dataclass(frozen=True, slots=True)
class SyncerStopped:
    reason: str
    commits: int


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that a person should know about."""

    source: str
    text: str


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
    | ContributionReceived
    | ContributionRefused
    | NormGuardReset
    | RoundClosed
    | RoundAborted
    | Committed
    | SyncerStats
    | SyncerStopped
    | Warned
)
