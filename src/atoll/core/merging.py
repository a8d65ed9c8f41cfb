"""What a round's contributions weigh in its merge, and what a fragment's record says of them afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.core.agreement import length_factors
from atoll.core.config import SyncConfig
from atoll.core.ledger import Ledger
from atoll.core.membership import Membership, MemberState
from atoll.core.plausible import capped, tokens_counted
from atoll.core.policy import (
    LEFT_BEHIND_PERIODS,
    MISSING_PERIODS,
    NORMS_NEEDED,
    LearnerNorm,
    contribution_weight,
    low_median,
    missing_tokens,
    present_tokens,
    scales_steps,
    stale_factor,
    step_share,
    usual_norm,
    way_factor,
    with_norm,
)
from atoll.core.rounds import ContributionRecord, FragmentTrack, Round
from atoll.core.sizes import LearnerSizes

HANDED_KEPT = 256
"""Merged contributions of learners that have left, remembered per fragment: their files are deleted at once, so this
covers what a crash may leave of the last few versions."""


@dataclass(frozen=True, slots=True)
class MergeWeights:
    """`share` is how much of its step the merge takes, the rest being for contributions that are still to come.
    `discounts` are what age, way, length and the run's end leave of each weight."""

    weights: list[float]
    share: float
    discounts: list[float]


class MergeScales:
    """Weighs the contributions of a round (design section 4, syncer 4)."""

    def __init__(self, config: SyncConfig, membership: Membership, ledger: Ledger, sizes: LearnerSizes) -> None:
        self._config = config
        self._sizes = sizes
        self._membership = membership
        self._ledger = ledger

    def weigh(
        self, track: FragmentTrack, opened: Round, items: Sequence[ContributionRecord], ending: int
    ) -> MergeWeights:
        """Weights in the order of `items`. `ending` is how many learners there were when the run was told to stop."""
        ages, usual = [track.age(item) for item in items], self._sizes.usual(items)
        tokens = [tokens_counted(i.steps, i.tokens, self._sizes.limit(i.id.learner, usual)) for i in items]
        weights = [
            contribution_weight(self._config, item.steps, counted, age)
            for item, counted, age in zip(items, tokens, ages, strict=True)
        ]
        if not any(weights):  # age_discount 0, and all of them are old: they are all that there is
            weights = [1.0] * len(items)
        discounts = _discounts_of(self._config, track, items)
        if not scales_steps(self._config):  # only ratios count: what is taken from one is given to the others
            weights = [weight * discount for weight, discount in zip(weights, discounts, strict=True)]
            return MergeWeights(self._capped(items, weights), 1.0, discounts)
        weights = self._capped(items, weights)
        fresh = sum(weights)
        weights = [weight * discount for weight, discount in zip(weights, discounts, strict=True)]
        counts = zip(items, tokens, strict=True)
        present = [present_tokens(self._config, i.steps, counted, track.period) for i, counted in counts]
        share = step_share(self._config, self._ledger.spent, present, self._missing(track, opened, usual))
        crowd = _crowd_at_the_end(track, opened, ending)
        share = min(share, len(opened.contributors()) / crowd) if crowd else share
        if len(opened.asked) > len(opened.contributors()):
            share = min(share, self._config.share_max * len(opened.contributors()))
        # What is taken from old and long contributions is not given to the others: the step is so much smaller.
        weights = [weight * (share / fresh) for weight in weights]
        if not crowd or not any(weights):
            return MergeWeights(weights, share, discounts)
        cuts = _as_one_of_all(items, weights, crowd, MISSING_PERIODS * self._config.sync_every)
        left = [weight * cut for weight, cut in zip(weights, cuts, strict=True)]
        discounts = [discount * cut for discount, cut in zip(discounts, cuts, strict=True)]
        return MergeWeights(left, share * sum(left) / sum(weights), discounts)

    def _capped(self, items: Sequence[ContributionRecord], weights: list[float]) -> list[float]:
        """No learner weighs more than `share_max`, however many contributions it has in the merge."""
        if self._config.share_max >= 1.0:
            return weights
        of: dict[str, float] = {}
        for item, weight in zip(items, weights, strict=True):
            of[item.id.learner] = of.get(item.id.learner, 0.0) + weight
        left = dict(zip(of, capped(list(of.values()), self._config.share_max), strict=True))
        return [w * (left[i.id.learner] / of[i.id.learner]) if w else 0.0 for i, w in zip(items, weights, strict=True)]

    def _missing(self, track: FragmentTrack, opened: Round, usual: float) -> list[int]:
        """What learners hold of this fragment who were asked, have neither answered nor gone, and have nothing from an
        earlier round in this one, of those that rounds count on; of each no more than it can have made meanwhile, and
        nothing of one that has missed the last two rounds of the fragment, whatever it does with others. Of one that is
        left out of merges as often as it comes (`agreement`) that share will never be merged: nobody waits for it."""
        tokens = []
        for learner in sorted(opened.waiting - opened.contributors()):
            member = self._membership.members.get(learner)
            counts = member is not None and self._membership.counts(learner)
            if member is not None and counts and track.missed.get(learner, 0) < MISSING_PERIODS:
                rest = self._ledger.account(learner, member.generation).rest(opened.fragment)
                made = tokens_counted(member.steps, member.tokens, self._sizes.limit(learner, usual))
                missing = missing_tokens(self._config, rest, member.steps, made, track.period)
                tokens.append(int(missing * (1.0 - member.doubt)))
        return tokens


