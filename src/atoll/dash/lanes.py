"""What each learner was doing, and when: the lanes of the report and of the live page, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any

from atoll.core import SECOND_NS
from atoll.dash.text import duration_text
from atoll.observe import CATEGORIES, SLOW_SHARE, TRACKED, ObservedFault, RunState, TimeAccount

LANE_BINS = 240
SPEED_REACH_S = 2.0
"""Speed is taken over this long on both sides: a single slow step does not make a learner slow."""
MARKS_MAX = 260
"""Contributions on one lane: more dots than this run into each other."""
REPORT_OVERDUE_NS = 15 * SECOND_NS
"""Reports come four times a second, or at the end of each step."""
OF_MEMBERS = {"joining": "recovery", "active": "compute", "away": "down", "lost": "down"}
"""What a learner that writes no events here was doing, as far as the syncer knows."""

Stretch = tuple[float, float, str, float]
"""From, to (in seconds on the clock of the views), what it was doing, and the share of it that was waiting."""

_TOKENS = TRACKED.index("tokens")
_FIRST_CATEGORY = TRACKED.index(CATEGORIES[0])


def lane(state: RunState, learner: str, until_ns: int) -> dict[str, Any]:
    """Everything on one learner's lane."""
    account = state.account(learner)
    told = account is not None and account.track.start_ns is not None
    stretches: Iterable[Stretch] = _by_members(state, learner)
    if account is not None and told:
        stretches = _stretches(state, account, _told_until(state, learner, account, until_ns))
    return {
        "stretches": [(round(a, 2), round(b, 2), name, share) for a, b, name, share in stretches],
        "marks": _marks(state, learner),
        "cuts": [
            (round(state.elapsed_s(a), 2), round(state.elapsed_s(b), 2))
            for name, a, b in state.comebacks.cut_off(until_ns)
            if name == learner
        ],
        "flags": [_flag(state, fault) for fault in state.faults if fault.target == learner],
    }


def syncer_lane(state: RunState, until_ns: int) -> dict[str, Any]:
    """When there was no syncer, and when one could not write."""
    return {
        "away": [(max(0.0, state.elapsed_s(a)), state.elapsed_s(b)) for a, b in state.syncer.away_times(until_ns)],
        "lapses": [
            (
                state.elapsed_s(one.start_ns),
                state.elapsed_s(one.end_ns or until_ns),
                f"durability {one.level}: {one.reason}",
            )
            for one in state.durability.lapses
        ],
    }


def _told_until(state: RunState, learner: str, account: TimeAccount, until_ns: int) -> int:
    """Until the next report of a learner that trains is overdue, nothing is said of the time since its last one."""
    end_ns, report_ns = account.track.end_ns or until_ns, state.learners[learner].report_ns
    due_ns = max(REPORT_OVERDUE_NS, 3 * report_ns)
    trains = account.mood == "idle" and account.stepping and account.finished_ns is None
    return min(until_ns, end_ns) if trains and until_ns - end_ns < due_ns else until_ns


