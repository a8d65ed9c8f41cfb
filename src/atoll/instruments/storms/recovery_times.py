"""How long a run took to get over each of its faults, from its recorded events.

The clock starts when the fault is over: at its end for those that last, at its beginning for instants and for a learner
that joins. It stops when what was hit is useful again:

    kill, away, join of a learner   its new process has joined, and a contribution of it is in a commit
    other faults of a learner       a contribution of it is in a commit
    faults of the syncer            the next commit (of the new process, after a kill)
    faults of a shard               every fragment has a new version: its own, too
    faults of a relay               a contribution of every learner is in a commit: those behind it, too
    faults of the standby           (not measured: the run does not notice)
    disk_full of the syncer         everything is on disk again, or, if no write fell into it, the next commit
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.instruments.chaos import KINDS, STANDBY, role_of
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
    """By kind, with those of syncer, shards and relays apart ("kill syncer"): median and longest time in seconds, how
    many, and how many of them were not over when the run ended."""
    times: defaultdict[str, list[float | None]] = defaultdict(list)
    for fault in faults_of(stamped):
        role = role_of(fault.target)
        plain = role == "learner" or (role == "syncer" and fault.kind == "disk_full")
        if role != STANDBY:
            times[fault.kind if plain else f"{fault.kind} {role}"].append(_recovery_s(fault, stamped))
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
    role = role_of(fault.target)
    if role in ("shard", "relay"):
        return _all_again_s(role, stamped, start_ns)
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


def _all_again_s(role: str, stamped: Sequence[Stamped], start_ns: int) -> float | None:
    """Until every fragment (of a shard), or every learner (of a relay), is in a commit again."""
    commits = [(t_ns, _committed(role, event)) for t_ns, _, event in stamped if isinstance(event, ev.Committed)]
    missing = set().union(*(who for t_ns, who in commits if t_ns < start_ns))
    for t_ns, who in commits:
        missing -= who if t_ns >= start_ns else set()
        if not missing:
            return max(0.0, (t_ns - start_ns) / 1e9)
    return None


def _committed(role: str, event: ev.Committed) -> set[str]:
    return {str(event.fragment)} if role == "shard" else set(event.contributors)


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
