"""How long a run took to get over each of its faults, from its recorded events.

The clock starts when the fault is over: at its end for those that last, at its beginning for instants and for a learner
that joins. It stops when what was hit is useful again:

    kill, away, join of a learner   its new process has joined, and a contribution of it is in a commit
    other faults of a learner       a contribution of it is in a commit
    faults of the syncer            the next commit (of the new process, after a kill)
    disk_full                       everything is on disk again, or, if no write fell into it, the next commit
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.instruments.chaos import KINDS
from atoll.observe import events as ev

Stamped = tuple[int, str, ev.Event]
BEGINS = ("join",)
"""Lasting faults whose clock starts at their beginning: how soon a newcomer is useful."""
NEW_PROCESS = ("kill", "away", "join")


@dataclass(frozen=True, slots=True)
class PutIn:
    """One fault as it happened."""

    kind: str
    target: str
    begin_ns: int
    end_ns: int
    """Of an instant, its beginning; of one that never ended, the end of the run."""
    lasts_s: float
    amount: float
    detail: str


def faults_of(stamped: Sequence[Stamped]) -> list[PutIn]:
    """The faults of a run with their real times, in order of their beginning."""
    last_ns = stamped[-1][0] if stamped else 0
    ends: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for t_ns, _, event in stamped:
        if isinstance(event, ev.FaultEnded):
            ends[event.fault, event.target].append(t_ns)
    faults = []
    for t_ns, _, event in stamped:
        if isinstance(event, ev.FaultInjected):
            end_ns = t_ns
            if event.fault in KINDS and KINDS[event.fault].lasting:
                end_ns = next((end for end in ends[event.fault, event.target] if end >= t_ns), last_ns)
            faults.append(PutIn(event.fault, event.target, t_ns, end_ns, event.lasts_s, event.amount, event.detail))
    return faults


def recovery_times(stamped: Sequence[Stamped]) -> dict[str, dict[str, float | int | None]]:
    """By kind, with the syncer's apart ("kill syncer"): median and longest time in seconds, how many, and how many of
    them were not over when the run ended."""
    times: defaultdict[str, list[float | None]] = defaultdict(list)
    for fault in faults_of(stamped):
        name = f"{fault.kind} syncer" if fault.target == "syncer" and fault.kind != "disk_full" else fault.kind
        times[name].append(_recovery_s(fault, stamped))
    order = list(KINDS)
    names = sorted(times, key=lambda name: (order.index(name.split()[0]), name))
    return {name: _figures(times[name]) for name in names}


def _figures(values: list[float | None]) -> dict[str, float | int | None]:
    known = [value for value in values if value is not None]
    return {
        "median": statistics.median(known) if known else None,
        "max": max(known) if known else None,
        "count": len(values),
        "open": len(values) - len(known),
    }


def _recovery_s(fault: PutIn, stamped: Sequence[Stamped]) -> float | None:
    lasting = KINDS[fault.kind].lasting
    start_ns = fault.begin_ns if fault.kind in BEGINS or not lasting else fault.end_ns
    after = [(t_ns, event) for t_ns, _, event in stamped if t_ns >= start_ns]
    if fault.kind == "disk_full":
        back_ns = _mended_ns(fault, stamped)
        if back_ns is not None:
            return max(0.0, (back_ns - start_ns) / 1e9)
    from_ns: int | None = start_ns
    if fault.kind in NEW_PROCESS:
        from_ns = _new_process_ns(fault, after)
    if from_ns is None:
        return None
    for t_ns, event in after:
        if t_ns < from_ns or not isinstance(event, ev.Committed):
            continue
        if fault.target == "syncer" or fault.target in event.contributors:
            return (t_ns - start_ns) / 1e9
    return None


def _new_process_ns(fault: PutIn, after: list[tuple[int, ev.Event]]) -> int | None:
    """When the successor of what was killed (or the newcomer) began to take part."""
    for t_ns, event in after:
        if fault.target == "syncer" and isinstance(event, ev.SyncerStarted):
            return t_ns
        if isinstance(event, ev.LearnerJoined) and event.learner == fault.target:
            return t_ns
    return None


def _mended_ns(fault: PutIn, stamped: Sequence[Stamped]) -> int | None:
    """When a disk that was full had taken everything; None if nothing was to be written while it was."""
    degraded = False
    for t_ns, _, event in stamped:
        if isinstance(event, ev.DurabilityChanged) and t_ns >= fault.begin_ns:
            if event.level == event.wanted and degraded:
                return t_ns
            degraded = degraded or (event.level != event.wanted and t_ns <= fault.end_ns)
    return None
