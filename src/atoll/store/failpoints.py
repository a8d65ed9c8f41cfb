"""Places where the store can be made to die or to meet a broken disk, for tests.

`hit(name)` stands before every write, sync, rename and header flip. It does nothing unless the environment says so:

    ATOLL_FAILPOINT="slot.header.sync:3"           SIGKILL this process at the third hit
    ATOLL_FAILPOINT="slot.data.mid:1:enospc"       raise that OSError from the first hit on, until the file named in
                                                   ATOLL_FAILPOINT_UNTIL exists (for ever where none is named)
    ATOLL_FAILPOINT="tape.sync:2-5:eio"            raise it at hits 2 to 5 only
    ATOLL_FAILPOINT="slot.*:1:eio,tape.*:1:eio"    patterns, and several of them

Points that end in "mid" write the first half of their bytes before they are hit, which is how torn writes are made.

    ATOLL_DISK_FULL_FILE=PATH                      every point that takes room on the disk raises ENOSPC while PATH
                                                   exists: a full disk that comes and goes while the process runs

The environment is read once, when this module is imported; a process where it is not set pays one comparison a hit.
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
    *_steps("snapshot.fragment"),
    *_steps("snapshot.rows"),
    *_steps("snapshot.manifest"),
    "snapshot.delete",
    *_steps("handover"),
    *_steps("export"),
    "commit.before_publish",
    "commit.after_publish",
)
"""Every name that may be given. The two about publishing are hit by the syncer's shell, all others in this room."""

TAKES_ROOM = frozenset(
    name for name in FAILPOINTS if name.endswith((".create", ".allocate", ".mid")) or name == "epoch.folder"
)
"""The points at which a full disk shows: new files and folders, reserved room, written bytes. What was written can
still be synced and renamed, and deleting gives room back."""

ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}
_SPEC = re.compile(r"(?P<name>[a-z_.*]+):(?P<first>[1-9]\d*)(-(?P<last>[1-9]\d*))?(:(?P<what>kill|enospc|eio))?")


@dataclass(slots=True)
class _Plan:
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


def _parse(text: str | None, until: str | None) -> tuple[_Plan, ...]:
    plans = []
    for part in (text or "").split(","):
        if not part.strip():
            continue
        found = _SPEC.fullmatch(part.strip())
        if found is None or not fnmatch.filter(FAILPOINTS, found["name"]):
            raise ConfigError(
                f"ATOLL_FAILPOINT={part!r} is not NAME:N, NAME:N:enospc, NAME:N:eio or NAME:N-M:eio with a known "
                "name; unset it, or take a name from atoll.store.failpoints.FAILPOINTS"
            )
        error = ERRORS.get(found["what"] or "kill")
        last = int(found["last"]) if found["last"] else None
        plans.append(_Plan(found["name"], int(found["first"]), last, error, Path(until) if until else None))
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


def _read_environment() -> tuple[_Plan | _Full, ...]:
    full = os.environ.get("ATOLL_DISK_FULL_FILE")
    plans = _parse(os.environ.get("ATOLL_FAILPOINT"), os.environ.get("ATOLL_FAILPOINT_UNTIL"))
    return (*plans, *([_Full(Path(full))] if full else []))


_plans: tuple[_Plan | _Full, ...] = _read_environment()


def hit(name: str) -> None:
    """Die or raise here if the plan says so."""
    if _plans:
        assert name in FAILPOINTS, f"{name} is not in FAILPOINTS"
        for plan in _plans:
            if plan.matches(name):
                plan.hit(name)


def armed(name: str) -> bool:
    """Whether `name` is part of the plan, so that a write has to be done in two halves."""
    return bool(_plans) and any(plan.matches(name) for plan in _plans)


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """A disk that is full while `path` exists, inside a `with` block, for tests in one process."""
    global _plans
    before, _plans = _plans, (_Full(path),)
    try:
        yield
    finally:
        _plans = before


@contextmanager
def arm(text: str, until: Path | None = None) -> Iterator[None]:
    """Follow the plan `text` inside a `with` block, for tests in one process."""
    global _plans
    before, _plans = _plans, _parse(text, str(until) if until else None)
    try:
        yield
    finally:
        _plans = before
