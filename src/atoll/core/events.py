"""What the machines have to say for the record, as typed events.

These are the events that follow from a decision; `atoll.observe.events` has them too, together with those of the shells
and launchers, and says how they are written. A machine gives one out as a Note effect.
"""

from __future__ import annotations

from dataclasses import field

from atoll.core.values import dataclass

# ---------------------------------------------------------------- learners


@dataclass(frozen=True, slots=True)
class LearnerAdopted:
    """A published version is in the parameters of a learner; `merged`: with a contribution of its own."""

    learner: str
    fragment: int
    version: int
    merged: bool
    step: int


@dataclass(frozen=True, slots=True)
class LearnerDiscarded:
    """Tokens that will never be merged, of one fragment."""

    learner: str
    fragment: int
    tokens: int
    cause: str


# ---------------------------------------------------------------- the syncer


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
class RoundLaunched:
    """A fragment is asked for from everybody who is active."""

    round: int
    attempt: int
    fragment: int
    clock_step: int
    asked: list[str]
    quorum: int


@dataclass(frozen=True, slots=True)
class Adapted:
    """With `adaptive`: what is sent has changed. `subject` is a learner, or "run"; `what` is codec_up, period or
    overlap; or "nothing", where what was measured cannot be."""

    subject: str
    what: str
    before: str
    after: str
    reason: str
    clock_step: int


@dataclass(frozen=True, slots=True)
class PaceChanged:
    """The pacing policy decided for another number of steps (`period`) between two rounds of a fragment."""

    fragment: int
    clock_step: int
    period: int
    reason: str


@dataclass(frozen=True, slots=True)
class ContributionReceived:
    """A contribution was accepted; `late`: its round had closed."""

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
    """A contribution will not be merged. Every refusal is told, so that none is silent."""

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
    """No quorum came in time, or too few are left to make one; what had come is held for the next attempt."""

    round: int
    attempt: int
    fragment: int
    contributions: int
    quorum: int
    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """A version is merged and on disk; only now is it published (I4)."""

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


# ---------------------------------------------------------------- both


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that a person should know about."""

    source: str
    text: str


CoreEvent = (
    LearnerAdopted
    | LearnerDiscarded
    | SyncerRecovered
    | FragmentHealed
    | MemberChanged
    | MemberAside
    | RoundLaunched
    | PaceChanged
    | Adapted
    | ContributionReceived
    | NormGuardReset
    | ContributionRefused
    | RoundClosed
    | RoundAborted
    | Committed
    | Warned
)
