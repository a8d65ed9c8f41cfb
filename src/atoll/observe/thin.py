"""What a process still writes once its event file has reached its size bound.

The sums that goodput, the token ledger and the report rest on must stay exact for a run of any length, so nothing that
is summed may be sampled away. Past the bound the step reports of a learner are therefore added up into one per minute,
discards likewise, the syncer's statistics and the data ledgers are kept once a minute, the events of single rounds are
left out, and the rare kinds (faults, membership, processes, recoveries, checkpoints, evaluations, warnings) are written
as before. A file then grows by less than 100 bytes a second.
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
    """Takes events, gives back those to write now; held sums come out each minute and at `rest`."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], events.LearnerSteps] = {}
        self._discards: dict[tuple[str, int, str], events.LearnerDiscarded] = {}
        self._stats: events.SyncerStats | None = None
        self._data: dict[str, events.DataLedger] = {}
        self._since_ns: int | None = None

    def take(self, t_ns: int, event: events.Event) -> list[events.Event]:
        if self._since_ns is None:
            self._since_ns = t_ns
        if isinstance(event, _PER_ROUND):
            return []
        if isinstance(event, events.LearnerSteps):
            key = (event.learner, event.generation)
            held = self._steps.get(key)
            self._steps[key] = add_steps(held, event) if held else event
        elif isinstance(event, events.LearnerDiscarded):
            place = (event.learner, event.fragment, event.cause)
            before = self._discards.get(place)
            self._discards[place] = replace(event, tokens=event.tokens + (before.tokens if before else 0))
        elif isinstance(event, events.SyncerStats):
            self._stats = event
        elif isinstance(event, events.DataLedger):
            self._data[event.stream] = event
        else:
            # What is held happened earlier than this event, and a reducer must see it first.
            return [*self.rest(), event]
        if t_ns - self._since_ns >= THIN_PERIOD_NS:
            return self.rest()
        return []

    def rest(self) -> list[events.Event]:
        """Everything that is held back; empties it."""
        held: list[events.Event] = [*self._steps.values(), *self._discards.values()]
        if self._stats is not None:
            held.append(self._stats)
        held += self._data.values()
        self._steps, self._discards, self._stats, self._data, self._since_ns = {}, {}, None, {}, None
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
