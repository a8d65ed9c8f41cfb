"""The syncers of a run, one after the other: which one serves, when there was none, and from what each went on.

A restart is a SyncerStarted after an earlier one. The run was without a syncer from the exit of the old process (or, if
nobody saw it end, from its last sign of life) until the new one served. A syncer that starts with a new launch of the
whole run ends no such time: nothing ran that could have missed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.core import SECOND_NS
from atoll.observe import events

STANDBY = "standby"
"""The id under which a launcher starts a second syncer. From then on the end of one that only waits says nothing."""
RESTARTS_MAX = 1000
"""Restarts that are kept whole; all are counted."""
SILENT_NS = 10 * SECOND_NS
"""Ten times the period of its statistics."""
RECOVERED_NS_MAX = 60 * SECOND_NS
"""SyncerRecovered belongs to the SyncerStarted before it if it comes within this; else to the next one."""


@dataclass(slots=True)
class SyncerRestart:
    """A syncer that followed another, or that took up the state of one that this run folder knows nothing of."""

    t_ns: int
    """When it served."""
    epoch: int
    away_ns: int
    """How long learners were without one before; 0 where a new launch or a new folder began with it."""
    down_ns: int
    """When the one before was gone."""
    exit_code: int | None = None
    resumed: bool = False
    source: str = ""
    """The rung of the ladder; empty when it did not say that it recovered anything."""
    exact: bool = False
    load_ns: int = 0
    tokens_merged: int = 0
    problems: list[str] = field(default_factory=list)

    def take(self, event: events.SyncerRecovered) -> None:
        self.source, self.exact, self.load_ns = event.source, event.exact, event.load_ns
        self.tokens_merged, self.problems = event.tokens_merged, list(event.problems)


class SyncerBook:
    """`up` is None until a syncer of this launch serves."""

    def __init__(self) -> None:
        self.up: bool | None = None
        self.epoch = 0
        self.restarts: list[SyncerRestart] = []
        self.restarts_count = 0
        self.last_sign_ns = 0
        self.down_ns: int | None = None
        """Since when there has been none; None while one serves, and before the first."""
        self._pids: set[int] = set()  # of the newest: its own, and what its launcher knows it by
        self._launched_pid: int | None = None  # of one that does not serve yet
        self._paired = False  # two processes take turns
        self._exit_code: int | None = None
        self._started_ns: int | None = None
        self._held: events.SyncerRecovered | None = None
        self._away_closed_ns = 0
        self._new_launch = False
        self._missed_ns = 0  # how long it had been missed when the launch before ended
        self._source = ""

    def apply(self, t_ns: int, event: events.Event, source: str = "") -> None:
        """`source` is the stem of the file that the event is from: each process has its own."""
        if isinstance(event, events.SyncerStats | events.Committed):
            self.last_sign_ns = max(self.last_sign_ns, t_ns)
        elif isinstance(event, events.SyncerStarted):
            self._started(t_ns, event)
            self._source = source
        elif isinstance(event, events.SyncerRecovered):
            self._recovered(t_ns, event, source)
        elif isinstance(event, events.ProcessStarted) and event.role == "syncer":
            self._paired = self._paired or event.id == STANDBY
            self._launched_pid = event.pid if not self._paired else None
        elif isinstance(event, events.ProcessExited) and event.role == "syncer":
            # One that was fenced out long ago may still have to end.
            if event.pid == self._launched_pid or event.pid in self._pids or not self._pids:
                self._gone(t_ns, event.code)
        elif isinstance(event, events.SyncerStopped) and source == self._source:  # not one that was overtaken
            self._gone(t_ns, 0)

    def new_launch(self, end_ns: int) -> None:
        """Whatever ran is gone since `end_ns`. A syncer that was missing by then was missed until then, no longer; also
        one of whose end nobody could tell, while learners elsewhere went on."""
        if self.down_ns is None and self.up and end_ns - self.last_sign_ns > SILENT_NS:
            self.down_ns = self.last_sign_ns
        self._missed_ns = max(0, end_ns - self.down_ns) if self.down_ns is not None else 0
        self._pids, self._launched_pid, self._exit_code = set(), None, None
        self.up, self._new_launch = None, True

    def _gone(self, t_ns: int, code: int) -> None:
        if self.up is False or (self.up is None and self._started_ns is None):
            return
        self.up, self._exit_code, self.down_ns = False, code, t_ns

    def _started(self, t_ns: int, event: events.SyncerStarted) -> None:
        first = self._started_ns is None
        resumed = self._new_launch or first
        if not first or event.epoch > 1:
            self._restarted(t_ns, event.epoch, resumed)
        self.up, self.epoch = True, event.epoch
        self._pids, self._launched_pid = {event.pid, self._launched_pid or event.pid}, None
        self._started_ns, self.last_sign_ns = t_ns, max(self.last_sign_ns, t_ns)
        self.down_ns, self._exit_code, self._new_launch = None, None, False

    def _restarted(self, t_ns: int, epoch: int, resumed: bool) -> None:
        down_ns = self.last_sign_ns if self.down_ns is None else self.down_ns
        away_ns = self._missed_ns if resumed else max(0, t_ns - down_ns)
        self._away_closed_ns += away_ns
        restart = SyncerRestart(t_ns, epoch, away_ns, down_ns if away_ns else t_ns, self._exit_code, resumed)
        self._missed_ns = 0
        if self._held is not None:
            restart.take(self._held)
            self._held = None
        self._add(restart)

    def _add(self, restart: SyncerRestart) -> None:
        self.restarts_count += 1
        if len(self.restarts) < RESTARTS_MAX:
            self.restarts.append(restart)

    def _recovered(self, t_ns: int, event: events.SyncerRecovered, source: str) -> None:
        """It may be said before or after SyncerStarted."""
        last = self.restarts[-1] if self.restarts else None
        serves = self.up is True and self._started_ns is not None and t_ns - self._started_ns <= RECOVERED_NS_MAX
        serves = serves and source == self._source
        if not serves:
            self._held = event
        elif last is not None and last.t_ns == self._started_ns and not last.source:
            last.take(event)
        elif last is None or last.t_ns != self._started_ns:
            # The first syncer of this folder went on from a snapshot of another run.
            restart = SyncerRestart(self._started_ns or t_ns, self.epoch, 0, self._started_ns or t_ns, resumed=True)
            restart.take(event)
            self._add(restart)
        else:
            self._held = event

    @property
    def recovery(self) -> SyncerRestart | None:
        """What the syncer that serves now went on from; None for the first of a run."""
        last = self.restarts[-1] if self.restarts else None
        return last if last is not None and last.t_ns == self._started_ns and last.source else None

    def state(self, now_ns: int, links_down: bool) -> str:
        """up, stopped (it ended in order), down, silent (links are down, and it has not said a word for a while; where
        no launcher watches it, nobody can say more), or nothing before the first of a launch serves."""
        if self.up is None:
            return ""
        if self.up:
            return "silent" if links_down and now_ns - self.last_sign_ns > SILENT_NS else "up"
        return "stopped" if self._exit_code == 0 else "down"

    def away_ns(self, end_ns: int) -> int:
        """How long the run was without a syncer, up to its last step at `end_ns`: nobody misses one after that."""
        return self._away_closed_ns + self._still_ns(end_ns)

    def away_times(self, end_ns: int) -> list[tuple[int, int]]:
        """Each stretch without one, from and to."""
        times = [(one.down_ns, one.down_ns + one.away_ns) for one in self.restarts if one.away_ns > 0]
        still_ns = self._still_ns(end_ns)
        if self.down_ns is not None and still_ns:
            times.append((self.down_ns, self.down_ns + still_ns))
        return times

    def _still_ns(self, end_ns: int) -> int:
        if self._new_launch:
            return self._missed_ns
        return max(0, end_ns - self.down_ns) if self.down_ns is not None else 0
