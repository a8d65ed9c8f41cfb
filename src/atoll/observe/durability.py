"""What of a run is on disk: the level of durability and its lapses, snapshots, healed fragments, the cost of a commit,
and the data ledger."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.observe import events

PERIODS_MAX = 1000
HEALED_MAX = 1000
REASONS_MAX = 20
STREAMS_MAX = 256
"""Lists are cut at these lengths; the count of heals goes on."""


@dataclass(slots=True)
class Lapse:
    """A stretch in which less was kept than the run asked for."""

    start_ns: int
    level: str
    wanted: str
    reason: str
    end_ns: int | None = None


@dataclass(slots=True)
class Cost:
    """A number of things, with the sum and the largest of what they took."""

    count: int = 0
    ns: int = 0
    ns_max: int = 0
    bytes: int = 0
    bytes_max: int = 0

    def add(self, ns: int, bytes_count: int) -> None:
        self.count += 1
        self.ns += ns
        self.ns_max = max(self.ns_max, ns)
        self.bytes += bytes_count
        self.bytes_max = max(self.bytes_max, bytes_count)

    @property
    def ns_mean(self) -> float:
        return self.ns / self.count if self.count else 0.0

    @property
    def bytes_mean(self) -> float:
        return self.bytes / self.count if self.count else 0.0


class DurabilityBook:
    """`level` is what holds now, `wanted` what the run asked for; both are empty until a syncer has started."""

    def __init__(self) -> None:
        self.level = ""
        self.wanted = ""
        self.lapses: list[Lapse] = []
        self.commits = Cost()
        """Commits that were written to disk."""
        self.snapshots = Cost()
        self.last_snapshot: events.SnapshotWritten | None = None
        self.snapshots_failed = 0
        self.snapshot_failures: list[tuple[int, str]] = []
        """(time, reason) of the last few."""
        self.healed: list[tuple[int, events.FragmentHealed]] = []
        self.healed_count = 0
        self.data: dict[str, events.DataLedger] = {}
        """The newest account of each data stream."""

    def apply(self, t_ns: int, event: events.Event) -> None:
        if isinstance(event, events.Committed):
            if event.store_bytes > 0 or event.store_ns > 0:
                self.commits.add(event.store_ns, event.store_bytes)
        elif isinstance(event, events.RoundsFolded):
            self.commits.count += event.stored
            self.commits.ns += event.store_ns
            self.commits.bytes += event.store_bytes
        elif isinstance(event, events.SyncerStarted):
            self._end_lapse(t_ns)  # one that cannot write either says so by itself
            self.level = self.wanted = event.durability
        elif isinstance(event, events.DurabilityChanged):
            self._changed(t_ns, event)
        elif isinstance(event, events.SnapshotWritten):
            self.snapshots.add(event.write_ns, event.bytes)
            self.last_snapshot = event
        elif isinstance(event, events.SnapshotFailed):
            self.snapshots_failed += 1
            self.snapshot_failures = [*self.snapshot_failures[-(REASONS_MAX - 1) :], (t_ns, event.reason)]
        elif isinstance(event, events.FragmentHealed):
            self.healed_count += 1
            if len(self.healed) < HEALED_MAX:
                self.healed.append((t_ns, event))
        elif isinstance(event, events.DataLedger) and (event.stream in self.data or len(self.data) < STREAMS_MAX):
            self.data[event.stream] = event

    def new_launch(self, end_ns: int) -> None:
        """Whatever ran is gone since `end_ns`."""
        self._end_lapse(end_ns)

    def _changed(self, t_ns: int, event: events.DurabilityChanged) -> None:
        self.level, self.wanted = event.level, event.wanted
        if event.level == event.wanted:
            self._end_lapse(t_ns)
        elif self.lapse is None and len(self.lapses) < PERIODS_MAX:
            self.lapses.append(Lapse(t_ns, event.level, event.wanted, event.reason))

    def _end_lapse(self, t_ns: int) -> None:
        lapse = self.lapse
        if lapse is not None:
            lapse.end_ns = max(t_ns, lapse.start_ns)

    @property
    def lapse(self) -> Lapse | None:
        """The one that goes on."""
        return self.lapses[-1] if self.lapses and self.lapses[-1].end_ns is None else None
