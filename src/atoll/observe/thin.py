"""What is kept of the events of an old part of an event file (`folding`).

The sums that goodput, the token ledger and the report rest on must stay exact for a run of any length, so nothing that
is summed may be sampled away. The step reports of a learner are therefore added up into one per minute, discards
likewise, the syncer's statistics and the data ledgers are kept once a minute, the events of single rounds are left out,
and the rare kinds (faults, membership, processes, recoveries, checkpoints, evaluations, warnings) are kept as they are.
What is left of a process is less than 100 bytes for each second.
"""

from __future__ import annotations

import math
from dataclasses import replace

from atoll.observe import events

THIN_PERIOD_NS = 60_000_000_000
_PER_ROUND = (
    events.LearnerPushed,
    events.LearnerFetched,
    events.LearnerAdopted,
    events.ContributionReceived,
    events.RoundLaunched,
    events.RoundClosed,
    events.Committed,
)


class Thinner:
    """Takes events in time order, gives back those to keep, each with its time; held sums come out each minute and at
    `rest`. A sum has the time of its last part, so that what happened after it still comes after it."""

    def __init__(self) -> None:
        self._held: dict[tuple[object, ...], tuple[int, events.Event]] = {}
        self._since_ns: int | None = None

    def take(self, t_ns: int, event: events.Event) -> list[tuple[int, events.Event]]:
        if self._since_ns is None:
            self._since_ns = t_ns
        if isinstance(event, _PER_ROUND):
            return []
        if isinstance(event, events.LearnerSteps):
            key: tuple[object, ...] = (event.learner, event.generation)
            before = self._held.get(key)
            self._held[key] = (t_ns, add_steps(before[1], event) if before else event)  # type: ignore[arg-type]
        elif isinstance(event, events.LearnerDiscarded):
            key = (event.learner, event.fragment, event.cause)
            _, held = self._held.get(key, (0, None))
            tokens = held.tokens if isinstance(held, events.LearnerDiscarded) else 0
            self._held[key] = (t_ns, replace(event, tokens=event.tokens + tokens))
        elif isinstance(event, events.SyncerStats):
            self._held["stats",] = (t_ns, event)
        elif isinstance(event, events.DataLedger):
            self._held[event.stream,] = (t_ns, event)
        else:
            # What is held happened earlier than this event, and a reducer must see it first.
            return [*self.rest(), (t_ns, event)]
        if t_ns - self._since_ns >= THIN_PERIOD_NS:
            return self.rest()
        return []

    def rest(self) -> list[tuple[int, events.Event]]:
        """Everything that is held back, by time; empties it."""
        held = sorted(self._held.values(), key=lambda stamped: stamped[0])
        self._held, self._since_ns = {}, None
        return held


def add_steps(first: events.LearnerSteps, second: events.LearnerSteps) -> events.LearnerSteps:
    """One report for two successive ones: durations, steps and tokens add, the loss is the mean per step."""
    parts = [(e.loss, e.steps) for e in (first, second) if math.isfinite(e.loss) and e.steps > 0]
    weight = sum(steps for _, steps in parts)
    return replace(
        second,
        steps=first.steps + second.steps,
        tokens=first.tokens + second.tokens,
        loss=sum(loss * steps for loss, steps in parts) / weight if weight else math.nan,
        compute_ns=first.compute_ns + second.compute_ns,
        stall_ns=first.stall_ns + second.stall_ns,
        adopt_ns=first.adopt_ns + second.adopt_ns,
        snapshot_ns=first.snapshot_ns + second.snapshot_ns,
        overhead_ns=first.overhead_ns + second.overhead_ns,
    )
