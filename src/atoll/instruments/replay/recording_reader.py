"""Reading a recording back: its segments (`store.SegmentReader`), and the decisions on the tape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.store import FILE_BYTES_MAX, TAPE_FOLDER, Record, SegmentReader, read_records, tape_files

__all__ = ["Record", "SegmentReader", "read_notes"]


def read_notes(state: Path, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every decision that the tape holds, oldest first, with the epoch of the syncer that took it."""
    for file in tape_files(state / TAPE_FOLDER):
        try:
            if (size := file.path.stat().st_size) > FILE_BYTES_MAX:
                raise ValueError(f"it has {size} bytes, more than any tape")
            records, fault = read_records(file.path.read_bytes())
        except (OSError, ValueError) as error:
            problems.append(f"{file.path.name}: it cannot be read ({error})")
            continue
        if fault is not None:
            problems.append(f"{file.path.name}: {fault}")
        for record in records:
            if isinstance(record, dict) and isinstance(note := record.get("note"), dict):
                yield file.epoch, note
