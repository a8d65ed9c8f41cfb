"""Which syncer may commit: the one with the highest epoch.

Two things keep two syncers apart. A lock on `state/lock`, held for life, catches the ordinary mistake (started twice
on one machine) and dies with its process. The epoch catches what a lock cannot: a process that was frozen, or whose
machine was out of reach, and comes back after another one has taken over. Every opening writes the next number to
`state/epoch.json` before it reads anything, and writes only below its own `state/epoch-N/`. A syncer looks at the
number after each commit and publishes nothing if it has been passed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import FencedSyncerError, PayloadError, StoreError
from atoll.store import files
from atoll.store.documents import json_object

EPOCH_FILE = "epoch.json"
LOCK_FILE = "lock"
TAPE_FOLDER = "tape"
OPENING_WAIT_S = 60.0
"""How long an opening waits for another opening of the same folder. One takes milliseconds, on a busy disk seconds."""
SMALL_FILE_BYTES_MAX = 64 << 10
"""epoch.json and lock hold a hundred bytes."""
EPOCH_MAX = 10**12
"""A restart every second for thirty thousand years. A higher number is damage, from which nobody could count on."""
_EPOCH_NAME = re.compile(r"epoch-(\d{5,})")
_TAPE_NAME = re.compile(r"tape-(\d{5,})-\d{8,}\.log")


@dataclass(slots=True)
class Tenure:
    """This process's right to write: its epoch and its lock."""

    state: Path
    epoch: int
    problems: list[str]
    lock: int
    fenced: str = ""
    """Who has taken over, once that was seen."""

    @property
    def folder(self) -> Path:
        return epoch_folder(self.state, self.epoch)

    def check(self) -> None:
        """Raise FencedSyncerError if a newer epoch is on the disk, or once was."""
        if not self.fenced:
            try:
                found = _read_small(self.state / EPOCH_FILE)
            except FileNotFoundError:
                found = None
            newest = _epoch_in(found)
            if newest is None:  # damaged or deleted; a new syncer makes its folder first
                newest = max(epoch_folders(self.state), default=0)
            if newest <= self.epoch:
                return
            self.fenced = (
                f"a newer syncer (epoch {newest}, {_holder(found)}) has taken over this run in {self.state}; "
                f"this one (epoch {self.epoch}) has published nothing since. Let it end; the run goes on without it"
            )
        raise FencedSyncerError(self.fenced)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """An OSError in the block may come of a newer syncer, which clears away what older ones were writing: then it
        comes out as FencedSyncerError."""
        try:
            yield
        except OSError:
            self.check()
            raise

    def release(self) -> None:
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def begin_epoch(state: Path, *, take_over: bool) -> Tenure:
    """Take the lock and write the next epoch, durably, before anything else is read; clear away what older ones left.

    The clearing is done while no other opening runs: an older one never takes a newer one's files for leftovers.
    """
    files.make_folders(state, "epoch.folder")
    with alone(state):
        lock = _take_lock(state, take_over)
        try:
            problems: list[str] = []
            epoch = _last_epoch(state, problems) + 1
            files.make_folder(epoch_folder(state, epoch), "epoch.folder")
            document = {"epoch": epoch, "pid": os.getpid(), "host": socket.gethostname()}
            files.replace_file(state / EPOCH_FILE, json.dumps(document).encode(), "epoch")
            _clear(state, epoch)
        except BaseException:
            os.close(lock)
            raise
    return Tenure(state, epoch, problems, lock)


def _clear(state: Path, epoch: int) -> None:
    """Make the folders ready for `epoch`. Half-written files are of a crash, or of a syncer that is fenced now."""
    if not (tape := state / TAPE_FOLDER).is_dir():
        files.make_folder(tape, "epoch.folder")
    for folder in state.iterdir():
        # An older syncer, alive, may tidy up as well; what cannot be read (lost+found) is not ours.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            for left in folder.iterdir():
                if left.name.endswith(files.TEMPORARY):
                    files.remove(left)
    for number, older in epoch_folders(state).items():
        if number != epoch:
            with contextlib.suppress(OSError):
                older.rmdir()  # only if it is empty: of an opening that died at once


