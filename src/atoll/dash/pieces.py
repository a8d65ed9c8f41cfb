"""A run as plain data for a browser: what static/pieces.js draws, in the report and on the live page."""

from __future__ import annotations

import math
from typing import Any

from atoll.core import SECOND_NS
from atoll.dash import curves, lanes, words
from atoll.dash.text import count_text, duration_text, loss_text, percent_text, ratio_text
from atoll.observe import CATEGORIES, RoundSeen, RunState

ROUNDS_SHOWN = 24
NAMES_SHOWN_MAX = 12
"""Of the learners in a round: a line; the rest are counted."""
LOG_SHOWN = 120
DECISIONS_SHOWN = 60
BARS_MAX = 64
"""Learners with a bar of their own under "where the time goes", those that lost most first."""


def picture(state: RunState, now_ns: int) -> dict[str, Any]:
    """Everything but the learners' rows and lanes, which a page of a thousand asks for as it shows them."""
    until_ns = until(state, now_ns)
    return {
        "head": head(state, now_ns),
        "tiles": tiles(state),
        "seconds": round(max(curves.shown_seconds(state), state.elapsed_s(until_ns)), 2),
        "loss": curves.loss(state),
        "rates": curves.rates(state),
        "commits": curves.commits(state),
        "faults": curves.faults(state),
        "pauses": [
            (round(state.elapsed_s(pause.start_ns), 2), duration_text((pause.end_ns - pause.start_ns) / SECOND_NS))
            for pause in state.pauses
            if pause.end_ns is not None
        ],
        "syncer": lanes.syncer_lane(state, until_ns),
        "time": where_the_time_goes(state),
        "bytes": {"up": state.bytes_up, "down": state.bytes_down, "data_parallel": state.data_parallel_bytes},
        "versions": versions(state, now_ns),
        "ledger": ledger(state),
        "data": data_leases(state),
        "decisions": [
            (round(state.elapsed_s(one.t_ns), 1), one.what, one.why)
            for one in list(state.decisions.newest)[: -DECISIONS_SHOWN - 1 : -1]
        ],
        "closed": dict(state.decisions.closed),
        "rounds": [round_seen(state, entry) for entry in list(state.rounds.recent)[: -ROUNDS_SHOWN - 1 : -1]],
        "meaning": words.MEANING,
    }


def until(state: RunState, now_ns: int) -> int:
    """To where lanes are drawn: a run that goes on is drawn to now."""
    return state.end_ns if state.finished is not None else max(now_ns, state.end_ns)


def head(state: RunState, now_ns: int) -> dict[str, Any]:
    """What stands on top: what run this is, and how it is."""
    run = state.run
    budget = run.tokens_budget if run else 0
    tokens = state.tokens or state.ledger.processed
    word = "" if state.finished is not None else state.syncer_state(now_ns)
    return {
        "title": run.title if run and run.title else "",
        "method": state.method,
        "parameters": state.parameters,
        "over": state.finished.reason if state.finished is not None else "",
        "begun": bool(state.learner_steps or state.rounds.commits),
        "elapsed_s": round(max(0.0, state.elapsed_s(until(state, now_ns))), 1),
        "tokens": tokens,
        "budget": budget,
        "tokens_s": round(sum(state.rates(now_ns).values())) if state.finished is None else 0,
        "syncer": word,
        "epoch": state.syncer.epoch,
        "durability": state.durability.level,
        "lapse": state.durability.lapse.reason if state.durability.lapse is not None else "",
        "restarts": state.syncer.restarts_count,
        "waits_for": state.waits_for,
        "joined": state.joined,
        "snapshots": state.durability.snapshots.count,
        "warnings": [f"{one.source}: {one.text}" for one in state.notices.warnings[-5:]],
    }


def tiles(state: RunState) -> list[tuple[str, str]]:
    """The few figures that people look for first."""
    ours, theirs = state.bytes_up + state.bytes_down, state.data_parallel_bytes
    figures = [
        _loss(state),
        (percent_text(state.goodput().share), "goodput"),
        (count_text(state.tokens or state.ledger.processed), "tokens processed"),
        (duration_text(max(1e-3, state.elapsed_s(state.end_ns))), "from first to last step"),
    ]
    if ours and theirs:
        figures.append((ratio_text(theirs / ours), "fewer bytes than data-parallel"))
    commits = state.rounds.commits or (state.stats.commits if state.stats is not None else 0)
    if commits:
        figures.append((f"{commits:,}", "versions committed"))
    else:
        figures.append((f"{state.learner_steps:,}", "steps, over all learners"))
    return figures


