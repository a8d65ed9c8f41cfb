from __future__ import annotations

import math

from atoll.instruments.check.facts import Charged, Committed, Kept, Overtaken, Rested, Spent, TurnedAway, Unlied
from atoll.instruments.check.lineage import FollowsLines

SHARE_MIN = 0.95
"""Of what honest learners would have merged without the liar (issue 17)."""
SHARE_MIN_ROBUST = 0.75
"""The same where `robust` leaves learners out. In the simulated worlds each pulls the same few numbers to a place of
its own, so that honest ones are left out at times, with a liar or without: 0.67 to 0.84 of their tokens are merged in
runs without any lie. Who is left out changes with every message, and that is more than the 5%."""
RHYTHM_MAX = 2.0
"""Times as many versions, or as few, as without the lies."""
VERSIONS_SPARED = 10
"""Of all fragments: a beginning takes a moment more or less."""
ROUNDING = 1.01
"""A merge is made of decoded values, and norms are float32."""


class BoundedTrust(FollowsLines):
    """I15. One learner that lies ends no process, takes nobody's place, and costs the others next to nothing: their
    tokens are merged as without it, to the token, and no merge moves the model further than what is in it."""

    invariant = "I15"
    statement = (
        "one learner that lies ends nothing, and costs the others at most 5% of what is merged of their work "
        "(25% where robust leaves learners out)"
    )

    def __init__(self, norm_max: float = math.inf) -> None:
        """`norm_max` is what no contribution of this run may reach, whatever is known of others."""
        super().__init__()
        self._norm_max = norm_max
        self._kept: list[Kept] = []

    def on_overtaken(self, fact: Overtaken) -> None:
        if fact.epoch >= fact.newest:
            self.complain(f"the syncer of epoch {fact.epoch} ended for a newer one, and there is none")

    def on_turnedaway(self, fact: TurnedAway) -> None:
        if fact.code == "fenced":
            self.complain(f"{fact.learner} was fenced out, and it has no newer process")

    def on_charged(self, fact: Charged) -> None:
        if fact.known > fact.did:
            self.complain(f"the ledger has {fact.learner} process {fact.known} tokens, and it did {fact.did}")

    def on_committed(self, fact: Committed) -> None:
        super().on_committed(fact)
        if max(fact.norms, default=0.0) > self._norm_max:
            self.complain(
                f"fragment {fact.fragment}: a contribution of norm {max(fact.norms):.3g} was merged into version "
                f"{fact.version}, and {self._norm_max:.3g} is the most for anybody"
            )
        longest = sum(weight * norm for weight, norm in zip(fact.weights, fact.norms, strict=False))
        if fact.moved > ROUNDING * longest:
            self.complain(
                f"fragment {fact.fragment}: version {fact.version} moved by {fact.moved:.3g}, and its contributions "
                f"are {longest:.3g} long"
            )

        if fact.liar_weight > ROUNDING * fact.liar_weight_max:
            self.complain(
                f"fragment {fact.fragment}: the liar has {fact.liar_weight:.3g} of the weight of version "
                f"{fact.version}; with those beside it {fact.liar_weight_max:.3g} is the most"
            )

    def on_kept(self, fact: Kept) -> None:
        self._kept.append(fact)

    def on_rested(self, fact: Rested) -> None:
        for kept in self._kept if fact.whole else ():
            inside = self._merged(kept)
            missing = kept.processed - kept.discarded - inside
            if not 0 <= missing <= kept.refused:
                self.complain(
                    f"{kept.learner} (generation {kept.generation}) processed {kept.processed} tokens; of fragment "
                    f"{kept.fragment} {inside} are merged and {kept.discarded} discarded: {missing} are missing"
                )

    def on_unlied(self, fact: Unlied) -> None:
        least = min(fact.merged_there)
        if fact.merged < (SHARE_MIN_ROBUST if fact.robust else SHARE_MIN) * least:
            self.complain(f"{fact.merged:.3f} of honest learners' tokens were merged, without the lies {least:.3f}")
        # One voice more, and the clock may follow an honest learner that is faster than the one it followed before
        # (draw 3, seed 3158: one of three takes five steps while the others take one).
        low, high = min(fact.versions_there) / RHYTHM_MAX, max(fact.versions_there) * RHYTHM_MAX * fact.spread
        if not low - VERSIONS_SPARED <= fact.versions <= high + VERSIONS_SPARED:
            self.complain(f"{fact.versions} versions were made, without the lies {fact.versions_there}")

    def on_spent(self, fact: Spent) -> None:
        if fact.most < fact.budget:
            self.complain(f"the budget of {fact.budget} tokens was called spent after {fact.most}")

    @property
    def merged_share(self) -> float:
        """Of the tokens of those who are kept."""
        wanted = sum(kept.processed - kept.overwritten for kept in self._kept)
        return sum(map(self._merged, self._kept)) / wanted if wanted else 1.0

    def _merged(self, kept: Kept) -> int:
        return sum(
            tokens
            for version in self.lineages[kept.fragment].line()
            for (learner, generation, _), tokens in zip(version.contributions, version.tokens_each, strict=True)
            if (learner, generation) == (kept.learner, kept.generation)
        )
