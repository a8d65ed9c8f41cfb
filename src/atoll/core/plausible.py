"""What a learner can have done, as pure functions of numbers: its claims against the time that has passed, against the
others' pace, and against what was merged before.

Whoever has the run's token can say anything. What no honest learner can say is refused. What an honest learner might
say (after an outage, in a fast burst, with another batch size) is taken down as it is said, and counts only as far as
it is plausible: for the clock (`steps_believed`), for a merge's weights (`size_limit`), for the budget
(`rate_limit`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll.core.config import SyncConfig
from atoll.core.messages import TOKENS_MAX, DiscardCount

PACE_FACTOR = 16.0
"""How many times as fast as the others a learner's steps count for the clock. Unequal islands of one run differ by
less; one that is faster still has its steps merged, and only the clock follows it no further."""
STEP_NS_MIN = 10_000
"""No training step is shorter: Python itself takes about as long to call one."""
BURST_PERIODS = 4
"""Steps that are believed at once, in periods of a fragment: reports come in bursts over a link that stalls."""
AWAY_STEPS_MAX = 10_000_000
"""After a restart of the syncer nobody here knows how long it was gone, while its learners trained on: a day at 10 ms a
step, or four months at 1 s."""
SIZE_SLACK = 2.0
"""A learner's tokens per step count up to this many times the low median of all, unasked: batches vary. By the square
of it, one that claims more than it does gains a weight of four."""
SIZE_GROWTH = 2.0
SIZE_PERIODS = 2
"""And beyond that, up to this many times what has counted so far, after contributions of so many periods were merged
that all claimed more. An island 64 times the size of the others so has its true weight after ten periods."""
SPEND_SLACK = 2.0
"""Tokens that a learner's contributions show count for the budget up to this many times what the usual learner makes in
the same time."""
SPEND_GROWTH = 2.0
SPEND_PERIODS = 8
"""And beyond that, up to this many times what counted so far, after so many periods of the usual pace that all showed
more. A learner 64 times as large or fast as the others counts in full after six such windows; a lie that lasts for one
has used two shares instead of one."""


def step_credit(elapsed_ns: int, pace_ns: float) -> float:
    """How many more steps are believed of anybody after this time, where the others' steps take `pace_ns`."""
    pace_ns = pace_ns if pace_ns > STEP_NS_MIN else STEP_NS_MIN
    return PACE_FACTOR * elapsed_ns / pace_ns if elapsed_ns > 0 else 0.0


def steps_burst(config: SyncConfig) -> int:
    """Steps that are believed beyond what time allows."""
    return BURST_PERIODS * config.sync_every


def discards_fit(tokens: int, discarded: Sequence[DiscardCount]) -> bool:
    """True if no fragment has lost more tokens than there were: each is discarded once, for one cause."""
    if not discarded:  # as in nearly every report
        return 0 <= tokens <= TOKENS_MAX
    lost: dict[int, int] = {}
    for count in discarded:
        lost[count.fragment] = lost.get(count.fragment, 0) + count.tokens
    return max(lost.values(), default=0) <= tokens <= TOKENS_MAX


def steps_overtaking(steps: int, tokens: int, rest: int) -> float:
    """Of a contribution's steps, how many its learner has not reported yet: `rest` are the tokens that are reported and
    in no contribution. A report may be overtaken, so there may be some."""
    return max(0.0, (tokens - rest) * steps / tokens)


def size_limit(declared: int, confirmed: float, usual: float) -> float:
    """Tokens per step that count of one learner: what was declared with its key, or what it has shown, or what all
    have. `usual` is the low median over the learners that are counted; 0: nothing is known."""
    if declared:
        return float(declared)
    return max(SIZE_SLACK * usual, confirmed) or math.inf


def size_confirmed(claimed: float, limit: float) -> float:
    """What counts of a learner that has claimed this size or more for SIZE_PERIODS, and had this limit before."""
    return min(claimed, SIZE_GROWTH * limit)


def rate_limit(declared: int, confirmed: float, usual: float) -> float:
    """Tokens per step of the usual pace that one learner's contributions may show for the budget."""
    most = PACE_FACTOR * declared if declared else math.inf
    return min(most, max(SPEND_SLACK * (declared or usual), confirmed))


def rate_confirmed(shown: float, limit: float) -> float:
    """What may be shown by a learner that has shown this much for SPEND_PERIODS, and had this limit before."""
    return min(shown, SPEND_GROWTH * limit)


def tokens_counted(steps: int, tokens: int, limit: float) -> int:
    """Of a contribution's tokens, those that count for its weight. One at least: beside a learner that claims thousands
    of steps for a few tokens, an honest one must not weigh nothing (draw 4, seeds 2025, 2577, 2889)."""
    return tokens if limit == math.inf or tokens <= steps * limit else max(1, int(steps * limit))


def capped(weights: Sequence[float], share_max: float) -> list[float]:
    """Weights none of which is more than this share of all, as far as there are enough of them for that. What one has
    too much is taken from it, beginning with the largest, and the others keep their ratios."""
    ordered = sorted((weight for weight in weights if weight > 0.0), reverse=True)
    for over, weight in enumerate(ordered):
        # With so many at the cap, each has its share of a whole of which the others make up the remainder.
        share = max(share_max, 1.0 / len(ordered))
        cap = share / (1.0 - over * share) * math.fsum(ordered[over:])
        if weight <= cap * (1.0 + 1e-9):
            return [min(weight, cap) for weight in weights] if over else list(weights)
    return list(weights)
