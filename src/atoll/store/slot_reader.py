"""Reading slots back: the newest version whose checksums match, and a word about each one whose do not.

The file may belong to a living syncer (`atoll export` of a run that goes on): then a slot can be overwritten while it
is read. A checksum that does not match is therefore damage only if the headers have not changed meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.errors import PayloadError
from atoll.store import files
from atoll.store.documents import json_object
from atoll.store.loaded import LoadedFragment
from atoll.store.slot_record import SECTOR, SlotRecord, decode_record
from atoll.store.slots import META_BYTES_MAX

READ_TRIES = 8
"""Attempts on a file that changes while it is read. Between two commits of a fragment a run trains for seconds."""

Refuse = Callable[[SlotRecord], str | None]
"""Says why a record may not be used although it is whole, or None."""


@dataclass(frozen=True, slots=True)
class FragmentRead:
    """The best good version in a file, and what was wrong with the others.

    `newest` is the highest sequence number that may be used, good or not; None if a header could not be read.
    """

    good: LoadedFragment | None
    faults: list[str]
    newest: int | None


def read_fragment(
    path: Path, fragment: int, *, only: Collection[str] | None = None, refuse: Refuse = lambda record: None
) -> FragmentRead:
    """Read one file. `only` names the arrays to read."""
    with files.opened(path, os.O_RDONLY) as descriptor:
        for attempt in range(READ_TRIES):
            records, faults = _headers(descriptor)
            unread = bool(faults)
            usable: list[tuple[int, SlotRecord]] = []
            for slot, record in records:
                reason = refuse(record) if record.fragment == fragment else "it belongs to another fragment"
                if reason is None:
                    usable.append((slot, record))
                else:
                    faults.append(f"slot {slot} holds version {record.version}, but {reason}")
            newest = None if unread else max((record.sequence for _, record in usable), default=0)
            good, found, changed = _best(descriptor, usable, only)
            if changed and attempt + 1 == READ_TRIES:
                found = [f"it was written faster than it could be read, {READ_TRIES} times; try again"]
            if good is not None or not changed or attempt + 1 == READ_TRIES:
                return FragmentRead(good, faults + found, newest)
    raise AssertionError("unreachable")


def _best(
    descriptor: int, records: list[tuple[int, SlotRecord]], only: Collection[str] | None
) -> tuple[LoadedFragment | None, list[str], bool]:
    """The newest of `records` that is whole, the faults of those before it, and whether the file changed meanwhile."""
    faults: list[str] = []
    for slot, record in sorted(records, key=lambda item: (item[1].version, item[1].sequence), reverse=True):
        try:
            return _read(descriptor, record, only), faults, False
        except (PayloadError, OSError) as error:
            faults.append(f"slot {slot} (version {record.version}): {error}")
            now = _headers(descriptor)[0]
            if any(item not in now for item in records):
                return None, faults, True
    return None, faults, False


def _headers(descriptor: int) -> tuple[list[tuple[int, SlotRecord]], list[str]]:
    records: list[tuple[int, SlotRecord]] = []
    faults: list[str] = []
    for slot in range(2):
        sector = bytearray(SECTOR)
        try:
            count = files.read_into(descriptor, memoryview(sector), slot * SECTOR)
            record = decode_record(bytes(sector[:count]))
        except (PayloadError, OSError) as error:
            faults.append(f"slot {slot}: {error}")
            continue
        if record is not None:
            records.append((slot, record))
    if not records and not faults:
        faults.append("there is no header record")
    return records, faults


def _read(descriptor: int, record: SlotRecord, only: Collection[str] | None) -> LoadedFragment:
    """Sizes are compared with the file before anything is allocated."""
    size = os.fstat(descriptor).st_size
    taken = record.meta_bytes + sum(array.bytes for array in record.arrays)
    # Arrays that lie over each other would each be inside the file and together be any size.
    if max(record.end, taken) > size or record.meta_bytes > META_BYTES_MAX:
        raise PayloadError(f"the file has {size} bytes, and its header speaks of {max(record.end, taken)}")
    document = np.empty(record.meta_bytes, np.uint8)
    _fill(descriptor, document, record.meta_offset, record.meta_checksum, "the meta data")
    arrays: dict[str, NDArray[Any]] = {}
    for stored in record.arrays:
        if only is None or stored.name in only:
            array: NDArray[Any] = np.empty(stored.size, stored.dtype)
            _fill(descriptor, array.view(np.uint8), stored.offset, stored.checksum, f"array {stored.name!r}")
            arrays[stored.name] = array
    meta = json_object(document.tobytes(), "the meta data")
    return LoadedFragment(record.version, meta, arrays, record.epoch, record.sequence)


def _fill(descriptor: int, target: NDArray[np.uint8], offset: int, checksum: int, what: str) -> None:
    found = files.read_checked(descriptor, target.data, offset)
    if found is None:
        raise PayloadError(f"{what} is cut off")
    if found != checksum:
        raise PayloadError(f"{what} does not match its checksum")
