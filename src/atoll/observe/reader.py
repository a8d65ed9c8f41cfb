"""Events back from a run folder, merged by time over its files; a torn last line waits until it is whole."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path

from atoll.errors import LaunchError
from atoll.observe.events import Event
from atoll.observe.folding import folded_bytes, source_of
from atoll.observe.lines import decode

READ_BYTES = 1 << 20
LINE_BYTES_MAX = 16 << 20
"""A longer line is not ours (the longest event lists a million learners' ids); it is skipped to bound the memory."""

Stamped = tuple[int, str, Event]
"""(t_ns, file stem, event)"""


def read_events(run_folder: str | Path) -> Iterator[Stamped]:
    """Every event of a run in time order. Raises LaunchError when the folder holds no event files."""
    folder = Path(run_folder)
    if not any(_files(folder)):
        raise LaunchError(
            f"no events in {folder}: expected {folder / 'events'}/*.jsonl; give the folder that `atoll train --out` or "
            f"`atoll run --out` wrote"
        )
    return Tail(folder).poll()


class Tail:
    """Follows a run folder: each `poll` gives what was appended since the one before, in time order.

    Files may appear while we look, and old parts be folded. Only new bytes are read and one chunk per file is held, so
    polling a run of hundreds of MB costs what was appended. Between two files the order is exact within one poll only:
    a process that is a flush behind shows up in the next.
    """

    def __init__(self, run_folder: str | Path) -> None:
        self.folder = Path(run_folder)
        self.missed = False
        """A part was folded before its end was read, which takes days without a poll: begin anew with another Tail."""
        self._offsets: dict[Path, int] = {}

    def poll(self) -> Iterator[Stamped]:
        """New events. Consume the iterator to its end before polling again."""
        return heapq.merge(*(self._new_events(path) for path in _files(self.folder)), key=lambda stamped: stamped[0])

    def _new_events(self, path: Path) -> Iterator[Stamped]:
        source = source_of(path)
        for line in self._new_lines(path):
            decoded = decode(line)
            if decoded is not None:
                yield decoded[0], source, decoded[1]

    def _new_lines(self, path: Path) -> Iterator[bytes]:
        """Whole lines only; the offset stays at the start of an unfinished one, so the next poll reads it again."""
        offset = self._offsets.get(path, 0)
        try:
            with path.open("rb") as file:
                if (size := file.seek(0, 2)) < offset:
                    # It was replaced by a shorter one: another file, or its folded form.
                    raw_bytes = folded_bytes(path)
                    self.missed = self.missed or offset < raw_bytes
                    offset = self._offsets[path] = size if raw_bytes else 0
                file.seek(offset)
                held = b""
                while chunk := file.read(READ_BYTES):
                    *lines, held = (held + chunk).split(b"\n")
                    for line in lines:
                        offset += len(line) + 1
                        self._offsets[path] = offset
                        yield line
                    if len(held) > LINE_BYTES_MAX:
                        offset += len(held)
                        self._offsets[path], held = offset, b""
        except OSError:
            return  # removed or unreadable for now: the next poll tries again


def _files(folder: Path) -> Iterator[Path]:
    return iter(sorted((folder / "events").glob("*.jsonl")))
