"""The decisions of the syncer as pure functions of numbers: quorum, clock, grace window, weights, guards.

Each returns what was decided and, where a person may ask why, the reason beside it. None of them knows a network,
a clock or a machine. Section numbers are those of the design.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll.core.config import SyncConfig, parse_quorum

LearnerNorm = tuple[str, float]
"""Whose contribution was how long."""
FRAGMENTS_AUTO_MAX = 24
"""Fragments of a large model, however rarely they are merged."""
FRAGMENT_PARAMETERS_MIN = 65_536
"""Fragments are there to spread traffic evenly. One of fewer parameters (34 KB as int4) costs more in messages than it
spreads in bytes, so small models get fewer fragments."""
EMA_WEIGHT = 0.2
"""Weight of a new sample in the running means of step, quorum and merge times: about the last ten samples."""
NORMS_KEPT = 33
"""Norms per fragment behind the running median: odd, and long enough that a few outliers cannot move it."""
OUTER_FACTOR_END = 0.1
"""What is left of the outer step at the end of a schedule: the usual end of an inner one."""
LATE_SHARE = 0.25
"""Of the time that a quorum takes: the grace window where rounds take longer than they should. With none, half of the
learners close a round, the others, a moment late, are a quorum when the next one is launched, and so on for ever: each
is in every other round only."""
CARRIED_ROUNDS_MAX = 2
"""Times what a round should take: beyond, nobody waits for those who have not been asked. Who is late by more loses
nothing by it."""
ASIDE_PERIODS = 3
"""A learner that answers no round of three whole periods is not merely late: what it sends is carried and merged when
it comes, and nobody counts on it meanwhile."""
MISSING_PERIODS = 2
"""What one learner may weigh in a merge, in periods: as much while it is missing as when it comes."""
STALE_FACTOR = 64
"""How much older than `carry_versions_max` a contribution may be whose learner is set aside. At 50 kbit/s the 400 kB of
a model of 100,000 parameters take 64 s, in which a run of 0.1 s a step publishes some 80 versions."""
NORMS_NEEDED = 8
"""Before this many norms are known, contributions are held against each other and against DELTA_RMS_MAX only."""
NORM_PERIODS_MAX = 16
"""How far the limit of a norm grows with the steps behind it. A learner that was cut off for a day has not moved ten
thousand times as far as in a period: the ways of single periods point in many directions. With the factor of 10 this
allows for 160 periods of walking straight ahead, and a claim of 2^60 steps brings no more."""
DELTA_RMS_MAX = 100.0
"""Times `norm_outlier_factor`: what a contribution's values may be at most, in the root of their mean square, from the
first one on. Parameters of networks are of the order of 0.01 to 1 and move by less than themselves, so 1000 is far
above any honest contribution, and far below what overflows fp32 (1e30 once stopped all commits of a run). Whoever
trains parameters of another order raises `norm_outlier_factor`."""
CROWD_MIN = 3
"""Contributions in one merge from which on there is a majority that can say which of them is too long."""
CROWD_JUDGES = 64
"""How many of a merge judge each: as good as all of them, and a thousand learners cost no million comparisons."""
CROWD_AHEAD_MAX = 4.0
"""How many times the others' steps are believed then. 16 times the factor is more than a learner needs that has taken
eight steps of a warm-up while the others took one (36 times their way)."""


def fragments_for(parameters: int, sync_every: int) -> int:
    """P for a model of this size, when the user did not choose it: at most one round per step. More would make the
    messages smaller and the bytes of a step no fewer."""
    return max(1, min(FRAGMENTS_AUTO_MAX, sync_every, parameters // FRAGMENT_PARAMETERS_MIN))


def quorum_count(config: SyncConfig, active: int, joined_max: int) -> int:
    """K for the learners that are active now. Until all expected have joined, shares are of those."""
    count, share = parse_quorum(config.quorum)
    if count:
        return count
    members = active if joined_max >= config.learners_expected else max(active, config.learners_expected)
    return max(1, math.ceil(share * members - 1e-9))


def clock_step(steps: Sequence[int], quorum: int) -> int | None:
    """s, the K-th largest step among active learners (given smallest first); None while fewer than K are active
    (section 4, syncer 1)."""
    return steps[-quorum] if len(steps) >= quorum else None


def first_due_step(config: SyncConfig, fragment: int) -> int:
    """First launches are staggered by H/P so that traffic is flat from the start."""
    return max(1, config.sync_every * (fragment + 1) // config.fragments)


def round_steps(fragments: int, period: int, in_flight: int) -> float:
    """So many steps a round may take before the next ones wait for it: tau, or a little more, where a model has several
    fragments; a whole period where it is one."""
    return in_flight * period / fragments


def grace_ns(
    config: SyncConfig, step_ns: float, quorum_ns: float, sync_ns: float, steps: float, *, carried: bool = False
) -> tuple[int, str]:
    """clamp(gamma * (steps * xi_step - xi_quorum - xi_sync), 0, cap): uses only slack (section 4, syncer 3). `steps`:
    those of `round_steps`. Where there is less slack, LATE_SHARE of xi_quorum.

    `carried`: the quorum is of contributions that came too late for the round before, and nobody has had the time to
    answer. Then xi_quorum comes on top, unless that is far more than a round has: so those who have parted meet
    again."""
    cap = config.grace_cap_steps * step_ns
    if cap <= 0 or not config.overlap:
        return 0, "grace is off"
    slack = config.grace_gamma * (steps * step_ns - quorum_ns - sync_ns)
    late = LATE_SHARE * quorum_ns if config.grace_gamma else 0.0
    window, reason = min((cap, "cap"), max((slack, "slack"), (late, "late")))
    if carried and window > 0 and quorum_ns <= CARRIED_ROUNDS_MAX * steps * step_ns:
        return int(quorum_ns + window), "others were not asked before"
    return (int(window), reason) if window > 0 else (0, "no slack")


def may_set_aside(config: SyncConfig, counted: int, joined_max: int) -> bool:
    """True if rounds can do without one of the members that they count: those that are left make a quorum. Where
    everybody's answer is asked for, nobody is left out."""
    left = counted - 1
    return parse_quorum(config.quorum)[1] < 1.0 and left >= max(1, quorum_count(config, left, joined_max))


