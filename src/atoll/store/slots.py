"""Two slots per fragment: a commit leaves exactly the version before it or the one after it.

A file has two header sectors and two slot areas:

    header of slot 0 | header of slot 1 | slot 0: arrays, meta | slot 1: arrays, meta

A commit writes the slot that does not hold the current version, syncs, writes that slot's header record, syncs. Until
the record is whole on the disk the other slot counts; from then on this one does. The file is reserved in full when it
is made, so disk use is two slots and does not grow, unless the meta data outgrows its room.

A new file is made (aside, then renamed into place) for the first commit of an epoch, when a slot has become too small,
and after a sync failed: what the disk holds is unknown then, and the old file stays until the new one is durable.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.errors import LocalProtocolError
from atoll.store import failpoints, files
from atoll.store.slot_record import DTYPES, EMPTY_SECTOR, SECTOR, SlotRecord, StoredArray

META_ROOM_BYTES_MIN = 64 << 10
"""Room for the meta data of a new file; twice the first meta data if that is more. Ours is a few KiB."""
META_BYTES_MAX = 64 << 20
"""A fragment's meta data is counters and names; more than this is a mistake."""

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class CommitStats:
    """What a commit cost: bytes written, and time in writes (checksums included) and in syncs."""

    bytes: int
    write_ns: int
    sync_ns: int


class SlotFile:
    """The slots of one fragment in this epoch. `commit` may run on any thread, one at a time."""

    def __init__(self, path: Path, epoch: int, fragment: int) -> None:
        self.path = path
        self.version = -1
        """The last version that this process knows to be durable here; -1 before the first commit."""
        self._epoch = epoch
        self._fragment = fragment
        self._sequence = 0
        self._active = 0
        self._capacity = 0
        self._fresh = True  # the next commit needs a new file
        self._lock = threading.Lock()

    def commit(self, version: int, arrays: Arrays, meta: Mapping[str, Any]) -> CommitStats:
        """Make `version` durable. After an OSError the version before it still is, and commit may be called again."""
        document = json.dumps(meta, separators=(",", ":")).encode()
        _check(self._fragment, arrays, document)
        with self._lock:
            if version < self.version:
                raise LocalProtocolError(
                    f"fragment {self._fragment}: version {version} after version {self.version}; versions only go up"
                )
            # A sequence number is never used twice, also not after a failed attempt whose record may be on the disk.
            self._sequence += 1
            size = sum(_aligned(array.nbytes) for array in arrays.values()) + _aligned(len(document))
            write = _Write(self._epoch, self._fragment, version, self._sequence, arrays, document)
            if self._fresh or size > self._capacity:
                self._commit_fresh(write, size)
            else:
                self._commit_in_place(write)
            self.version = version
        failpoints.hit("slot.flipped")
        return CommitStats(write.bytes, write.write_ns, write.sync_ns)

    def _commit_in_place(self, write: _Write) -> None:
        target = 1 - self._active
        with files.opened(self.path, os.O_RDWR) as descriptor:
            record = write.data(descriptor, 2 * SECTOR + target * self._capacity)
            try:
                write.sync(descriptor, "slot.data.sync")
                write.header(descriptor, target, record)
                write.sync(descriptor, "slot.header.sync")
            except OSError:
                # A failed write is repaired by writing again. After a failed sync, and once the record may be half
                # there, the file is in doubt.
                self._fresh = True
                raise
        self._active = target

    def _commit_fresh(self, write: _Write, size: int) -> None:
        room = max(META_ROOM_BYTES_MIN, _aligned(2 * len(write.document)))
        capacity = size + room
        temporary = self.path.with_name(self.path.name + files.TEMPORARY)
        self._fresh = True
        failpoints.hit("slot.create")
        try:
            with files.opened(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as descriptor:
                files.allocate(descriptor, 2 * (SECTOR + capacity), "slot.allocate")
                record = write.data(descriptor, 2 * SECTOR)
                write.sync(descriptor, "slot.data.sync")
                write.header(descriptor, 0, record, EMPTY_SECTOR)
                write.sync(descriptor, "slot.header.sync")
            files.rename(temporary, self.path, "slot.rename")
        except OSError:
            with contextlib.suppress(OSError):
                files.remove(temporary)  # gives the space back
            raise
        files.sync_folder(self.path.parent, "slot.folder.sync")
        self._active, self._capacity, self._fresh = 0, capacity, False


class _Write:
    """One commit on its way to the disk, and what it costs."""

    def __init__(self, epoch: int, fragment: int, version: int, sequence: int, arrays: Arrays, document: bytes) -> None:
        self.key = (epoch, fragment, version, sequence)
        self.arrays = arrays
        self.document = document
        self.bytes = self.write_ns = self.sync_ns = 0

    def data(self, descriptor: int, start: int) -> SlotRecord:
        """Write arrays and meta data from `start` on; returns the record that will point to them."""
        begun = time.monotonic_ns()
        stored: list[StoredArray] = []
        offset = start
        for name, array in self.arrays.items():
            checksum = files.write_checked(descriptor, array.view(np.uint8).data, offset, "slot.data.mid")
            stored.append(StoredArray(name, array.dtype.name, array.size, offset, checksum))
            self.bytes += array.nbytes
            offset += _aligned(array.nbytes)
        files.write_at(descriptor, self.document, offset, "slot.meta.mid")
        self.bytes += len(self.document)
        self.write_ns += time.monotonic_ns() - begun
        checksum = xxhash.xxh3_64_intdigest(self.document)
        return SlotRecord(*self.key, tuple(stored), offset, len(self.document), checksum)

    def header(self, descriptor: int, slot: int, record: SlotRecord, after: bytes = b"") -> None:
        begun = time.monotonic_ns()
        data = record.encode() + after
        files.write_at(descriptor, data, slot * SECTOR, "slot.header.mid")
        self.bytes += len(data)
        self.write_ns += time.monotonic_ns() - begun

    def sync(self, descriptor: int, point: str) -> None:
        begun = time.monotonic_ns()
        files.sync_data(descriptor, point)
        self.sync_ns += time.monotonic_ns() - begun


def _check(fragment: int, arrays: Arrays, document: bytes) -> None:
    for name, array in arrays.items():
        if array.ndim != 1 or not array.flags.c_contiguous or array.dtype.name not in DTYPES:
            raise LocalProtocolError(
                f"fragment {fragment}: array {name!r} is {array.dtype} with shape {array.shape}; "
                f"the store takes flat contiguous arrays of {', '.join(sorted(DTYPES))}"
            )
    if len(document) > META_BYTES_MAX:
        raise LocalProtocolError(
            f"fragment {fragment}: {len(document)} bytes of meta data, and at most {META_BYTES_MAX} are kept; "
            "store what grows as rows"
        )


def _aligned(count: int) -> int:
    return -(-count // SECTOR) * SECTOR
