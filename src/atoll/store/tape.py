"""The tape: what the syncer knows besides arrays, and every decision, appended and made durable together.

`remember` and `note` only append to memory, so the event loop never meets the disk. `sync` writes what has gathered and
syncs it, once for all who wait. A file that has grown past its bound is followed by one that begins with all rows, and
the oldest are dropped: memory and disk are bounded by the rows, not by the length of the run.

When a write or a sync fails the file is in doubt and is never written again. What was to be written stays in memory,
and the next `sync` begins a new file with all rows. If that goes on for long, history is dropped first (and the number
of lost notes is in the next file); rows never are.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.errors import LocalProtocolError
from atoll.store import failpoints, files
from atoll.store.tape_record import TAPE_FORMAT, frame, tape_files, tape_path

TAPE_BYTES_MAX = 8 << 20
"""A file takes this much after its base (or as much as its base, if that is more): hours of decisions, read in no
time."""
TAPE_FILES_KEPT = 16
"""Files kept as history. Every start of a syncer begins one, so that some restarts do not push out what led to them."""
TAPE_FILES_ALL = 1 << 62
"""Keep every file: history that is to be replayed must be whole."""
PENDING_BYTES_MAX = 8 << 20
"""What may wait in memory for a disk that does not take it."""
BATCH_BYTES_MAX = 64 << 20
"""One batch. The largest row is the model's layout: a hundred bytes per tensor."""
ROWS_BYTES_MAX = 512 << 20
"""All rows together; a record's length is kept in 32 bits."""