def _discounts_of(config: SyncConfig, track: FragmentTrack, items: Sequence[ContributionRecord]) -> list[float]:
    """What is left of the weight of contributions that are too old, go too far or, where `robust`, are too long."""
    stale = [stale_factor(config, track.age(item)) for item in items]
    left = [old * way for old, way in zip(stale, _way_factors(config, track, items), strict=True)]
    if config.robust == "off":
        return left
    return [one * long for one, long in zip(left, length_factors(config, track.norms, items), strict=True)]


def _way_factors(config: SyncConfig, track: FragmentTrack, items: Sequence[ContributionRecord]) -> list[float]:
    """Of contributions of learners that were left behind. Where the others have a long way behind them, too, as after
    an outage of the syncer, that is the usual one."""
    if len(track.norms) < NORMS_NEEDED:
        return [1.0] * len(items)
    long = LEFT_BEHIND_PERIODS * config.sync_every
    behind = {i.id.learner for i in items if i.steps >= long and i.behind >= LEFT_BEHIND_PERIODS}
    beside = sorted(item.norm for item in items if item.id.learner not in behind)
    usual = max(usual_norm(config, track.norms), low_median(beside))
    return [way_factor(item.norm, usual) if item.id.learner in behind else 1.0 for item in items]


def _crowd_at_the_end(track: FragmentTrack, opened: Round, ending: int) -> int:
    """When a run ends its learners hand over one by one, and whoever comes last comes alone: what it brings still
    counts as one of all. (A thin link's last 304 steps, alone in the last merge, once cost a run 10% of loss.) Returns
    how many all are; 0 while the run goes on."""
    return ending or (0 if opened.asked else track.asked_last)


def _as_one_of_all(
    items: Sequence[ContributionRecord], weights: Sequence[float], crowd: int, steps_max: int
) -> list[float]:
    """What is left of each weight: nobody weighs more than one of `crowd`, nor moves the model further than `steps_max`
    steps would; what that takes from it is given to nobody. In the last merge most bring the two or three steps since
    their last round: by tokens, the 163 steps of a thin link took a third of it beside them, and no merge came after it
    to mend that (1.3% of loss). Most of so long a way the others have gone meanwhile: to go all of it once more is too
    far."""
    ways = [min(1.0, steps_max / item.steps) for item in items]
    of: dict[str, float] = {}
    for item, weight, way in zip(items, weights, ways, strict=True):
        of[item.id.learner] = of.get(item.id.learner, 0.0) + weight * way
    return [way / max(1.0, crowd * of[item.id.learner]) for item, way in zip(items, ways, strict=True)]


def norms_after(config: SyncConfig, track: FragmentTrack, items: Iterable[ContributionRecord]) -> list[LearnerNorm]:
    """What the guard knows of usual norms once these are merged. Of each learner the longest: whoever has many in a
    merge has one voice all the same (draw 3, seed 1887: copies of next to nothing had all others refused)."""
    longest: dict[str, ContributionRecord] = {}
    for item in items:
        if item.id.learner not in longest or item.norm > longest[item.id.learner].norm:
            longest[item.id.learner] = item
    norms = track.norms_of
    for learner, item in longest.items():
        norms = with_norm(config, norms, learner, item.norm, item.steps)
    return norms


def handed_after(
    track: FragmentTrack, items: Iterable[ContributionRecord], version: int, membership: Membership
) -> list[tuple[str, int, int, int]]:
    """What the fragment's record says, once these are merged, of contributions whose learners have left."""
    gone = [
        (item.id.learner, item.id.generation, item.id.seq, version)
        for item in items
        if (member := membership.members.get(item.id.learner)) is None
        or member.generation != item.id.generation
        or member.state is MemberState.LEFT
    ]
    return [*track.handed, *gone][-HANDED_KEPT:]