def epoch_folder(state: Path, epoch: int) -> Path:
    return state / f"epoch-{epoch:05}"


def epoch_folders(state: Path) -> dict[int, Path]:
    """Every epoch's folder, newest first."""
    found = {int(match[1]): path for path in state.iterdir() if (match := _EPOCH_NAME.fullmatch(path.name))}
    return dict(sorted(found.items(), reverse=True))


def _last_epoch(state: Path, problems: list[str]) -> int:
    """The highest number that was ever used here. Names of folders and tape files count too: the file may be
    damaged."""
    traces = [0, *epoch_folders(state)]
    if (tape := state / TAPE_FOLDER).is_dir():
        traces += [int(match[1]) for path in tape.iterdir() if (match := _TAPE_NAME.fullmatch(path.name))]
    try:
        written = _read_small(state / EPOCH_FILE)
    except FileNotFoundError:
        if max(traces) > 0:
            problems.append(f"{EPOCH_FILE} is missing; epoch {max(traces)} is taken from the names of other files")
        return max(traces)
    epoch = _epoch_in(written)
    if epoch is None:
        problems.append(f"{EPOCH_FILE} is damaged; epoch {max(traces)} is taken from the names of other files")
        return max(traces)
    return max(epoch, *traces)


def _epoch_in(found: dict[str, Any] | None) -> int | None:
    """The number in an epoch.json, None if there is none that can be."""
    epoch = found.get("epoch") if found is not None else None
    return epoch if type(epoch) is int and 0 <= epoch <= EPOCH_MAX else None


def _read_small(path: Path) -> dict[str, Any] | None:
    """A small JSON object, or None where the file holds something else."""
    with path.open("rb") as file:
        data = file.read(SMALL_FILE_BYTES_MAX)
    with contextlib.suppress(PayloadError):
        return json_object(data, path.name)
    return None


@contextlib.contextmanager
def alone(state: Path) -> Iterator[None]:
    """Openings of one folder go one after the other: a lock on the folder itself, for a moment. Nobody takes over
    meanwhile."""
    with files.opened(state, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        deadline_s = time.monotonic() + OPENING_WAIT_S
        while not _flock(descriptor, state):
            if time.monotonic() > deadline_s:
                raise StoreError(
                    f"another process has been opening {state} for {OPENING_WAIT_S:.0f} s; end it and try again"
                )
            time.sleep(0.01)
        yield


def is_held(state: Path) -> bool:
    """Whether a living process holds this state. Where the file system has no locks, nobody is seen to."""
    try:
        with files.opened(state / LOCK_FILE, os.O_RDWR) as descriptor:
            return not _flock(descriptor, state / LOCK_FILE)
    except (OSError, StoreError):
        return False


def _take_lock(state: Path, take_over: bool) -> int:
    """The lock of this process's life, as a descriptor. Runs inside `alone`, so nobody else replaces the file."""
    path = state / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _flock(descriptor, path):
            if not take_over:
                raise StoreError(
                    f"another syncer ({_holder(_read_small(path))}) is using {state}; stop it, or start this one with "
                    "--take-over if the other one hangs"
                )
            # The old holder keeps its lock, on a file that no longer has a name; from here on the name is ours.
            os.close(descriptor)
            fresh = path.with_name(path.name + files.TEMPORARY)
            descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            _flock(descriptor, fresh)
            fresh.replace(path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _flock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StoreError(
            f"{path} cannot be locked ({error.strerror}); put the run folder on a file system that has locks, such as "
            "a local disk"
        ) from error
    return True


def _holder(found: dict[str, Any] | None) -> str:
    values = found or {}
    return f"process {values.get('pid', 'unknown')} on {values.get('host', 'an unknown host')}"
