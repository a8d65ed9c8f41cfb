"""A learner's inner state on its own disk: RUN/learners/NAME/inner-SEQUENCE-CHECKSUM.safetensors.

A checkpoint is written beside its final name, synced, and then renamed: what has the final name is whole. The name
carries the xxh3-64 of every byte of the file, so that a torn or rotten one is noticed when it is read, and the one
before is used. Writing happens on a thread of its own; training goes on when it fails.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from atoll.errors import LocalProtocolError, PayloadError
from atoll.learner.inner import BLOB_BYTES_MAX, Captured, InnerAbout, parts, unpack
from atoll.learner.inner_state import folder_name
from atoll.private import FILE_MODE, make_private_folder

KEPT = 2
"""The newest, and the one before in case the newest is damaged. A third exists while it is being written."""
CANDIDATES_MAX = 4
"""Files that loading tries: those kept, and what a kill between rename and clean-up may leave."""
WRITE_BYTES = 16 * 2**20
"""One write call: large enough for a disk's bandwidth, small enough for the checksum to find it in the cache."""
TEMPORARY_S_MAX = 3600.0
"""Where files cannot be locked, a temporary file is taken for a dead process's after this long."""

_NAME = re.compile(r"inner-(\d{8,18})-([0-9a-f]{16})\.safetensors")
_TEMPORARY = "writing-"


@dataclass(frozen=True, slots=True)
class WriteStats:
    """One checkpoint that is safe on disk."""

    file: Path
    bytes: int
    write_ns: int
    """All of it, from the first byte to the clean-up."""
    sync_ns: int
    """The part of it that waited for the disk."""


class CheckpointFile:
    """The checkpoints of one learner in the folder of its run."""

    def __init__(self, folder: Path, learner: str, part: str = "") -> None:
        """`folder` is the run's. Ids that are no file names get a folder of their own all the same. `part`: of a
        learner of several processes, which one this is."""
        self._name = folder_name(learner)
        self.folder = folder / "learners" / self._name / part
        self.learner = learner

    def write(self, captured: Captured) -> WriteStats:
        """Background. When it returns, the checkpoint survives a power cut; when it raises OSError, those before do."""
        began_ns = time.perf_counter_ns()
        make_private_folder(self.folder)
        self._remove_stale()
        temporary = self.folder / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # tells others that this one is not stale
            size, checksum = _write_parts(handle, captured)
            sync_ns = _timed(lambda: os.fsync(handle))
            sequence = max((number for number, _, _ in self._files()), default=0) + 1
            final = self.folder / f"inner-{sequence:08d}-{checksum}.safetensors"
            temporary.rename(final)
            sync_ns += _timed(lambda: _sync_folder(self.folder))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        for _, _, old in self._files()[KEPT:]:
            old.unlink(missing_ok=True)
        return WriteStats(final, size, time.perf_counter_ns() - began_ns, sync_ns)

    def load(self, *, run: str | None = None, step: int | None = None) -> tuple[Captured | None, list[str]]:
        """The newest checkpoint that is whole and this learner's own (and of the run `run` and the step `step`, if
        given), and what was wrong with newer ones."""
        problems: list[str] = []
        for _, checksum, file in self._files()[:CANDIDATES_MAX]:
            try:
                captured = _read(file, checksum)
            except (OSError, PayloadError, MemoryError) as error:
                problems.append(f"{file.name}: {error}")
                continue
            about = captured.about
            if folder_name(about.learner) != self._name:
                problems.append(f"{file.name}: it is of learner {about.learner!r}, not {self.learner!r}; not loaded")
            elif run is not None and about.run != run:
                problems.append(f"{file.name}: it is of run {about.run!r}, this is run {run!r}; not loaded")
            elif step is not None and about.step != step:
                continue  # other ranks do not have this one
            else:
                return captured, problems
        return None, problems

    def remove(self) -> None:
        """Forget every checkpoint of this learner."""
        for _, _, file in self._files():
            file.unlink(missing_ok=True)
        self._remove_stale()
        with suppress(OSError):
            self.folder.rmdir()  # stays if somebody else put something there

    def _files(self) -> list[tuple[int, str, Path]]:
        return checkpoint_files(self.folder)

    def _remove_stale(self) -> None:
        """Delete what killed processes left half-written. A process that still writes, under this id until it learns
        that it was fenced, holds a lock on its file."""
        for file in self.folder.glob(f"{_TEMPORARY}*"):
            with suppress(OSError):  # gone already, or not ours: no reason not to write
                if _is_stale(file):
                    file.unlink()


def checkpoint_files(folder: Path) -> list[tuple[int, str, Path]]:
    """(sequence number, checksum, path), newest first."""
    try:
        found = [(match, entry) for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name))]
    except OSError:
        return []
    return sorted(((int(match[1]), match[2], entry) for match, entry in found), reverse=True)


