"""The curves of a run as plain data, which the report and the live page draw with the same few lines of uPlot.

A curve is (x values, y values). Times are seconds on the clock of the views: since the first step, without the times in
which the run was stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from atoll.observe import TRACKED, RunState

LEARNERS_DRAWN_MAX = 16
"""Learners with a curve of their own: more cannot be told apart. Those with a fault come first."""
POINTS_MAX = 300
GAP_SHARE = 0.04
"""A curve is cut where it has no point for this share of the axis: a line across the time that a learner was down would
lie."""
SETTLED_SHARE = 0.03
"""The loss axis begins with what was reached after this share of the run: the fall from the random start would press
flat what people want to see."""
RATE_BINS = 150
COMMITS_MAX = 240

_TOKENS = TRACKED.index("tokens")

Points = Sequence[tuple[float, float]]
Curve = tuple[list[float], list[float | None]]


def drawn(state: RunState) -> list[str]:
    """The learners that get a curve and a lane of their own."""
    hit = {fault.target for fault in state.faults}
    chosen = set(sorted(state.learners, key=lambda learner: learner not in hit)[:LEARNERS_DRAWN_MAX])
    return [learner for learner in state.learners if learner in chosen]


def shown_seconds(state: RunState) -> float:
    """The length of the time axes: the last rounds and the last test may come after the last step."""
    last_ns = max([0, state.end_ns, *(entry.commit_ns for entry in state.rounds.recent)])
    if state.last_evaluation is not None:
        last_ns = max(last_ns, state.last_evaluation.t_ns)
    return max(1e-3, state.elapsed_s(last_ns))


def loss(state: RunState) -> dict[str, Any]:
    """The published model, and the training loss of the learners, over time and over tokens."""
    final = state.finished.eval_loss if state.finished is not None else math.nan
    by_time = [(state.elapsed_s(e.t_ns), e.loss) for e in state.evaluations]
    by_tokens = [(float(e.tokens), e.loss) for e in state.evaluations]
    if math.isfinite(final):
        by_time.append((shown_seconds(state), final))
        by_tokens.append((float(state.tokens), final))
    trains = [
        {
            "learner": learner,
            "time": curve([(state.elapsed_s(t), y) for t, y in state.learners[learner].loss_by_time.points]),
            "tokens": curve(state.learners[learner].loss_by_tokens.points),
        }
        for learner in drawn(state)
    ]
    low, high = _loss_range(state)
    return {
        "time": curve(by_time, cut=False),
        "tokens": curve(by_tokens, cut=False),
        "trains": trains,
        "range": [low, high],
    }


def _loss_range(state: RunState) -> tuple[float, float]:
    points = [(float(e.tokens), e.loss) for e in state.evaluations if math.isfinite(e.loss)]
    for learner in drawn(state):
        points += state.learners[learner].loss_by_tokens.points
    if not points:
        return 0.0, 1.0
    settled = [y for tokens, y in points if tokens >= SETTLED_SHARE * state.tokens] or [y for _, y in points]
    low, high = min(settled), max(settled)
    pad = max(0.06 * (high - low), 1e-3 * max(1.0, abs(high)), 1e-6)
    return low - pad, high + pad


def rates(state: RunState) -> list[dict[str, Any]]:
    """Tokens per second of each learner that is drawn, and of all together."""
    found = [{"learner": learner, "time": _rate(state, [learner])} for learner in drawn(state)]
    return [{"learner": "", "time": _rate(state, state.learners)}, *found] if len(state.learners) > 1 else found


def _rate(state: RunState, learners: Iterable[str]) -> Curve:
    """In bins of equal time; a bin is never shorter than a second, which would only show noise."""
    accounts = [account for learner in learners if (account := state.account(learner)) is not None and account.tokens]
    end_s = state.elapsed_s(state.end_ns)
    bins = min(RATE_BINS, int(end_s))
    if not accounts or bins < 2:
        return [], []
    edges_ns = [state.moment_ns(end_s * i / bins) for i in range(bins + 1)]
    totals = [sum(account.track.at(edge_ns)[_TOKENS] for account in accounts) for edge_ns in edges_ns]
    per_second = [(b - a) * bins / end_s for a, b in pairwise(totals)]
    return [round(end_s * (i + 0.5) / bins, 2) for i in range(bins)], [float(f"{rate:.4g}") for rate in per_second]


def commits(state: RunState) -> dict[str, Any]:
    """Of a sample of the commits: when, how many were in them and had been asked, and who was missing."""
    rounds = list(state.rounds.sample)
    shown = rounds[:: max(1, math.ceil(len(rounds) / COMMITS_MAX))]
    rho = thin([(state.elapsed_s(t), y) for t, y in state.rounds.rho.points], COMMITS_MAX)
    return {
        "time": [round(state.elapsed_s(entry.commit_ns), 2) for entry in shown],
        "merged": [len(set(entry.contributors)) for entry in shown],
        "asked": [max(len(entry.asked), len(set(entry.contributors))) for entry in shown],
        "rho": curve(rho, cut=False),
        "rho_mean": curve(thin(rho, 24), cut=False),
    }


def faults(state: RunState) -> list[dict[str, Any]]:
    """The bands behind the curves."""
    return [
        {
            "target": fault.target,
            "text": fault.text,
            "from": round(max(0.0, state.elapsed_s(fault.start_ns)), 2),
            "to": round(state.elapsed_s(fault.end_by(state.end_ns)), 2),
        }
        for fault in state.faults
    ]


def curve(points: Points, *, cut: bool = True) -> Curve:
    """At most POINTS_MAX points, in order of x, with a hole where nothing was reported for long."""
    shown = sorted(thin(points, POINTS_MAX))
    gap = GAP_SHARE * (shown[-1][0] - shown[0][0]) if shown else 0.0
    xs: list[float] = []
    ys: list[float | None] = []
    for x, y in shown:
        if cut and xs and x - xs[-1] > gap:
            xs.append((x + xs[-1]) / 2)
            ys.append(None)
        xs.append(float(f"{x:.6g}"))
        ys.append(float(f"{y:.5g}") if math.isfinite(y) else None)
    return xs, ys


def thin(points: Points, count_max: int) -> list[tuple[float, float]]:
    """At most `count_max` points, each the mean of its neighbours."""
    size = max(1, math.ceil(len(points) / count_max))
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
