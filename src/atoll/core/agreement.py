"""Who points against the others: what `robust=cosine` leaves out of a merge, and how long a contribution may be.

A learner that lies within the norm guard is told by its direction. The shell measures, this file decides:

1. Each learner's cosine with the sum of the directions of all others. Each has one voice, whatever it claims to weigh
   and however long its way is. If nobody points against the others, nobody is left out: that is every honest merge.
2. Those who do are suspects, the most opposed first, and never half of the learners. They are measured once more, with
   the sum of those who are no suspects. A suspect is left out if it points against that sum at least half as much as
   its members agree among themselves.

So nobody is left out because its data is unlike the others' (its cosine is small, and not negative), and nobody when
all point against each other: then the run is where their data balance, or has nothing left but noise.

A merge of fewer than three learners cannot say which of two is wrong. So what each learner last had in a merge of the
fragment bears witness as well: a liar that always comes alone is judged by all. Witnesses are in memory only: a syncer
that comes back has them again after a period. They grow old: when most learners were left out one after the other, and
none was merged since, then it is the run that has turned (past a minimum, say), and the witnesses are forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from atoll.core.config import SyncConfig
from atoll.core.effects import Compare, Compared
from atoll.core.membership import Membership, MemberState
from atoll.core.policy import NORMS_NEEDED, median
from atoll.core.rounds import ContributionId, ContributionRecord

JUDGES_MIN = 3
"""Learners that can tell who of them is wrong, those that bear witness included."""
AGREEMENT_MIN = 0.05
"""Below this, those who are no suspects do not agree themselves. Honest learners of a run with eight were at 0.25 to
0.9, whatever their data and speed (docs/results/robust.md); noise alone comes to a hundredth."""
OPPOSED = 0.5
"""How far against the others is too far, as a share of their own agreement. One that flips its sign is at 1.1."""
LENGTH_FACTOR = 2.0
"""A contribution longer than this times the usual weighs as much less. Honest ones were below 1.3 for their steps."""
DOUBT_WEIGHT = 0.25
DOUBT_MAX = 0.5
"""The operator is told of a learner that is left out three times in a row: once may be chance."""
DOUBT_MIN = 0.01
"""Smaller doubts are forgotten: sixteen merges after the last one."""


def suspects(cosines: Mapping[str, float]) -> list[str]:
    """Learners that point against the sum of all others, most opposed first; always a minority."""
    opposed = sorted((cosine, learner) for learner, cosine in cosines.items() if cosine < 0.0)
    return [learner for _, learner in opposed[: (len(cosines) - 1) // 2]]


def left_out(cosines: Mapping[str, float], suspected: Sequence[str]) -> dict[str, str]:
    """Of these suspects, those that are left out, and why. The cosines are with the sum of all who are no suspects."""
    agreed = median(sorted(c for learner, c in cosines.items() if learner not in suspected and not math.isnan(c)))
    if agreed < AGREEMENT_MIN:
        return {}
    return {
        learner: f"it points against the others: cosine {cosines[learner]:.2f}, and theirs is {agreed:.2f}"
        for learner in suspected
        if cosines.get(learner, 0.0) <= -OPPOSED * agreed  # a witness may have gone since
    }


def doubt_after(doubt: float, *, opposed: bool) -> float:
    """How far a learner is doubted after one more verdict: a running share of those in which it was left out."""
    doubt += DOUBT_WEIGHT * (float(opposed) - doubt)
    return doubt if doubt >= DOUBT_MIN else 0.0


def length_factors(config: SyncConfig, usual: Sequence[float], items: Sequence[ContributionRecord]) -> list[float]:
    """What contributions weigh that are too long, 1 for all others. `usual` are norms of H steps, as the norm guard
    keeps them; where they know too little, or everybody has grown, the merge's own median counts.

    A learner may bring more steps than another, and with them up to so much longer a way."""
    known = median(sorted(usual)) if len(usual) >= NORMS_NEEDED else 0.0
    many = len({item.id.learner for item in items}) >= JUDGES_MIN
    factors = []
    for item in items:
        beside = sorted(other.norm * max(1.0, item.steps / other.steps) for other in items) if many else []
        limit = LENGTH_FACTOR * max(known * max(1.0, item.steps / config.sync_every), median(beside))
        factors.append(limit / item.norm if 0.0 < limit < item.norm else 1.0)
    return factors


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be merged: everybody but these."""

    left_out: Mapping[str, str] = field(default_factory=dict)
    """By learner, why."""
    news: Sequence[str] = ()
    """What the operator should know."""


