"""Events to a file without ever holding up training.

`emit` stamps the time and appends to a bounded queue: a microsecond, no lock that a disk could hold. A daemon thread
encodes and writes what has gathered every FLUSH_PERIOD_S, so that a SIGKILL loses at most that much. When the queue is
full (a dead disk, a burst) events are dropped, counted, and reported in a Warned event once writing works again. A disk
error is counted and the same bytes are tried again; no error of this module reaches the training loop.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Protocol

from atoll.observe.events import Event, Warned
from atoll.observe.folding import PART_BYTES_MAX, RAW_PARTS_MAX, fold_old, newest_part, part_path
from atoll.observe.lines import encode
from atoll.private import FILE_MODE

FLUSH_PERIOD_S = 0.2
QUEUE_EVENTS_MAX = 10_000
"""About 10 MB of events, and several minutes of what a learner emits."""
WRITE_BYTES_MAX = 1 << 20
"""Bytes given to the operating system at once, so that a retry after a full disk repeats little."""
WARN_PERIOD_S = 5.0


class Writer(Protocol):
    """What a process needs of the place its events go to."""

    def emit(self, event: Event) -> None: ...
    def flush(self, timeout_s: float = 2.0) -> bool: ...
    def close(self, timeout_s: float = 2.0) -> None: ...


class NullWriter:
    """Takes events and keeps nothing: for a process without a run folder."""

    def emit(self, event: Event) -> None:
        pass

    def flush(self, timeout_s: float = 2.0) -> bool:
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        pass


class EventWriter:
    """Appends events to one JSONL file from a background thread. `dropped` and `disk_errors` count what went wrong."""

    def __init__(
        self, path: str | Path, *, queue_events_max: int = QUEUE_EVENTS_MAX, part_bytes_max: int = PART_BYTES_MAX
    ) -> None:
        self.path = Path(path)
        self.dropped = 0
        self.disk_errors = 0
        self._queue: deque[tuple[int, Event]] = deque()
        self._queue_events_max = queue_events_max
        self._part_bytes_max = part_bytes_max
        self._part = 0  # not known before the folder can be read
        self._file_bytes = 0
        self._pending = bytearray()  # encoded, not yet taken by the disk
        self._dropped_told = 0
        self._told_at_s = float("-inf")
        self._descriptor: int | None = None
        self._progress = threading.Condition()
        self._emitted = 0
        self._taken = 0
        self._written = 0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._drain, name=f"events {self.path.stem}", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def emit(self, event: Event) -> None:
        """Queue one event, or drop and count it when the queue is full. Safe from any thread."""
        if len(self._queue) >= self._queue_events_max or self._closing.is_set():
            self.dropped += 1
            return
        self._emitted += 1
        self._queue.append((time.time_ns(), event))

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Wait until what was emitted before this call is written; False when that did not happen in time."""
        goal = self._emitted
        self._wake.set()
        with self._progress:
            return self._progress.wait_for(lambda: self._written >= goal, timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is left, for at most `timeout_s`, and close the file. Later events are dropped."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        atexit.unregister(self.close)

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ the thread

    def _drain(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(FLUSH_PERIOD_S)
            self._wake.clear()
            self._write_batch()
        self._write_batch(last=True)
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)

    def _write_batch(self, last: bool = False) -> None:
        """Encode what is queued and write it. After a disk error the queue is left alone until the disk takes bytes
        again, which is what bounds the memory."""
        if not self._try_write():
            return
        for _ in range(len(self._queue)):
            t_ns, event = self._queue.popleft()
            self._taken += 1
            self._append(t_ns, event)
        self._warn_of_drops(last)
        self._try_write()

    def _append(self, t_ns: int, event: Event) -> None:
        try:
            self._pending += encode(t_ns, event)
        except (TypeError, ValueError, KeyError):
            # An event with a value that JSON cannot hold is a bug of its sender, and no reason to stop training.
            self.dropped += 1

    def _warn_of_drops(self, last: bool) -> None:
        now_s = time.monotonic()
        if self.dropped == self._dropped_told or (now_s - self._told_at_s < WARN_PERIOD_S and not last):
            return
        count, self._dropped_told, self._told_at_s = self.dropped - self._dropped_told, self.dropped, now_s
        text = (
            f"{count} events were dropped ({self.disk_errors} disk errors so far); figures made from them are too low"
        )
        self._append(time.time_ns(), Warned(source=self.path.stem, text=text))

    def _try_write(self) -> bool:
        """Write the pending bytes; False when the disk refused, and then they stay for the next time."""
        try:
            if self._descriptor is None:
                self._descriptor = self._open()
            while self._pending:
                count = os.write(self._descriptor, self._pending[:WRITE_BYTES_MAX])
                del self._pending[:count]
                self._file_bytes += count
            if self._file_bytes >= self._part_bytes_max:
                self._next_part()
        except OSError:
            self.disk_errors += 1
            return False
        with self._progress:
            self._written = self._taken
            self._progress.notify_all()
        return True

    def _next_part(self) -> None:
        """At the end of a line. What has become old is folded on this thread: some 2 s, every few hours."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._part = None, self._part + 1
        self._descriptor = self._open()
        self._fold_old()

    def _fold_old(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: it is tried again with the next part
            fold_old(self.path, RAW_PARTS_MAX * self._part_bytes_max)

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        first = self._part == 0
        self._part = self._part or newest_part(self.path)
        path = part_path(self.path, self._part)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        self._file_bytes = os.fstat(descriptor).st_size
        if self._file_bytes and os.pread(descriptor, 1, self._file_bytes - 1) != b"\n":
            # A predecessor was killed in the middle of a line; ours must not be glued to its rest.
            self._pending[:0] = b"\n"
        if first:
            self._fold_old()  # what earlier processes of this name have left
        return descriptor
