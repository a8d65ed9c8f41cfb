"""Launches: a run may be stopped and resumed (`atoll resume`), perhaps hours later, by other processes in one folder.

A launch begins with a RunStarted, with a syncer that starts after RunFinished, or with anything that starts after
SILENCE_NS in which no process of the run wrote a word (everything was killed, and nobody could say so). A launcher that
only adds learners to a run that is going on must therefore not write RunStarted into its folder.

A pause lies between two launches: from the last reported step of the earlier one to where the first step of the later
one began. Nothing ran that could have trained, so a pause counts as nobody's time, and the clock of the views stands
still in it. Two launches without a step in the earlier one have no pause between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core import SECOND_NS
from atoll.observe import events

SILENCE_NS = 300 * SECOND_NS
"""A syncer writes its statistics every second, and every minute once its file is full; five of those leave no doubt."""
STOP_NS_MAX = 25 * SECOND_NS
"""A launcher that ends a run gives its learners this long to leave: the last may train so much longer than others."""
STOP_CODES = frozenset({-2, -15, 130, 143})
"""SIGINT and SIGTERM, as such and as a shell reports them: how a run is ended. SIGKILL is not among them: a launcher
takes to it only for a process that did not heed the others, and that is worth telling."""
PAUSES_MAX = 10_000
REPORTED = ("compute", "stall", "adopt", "snapshot", "overhead")
"""The parts of a LearnerSteps; they add up to the time that it covers."""


@dataclass(slots=True)
class Pause:
    start_ns: int
    end_ns: int | None = None

    def within(self, start_ns: int, end_ns: int) -> int:
        """Nanoseconds of this pause that lie between two times; one that is not over lasts beyond both."""
        until_ns = end_ns if self.end_ns is None else min(self.end_ns, end_ns)
        return max(0, until_ns - max(self.start_ns, start_ns))


def report_begin_ns(t_ns: int, event: events.LearnerSteps) -> int:
    """When the first step of a report began."""
    duration_ns: int = sum(max(0, getattr(event, f"{name}_ns")) for name in REPORTED)
    return t_ns - duration_ns


def stopped_with_run(code: int | None, ended_ns: int, last_step_ns: int) -> bool:
    """Whether a process that was not started again was ended by the launcher, together with the run. Launchers say
    RunFinished only after that, so whoever hears it has heard of all these ends."""
    return code in STOP_CODES and ended_ns >= last_step_ns - STOP_NS_MAX


def _starts_syncer(event: events.Event) -> bool:
    # A learner may still be started by somebody who has not heard yet that the run is over.
    return isinstance(event, events.ProcessStarted) and event.role == "syncer"


class LaunchBook:
    """The launches of a run and the pauses between them."""

    def __init__(self) -> None:
        self.count = 1
        self.pauses: list[Pause] = []
        self._last_ns = 0
        self._last_step_ns: int | None = None
        self._run_started = False
        self._over = False

    def apply(self, t_ns: int, event: events.Event) -> bool:
        """True when a new launch begins with this event: nothing of the earlier one runs any more."""
        begins = self._begins(t_ns, event)
        if begins:
            self.count += 1
            self._over = False
            if self._last_step_ns is not None and len(self.pauses) < PAUSES_MAX:
                self.pauses.append(Pause(self._last_step_ns))
            self._last_step_ns = None
        if isinstance(event, events.LearnerSteps):
            self._stepped(t_ns, event)
        elif isinstance(event, events.RunStarted):
            self._run_started = True
        elif isinstance(event, events.RunFinished):
            self._over = True
        self._last_ns = max(self._last_ns, t_ns)
        return begins

    def _begins(self, t_ns: int, event: events.Event) -> bool:
        if isinstance(event, events.RunStarted):
            return self._run_started or self._last_step_ns is not None
        if self._over and (isinstance(event, events.SyncerStarted) or _starts_syncer(event)):
            return True
        silent = self._last_step_ns is not None and t_ns - self._last_ns > SILENCE_NS
        return silent and isinstance(event, events.ProcessStarted | events.SyncerStarted | events.LearnerStarted)

    def _stepped(self, t_ns: int, event: events.LearnerSteps) -> None:
        if self.pauses and self.pauses[-1].end_ns is None:
            self.pauses[-1].end_ns = max(report_begin_ns(t_ns, event), self.pauses[-1].start_ns)
        self._last_step_ns = max(t_ns, self._last_step_ns or t_ns)

    def elapsed_ns(self, start_ns: int, end_ns: int) -> int:
        """From one time to another without the pauses between them; negative when the second comes first."""
        if end_ns < start_ns:
            return end_ns - start_ns
        return end_ns - start_ns - sum(pause.within(start_ns, end_ns) for pause in self.pauses)

    def moment_ns(self, start_ns: int, elapsed_ns: float) -> float:
        """The time at which so much had elapsed since the start: the inverse of `elapsed_ns`."""
        at_ns = start_ns + elapsed_ns
        for pause in self.pauses:
            if pause.end_ns is not None and pause.start_ns >= start_ns and at_ns > pause.start_ns:
                at_ns += pause.end_ns - pause.start_ns
        return at_ns

    def since_ns(self, t_ns: int) -> int:
        """When the launch that a time belongs to reported its first step; 0 for the first launch."""
        return max((p.end_ns for p in self.pauses if p.end_ns is not None and p.end_ns <= t_ns), default=0)
