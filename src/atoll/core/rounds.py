"""One fragment's rounds: what was contributed, who is still awaited, when the round may close.

A round asks every active learner for one fragment. Contributions that came too late for an earlier round, or that a
leaving learner handed over, are *held* by the fragment and enter its next round at once. A round closes when

  (a) everybody asked has answered or is gone, and at least a quorum answered; or
  (b) a quorum of contributions is complete and the grace window is over.

If neither happens by the quorum timeout, the round is aborted: its contributions are held and it is launched again.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import field

from atoll.core.messages import NO_VERSION
from atoll.core.policy import LearnerNorm
from atoll.core.values import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ContributionId:
    """Names one encoded delta for ever. Ordered by learner first: merges take contributions in this order."""

    learner: str
    generation: int
    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class ContributionRecord:
    """What the syncer knows of one contribution; the shell keeps its bytes. `late`: its round had closed when it
    came."""

    id: ContributionId
    round: int
    base_version: int
    steps: int
    tokens: int
    bytes: int
    norm: float
    late: bool
    codec: str = ""
    """What it is encoded in; empty: the run's codec of contributions, as before there was a choice."""
    behind: int = 0
    """Rounds of its fragment that there were for the others while it was made."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A contribution of a learner that left, as it came back from disk: the learner cannot give it again."""

    contribution: ContributionRecord
    processed: int
    """Tokens that its learner had processed in all when it left."""


class ContributionsById(dict[ContributionId, ContributionRecord]):
    """Contributions, and how many each learner has among them. Every push asks that: with a thousand learners it must
    not mean going through all of them. Items come and go one by one (`update` and its like would not be counted)."""

    def __init__(self) -> None:
        super().__init__()
        self.count_of: dict[str, int] = {}

    def __setitem__(self, identity: ContributionId, item: ContributionRecord) -> None:
        if identity not in self:
            self.count_of[identity.learner] = self.count_of.get(identity.learner, 0) + 1
        super().__setitem__(identity, item)

    def __delitem__(self, identity: ContributionId) -> None:
        super().__delitem__(identity)
        self.count_of[identity.learner] -= 1
        if not self.count_of[identity.learner]:
            del self.count_of[identity.learner]


@dataclass(slots=True)
class Round:
    """One attempt to collect a fragment, from launch to merge."""

    number: int
    attempt: int
    fragment: int
    launched_ns: int
    clock_step: int
    due_step: int
    """When the fragment had fallen due: learners of a synchronous run wait for it from that step on."""
    next_due_step: int
    """When it falls due again, as was decided at the launch."""
    asked: list[str]
    waiting: set[str]
    """Learners asked that have neither answered nor gone."""
    contributions: ContributionsById = field(default_factory=ContributionsById)
    nothing: set[str] = field(default_factory=set)
    unusable: set[str] = field(default_factory=set)
    """Of those, who sent something that was too old to be merged: an answer, but not one to count on."""
    quorum_ns: int = -1
    """When the quorum was complete, since the launch; -1 before."""
    grace_ns: int = 0
    first_ns: int = -1
    """When the first contribution came; -1 before."""
    patience_over: bool = False
    """Those who have not answered were set aside, as far as the others make a quorum."""

    def contributors(self) -> Set[str]:
        return self.contributions.count_of.keys()

    @property
    def carried(self) -> bool:
        """All that it has came too late for the round before, or was handed over."""
        return all(item.round != self.number for item in self.contributions.values())

    def close_reason(self, quorum: int, now_ns: int) -> str | None:
        """Why the round may close now, or None. Learners with nothing to give count as present, not as contributors."""
        contributors = len(self.contributors())
        if not self.waiting and contributors + len(self.nothing) >= quorum:
            return "all answered"
        if contributors >= quorum and self.quorum_ns >= 0 and now_ns >= self.grace_deadline_ns():
            return "quorum and grace"
        return None

    def grace_deadline_ns(self) -> int:
        return self.launched_ns + self.quorum_ns + self.grace_ns


@dataclass(slots=True)
class FragmentTrack:
    """The syncer's view of one fragment."""

    index: int
    due_step: int
    period: int
    """Steps from a launch to the next one, as was last decided."""
    version: int = NO_VERSION
    checksum: int = 0
    round: Round | None = None
    asked_last: int = 0
    """How many learners were asked for it when it was last asked for."""
    last_round: int = 0
    """How many rounds there had been when this fragment was last asked for."""
    merging: bool = False
    aborted: tuple[int, int] = (0, 0)
    """(round, next attempt) while the last round was aborted and waits to be launched again."""
    held: ContributionsById = field(default_factory=ContributionsById)
    norms_of: list[LearnerNorm] = field(default_factory=list)
    """The last norms of each learner, of H steps: what is usual."""
    missed: dict[str, int] = field(default_factory=dict)
    """Rounds of this fragment in a row that others have closed without a usable answer, by learner."""
    outliers: dict[str, int] = field(default_factory=dict)
    """Contributions that were refused as outliers since the last accepted one, per learner."""
    handed: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(learner, generation, seq, version) of the last merged contributions of learners that had left: what tells, after
    a crash, that one which is still on disk was merged."""
    weights: list[float] = field(default_factory=list)
    """Of the merge that is under way or was the last."""
    discounts: list[float] = field(default_factory=list)
    """What age, way, length and the run's end have left of each of these."""
    share: float = 1.0
    """How much of its step is taken, the rest being for contributions that are still to come."""
    contributions_merged: int = 0
    rho: float = 0.0
    """Cosine between the last two merged gradients."""

    @property
    def busy(self) -> bool:
        return self.round is not None or self.merging

    @property
    def norms(self) -> list[float]:
        return [norm for _, norm in self.norms_of]

    def age(self, item: ContributionRecord) -> int:
        """How many versions were published since the one that this contribution started from."""
        return max(0, self.version - item.base_version)
