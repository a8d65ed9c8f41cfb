"""Event files over months: a process writes parts of bounded size, and old parts are folded.

    RUN/events/learner-a-4711.jsonl          the first part of process 4711
    RUN/events/learner-a-4711.0002.jsonl     the next one

Folding a part keeps every sum that goodput, ledger and report rest on, and every rare event, and lets the events of
single rounds go (`thin`): 32 MiB become some 100 KB. Its first line is RoundsFolded, which counts what has gone. The
newest 128 MiB of all processes of one learner (or of the syncer) are never folded, so whoever follows a run has
read a part long before.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from atoll.observe import events
from atoll.observe.lines import decode, encode
from atoll.observe.thin import Thinner
from atoll.private import FILE_MODE

PART_BYTES_MAX = 32 << 20
"""About four hours of a busy learner."""
RAW_PARTS_MAX = 4
"""As much as so many parts is kept whole, over all processes of one name."""
_PART = re.compile(r"\.(\d{4,})$")
_FOLDED = b'"kind":"rounds_folded"'
_HEAD_BYTES = 64
"""Within these the kind of the first line is told: `encode` writes it after the time."""


def part_path(path: Path, number: int) -> Path:
    """The file of a part; the first has the plain name."""
    return path if number == 1 else path.with_name(f"{path.stem}.{number:04d}{path.suffix}")


def newest_part(path: Path) -> int:
    """The part that a writer goes on with."""
    found = [int(m[1]) for one in path.parent.glob(f"{path.stem}.*{path.suffix}") if (m := _PART.search(one.stem))]
    return max(found, default=1)


def source_of(path: Path) -> str:
    """The process that a file is of: the stem of its first part."""
    return _PART.sub("", path.stem)


def is_folded(path: Path) -> bool:
    return folded_bytes(path) > 0


def folded_bytes(path: Path) -> int:
    """The size of a part before it was folded; 0 for one that is whole."""
    try:
        with path.open("rb") as file:
            if _FOLDED not in file.read(_HEAD_BYTES):
                return 0
            file.seek(0)
            decoded = decode(file.readline())
    except OSError:
        return 0
    return decoded[1].raw_bytes if decoded is not None and isinstance(decoded[1], events.RoundsFolded) else 0


def fold_old(path: Path, raw_bytes_max: int) -> None:
    """Fold what is beyond the newest raw bytes of this process and of earlier ones of the same name. May raise OSError;
    then what was there is still there."""
    own = re.compile(re.escape(re.sub(r"-\d+$", "", path.stem)) + r"(-\d+)?(\.\d{4,})?")
    files = [one for one in path.parent.glob("*.jsonl") if own.fullmatch(one.stem)]
    raw = sorted((one for one in files if not is_folded(one)), key=lambda one: one.stat().st_mtime_ns, reverse=True)
    total = 0
    for i, one in enumerate(raw):
        total += one.stat().st_size
        if i > 0 and total > raw_bytes_max:  # the newest is being written
            fold(one)


def fold(path: Path) -> None:
    """Put the folded form in the place of a part, at once."""
    stat = path.stat()
    partial = path.with_suffix(".folding")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file, path.open("rb") as source:
        file.writelines(folded_lines(source, stat.st_size))
    os.utime(partial, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    partial.replace(path)


def folded_lines(lines: Iterable[bytes], raw_bytes: int) -> list[bytes]:
    """The lines of the folded form, RoundsFolded first."""
    thinner, gone = Thinner(), FoldedRounds()
    kept: list[tuple[int, events.Event]] = []
    first_ns = last_ns = 0
    for line in lines:
        decoded = decode(line)
        if decoded is None:
            continue
        last_ns, event = decoded
        first_ns = first_ns or last_ns
        if not gone.take(event):
            kept += thinner.take(last_ns, event)
    kept += thinner.rest()
    kept.sort(key=lambda stamped: stamped[0])
    return [encode(first_ns, gone.event(raw_bytes)), *(encode(t_ns, event) for t_ns, event in kept)]


class FoldedRounds:
    """Adds up what the events of single rounds say."""

    def __init__(self) -> None:
        self._raw_bytes = 0
        self._sums: Counter[str] = Counter()
        self._closed: Counter[str] = Counter()
        self._up: Counter[str] = Counter()
        self._down: Counter[str] = Counter()

    def take(self, event: events.Event) -> bool:
        """True for what is told by the sums alone."""
        match event:
            case events.Committed():
                stored = event.store_bytes > 0 or event.store_ns > 0
                self._sums.update(commits=1, merged=len(event.contributors), stored=int(stored))
                self._sums.update(store_ns=event.store_ns, store_bytes=event.store_bytes)
            case events.ContributionReceived():
                self._sums.update(late=int(event.late))
            case events.RoundClosed():
                self._closed[event.reason] += 1
            case events.LearnerPushed():
                self._up[event.learner] += event.bytes
            case events.LearnerFetched():
                self._down[event.learner] += event.bytes
            case events.RoundsFolded():
                self._raw_bytes = event.raw_bytes
                for name in _SUMMED:
                    self._sums[name] += getattr(event, name)
                for mine, theirs in ((self._closed, event.closed), (self._up, event.up), (self._down, event.down)):
                    mine.update(theirs)
            case events.LearnerAdopted() | events.RoundLaunched():
                pass
            case _:
                return False
        return True

    def event(self, raw_bytes: int) -> events.RoundsFolded:
        sums = self._sums
        return events.RoundsFolded(
            commits=sums["commits"],
            merged=sums["merged"],
            late=sums["late"],
            stored=sums["stored"],
            store_ns=sums["store_ns"],
            store_bytes=sums["store_bytes"],
            closed=dict(self._closed),
            up=dict(self._up),
            down=dict(self._down),
            raw_bytes=self._raw_bytes or raw_bytes,
        )


_SUMMED = ("commits", "merged", "late", "stored", "store_ns", "store_bytes")