def _loss(state: RunState) -> tuple[str, str]:
    """Of the published model where somebody has measured it, and else of those who train."""
    training = [one.loss for one in state.learners.values() if math.isfinite(one.loss)]
    if math.isfinite(state.eval_loss) or not training:
        return loss_text(state.eval_loss), "loss of the published model"
    return loss_text(sum(training) / len(training)), "training loss, mean of learners"


def rows(state: RunState, now_ns: int) -> list[list[Any]]:
    """One row per learner, as ROW says."""
    states, rates = state.states(now_ns), state.rates(now_ns)
    return [
        [
            name,
            "restarting"
            if states[name] == "joining" and one.restarts
            else words.STATE_WORDS.get(states[name], states[name]),
            one.step,
            round(rates[name]),
            float(f"{one.loss:.4g}") if math.isfinite(one.loss) else None,
            one.behind,
            one.restarts,
            one.bytes_up,
            one.bytes_down,
            _doing(state, name, states[name]),
        ]
        for name, one in state.learners.items()
    ]


ROW = ("learner", "state", "step", "tokens_s", "loss", "behind", "restarts", "up", "down", "doing")


def _doing(state: RunState, learner: str, word: str) -> str:
    """What its lane goes on with."""
    if word == "left":
        return ""
    account = state.account(learner)
    if word in ("down", "away", "lost"):
        return "down"
    if word == "joining":
        return "recovery" if account is None or account.mood != "idle" else "idle"
    return "slow" if word == "slow" else "compute"


def round_seen(state: RunState, entry: RoundSeen) -> dict[str, Any]:
    closed_ns = entry.close_ns - entry.launch_ns if entry.launch_ns and entry.close_ns else 0
    return {
        "fragment": entry.fragment,
        "version": entry.version,
        "at": round(state.elapsed_s(entry.commit_ns), 1),
        "merged": entry.contributors[:NAMES_SHOWN_MAX],
        "merged_count": len(entry.contributors),
        "asked": len(entry.asked),
        "late": entry.late[:NAMES_SHOWN_MAX],
        "carried": entry.carried,
        "closed_ms": round(closed_ns / 1e6),
        "why": entry.close_reason,
    }


def where_the_time_goes(state: RunState) -> dict[str, Any]:
    goodput = state.goodput()
    lost = sorted(goodput.learners.values(), key=lambda one: one.seconds["compute"] - one.allocated_s)[:BARS_MAX]
    chosen = {one.learner for one in lost}
    return {
        "share": goodput.share,
        "total": {name: round(spent, 2) for name, spent in goodput.seconds.items()},
        "learners": [
            [name, {c: round(goodput.learners[name].seconds[c], 2) for c in CATEGORIES}]
            for name in state.learners
            if name in chosen
        ],
    }


def versions(state: RunState, now_ns: int) -> list[tuple[int, int, float]]:
    """(fragment, version, seconds since it was committed)"""
    end_ns = until(state, now_ns)
    return [
        (fragment, version, round(max(0, end_ns - t_ns) / SECOND_NS, 1))
        for fragment, (version, t_ns) in sorted(state.rounds.versions.items())
    ]


def ledger(state: RunState) -> list[tuple[str, int]]:
    """The fate of every token, in words."""
    fates = state.ledger
    rows = [("processed", fates.processed), ("merged", fates.merged), ("pending", fates.pending)]
    return rows + [
        (f"discarded: {words.CAUSES.get(cause, cause.replace('_', ' '))}", count)
        for cause, count in sorted(fates.discarded.items())
    ]


def data_leases(state: RunState) -> list[dict[str, Any]]:
    return [
        {"stream": one.stream, "chunks": one.chunks, "done": one.done, "in_hand": one.in_hand, "pool": one.pool}
        | {"reissued": one.reissued, "repeated": one.repeated, "lost": one.lost}
        for one in state.durability.data.values()
    ]


def log_lines(state: RunState, count: int = LOG_SHOWN) -> list[tuple[float, str, str]]:
    """The newest lines of the log, the newest last: (when, text, tone)."""
    return [(round(state.elapsed_s(line.t_ns), 1), line.text, line.tone) for line in list(state.log)[-count:]]
