"""What happens at the store's failpoints, for tests and storms: a plan in words, put where `store.failpoints` asks.

    ATOLL_FAILPOINT="slot.header.sync:3"           SIGKILL this process at the third hit
    ATOLL_FAILPOINT="slot.data.mid:1:enospc"       raise that OSError from the first hit on, until the file named in
                                                   ATOLL_FAILPOINT_UNTIL exists (for ever where none is named)
    ATOLL_FAILPOINT="tape.sync:2-5:eio"            raise it at hits 2 to 5 only
    ATOLL_FAILPOINT="slot.*:1:eio,tape.*:1:eio"    patterns, and several of them

    ATOLL_DISK_FULL_FILE=PATH                      every point that takes room on the disk raises ENOSPC while PATH
                                                   exists: a full disk that comes and goes while the process runs

`chaos.inside` reads these variables; `arm` and `full_disk` take the same for a while, in tests.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from atoll.errors import ConfigError
from atoll.store import failpoints


def _steps(prefix: str) -> tuple[str, ...]:
    """The points of a file that is written aside and renamed into place (`files.Replacement`)."""
    return tuple(f"{prefix}.{step}" for step in ("create", "write.mid", "sync", "rename", "folder.sync"))


FAILPOINTS: tuple[str, ...] = (
    "epoch.folder",
    *_steps("epoch"),
    *_steps("claims"),
    "slot.create",
    "slot.allocate",
    "slot.data.mid",
    "slot.meta.mid",
    "slot.data.sync",
    "slot.header.mid",
    "slot.header.sync",
    "slot.rename",
    "slot.folder.sync",
    "slot.flipped",
    "slot.older.delete",
    "tape.append.mid",
    "tape.append.sync",
    "tape.appended",
    *_steps("tape"),
    "tape.drop",
    "log.create",
    "log.folder.sync",
    "log.append.mid",
    "log.append.sync",
    "log.committed",
    "log.drop",
    *_steps("snapshot.fragment"),
    *_steps("snapshot.rows"),
    *_steps("snapshot.manifest"),
    "snapshot.delete",
    *_steps("handover"),
    *_steps("export"),
    "commit.before_publish",
    "commit.after_publish",
    "drop.slots",
    "move.described",
    "move.read",
    "move.copied",
    "move.installed",
    "move.recorded",
    "move.told",
)
"""Every name that may be given. Those about publishing and moving are hit by the syncer's shell, all others in the
store."""

TAKES_ROOM = frozenset(
    name for name in FAILPOINTS if name.endswith((".create", ".allocate", ".mid")) or name == "epoch.folder"
)
"""The points at which a full disk shows: new files and folders, reserved room, written bytes. What was written can
still be synced and renamed, and deleting gives room back."""

ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}
_SPEC = re.compile(r"(?P<name>[a-z_.*]+):(?P<first>[1-9]\d*)(-(?P<last>[1-9]\d*))?(:(?P<what>kill|enospc|eio))?")


@dataclass(slots=True)
class _Failure:
    """One entry of ATOLL_FAILPOINT."""

    pattern: str
    first: int
    last: int | None
    error: int | None  # None: SIGKILL
    until: Path | None
    hits: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def matches(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.pattern)

    def hit(self, name: str) -> None:
        with self.lock:
            self.hits += 1
            count = self.hits
        if count < self.first or (self.last is not None and count > self.last):
            return
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.until is None or not self.until.exists():
            assert self.error is not None
            raise OSError(self.error, f"{os.strerror(self.error)} (failpoint {name}, hit {count})")


def _parse(text: str, until: str) -> tuple[_Failure, ...]:
    plans = []
    for part in text.split(","):
        if not part.strip():
            continue
        found = _SPEC.fullmatch(part.strip())
        if found is None or not fnmatch.filter(FAILPOINTS, found["name"]):
            raise ConfigError(
                f"ATOLL_FAILPOINT={part!r} is not NAME:N, NAME:N:enospc, NAME:N:eio or NAME:N-M:eio with a known "
                "name; unset it, or take a name from atoll.instruments.chaos.failpoints.FAILPOINTS"
            )
        error = ERRORS.get(found["what"] or "kill")
        last = int(found["last"]) if found["last"] else None
        plans.append(_Failure(found["name"], int(found["first"]), last, error, Path(until) if until else None))
    return tuple(plans)


@dataclass(slots=True)
class _Full:
    """The disk is full while a file exists."""

    path: Path

    def matches(self, name: str) -> bool:
        return name in TAKES_ROOM

    def hit(self, name: str) -> None:
        if self.path.exists():
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (chaos, at {name})")


class FailurePlan:
    """`store.failpoints.Failpoints`: every entry of a plan gets its say."""

    def __init__(self, entries: tuple[_Failure | _Full, ...]) -> None:
        self._entries = entries

    def armed(self, name: str) -> bool:
        return any(entry.matches(name) for entry in self._entries)

    def hit(self, name: str) -> None:
        assert name in FAILPOINTS, f"{name} is not in FAILPOINTS"
        for entry in self._entries:
            if entry.matches(name):
                entry.hit(name)


def failure_plan(text: str = "", *, until: str = "", full: str = "") -> FailurePlan | None:
    """The plan `text`, until a file exists, and a disk that is full while another does; None where there is neither."""
    entries: tuple[_Failure | _Full, ...] = _parse(text, until)
    entries += (_Full(Path(full)),) if full else ()
    return FailurePlan(entries) if entries else None


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """A disk that is full while `path` exists, inside a `with` block, for tests in one process."""
    with _installed(failure_plan(full=str(path))):
        yield


@contextmanager
def arm(text: str, until: Path | None = None) -> Iterator[None]:
    """Follow the plan `text` inside a `with` block, for tests in one process."""
    with _installed(failure_plan(text, until=str(until or ""))):
        yield


@contextmanager
def _installed(plan: FailurePlan | None) -> Iterator[None]:
    before = failpoints.install(plan)
    try:
        yield
    finally:
        failpoints.install(before)
