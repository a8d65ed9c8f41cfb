"""The tape on disk: its file names, its records, and reading them back.

    marker (4 bytes) | length of the payload (4) | xxh3-64 of length and payload (8) | payload: JSON

The first record of a file is its base: every row as it stood when the file was begun. Later ones are batches of rows
({"rows": {key: value, or null to delete}}) and decisions ({"note": {...}}). So the newest file alone holds the state,
and the older ones are history and a second chance.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from atoll.errors import PayloadError, StoreError
from atoll.store.documents import json_object

TAPE_FORMAT = 1
MARKER = b"\xa7TR1"
FILE_BYTES_MAX = 2 << 30
"""More than a file can grow to: a base of at most 512 MiB and as much again."""
FAULT_TRIES = 64
"""Markers looked at behind a bad record. Text never holds one, so the first is nearly always a record. A file of
nothing but markers would otherwise be hashed once for each."""
FRAME = struct.Struct("<4sIQ")
_LENGTH = struct.Struct("<I")
_NAME = re.compile(r"tape-(?P<epoch>\d{5,})-(?P<number>\d{8,})\.log")


@dataclass(frozen=True, slots=True, order=True)
class TapeFile:
    """Names carry the epoch, so that a syncer that was fenced and begins one more file does not hide newer ones."""

    epoch: int
    number: int
    path: Path


def tape_path(folder: Path, epoch: int, number: int) -> Path:
    return folder / f"tape-{epoch:05}-{number:08}.log"


def tape_files(folder: Path) -> list[TapeFile]:
    """Oldest first."""
    if not folder.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(TapeFile(int(match["epoch"]), int(match["number"]), path) for match, path in found if match)


def frame(payload: bytes) -> bytes:
    """A record, ready to be appended."""
    return FRAME.pack(MARKER, len(payload), _checksum(payload)) + payload


def _checksum(payload: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(_LENGTH.pack(len(payload)))
    digest.update(payload)
    return int(digest.intdigest())


def read_records(data: bytes) -> tuple[list[dict[str, Any]], str | None]:
    """Every record up to the end or to the first bad one, and what is wrong from there on."""
    records: list[dict[str, Any]] = []
    offset = 0
    while offset < len(data):
        payload = _payload_at(data, offset)
        if payload is None:
            return records, _fault(data, offset)
        try:
            records.append(_document(bytes(payload)))
        except PayloadError as error:
            return records, f"the record at byte {offset} cannot be used ({error}); nothing from there on is trusted"
        offset += FRAME.size + len(payload)
    return records, None


def _document(payload: bytes) -> dict[str, Any]:
    record = json_object(payload, "it")
    if not isinstance(record.get("rows", {}), dict):
        raise PayloadError("its rows are not a JSON object")
    if type(record.get("tape", TAPE_FORMAT)) is not int:
        raise PayloadError("its format is not a number")
    return record


def _payload_at(data: bytes, offset: int) -> memoryview | None:
    if offset + FRAME.size > len(data):
        return None
    marker, length, checksum = FRAME.unpack_from(data, offset)
    start = offset + FRAME.size
    if marker != MARKER or start + length > len(data):
        return None
    payload = memoryview(data)[start : start + length]
    return payload if _checksum(payload) == checksum else None


def _fault(data: bytes, offset: int) -> str:
    """A crash while writing leaves a bad end; a good record after the bad place shows that it is damage instead."""
    rest = len(data) - offset
    place = data.find(MARKER, offset + 1)
    for _ in range(FAULT_TRIES):
        if place < 0:
            break
        if _payload_at(data, place) is not None:
            return f"the record at byte {offset} is damaged; from there on {rest} bytes are not trusted"
        place = data.find(MARKER, place + 1)
    return f"the last {rest} bytes, from byte {offset} on, are a record that was never finished; they are left out"


def _read_file(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    try:
        if (size := path.stat().st_size) > FILE_BYTES_MAX:
            return [], f"it has {size} bytes, more than any tape"
        return read_records(path.read_bytes())
    except OSError as error:
        return [], f"it cannot be read ({error.strerror})"


def read_rows(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The last value of every row: from the newest file whose base is whole."""
    problems: list[str] = []
    for file in reversed(tape_files(folder)):
        records, fault = _read_file(file.path)
        if fault is not None:
            problems.append(f"{folder.name}/{file.path.name}: {fault}")
        if not records or "tape" not in records[0]:
            problems.append(
                f"{folder.name}/{file.path.name}: the state at its beginning is lost; an older file is used"
            )
            continue
        if records[0]["tape"] > TAPE_FORMAT:
            raise StoreError(
                f"{file.path} has tape format {records[0]['tape']} and this version reads {TAPE_FORMAT}; "
                "install a newer atoll"
            )
        rows: dict[str, Any] = {}
        for record in records:
            rows.update(record.get("rows", {}))
        return {key: value for key, value in rows.items() if value is not None}, problems
    if problems:
        problems.append(f"{folder.name}: no file could be read; the rows are lost")
    return {}, problems


def read_history(state: Path, problems: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Every batch of rows and every decision that the tape still holds, oldest first, without the bases.

    What is damaged is left out and named in `problems`.
    """
    for file in tape_files(state / "tape"):
        records, fault = _read_file(file.path)
        if fault is not None and problems is not None:
            problems.append(f"{file.path.name}: {fault}")
        yield from (record for record in records if "tape" not in record)
