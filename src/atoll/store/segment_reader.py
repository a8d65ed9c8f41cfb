"""Reading segments (of a recording, of a commit log) back, head by head: bodies are read when somebody asks for one.

Nothing here trusts the disk. Lengths are compared with the file before anything is allocated, heads with their
checksums before they are parsed; the reader of a body compares it with the checksum in its head.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.errors import PayloadError, StoreError
from atoll.store import files
from atoll.store.recording import FRAME, HEAD_BYTES_MAX, MARKER, RECORDING_FORMAT, SegmentFile, head_checksum

READ_BYTES = 4096
"""Read at a time to get at a head; most are some hundred bytes."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record without its body."""

    segment: SegmentFile
    offset: int
    head: dict[str, Any]
    body_offset: int
    body_bytes: int

    @property
    def kind(self) -> str:
        return str(self.head.get("kind"))

    @property
    def where(self) -> str:
        return f"{self.segment.path.name}, byte {self.offset}"


class SegmentReader:
    """One segment, open for reading. `about` is what it begins with; `fault` says where it stops making sense."""

    def __init__(self, segment: SegmentFile) -> None:
        self.segment = segment
        self.fault = ""
        self.about: dict[str, Any] = {}
        self._descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._size = os.fstat(self._descriptor).st_size
            first = self.record_at(0)
            if first is None or "recording" not in first.head:
                self._end = 0
                self._stop(0)
            else:
                self._end = first.body_offset + first.body_bytes
                self.about = self._checked(first.head)
        except BaseException:
            self.close()
            raise

    def _checked(self, about: dict[str, Any]) -> dict[str, Any]:
        if about["recording"] != RECORDING_FORMAT:
            raise StoreError(
                f"{self.segment.path} has recording format {about['recording']!r} and this version reads "
                f"{RECORDING_FORMAT}; install a newer atoll"
            )
        if (about.get("epoch"), about.get("number")) != (self.segment.epoch, self.segment.number):
            raise StoreError(
                f"{self.segment.path} says that it is segment {about.get('number')} of epoch {about.get('epoch')}; "
                "give it its own name back, or delete it"
            )
        return about

    def records(self) -> Iterator[Record]:
        """Every record after the first, up to the end or to the first that is bad."""
        offset = self._end
        while self.about and offset < self._size:
            record = self.record_at(offset)
            if record is None:
                self._stop(offset)
                return
            yield record
            offset = record.body_offset + record.body_bytes

    def record_at(self, offset: int) -> Record | None:
        """The record that begins there, or None if there is no whole one."""
        if not 0 <= offset <= self._size - FRAME.size:
            return None
        data = self._read(offset, min(READ_BYTES, self._size - offset))
        if len(data) < FRAME.size:
            return None
        marker, head_bytes, body_bytes, checksum = FRAME.unpack_from(data)
        start = offset + FRAME.size
        if marker != MARKER or head_bytes > HEAD_BYTES_MAX or start + head_bytes + body_bytes > self._size:
            return None
        head = data[FRAME.size : FRAME.size + head_bytes]
        if len(head) < head_bytes:
            head = self._read(start, head_bytes)
        if len(head) < head_bytes or head_checksum(head, body_bytes) != checksum:
            return None
        try:
            found = json.loads(head)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        return Record(self.segment, offset, found, start + head_bytes, body_bytes)

    def read_body(self, record: Record, start: int, target: NDArray[Any], checksum: int) -> None:
        """Fill `target` from byte `start` of a record's body. PayloadError if it is not what was written."""
        view = target.view(np.uint8)
        if start + view.nbytes > record.body_bytes:
            raise PayloadError(f"it has {record.body_bytes} bytes, and {start + view.nbytes} are needed")
        if view.nbytes == 0:
            found: int | None = xxhash.xxh3_64_intdigest(b"")
        else:
            found = files.read_checked(self._descriptor, view.data, record.body_offset + start)
        if found is None:
            raise PayloadError("it is cut off")
        if found != checksum:
            raise PayloadError(f"its checksum is {found:016x} and {checksum:016x} was written")

    def _read(self, offset: int, count: int) -> bytes:
        data = bytearray(count)
        done = files.read_into(self._descriptor, memoryview(data), offset)
        return bytes(data[:done])

    def _stop(self, offset: int) -> None:
        self.fault = (
            f"{self.segment.path.name}: the record at byte {offset} is damaged or was never finished; the "
            f"{self._size - offset} bytes from there on are left out"
        )

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