def rounds_missed_max(config: SyncConfig) -> int:
    """Rounds that may close without an answer of a learner before they stop to count on it."""
    return ASIDE_PERIODS * config.fragments


def missing_tokens(config: SyncConfig, rest: int, steps: int, tokens: int, period: int = 0) -> int:
    """What a learner that was asked and has not answered weighs: the tokens that it still has (`rest`), but no more
    than it makes in two periods (by its `steps` and `tokens` so far): one is in a contribution on its way, one is new.
    What it holds beyond that it holds because it does not deliver, and it would shrink everybody's steps for as long as
    it does not (reliability lesson 9). A period is `sync_every`, if it is not given."""
    return min(rest, MISSING_PERIODS * (period or config.sync_every) * tokens // steps) if steps > 0 else 0


def present_tokens(config: SyncConfig, steps: int, tokens: int, period: int = 0) -> int:
    """What a contribution weighs against those that are missing: by the same measure as theirs, so that contributions
    of everybody after an outage, merged in two halves, add up to one of all."""
    return missing_tokens(config, tokens, steps, tokens, period)


def _counted_steps(config: SyncConfig, steps: int) -> float:
    """Of a contribution's steps, those that count for its weight."""
    most = MISSING_PERIODS * config.sync_every
    return float(steps) if steps <= most else max(most / 2, most * most / steps)


WAY_PERIODS = 2.0
"""Of usual ways that a long contribution may go: as for its weight, one may have been on its way, and one is new."""
LEFT_BEHIND_PERIODS = 4
"""A contribution of so many periods, in which the others had as many rounds, is of a learner that was left behind."""


def stale_factor(config: SyncConfig, age: int) -> float:
    """What is left of a contribution's weight that is older than `carry_versions_max` versions and is merged all the
    same, because its learner's link lets it have nothing newer: as much as it is too old."""
    return min(1.0, config.carry_versions_max / age) if age > 0 else 1.0


def way_factor(norm: float, usual: float) -> float:
    """What is left of the weight of a contribution of many periods, if the others were merged all the while: as much as
    makes its way that of WAY_PERIODS usual ones. The others have gone most of that way without it, and the model would
    go it twice (a learner behind 2 kB/s handed over 584 steps at the end of a run, a hundred times as long as usual and
    with a fifth of the weight: loss 2.16 instead of 1.35)."""
    return min(1.0, WAY_PERIODS * usual / norm) if usual > 0.0 and norm > 0.0 else 1.0


def age_limit(config: SyncConfig, *, aside: bool) -> int:
    """How many versions old a contribution may be: more where nothing newer is to be had from its learner."""
    return config.carry_versions_max * (STALE_FACTOR if aside else 1)


def contribution_weight(config: SyncConfig, steps: int, tokens: int, age: int) -> float:
    """w before normalisation (section 4, syncer 4): c_tokens^2 / c_steps, or tokens, or uniform; discounted by age.

    A contribution of more than two periods is long because its learner was cut off or its link is thin, and others were
    merged meanwhile at full strength. By its tokens one of 200 steps would take over the merge (measured: 0.7 of the
    weight of five learners, and 10% of loss). It weighs what its learner makes in two periods, and one of four periods
    or more in one. How far it may go is `way_factor`'s."""
    share = _counted_steps(config, steps) / steps
    if config.weights == "tokens2_per_step":
        weight = float(tokens) * float(tokens) / float(steps) * share
    elif config.weights == "tokens":
        weight = float(tokens) * share
    else:
        weight = 1.0
    return weight * config.age_discount**age


def scales_steps(config: SyncConfig) -> bool:
    """True if the sum of a merge's weights has a meaning (`step_share`) and not only their ratios."""
    return config.partial == "scaled" or config.outer_schedule != "constant"


def step_share(config: SyncConfig, processed: int, present: Sequence[int], missing: Sequence[int]) -> float:
    """How much of a merged gradient counts: what the schedule says once this many tokens of the run's budget are
    processed, times the share of the contributions that are in it.

    `present` are the tokens of those that are, `missing` the tokens that learners hold who were asked and will still
    answer. So the sum of several partial merges is what one merge of all of them is, as far as weights go by tokens.
    Without it a round that closes with one contribution of eight takes that learner's whole way, and so does the next.
    """
    share = 1.0
    if config.partial == "scaled":
        worth = len if config.weights == "uniform" else sum
        # What is missing comes a version late at least, and weighs so much less then. With age_discount 0 it weighs
        # nothing, and steps of a tenth would wait for it for ever (draw 4, seed 200017).
        here, there = worth(present), config.age_discount * worth([tokens for tokens in missing if tokens > 0])
        share = here / (here + there) if here > 0 else 1.0
    if config.outer_schedule == "constant":
        return share
    done = min(1.0, processed / config.tokens_budget)
    left = 1.0 - done if config.outer_schedule == "linear" else 0.5 + 0.5 * math.cos(math.pi * done)
    return share * (OUTER_FACTOR_END + (1.0 - OUTER_FACTOR_END) * left)


def step_factor_min(config: SyncConfig) -> float:
    """How small the run's schedule may make an outer step."""
    return 1.0 if config.outer_schedule == "constant" else OUTER_FACTOR_END


def with_norm(
    config: SyncConfig, norms: Sequence[LearnerNorm], learner: str, norm: float, steps: int
) -> list[LearnerNorm]:
    """The norms behind the running median after a merge; those of fewer than H steps as if they had gone on to H.
    Whoever is merged more often than the others has no more of them than its share: none but it would be usual.

    A contribution of less than half as many steps tells nothing about the usual size. Fragments take turns, so the
    first one's first contribution holds a single step, and in a warm-up that is a hundredth of what comes next.
    """
    if 2 * steps < config.sync_every:
        return list(norms)
    known = [*norms, (learner, norm * max(1.0, config.sync_every / steps))]
    own = [index for index, (name, _) in enumerate(known) if name == learner]
    if len(own) > math.ceil(NORMS_KEPT / len({name for name, _ in known})):
        del known[own[0]]
    return known[-NORMS_KEPT:]


def norm_limit(config: SyncConfig, norms: Sequence[float], steps: int) -> float:
    """Largest norm that is accepted. A learner that was away legitimately brings more than H steps at once, so the
    limit grows with its steps beyond H."""
    usual = usual_norm(config, norms) if len(norms) >= NORMS_NEEDED else 0.0
    return config.norm_outlier_factor * usual * _norm_periods(config, steps) if usual > 0.0 else math.inf


def usual_norm(config: SyncConfig, norms: Sequence[float]) -> float:
    """The median of those that tell what a step is. Whoever brings next to nothing, as much shorter than the median as
    an outlier is longer, says nothing of it: of three learners one could have the longer honest one refused by making
    the shorter one the usual one (draw 4, seed 2928)."""
    ordered = sorted(norms)
    least = median(ordered) / config.norm_outlier_factor
    return median([norm for norm in ordered if norm >= least])


def norm_limit_absolute(config: SyncConfig, parameters: int) -> float:
    """Largest norm that a fragment of so many parameters may ever have, whatever is known of others."""
    return config.norm_outlier_factor * DELTA_RMS_MAX * math.sqrt(parameters)


def heal_limit(config: SyncConfig, norms: Sequence[float], versions: int) -> float:
    """How far the parameters that one learner alone brings back may be from those on the disk, which are so many
    versions older: each version goes about as far as a contribution. While few norms are known the run may be in its
    warm-up, where the ways grow (CROWD_AHEAD_MAX); while none is, `norm_limit_absolute` is all there is."""
    usual = median(sorted(norms))
    growth = 1.0 if len(norms) >= NORMS_NEEDED else CROWD_AHEAD_MAX**2
    return config.norm_outlier_factor * growth * usual * max(1, versions) if usual > 0.0 else math.inf


def crowd_outliers(
    config: SyncConfig, learners: Sequence[str], norms: Sequence[float], steps: Sequence[int]
) -> list[int]:
    """Which contributions of one merge are too long beside the others: what holds while the guard knows too few norms
    to judge each when it comes in. Most of the other learners must say so, by the longest of their contributions, and
    two at least: two cannot say which of them is wrong, nor can one that brings next to nothing, however often, have
    those refused who move.

    In a warm-up the way grows with the square of the steps, so that a learner which is ahead may bring so much more."""
    longest: dict[str, int] = {}
    for index, learner in enumerate(learners):
        if learner not in longest or norms[index] > norms[longest[learner]]:
            longest[learner] = index
    judges = list(longest.values())[:CROWD_JUDGES]

    def is_long(one: int, beside: int) -> bool:
        ahead = max(1.0, min(CROWD_AHEAD_MAX, steps[one] / steps[beside])) ** 2
        return norms[one] > config.norm_outlier_factor * norms[beside] * ahead > 0.0

    found = []
    for one in range(len(norms)):
        others = [beside for beside in judges if learners[beside] != learners[one]]
        against = sum(is_long(one, beside) for beside in others)
        if against >= CROWD_MIN - 1 and 2 * against > len(others):
            found.append(one)
    return found


def _norm_periods(config: SyncConfig, steps: int) -> float:
    return max(1.0, min(float(NORM_PERIODS_MAX), steps / config.sync_every))


def upcoming_steps(learner_step_ns: float, run_step_ns: float) -> int:
    """How many steps the run may take during one step of this learner, and one to spare. A learner ten times slower
    keeps ten times the snapshots and so still answers every request at once."""
    if learner_step_ns <= run_step_ns or run_step_ns <= 0:
        return 2
    return math.ceil(learner_step_ns / run_step_ns) + 1


def moving_average(old: float, sample: float) -> float:
    """Exponential moving average that starts at its first sample."""
    return sample if old <= 0.0 else old + EMA_WEIGHT * (sample - old)


def low_median(ordered: Sequence[float]) -> float:
    """The lower one of two middle values: a claim counts as large only if most are."""
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0


def median(ordered: Sequence[float]) -> float:
    """Middle value (the upper one of two) of values that are given smallest first; 0.0 for none."""
    return ordered[len(ordered) // 2] if ordered else 0.0
