"""The header record of a slot: one sector that says what the slot holds and how to check it.

    magic (8 bytes) | length of the body (4) | xxh3-64 of the body (8) | body: JSON | zeros up to 4096 bytes

The record is what flips a commit. It is written in one piece into a sector of its own, but it does not rely on the disk
to write a sector whole: half a record does not match its checksum, and then the other slot counts.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from atoll.errors import LocalProtocolError, PayloadError
from atoll.store.documents import CHECKSUM_MAX, json_object, whole

MAGIC = b"ATOLSLOT"
SLOT_FORMAT = 1
SECTOR = 4096
"""Bytes per header record, and the alignment of everything else: the sector of today's disks and the page of x86."""
DTYPES = frozenset({"float32", "float64", "float16", "int64", "int32", "uint64", "uint32", "uint16", "uint8"})
"""Array types that may be stored, by numpy's names. All are little-endian on every machine that Atoll runs on."""
_FRAME = struct.Struct("<8sIQ")


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Where a flat array lies in the file. `size` counts elements."""

    name: str
    dtype: str
    size: int
    offset: int
    checksum: int

    @property
    def bytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What one slot holds. `sequence` counts the commits into this file: it decides between equal versions."""

    epoch: int
    fragment: int
    version: int
    sequence: int
    arrays: tuple[StoredArray, ...]
    meta_offset: int
    meta_bytes: int
    meta_checksum: int

    @property
    def end(self) -> int:
        """The first byte after everything that the record refers to."""
        return max([self.meta_offset + self.meta_bytes, *(array.offset + array.bytes for array in self.arrays)])

    def encode(self) -> bytes:
        body = json.dumps(
            {
                "format": SLOT_FORMAT,
                "epoch": self.epoch,
                "fragment": self.fragment,
                "version": self.version,
                "sequence": self.sequence,
                "arrays": [[a.name, a.dtype, a.size, a.offset, a.checksum] for a in self.arrays],
                "meta": [self.meta_offset, self.meta_bytes, self.meta_checksum],
            },
            separators=(",", ":"),
        ).encode()
        if _FRAME.size + len(body) > SECTOR:
            raise LocalProtocolError(
                f"the header of fragment {self.fragment} takes {len(body)} bytes and a sector has {SECTOR}; "
                "store fewer arrays or shorter names"
            )
        return _sector(body)


def _sector(body: bytes) -> bytes:
    return (_FRAME.pack(MAGIC, len(body), xxhash.xxh3_64_intdigest(body)) + body).ljust(SECTOR, b"\0")


EMPTY_SECTOR = _sector(b"")
"""The header of a slot that was not used yet. Zeros would not do: they are also what a lost sector reads as."""


def decode_record(sector: bytes) -> SlotRecord | None:
    """The record in a sector, or None for a slot that was not used yet. Raises PayloadError on a damaged one."""
    if sector == EMPTY_SECTOR:
        return None
    if len(sector) < SECTOR:
        raise PayloadError(f"the header record is cut off after {len(sector)} bytes")
    magic, length, checksum = _FRAME.unpack_from(sector)
    body = sector[_FRAME.size : _FRAME.size + length]
    if magic != MAGIC or len(body) != length or xxhash.xxh3_64_intdigest(body) != checksum:
        raise PayloadError("the header record is torn or damaged")
    values = json_object(body, "the header record")
    if values.get("format") != SLOT_FORMAT:
        raise PayloadError(f"slot format {values.get('format')} is unknown here; install a newer atoll")
    try:
        arrays = tuple(StoredArray(*row) for row in values["arrays"])
        record = SlotRecord(
            values["epoch"], values["fragment"], values["version"], values["sequence"], arrays, *values["meta"]
        )
    except (KeyError, TypeError) as error:
        raise PayloadError("the header record lacks fields") from error
    if not _can_be(record):
        raise PayloadError("the header record describes arrays that cannot be")
    return record


def _can_be(record: SlotRecord) -> bool:
    counters = (record.epoch, record.fragment, record.version, record.sequence, record.meta_offset, record.meta_bytes)
    return (
        whole(counters)
        and whole((record.meta_checksum, *(array.checksum for array in record.arrays)), CHECKSUM_MAX)
        and all(type(array.name) is str and type(array.dtype) is str for array in record.arrays)
        and all(array.dtype in DTYPES and whole((array.size, array.offset)) for array in record.arrays)
    )
