"""How large each learner is: the tokens per step that count, for the weight of what it brings.

A contribution weighs tokens^2 / steps, so that a claim of ten times the tokens takes a hundred times the weight. What a
claim is worth is decided by `plausible.size_limit`:

    declared    with the learner's key: that much and no more
    usual       the low median of the sizes that counted learners claim, times SIZE_SLACK: nobody is asked for a reason
    confirmed   more than that, if contributions of SIZE_PERIODS periods were merged that all claimed more; then up to
                SIZE_GROWTH times as much counts, and so on

A sudden claim of a hundred times the tokens so weighs four times as much as before. A patient liar gets there in the
end: against that there are declared sizes, and the setting `share_max`. Learners of equal size are never touched. The
ledger takes down every token as it is claimed; with `sizes=claimed` every claim counts, as in earlier versions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll.core.config import SyncConfig
from atoll.core.membership import Member, Membership
from atoll.core.plausible import SIZE_PERIODS, size_confirmed, size_limit
from atoll.core.policy import low_median
from atoll.core.rounds import ContributionRecord


class LearnerSizes:
    """By default weights go by tokens squared, so a size that is only claimed would be worth its square."""

    def __init__(self, config: SyncConfig, membership: Membership) -> None:
        self._config = config
        self._membership = membership
        self._known_at = -1
        self._known = 0.0

    @property
    def _believes_all(self) -> bool:
        return self._config.sizes == "claimed"

    def usual(self, items: Sequence[ContributionRecord] = ()) -> float:
        """The low median of the sizes that are claimed, in these contributions and by everybody else who is counted; 0
        if nobody has claimed any."""
        claimed = {m.learner: m.tokens / m.steps for m in self._membership.active() if self._has_size(m)}
        claimed |= {item.id.learner: item.tokens / item.steps for item in items}
        return low_median(sorted(claimed.values()))

    def usual_lately(self) -> float:
        """The same, as it was when somebody last came or went or something was merged: every report asks."""
        if self._known_at != self._membership.stamp or not self._known:
            self._known_at, self._known = self._membership.stamp, self.usual()
        return self._known

    def _has_size(self, member: Member) -> bool:
        return member.steps > 0 and self._membership.counts(member.learner)

    def limit(self, learner: str, usual: float) -> float:
        """Tokens per step of this learner that count."""
        member = self._membership.members.get(learner)
        if self._believes_all:
            return math.inf
        if member is None:
            return size_limit(0, 0.0, usual)
        return size_limit(member.tokens_per_step_declared, member.size_confirmed, usual)

    def merged(self, items: Sequence[ContributionRecord]) -> None:
        """These contributions are in a version: who has claimed more than counts for long enough has shown more."""
        usual, self._known_at = self.usual(items), -1
        for item in items:
            member = self._membership.members.get(item.id.learner)
            if member is None:
                continue
            member.size_seen = min(member.size_seen, item.tokens / item.steps)
            member.size_merges += 1
            if member.size_merges < SIZE_PERIODS * self._config.fragments:
                continue
            limit = self.limit(item.id.learner, usual)
            if member.size_seen > limit:
                member.size_confirmed = size_confirmed(member.size_seen, limit)
            member.size_seen, member.size_merges = math.inf, 0
