"""A run as the page sees it: one reader for all viewers, which reads only while somebody looks.

A thread takes in what is new, once per TICK_S, and makes one text of it that every viewer is sent. What it costs does
not depend on the number of viewers, and the syncer is not asked at all for a run folder's events.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from atoll.dash import head as head_of
from atoll.dash import lane, log_lines, picture, rows
from atoll.observe import Event, RunState, Tail

TICK_S = 1.0
MANY = 200
MANY_TICK_S = 2.0
"""With more learners than MANY a tick is a hundred kilobytes."""
UNWATCHED_S = 30.0
"""Without a viewer for this long nothing is read, until somebody looks again."""
PICTURE_S = 2.0
"""A whole picture is made at most this often, however many ask."""
LANES_MAX = 80
"""Lanes in one answer: what a tall screen shows."""
LOG_NEW_MAX = 60
"""New lines of the log in one tick; a viewer that missed some gets them with the next whole picture."""
BATCH_EVENTS = 2000
"""Taken in at once: about 20 ms, for which viewers wait."""

Stamped = tuple[int, str, Event]


class RunFeed(Protocol):
    """Where the events of a run come from."""

    def poll(self) -> Iterable[Stamped]: ...
    def begin_anew(self) -> bool:
        """True if events were missed, so that the next poll begins at the beginning."""

    @property
    def trouble(self) -> str:
        """Why nothing comes, in words; empty while all is well."""

    def places(self) -> dict[str, str]:
        """From where each learner comes, as far as that is known."""

    def parts(self) -> list[list[str]]:
        """Shards, relays and a standby, as far as the syncer tells of them."""


class FolderFeed:
    """The event files of a run folder."""

    def __init__(
        self, folder: Path, places: Callable[[], dict[str, str]] = dict, parts: Callable[[], list[list[str]]] = list
    ) -> None:
        self._folder = folder
        self._tail = Tail(folder)
        self._places = places
        self._parts = parts
        self.trouble = ""

    def poll(self) -> Iterable[Stamped]:
        return self._tail.poll()

    def begin_anew(self) -> bool:
        if not self._tail.missed:
            return False
        self._tail = Tail(self._folder)
        return True

    def places(self) -> dict[str, str]:
        return self._places()

    def parts(self) -> list[list[str]]:
        return self._parts()


class WatchedRun:
    """The state of one run, shared by whoever looks at it. Its methods may be called from any thread."""

    def __init__(self, name: str, feed: RunFeed, clock: Callable[[], int] = time.time_ns) -> None:
        self.name = name
        self.tick = ""
        """The newest tick as JSON, and its number: a viewer sends it on when the number has changed."""
        self.tick_number = 0
        self._feed = feed
        self._clock = clock
        self._state = RunState()
        self._lock = threading.Lock()
        """Over the state."""
        self._reading = threading.Lock()
        """Over the feed, which may wait for a disk or a network."""
        self._looked_s = 0.0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._said = 0
        self._rows: dict[str, list[Any]] = {}
        self._picture = ("", -float("inf"))

    def look(self) -> None:
        """Somebody looks: read on. Returns when what is there has been taken in."""
        self._looked_s = time.monotonic()
        if self._thread is not None and self._thread.is_alive():
            return
        with self._reading:
            if self._thread is None or not self._thread.is_alive():
                self._take_in()
                self._thread = threading.Thread(target=self._follow, name=f"atoll-page {self.name}", daemon=True)
                self._thread.start()

    def close(self) -> None:
        self._stop.set()

    def _follow(self) -> None:
        while not self._stop.wait(MANY_TICK_S if len(self._rows) > MANY else TICK_S):
            if time.monotonic() - self._looked_s > UNWATCHED_S:
                return
            with self._reading:
                self._take_in()

    def _take_in(self) -> None:
        """Whoever calls this is the only reader. Viewers are let in between two batches, and while the feed waits."""
        feed = iter(self._feed.poll())
        while batch := list(islice(feed, BATCH_EVENTS)):
            with self._lock:
                for t_ns, source, event in batch:
                    self._state.apply(t_ns, event, source)
        if self._feed.begin_anew():
            with self._lock:
                self._state = RunState()
            self._take_in()
            return
        with self._lock:
            self.tick = _json(self._make_tick(self._clock()))
            self.tick_number += 1

    def _make_tick(self, now_ns: int) -> dict[str, Any]:
        state = self._state
        found = {row[0]: row for row in rows(state, now_ns)}
        changed = [row for name, row in found.items() if self._rows.get(name) != row]
        self._rows = found
        new = min(state.log_count - self._said, LOG_NEW_MAX)
        self._said = state.log_count
        return {
            "number": self.tick_number + 1,
            "head": self._head(now_ns),
            "rows": changed,
            "log": log_lines(state, new) if new else [],
            "log_count": state.log_count,
        }

    def _head(self, now_ns: int) -> dict[str, Any]:
        return {**head_of(self._state, now_ns), "trouble": self._feed.trouble}

    # ------------------------------------------------------------ what viewers ask for

    def whole(self) -> str:
        """Everything that is drawn, and every learner's row, as JSON."""
        self.look()
        with self._lock:
            text, made_s = self._picture
            if time.monotonic() - made_s > PICTURE_S:
                text, made_s = self._make_picture(), time.monotonic()
                self._picture = (text, made_s)
            return text

    def _make_picture(self) -> str:
        now_ns = self._clock()
        return _json(
            {
                **picture(self._state, now_ns),
                "head": self._head(now_ns),
                "rows": rows(self._state, now_ns),
                "log": log_lines(self._state),
                "log_count": self._state.log_count,
                "places": self._feed.places(),
                "parts": self._feed.parts(),
                "sites": {one.learner: one.site for one in self._state.learners.values() if one.site},
                "number": self.tick_number,
            }
        )

    def lanes(self, learners: Iterable[str]) -> str:
        """The lanes of some learners; of unknown ones nothing."""
        self.look()
        with self._lock:
            state, now_ns = self._state, self._clock()
            until_ns = state.end_ns if state.finished is not None else max(now_ns, state.end_ns)
            known = [name for name in list(learners)[:LANES_MAX] if name in state.learners]
            return _json({"lanes": {name: lane(state, name, until_ns) for name in known}})

    def knows(self, learner: str) -> bool:
        with self._lock:
            return learner in self._state.learners

    def summary(self) -> dict[str, Any]:
        """For the list of runs, and for runs side by side."""
        self.look()
        with self._lock:
            now_ns = self._clock()
            whole = picture(self._state, now_ns)
            kept = {name: whole[name] for name in ("head", "tiles", "loss", "seconds", "bytes", "time")}
            return {**kept, "learners": len(self._state.learners), "name": self.name}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