def checksum_of(file: Path) -> str:
    """Of every byte, without keeping them."""
    hasher, piece = xxhash.xxh3_64(), np.empty(WRITE_BYTES, np.uint8)
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(piece.data):
            hasher.update(piece[:count].data)
    return hasher.hexdigest()


def _is_stale(file: Path) -> bool:
    with file.open("rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # some cluster file systems have no locks
            return time.time() - file.stat().st_mtime > TEMPORARY_S_MAX
        return True


def _write_parts(handle: int, captured: Captured) -> tuple[int, str]:
    """Stream the capture to an open file; gives (bytes, checksum)."""
    hasher, size = xxhash.xxh3_64(), 0
    for part in parts(captured):
        for at in range(0, len(part), WRITE_BYTES):
            piece = part[at : at + WRITE_BYTES]
            hasher.update(piece)
            size += len(piece)
            while len(piece):
                piece = piece[os.write(handle, piece) :]
    return size, hasher.hexdigest()


def _read(file: Path, checksum: str) -> Captured:
    with file.open("rb", buffering=0) as source:
        size = os.fstat(source.fileno()).st_size
        if size > BLOB_BYTES_MAX:
            raise PayloadError(f"{size} bytes are too many; delete it")
        blob = np.empty(size, np.uint8)
        at = 0
        while at < size and (count := source.readinto(blob[at : at + WRITE_BYTES].data)):
            at += count
    if at != size or xxhash.xxh3_64_hexdigest(blob.data) != checksum:
        raise PayloadError("its bytes do not match the checksum in its name; it is damaged and may be deleted")
    return unpack(blob)


def _sync_folder(folder: Path) -> None:
    """Make a rename in the folder, and the folder itself, survive a power cut."""
    for path in (folder, folder.parent):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _timed(work: Callable[[], None]) -> int:
    began_ns = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - began_ns


class CheckpointWriter:
    """Writes captures on one background thread. At most two captures exist: one being written, and a newer one.

        captured = capture(optimizer, extras, about, reuse=writer.spare())
        writer.offer(captured)      # from here on it belongs to the writer

    `spare` gives back the memory of a capture that is not needed any more, which makes the next capture several times
    faster, and holds the bound: a capture that waits for its turn is dropped for the newer one *before* that is taken.
    """

    def __init__(
        self,
        file: CheckpointFile,
        say: Callable[[str], None],
        *,
        written: Callable[[InnerAbout, WriteStats], None] | None = None,
    ) -> None:
        """`say` is told when writing begins to fail and when it works again, `written` of every checkpoint; both on the
        writer's thread."""
        self._file = file
        self._say = say
        self._written = written
        self._changed = threading.Condition()
        self._waiting: Captured | None = None
        self._spare: Captured | None = None
        self._busy = False
        self._closing = False
        self._failing: tuple[type[Exception], int | None] | None = None
        self._thread = threading.Thread(target=self._run, name="atoll-checkpoint", daemon=True)
        self._thread.start()

    def offer(self, captured: Captured) -> None:
        """Training thread: have this written as soon as possible. Never blocks."""
        with self._changed:
            if self._closing:
                raise LocalProtocolError("a capture was offered to a closed CheckpointWriter; offer it before `close`")
            self._waiting = captured
            self._spare = None
            self._changed.notify_all()

    def spare(self) -> Captured | None:
        """Training thread, just before a capture: one whose memory may be written over."""
        with self._changed:
            spare = self._spare if self._waiting is None else self._waiting
            self._waiting = self._spare = None
            return spare

    @property
    def busy(self) -> bool:
        """True while a capture is being written or waits to be."""
        with self._changed:
            return self._busy or self._waiting is not None

    def close(self, timeout_s: float) -> bool:
        """Write what waits, then end the thread. False if that took too long; the thread then ends with the process."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (captured := self._next()) is not None:
            try:
                stats = self._file.write(captured)
            except Exception as error:
                self._failed(captured.about, error)
            else:
                self._worked(captured.about, stats)
            with self._changed:
                self._busy = False
                self._spare = captured if self._waiting is None and not self._closing else None
                captured = None

    def _next(self) -> Captured | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closing)
            captured, self._waiting = self._waiting, None
            self._busy = captured is not None
            return captured

    def _failed(self, about: InnerAbout, error: Exception) -> None:
        kind = (type(error), getattr(error, "errno", None))
        if kind != self._failing:
            remedy = f"; make room or correct the permissions in {self._file.folder}" if kind[1] else ""
            self._say(
                f"the checkpoint of step {about.step} could not be written: {error}; training goes on, and the next "
                f"one is tried when it is due{remedy}"
            )
        self._failing = kind

    def _worked(self, about: InnerAbout, stats: WriteStats) -> None:
        if self._failing is not None:
            self._say(f"checkpoints are written again: step {about.step}, {stats.bytes} bytes")
        self._failing = None
        if self._written is not None:
            self._written(about, stats)
