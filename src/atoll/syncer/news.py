"""What a syncer's events say to somebody who looks in later: the last warnings and snapshots, links that are too thin.

`News` stands in front of the writer that everything of a syncer writes to, and passes all of it on.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from atoll.core import MEMBERS_MAX, PREEMPTED
from atoll.observe import Event, Writer, events

WARNINGS_KEPT = 20
"""A screen of them; all are in the events."""
THIN_KEPT = 1000
"""Learners whose thin links are remembered: as many as a status lists."""
ROUNDS_KEPT = 24
"""The last commits that a status tells of: what a page shows."""
NAMES_KEPT = 16
"""Contributors of each that are named."""
RATE_WINDOW_S = 10.0
"""Over which bytes per second are averaged: several rounds of a usual run, and short enough to follow a link."""


class News:
    """Implements `atoll.observe.Writer`."""

    def __init__(self, writer: Writer) -> None:
        self.tell: Callable[[Event], None] = lambda event: None
        """Whoever wants to hear of every event; must return at once."""
        self.ever_active = False
        """A learner has trained with this syncer."""
        self.preempted: set[str] = set()
        """Learners that left because of a signal: at most as many as there are members."""
        self._writer = writer
        self._warnings: deque[tuple[float, str, str]] = deque(maxlen=WARNINGS_KEPT)
        self._written: tuple[float, events.SnapshotWritten] | None = None
        self._failed: tuple[float, events.SnapshotFailed] | None = None
        self._thin: dict[str, dict[str, events.LinkThin]] = {}
        self._closed: dict[int, events.RoundClosed] = {}
        """By fragment: the round that was closed last."""
        self._rounds: deque[dict[str, Any]] = deque(maxlen=ROUNDS_KEPT)

    def emit(self, event: Event) -> None:
        self._writer.emit(event)
        now_s = time.time()
        if isinstance(event, events.Warned):
            self._warnings.append((now_s, event.source, event.text))
        elif isinstance(event, events.SnapshotWritten):
            self._written, self._failed = (now_s, event), None
        elif isinstance(event, events.SnapshotFailed):
            self._failed = (now_s, event)
        elif isinstance(event, events.RoundClosed):
            self._closed[event.fragment] = event
        elif isinstance(event, events.Committed):
            self._committed(now_s, event)
        elif isinstance(event, events.LinkThin) and (event.learner in self._thin or len(self._thin) < THIN_KEPT):
            self._thin.setdefault(event.learner, {})[event.direction] = event
        elif isinstance(event, events.MemberChanged):
            self.ever_active = self.ever_active or event.state == "active"
            self.preempted.discard(event.learner)
            if event.state == "left" and event.reason == PREEMPTED:
                self.preempted.add(event.learner)
            if event.state == "joining":
                self._thin.pop(event.learner, None)  # it may come from elsewhere now
        self.tell(event)

    def _committed(self, now_s: float, event: events.Committed) -> None:
        closed = self._closed.get(event.fragment)
        why = closed.reason if closed is not None and closed.round == event.round else ""
        told: dict[str, Any] = {"fragment": event.fragment, "version": event.version, "round": event.round}
        told |= {"contributors": event.contributors[:NAMES_KEPT], "tokens": event.tokens, "closed": why}
        self._rounds.append({**told, "bytes": event.update_bytes, "time_s": round(now_s, 1)})

    def flush(self, timeout_s: float = 2.0) -> bool:
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        self._writer.close(timeout_s)

    # ------------------------------------------------------------ looking in

    def thin(self, learner: str) -> list[str]:
        """In words, the directions in which this learner's link carries too little."""
        found = self._thin.get(learner, {}).values()
        return [
            f"{one.direction}: needs {one.needs_bytes_s:.0f} bytes/s, gets {one.gets_bytes_s:.0f}"
            for one in found
            if one.gets_bytes_s < one.needs_bytes_s
        ]

    def status(self) -> dict[str, Any]:
        warnings = [{"time_s": round(at_s), "source": source, "text": text} for at_s, source, text in self._warnings]
        return {"warnings": warnings, "snapshots": self._snapshots(), "rounds": list(self._rounds)}

    def _snapshots(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._written is not None:
            at_s, event = self._written
            told |= {"url": event.url, "label": event.label, "bytes": event.bytes, "time_s": round(at_s)}
            told |= {"versions": [min(event.versions, default=0), max(event.versions, default=0)]}
        if self._failed is not None:
            told |= {"failed": self._failed[1].reason, "failed_time_s": round(self._failed[0])}
        return told


class Flow:
    """Bytes per second of each learner, in one number each: what came in fades with RATE_WINDOW_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._flows: dict[str, tuple[float, float]] = {}
        self._totals: dict[str, int] = {}

    def add(self, learner: str, count: int) -> None:
        if len(self._flows) > MEMBERS_MAX:
            self._flows.clear()  # of learners that are forgotten as well
            self._totals.clear()
        self._totals[learner] = self.total(learner) + count
        self._flows[learner] = (self.rate(learner) * RATE_WINDOW_S + count, self._clock())

    def total(self, learner: str) -> int:
        """All its bytes since this process started."""
        return self._totals.get(learner, 0)

    def rate(self, learner: str) -> float:
        amount, at_s = self._flows.get(learner, (0.0, 0.0))
        return amount * math.exp((at_s - self._clock()) / RATE_WINDOW_S) / RATE_WINDOW_S
