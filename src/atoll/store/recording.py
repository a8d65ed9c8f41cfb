"""The recording: what merges were made from, so that they can be made again. Written only with --record.

    state/recording/recording-00002-00000007.log     epoch 2, segment 7

A segment is a row of records, and is only ever appended to:

    marker (4 bytes) | length of the head (4) | length of the body (8) | xxh3-64 of both lengths and the head (8) |
    head: JSON | body: raw bytes, whose checksums are in the head

The first record says what the run is: its id, its settings, its tensors. The others are, by the "kind" in their head:

    payload   one contribution as it came in (the index of a recording is made of these heads)
    merge     one decision: fragment, version, round, which payloads (and where they lie), weights, the checksum of the
              parameters that came of it
    state     the parameters, momentum and residual of a fragment that did not come from a merge, or whence they are

A merge is durable before its version is committed: first its payloads, then its decision. A write that
fails leaves a bad end, and the next record begins another segment; after a failed sync nothing more is written to that
file, since nobody knows what it holds. A crash can only cut off the end of an epoch's last segment.

Bodies are written from where they are: nothing is copied or queued. The failpoints are those of the tape, of which this
is the heavy half: a disk that fails the one fails the other.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from atoll.errors import LocalProtocolError
from atoll.store import failpoints, files

RECORDING_FOLDER = "recording"
RECORDING_FORMAT = 1
SEGMENT_BYTES_MAX = 256 << 20
"""A segment that has grown past this is followed by another: small enough to copy or to lose one, and a year of a busy
run stays below a hundred thousand files. A single record may be larger."""
HEAD_BYTES_MAX = 64 << 20
"""The largest head describes the model: a hundred bytes per tensor, as on the tape."""
MARKER = b"\xa7RC1"
FRAME = struct.Struct("<4sIQQ")
_LENGTHS = struct.Struct("<IQ")
_NAME = re.compile(r"(?P<prefix>[a-z]+)-(?P<epoch>\d{5,18})-(?P<number>\d{8,18})\.log")


@dataclass(frozen=True, slots=True, order=True)
class SegmentFile:
    """Names carry the epoch: a syncer that was fenced and writes one more record does so in a file of its own."""

    epoch: int
    number: int
    path: Path


def segment_path(folder: Path, epoch: int, number: int, prefix: str = RECORDING_FOLDER) -> Path:
    return folder / f"{prefix}-{epoch:05}-{number:08}.log"


def segment_files(folder: Path, prefix: str = RECORDING_FOLDER) -> list[SegmentFile]:
    """Oldest first."""
    if not folder.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    named = [(match, path) for match, path in found if match and match["prefix"] == prefix]
    return sorted(SegmentFile(int(match["epoch"]), int(match["number"]), path) for match, path in named)


def head_checksum(head: bytes, body_bytes: int) -> int:
    digest = xxhash.xxh3_64(_LENGTHS.pack(len(head), body_bytes))
    digest.update(head)
    return int(digest.intdigest())


@dataclass(slots=True)
class _Segment:
    number: int
    descriptor: int
    points: str
    size: int = 0
    synced: int = 0
    torn: bool = False
    """A write failed: what follows goes elsewhere."""
    broken: str = ""
    """A sync failed: what was not synced before is in doubt."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def sync(self, upto: int) -> None:
        """Return when the first `upto` bytes are durable; one sync serves all who wait."""
        with self.lock:
            if self.synced >= upto:
                return
            if self.broken:
                raise OSError(errno.EIO, f"an earlier sync of segment {self.number} failed: {self.broken}")
            size = self.size
            try:
                files.sync_data(self.descriptor, f"{self.points}.append.sync")
            except OSError as error:
                self.broken = str(error)
                raise
            self.synced = size

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(frozen=True, slots=True)
class RecordPosition:
    """Where a record lies."""

    number: int
    offset: int
    end: int
    segment: _Segment

    def sync(self) -> None:
        """Return when the record, and all before it in its segment, are durable."""
        self.segment.sync(self.end)


class Recording:
    """The recording of one epoch, to be written. All methods may be called on any thread. The commit log (`commit_log`)
    is made of the same segments, elsewhere and under another `prefix`, which its failpoints have as well."""

    def __init__(
        self,
        state: Path,
        epoch: int,
        *,
        bytes_max: int = SEGMENT_BYTES_MAX,
        folder: Path | None = None,
        prefix: str = RECORDING_FOLDER,
        points: str = "tape",
    ) -> None:
        self.folder = folder or state / RECORDING_FOLDER
        self.prefix = prefix
        self.begun = bool(segment_files(self.folder, prefix))
        """Whether an earlier epoch has recorded anything here."""
        self._points = points
        self._epoch = epoch
        self._bytes_max = bytes_max
        self._about: dict[str, Any] = {}
        self._segment: _Segment | None = None
        self._number = 0
        self._lock = threading.Lock()  # held over a write, so that what is written has no holes; not over a sync

    def describe(self, about: Mapping[str, Any]) -> None:
        """What every segment from here on begins with: the run, its settings, its tensors."""
        with self._lock:
            self._about = dict(about)

    def append(self, head: Mapping[str, Any], parts: Sequence[files.Buffer] = ()) -> RecordPosition:
        """Append one record. It is durable after `sync` of its place. After an OSError nothing of it counts."""
        with self._lock:
            segment = self._segment
            if segment is None or segment.torn or segment.broken or segment.size >= self._bytes_max:
                segment = self._begin()
            offset = segment.size
            self._write(segment, head, parts)
            return RecordPosition(segment.number, offset, segment.size, segment)

    def close(self) -> None:
        with self._lock:
            if self._segment is not None:
                self._segment.close()
                self._segment = None

    def _begin(self) -> _Segment:
        """Another segment. The one before it is synced first, so that only the last of an epoch can lack its end."""
        if self._segment is not None:
            if not self._segment.broken:
                self._segment.sync(self._segment.size)
            self._segment.close()
            self._segment = None
        files.make_folders(self.folder, f"{self._points}.create")
        failpoints.hit(f"{self._points}.create")
        self._number += 1
        path = segment_path(self.folder, self._epoch, self._number, self.prefix)
        descriptor = files.create(path)
        segment = _Segment(self._number, descriptor, self._points)
        about = {"recording": RECORDING_FORMAT, "epoch": self._epoch, "number": self._number, **self._about}
        try:
            self._write(segment, about, ())
            files.sync_folder(self.folder, f"{self._points}.folder.sync")
        except BaseException:
            segment.close()
            with contextlib.suppress(OSError):
                files.remove(path)
            raise
        self._segment = segment
        return segment

    def _write(self, segment: _Segment, head: Mapping[str, Any], parts: Sequence[files.Buffer]) -> None:
        document = json.dumps(head, separators=(",", ":")).encode()
        if len(document) > HEAD_BYTES_MAX:
            raise LocalProtocolError(
                f"the head of a record takes {len(document)} bytes, and at most {HEAD_BYTES_MAX} are kept; "
                "run without --record"
            )
        size = sum(memoryview(part).nbytes for part in parts)
        frame = FRAME.pack(MARKER, len(document), size, head_checksum(document, size)) + document
        end = segment.size
        try:
            for part in (frame, *parts):
                files.write_at(segment.descriptor, part, end, f"{self._points}.append.mid")
                end += memoryview(part).nbytes
        except BaseException:
            segment.torn = True
            with contextlib.suppress(OSError):
                os.ftruncate(segment.descriptor, segment.size)  # gives the space back
            raise
        segment.size = end