class AgreementWatch:
    """Judges closed rounds. Each ends with a verdict, after no measurement, one or two."""

    def __init__(self, config: SyncConfig, membership: Membership) -> None:
        self._config = config
        self._membership = membership
        self._witnesses: dict[int, dict[str, ContributionId]] = {}
        """By fragment and learner: what it last had in a merge."""
        self._suspected: dict[int, list[str]] = {}
        """By fragment: suspects that are measured once more."""
        self._left_out: dict[int, set[str]] = {}
        """By fragment: who was left out since it was last merged itself."""
        self._turned: set[int] = set()
        """Fragments whose witnesses are out of date."""

    def judge(self, items: Sequence[ContributionRecord]) -> Compare | Verdict:
        """A round has closed with these."""
        if self._config.robust == "off":
            return Verdict()
        learners = {identity.learner for identity in self._seen(items)}
        return self._compare(items, learners) if len(learners) >= JUDGES_MIN else Verdict()

    def heard(self, event: Compared, items: Sequence[ContributionRecord]) -> Compare | Verdict:
        """What was asked for last is measured."""
        suspected = self._suspected.pop(event.fragment, None)
        if suspected is None:
            suspected = suspects(event.cosines)
            if suspected:
                self._suspected[event.fragment] = suspected
                return self._compare(items, event.cosines.keys() - set(suspected))
        present = {item.id.learner for item in items}
        opposed = {name: why for name, why in left_out(event.cosines, suspected).items() if name in present}
        if self._has_turned(event.fragment, opposed, event.cosines.keys()):
            self._turned.add(event.fragment)
            opposed = {}
        return Verdict(opposed, self._remember(present, opposed))

    def _has_turned(self, fragment: int, opposed: Mapping[str, str], seen: Set[str]) -> bool:
        """True if most learners would be left out since each of them was merged last. What others have merged
        meanwhile proves nothing: one with a hundredth of the tokens was merged alone, and the two others were left out
        by turns, each by what the other had given when the run stood elsewhere (draw 5, seed 31061)."""
        members = self._membership.members
        out = {*self._left_out.get(fragment, ()), *opposed}
        out = {name for name in out if name in members and members[name].state is MemberState.ACTIVE}
        self._left_out[fragment] = out
        return 2 * len(out) > len(out | seen)

    def merged(self, items: Sequence[ContributionRecord]) -> list[ContributionId]:
        """These are merged. The newest of each learner stays to bear witness; returns which are not needed any more."""
        fragment = items[0].id.fragment
        before = self._witnesses.pop(fragment, {})
        self._left_out.get(fragment, set()).difference_update(item.id.learner for item in items)
        seen = {
            **({} if fragment in self._turned else before),
            **{item.id.learner: item.id for item in items},
        }  # in the order of their numbers
        self._turned.discard(fragment)
        kept = {name: identity for name, identity in seen.items() if self._bears_witness(identity)}
        if kept:
            self._witnesses[fragment] = kept
        gone = {*before.values(), *(item.id for item in items)} - set(kept.values())
        return sorted(gone)

    def forget(self, fragment: int) -> list[ContributionId]:
        """Nothing that was given of this fragment is there any more; returns what is needed no more."""
        self._suspected.pop(fragment, None)
        self._left_out.pop(fragment, None)
        return sorted(self._witnesses.pop(fragment, {}).values())

    def is_witness(self, identity: ContributionId) -> bool:
        return self._witnesses.get(identity.fragment, {}).get(identity.learner) == identity

    def _bears_witness(self, identity: ContributionId) -> bool:
        member = self._membership.members.get(identity.learner)
        if self._config.robust == "off" or member is None:
            return False
        return member.state is MemberState.ACTIVE and member.generation == identity.generation

    def _seen(self, items: Sequence[ContributionRecord]) -> list[ContributionId]:
        """The contributions of a round, and what everybody else who is there last gave of the fragment."""
        present = {item.id.learner for item in items}
        witnesses = self._witnesses.get(items[0].id.fragment, {})
        others = [i for name, i in witnesses.items() if name not in present and self._bears_witness(i)]
        return sorted([*(item.id for item in items), *others])

    def _compare(self, items: Sequence[ContributionRecord], voices: Iterable[str]) -> Compare:
        return Compare(items[0].id.fragment, tuple(self._seen(items)), tuple(sorted(voices)))

    def _remember(self, learners: Iterable[str], opposed: Mapping[str, str]) -> list[str]:
        news = []
        for name in sorted(learners):
            member = self._membership.members.get(name)
            if member is None or not (member.doubt or name in opposed):
                continue
            before, member.doubt = member.doubt, doubt_after(member.doubt, opposed=name in opposed)
            if before <= DOUBT_MAX < member.doubt:
                news.append(
                    f"learner {name!r} is left out of merges: {opposed[name]}; its tokens are quarantined. Look at its "
                    "data, its code and its machine, or ask it to leave (atoll leave)"
                )
            elif member.doubt == 0.0:
                news.append(f"learner {name!r} agrees with the others again")
        return news
