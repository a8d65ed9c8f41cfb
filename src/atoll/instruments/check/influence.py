from __future__ import annotations

import math
from collections import defaultdict

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Committed, GuardReset, Healed, Restored

MEDIANS_KEPT = 8
"""Medians that a merged contribution may have been judged by: it may wait for some versions before it is merged, while
others are refused."""
PERIODS_MAX = 16.0
"""How far the limit grows with the steps."""


class BoundedInfluence(Checker):
    """I8. Computed apart from the syncer's own guard: no merged contribution is larger than `factor` times the median
    of the `kept` merged before it (a learner that brings more than H steps may bring more, in proportion). Those of
    less than half of H steps do not count in the median; those of less than H count as if they had gone on to H. Those
    of a learner that is known to lie (`liar`) are judged and do not count; then the longest of the others is the
    measure.

    A contribution is judged when it comes in and merged later, so it may be compared with any median since it could
    have come in: the largest of the last few versions is used."""

    invariant = "I8"
    statement = "the norm of one learner's accepted delta is at most c times the running median"

    def __init__(
        self, factor: float = 10.0, *, sync_every: int, kept: int = 33, needed: int = 8, liar: str = ""
    ) -> None:
        super().__init__()
        self._liar = liar
        self._factor = factor
        self._sync_every = sync_every
        self._kept = kept
        self._needed = needed
        self._norms: defaultdict[int, list[tuple[str, float]]] = defaultdict(list)
        self._medians: defaultdict[int, list[float]] = defaultdict(list)
        self._from_disk: set[int] = set()

    def on_committed(self, fact: Committed) -> None:
        norms, medians = self._norms[fact.fragment], self._medians[fact.fragment]
        if fact.version == 0:
            norms.clear()
            medians.clear()
        needed = self._kept if fact.fragment in self._from_disk else self._needed
        medians.append(self._usual(norms) if len(norms) >= needed else math.inf)
        del medians[:-MEDIANS_KEPT]
        for norm, steps in zip(fact.norms, fact.steps, strict=True):
            limit = self._limit(max(medians), steps)
            if norm > limit:
                self.complain(
                    f"fragment {fact.fragment}: a contribution of norm {norm:.3g} was merged into version "
                    f"{fact.version}, the limit is {limit:.3g}"
                )
        self._learn(norms, fact)

    def _learn(self, norms: list[tuple[str, float]], fact: Committed) -> None:
        """One norm of each learner of a merge, its longest; and of each no more than its share of all."""
        if len(fact.norms) < len(fact.contributions):
            return  # a storm whose events do not tell all of them
        longest: dict[str, tuple[float, int]] = {}
        for (learner, _, _), norm, steps in zip(fact.contributions, fact.norms, fact.steps, strict=True):
            if norm > longest.get(learner, (-1.0, 0))[0]:
                longest[learner] = (norm, steps)
        for learner, (norm, steps) in longest.items():
            if steps < self._sync_every / 2 or learner == self._liar:
                continue
            norms.append((learner, norm if steps >= self._sync_every else norm * self._sync_every / steps))
            own = [index for index, (name, _) in enumerate(norms) if name == learner]
            if len(own) > math.ceil(self._kept / len({name for name, _ in norms})):
                del norms[own[0]]
        del norms[: -self._kept]

    def _usual(self, norms: list[tuple[str, float]]) -> float:
        """Their median, of those that are not next to nothing beside it. A liar's own norms move the syncer's, but
        never past what some honest learner brought."""
        ordered = sorted(norm for _, norm in norms)
        if self._liar:
            return ordered[-1]
        telling = [norm for norm in ordered if self._factor * norm >= ordered[len(ordered) // 2]]
        return telling[len(telling) // 2]

    def _limit(self, median: float, steps: int) -> float:
        return self._factor * median * max(1.0, min(PERIODS_MAX, steps / self._sync_every))

    def on_guardreset(self, fact: GuardReset) -> None:
        self._from_disk.discard(fact.fragment)
        self._norms[fact.fragment] = []
        self._medians[fact.fragment] = [math.inf]

    def on_restored(self, fact: Restored) -> None:
        for fragment in fact.fragments:
            self._forget(fragment)

    def on_healed(self, fact: Healed) -> None:
        self._forget(fact.fragment)  # of a run that came back from learners alone, nobody knows any norms

    def _forget(self, fragment: int) -> None:
        """What a restarted syncer knows of norms is on its disk, not here: they are in its median until as many have
        come since (draw 3, seed 1538)."""
        self._from_disk.add(fragment)
        self._norms[fragment] = []
        self._medians[fragment] = [math.inf]