def _marks(state: RunState, learner: str) -> list[tuple[float, int]]:
    """(when, 1 if it came late) of the learner's contributions."""
    marks = list(state.rounds.marks.get(learner, ()))
    shown = marks[:: max(1, -(-len(marks) // MARKS_MAX))]
    return [(round(state.elapsed_s(mark.t_ns), 2), int(mark.late)) for mark in shown]


def _flag(state: RunState, fault: ObservedFault) -> tuple[float, str]:
    words = fault.text
    if fault.ended_process and fault.end_ns is not None:
        away_s = state.elapsed_s(fault.end_ns) - state.elapsed_s(fault.start_ns)
        rung = f" ({fault.rung})" if fault.rung else ""
        words = f"killed, training again after {duration_text(away_s)}{rung}"
    return round(max(0.0, state.elapsed_s(fault.start_ns)), 2), words


def _by_members(state: RunState, learner: str) -> Iterator[Stretch]:
    members = [*state.learners[learner].members, (state.last_ns, "")]
    for (start_ns, member), (end_ns, _) in pairwise(members):
        if member in OF_MEMBERS:
            yield max(0.0, state.elapsed_s(start_ns)), state.elapsed_s(end_ns), OF_MEMBERS[member], 0.0


def _stretches(state: RunState, account: TimeAccount, until_ns: int) -> list[Stretch]:
    """Bins of equal time, neighbours that look the same made one. Where the slot was given back there is none."""
    begin_s = state.elapsed_s(account.track.start_ns or 0)
    size_s = (state.elapsed_s(until_ns) - begin_s) / LANE_BINS
    if size_s <= 0:
        return []
    edges_s = [begin_s + i * size_s for i in range(LANE_BINS + 1)]
    edges_ns = [state.moment_ns(edge_s) for edge_s in edges_s]
    bins = [account.track.between(a, b) for a, b in pairwise(edges_ns)]
    reach_s = max(size_s, SPEED_REACH_S)
    speeds = [
        _speed(
            account.track.between(state.moment_ns(s + size_s / 2 - reach_s), state.moment_ns(s + size_s / 2 + reach_s))
        )
        for s in edges_s[:-1]
    ]
    usual = median([speed for speed in speeds if speed > 0] or [0.0])
    gaps_s = _gaps_s(state, account)
    stretches: list[Stretch] = []
    for i, totals in enumerate(bins):
        start_s, end_s = edges_s[i], edges_s[i + 1]
        gone_s = sum(max(0.0, min(end_s, b) - max(start_s, a)) for a, b in gaps_s)
        if gone_s > size_s / 2:
            continue
        here_ns = (size_s - gone_s) * SECOND_NS
        name, stall = _most_of(totals, account, here_ns, slow=speeds[i] < SLOW_SHARE * usual)
        if stretches and stretches[-1][2:] == (name, stall) and stretches[-1][1] == start_s:
            stretches[-1] = (stretches[-1][0], end_s, name, stall)
        else:
            stretches.append((start_s, end_s, name, stall))
    return stretches


def _gaps_s(state: RunState, account: TimeAccount) -> list[tuple[float, float]]:
    """When the learner had given its slot back, on the clock of the report."""
    gaps_ns = list(account.gaps)
    if account.absent_ns is not None:
        gaps_ns.append((account.absent_ns, max(state.last_ns, account.absent_ns)))
    return [(state.elapsed_s(a), state.elapsed_s(b)) for a, b in gaps_ns]


def _training_ns(totals: tuple[float, ...]) -> float:
    spent = dict(zip(CATEGORIES, totals[_FIRST_CATEGORY:], strict=True))
    return spent["compute"] + spent["adopt"] + spent["snapshot"] + spent["overhead"]


def _speed(totals: tuple[float, ...]) -> float:
    """Tokens per nanosecond of training, so that a bin that is only half filled does not look slow."""
    training_ns = _training_ns(totals)
    return totals[_TOKENS] / training_ns if training_ns > 0 else 0.0


def _most_of(totals: tuple[float, ...], account: TimeAccount, size_ns: float, slow: bool) -> tuple[str, float]:
    """What a bin shows: down, recovery and the like if that was most of it; else training, and how much of it was
    waiting, in steps of a tenth so that neighbours can be equal."""
    spent = dict(zip(CATEGORIES, totals[_FIRST_CATEGORY:], strict=True))
    # Time that nobody has been charged with yet: the tail of a learner that never came back.
    spent[account.mood] += max(0.0, size_ns - sum(spent.values()))
    trouble = max(("down", "recovery", "evaluate", "idle"), key=lambda name: spent[name])
    if spent[trouble] >= size_ns / 2:
        return trouble, 0.0
    busy_ns = _training_ns(totals) + spent["stall"]
    stall = round(10 * spent["stall"] / busy_ns) / 10 if busy_ns > 0 else 0.0
    return "slow" if slow else "compute", stall
