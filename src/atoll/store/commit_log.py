"""The commit log: a merge is durable as what it was made from, which is a fraction of what it made.

    state/epoch-00002/log-00002-00000007.log      of epoch 2, segment 7 (`recording` has the format of a segment)

    payload   one contribution as it came in
    merge     fragment, version, weights, which payloads, the record of the commit, and the checksum of the parameters

A merge counts when its record is synced; its payloads were before. A fragment's log begins at a slot of the same epoch:
whoever reads the state takes the newest good slot and does the merges again that follow it, version by version, under
the settings that the segment begins with (`syncer.log_replay`). What did not come from a merge goes into a slot, and so
does the first commit of an epoch. A segment goes once slots are at or beyond everything that is in it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.errors import PayloadError, StoreError
from atoll.store import failpoints, files
from atoll.store.recording import Recording, RecordPosition, SegmentFile, segment_files, segment_path
from atoll.store.segment_reader import SegmentReader

LOG_PREFIX = "log"
LOG_SEGMENT_BYTES_MAX = 64 << 20
"""A segment that has grown past this is followed by another: one goes when all of it is in slots, so that small ones
give their room back earlier. A single record may be larger."""

Payload = tuple[str, NDArray[np.uint8]]
"""A contribution: the name of its codec, and its bytes."""


class CommitLog:
    """The log of one epoch, to be written. All methods may be called on any thread."""

    def __init__(self, folder: Path, epoch: int, *, bytes_max: int = LOG_SEGMENT_BYTES_MAX) -> None:
        self._segments = Recording(
            folder, epoch, bytes_max=bytes_max, folder=folder, prefix=LOG_PREFIX, points=LOG_PREFIX
        )
        self._folder = folder
        self._epoch = epoch
        self._lock = threading.Lock()
        self._in: dict[int, dict[int, int]] = {}
        """By segment and fragment: the newest version that the segment knows of."""
        self._slots: dict[int, int] = {}
        """By fragment: the version that its slot holds."""

    def describe(self, about: Mapping[str, Any]) -> None:
        """What every segment from here on begins with: the run, its settings, its tensors."""
        self._segments.describe(about)

    def payloads(self, fragment: int, version: int, payloads: Sequence[Payload]) -> list[RecordPosition]:
        """Make the contributions of a merge durable, which does not commit anything yet."""
        places = []
        for codec, payload in payloads:
            head = {"kind": "payload", "fragment": fragment, "version": version, "codec": codec}
            head["checksum"] = xxhash.xxh3_64_intdigest(payload.data)
            places.append(self._append(fragment, version, head, [payload.data]))
        for place in {place.number: place for place in places}.values():  # the last one of each segment
            place.sync()
        return places

    def commit(
        self,
        fragment: int,
        version: int,
        meta: Mapping[str, Any],
        weights: Sequence[float],
        places: Sequence[RecordPosition],
    ) -> int:
        """Make the version durable that these payloads lead to; returns the bytes of the record."""
        lie = [[place.number, place.offset] for place in places]
        head = {"kind": "merge", "fragment": fragment, "version": version, "meta": dict(meta)}
        place = self._append(fragment, version, head | {"weights": list(weights), "payloads": lie}, ())
        place.sync()
        failpoints.hit("log.committed")
        return place.end - place.offset

    def _append(self, fragment: int, version: int, head: Mapping[str, Any], parts: Sequence[Any]) -> RecordPosition:
        place = self._segments.append(head, parts)
        with self._lock:
            inside = self._in.setdefault(place.number, {})
            inside[fragment] = max(version, inside.get(fragment, version))
        return place

    def in_slot(self, fragment: int, version: int) -> None:
        """A slot holds this version durably: segments that nobody needs any more go. One that cannot be deleted is
        tried again the next time."""
        with self._lock:
            self._slots[fragment] = version
            last = max(self._in, default=0)
            over = [n for n, inside in self._in.items() if n != last and self._is_over(inside)]
        for number in over:
            with contextlib.suppress(OSError):
                failpoints.hit("log.drop")
                files.remove(segment_path(self._folder, self._epoch, number, LOG_PREFIX))
                with self._lock:
                    self._in.pop(number, None)

    def _is_over(self, inside: Mapping[int, int]) -> bool:
        return all(version <= self._slots.get(fragment, -1) for fragment, version in inside.items())

    def close(self) -> None:
        self._segments.close()


# ------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class LoggedMerge:
    """A merge that was committed to the log. Its payloads are read when they are asked for."""

    fragment: int
    version: int
    meta: dict[str, Any]
    weights: tuple[float, ...]
    about: dict[str, Any]
    """The run, its settings and its tensors when it was made."""
    segment: SegmentFile
    places: tuple[tuple[int, int], ...]

    def payloads(self) -> list[Payload]:
        """What it was made from. Raises PayloadError if any of it is not what was written."""
        return [self._payload(number, offset) for number, offset in self.places]

    def _payload(self, number: int, offset: int) -> Payload:
        folder = self.segment.path.parent
        path = segment_path(folder, self.segment.epoch, number, LOG_PREFIX)
        try:
            with SegmentReader(SegmentFile(self.segment.epoch, number, path)) as reader:
                record = reader.record_at(offset)
                if record is None or record.kind != "payload":
                    raise PayloadError(f"there is no contribution at byte {offset} of {path.name}")
                if (record.head.get("fragment"), record.head.get("version")) != (self.fragment, self.version):
                    raise PayloadError(f"byte {offset} of {path.name} holds another contribution")
                payload = np.empty(record.body_bytes, np.uint8)
                reader.read_body(record, 0, payload, int(record.head["checksum"]))
                return str(record.head["codec"]), payload
        except (OSError, StoreError, KeyError, TypeError, ValueError) as error:
            raise PayloadError(f"a contribution in {path.name} cannot be read ({error})") from error


def read_log(folder: Path, problems: list[str]) -> dict[int, dict[int, LoggedMerge]]:
    """Every merge that the log of an epoch's folder holds, by fragment and version. A bad end is no problem: it was
    never committed."""
    found: dict[int, dict[int, LoggedMerge]] = {}
    for segment in segment_files(folder, LOG_PREFIX):
        try:
            with SegmentReader(segment) as reader:
                for record in reader.records():
                    if record.kind == "merge":
                        merge = _merge_of(record.head, reader.about, segment)
                        found.setdefault(merge.fragment, {})[merge.version] = merge
        except FileNotFoundError:
            raise  # a living syncer has dropped it: read again
        except (OSError, StoreError, KeyError, TypeError, ValueError) as error:
            problems.append(f"{folder.name}/{segment.path.name}: {error}; what it holds is left out")
    return found


def _merge_of(head: Mapping[str, Any], about: dict[str, Any], segment: SegmentFile) -> LoggedMerge:
    places = tuple((int(number), int(offset)) for number, offset in head["payloads"])
    weights = tuple(float(weight) for weight in head["weights"])
    return LoggedMerge(int(head["fragment"]), int(head["version"]), dict(head["meta"]), weights, about, segment, places)