class Tape:
    """The tape of one epoch. `remember` and `note` belong to one thread, `sync` to any."""

    def __init__(
        self,
        folder: Path,
        epoch: int,
        rows: Mapping[str, Any],
        *,
        bytes_max: int = TAPE_BYTES_MAX,
        files_kept: int = TAPE_FILES_KEPT,
    ) -> None:
        self._folder = folder
        self._epoch = epoch
        self._bytes_max = bytes_max
        self._files_kept = max(2, files_kept)
        self._lock = threading.Lock()  # guards the rows and what is pending; held for microseconds
        self._disk = threading.Lock()  # guards the file; held over writes and syncs
        self._rows: dict[str, bytes] = {key: _encode(value) for key, value in rows.items()}
        self._rows_bytes = sum(len(key) + len(value) for key, value in self._rows.items())
        self._pending: list[tuple[bool, bytes]] = []  # (is a note, record)
        self._pending_bytes = 0
        self._lost_notes = 0
        self._appended = 0
        self._durable = -1  # nothing is durable before the first file
        self._number = 0
        self._descriptor = -1
        self._base_bytes = 0
        self._tail_bytes = 0
        self._fresh = True  # the next sync begins a new file

    def remember(self, rows: Mapping[str, Any | None]) -> None:
        """One atomic batch: after a crash all of it is there or nothing. None deletes."""
        encoded = {key: _encode(value) for key, value in rows.items()}
        payload = b'{"rows":' + _object(encoded) + b"}"
        if len(payload) > BATCH_BYTES_MAX or self._rows_bytes + len(payload) > ROWS_BYTES_MAX:
            raise LocalProtocolError(
                f"a batch of {len(rows)} rows takes {len(payload)} bytes on top of {self._rows_bytes}; at most "
                f"{BATCH_BYTES_MAX} and {ROWS_BYTES_MAX} are kept. Delete rows that are no longer needed"
            )
        with self._lock:
            for key, value in encoded.items():
                before = self._rows.pop(key, None)
                self._rows_bytes -= 0 if before is None else len(key) + len(before)
                if rows[key] is not None:
                    self._rows[key] = value
                    self._rows_bytes += len(key) + len(value)
            self._queue(False, payload)

    def note(self, record: Mapping[str, Any]) -> None:
        """One decision, for replay and for people."""
        payload = b'{"note":' + _encode(record) + b"}"
        if len(payload) > PENDING_BYTES_MAX:
            raise LocalProtocolError(f"a note of {len(payload)} bytes; at most {PENDING_BYTES_MAX} are kept")
        with self._lock:
            self._queue(True, payload)

    def rows(self) -> dict[str, Any]:
        with self._lock:
            encoded = dict(self._rows)
        return {key: json.loads(value) for key, value in encoded.items()}

    def sync(self) -> None:
        """Return when all that was appended before this call is durable."""
        with self._lock:
            goal = self._appended
        with self._disk:
            if self._durable >= goal:
                return  # another thread's sync took ours along
            with self._lock:
                taken, self._pending = self._pending, []
                taken_bytes, self._pending_bytes = self._pending_bytes, 0
                reached, fresh = self._appended, self._fresh
                self._fresh = False  # set again by a failure, or by memory that has to be shed meanwhile
                full = self._tail_bytes + taken_bytes > max(self._bytes_max, self._base_bytes)
                rows = dict(self._rows) if fresh or full else {}
                lost = self._lost_notes
            try:
                if not fresh:
                    self._append(b"".join(record for _, record in taken))
                    taken, self._durable = [], reached
                if fresh or full:
                    self._begin_file(rows, [record for is_note, record in taken if is_note], lost)
            except BaseException:
                with self._lock:
                    self._pending[:0] = taken
                    self._pending_bytes += sum(len(record) for _, record in taken)
                    self._fresh = True
                    self._shed()
                raise
            self._durable = reached

    def close(self) -> None:
        with self._disk:
            self._close_file()
            self._fresh = True

    # ------------------------------------------------------------ memory

    def _queue(self, is_note: bool, payload: bytes) -> None:
        record = frame(payload)
        self._pending.append((is_note, record))
        self._pending_bytes += len(record)
        self._appended += 1
        self._shed()

    def _shed(self) -> None:
        """Keep what is pending within its bound: batches go first (a new file begins with all rows), then old notes."""
        if self._pending_bytes <= PENDING_BYTES_MAX:
            return
        self._fresh = True
        kept = [item for item in self._pending if item[0]]
        size = sum(len(record) for _, record in kept)
        drop = 0
        while size > PENDING_BYTES_MAX // 2 and drop < len(kept) - 1:
            size -= len(kept[drop][1])
            drop += 1
        self._lost_notes += drop
        self._pending, self._pending_bytes = kept[drop:], size

    # ------------------------------------------------------------ disk

    def _append(self, data: bytes) -> None:
        offset = self._base_bytes + self._tail_bytes
        files.write_at(self._descriptor, data, offset, "tape.append.mid")
        files.sync_data(self._descriptor, "tape.append.sync")
        self._tail_bytes += len(data)
        failpoints.hit("tape.appended")

    def _begin_file(self, rows: Mapping[str, bytes], notes: list[bytes], lost: int) -> None:
        """A new file with all rows takes the place of the current one, whole or not at all."""
        self._number += 1
        about = f'{{"tape":{TAPE_FORMAT},"epoch":{self._epoch},"number":{self._number},"lost_notes":{lost},"rows":'
        base = frame(about.encode() + _object(rows) + b"}")
        replacement = files.Replacement(tape_path(self._folder, self._epoch, self._number), "tape")
        try:
            replacement.write(base + b"".join(notes))
            descriptor = replacement.finish(keep_open=True)
        finally:
            replacement.abandon()
        self._close_file()
        self._descriptor = descriptor
        self._base_bytes, self._tail_bytes = len(base), sum(map(len, notes))
        with self._lock:
            self._lost_notes -= lost
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        with contextlib.suppress(OSError):  # tried again with the next file
            for file in tape_files(self._folder)[: -self._files_kept]:
                failpoints.hit("tape.drop")
                files.remove(file.path)

    def _close_file(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _object(encoded: Mapping[str, bytes]) -> bytes:
    return b"{" + b",".join(_encode(key) + b":" + value for key, value in encoded.items()) + b"}"
