"""The state folder of a run, as the syncer uses it.

    state/epoch.json                          the newest epoch
    state/lock                                held by the process that writes here
    state/epoch-00002/fragment-0007.slots     one file per fragment with its last two versions
    state/epoch-00002/log-00002-00000003.log  what the versions after the slots were made from
    state/epoch-00002/claims.json             what that epoch took over from older ones
    state/tape/tape-00002-00000012.log        rows and decisions
    state/recording/recording-00002-....log   with --record: payloads and states, for replay

Threads: `remember` and `note` on one thread, which they never hold up; `sync`, `commit` and `check_epoch` on any,
several at once, but one commit per fragment at a time. OSError from `sync` or `commit` means "not durable yet" and
nothing worse: the store stays usable, and the next success covers everything.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.store import failpoints, files, recover
from atoll.store.commit_log import CommitLog, Payload
from atoll.store.epoch import TAPE_FOLDER, Tenure, alone, begin_epoch, epoch_folders
from atoll.store.handover import Handover
from atoll.store.loaded import Loaded
from atoll.store.recording import Recording, RecordPosition
from atoll.store.slots import Arrays, CommitStats, SlotFile
from atoll.store.tape import TAPE_BYTES_MAX, TAPE_FILES_KEPT, Tape
from atoll.store.tape_record import read_rows


def open_store(
    path: Path,
    *,
    take_over: bool = False,
    tape_bytes_max: int = TAPE_BYTES_MAX,
    tape_files_kept: int = TAPE_FILES_KEPT,
) -> RunStore:
    """Open RUN/state under a new epoch. Raises StoreError if a living process holds it, unless `take_over`."""
    tenure = begin_epoch(path, take_over=take_over)
    try:
        folder = path / TAPE_FOLDER
        with tenure.writing():
            rows, problems = read_rows(folder)
            tape = Tape(folder, tenure.epoch, rows, bytes_max=tape_bytes_max, files_kept=tape_files_kept)
            tape.sync()
        return RunStore(tenure, tape, Loaded(rows, {}, [*tenure.problems, *problems]))
    except BaseException:
        tenure.release()
        raise


class RunStore:
    """Made by `open_store`."""

    def __init__(self, tenure: Tenure, tape: Tape, opened: Loaded) -> None:
        self._tenure = tenure
        self._tape = tape
        self._opened = opened
        self._slots: dict[int, SlotFile] = {}
        self._log = CommitLog(tenure.folder, tenure.epoch)
        self._lock = threading.Lock()
        self._older = [folder for epoch, folder in epoch_folders(tenure.state).items() if epoch < tenure.epoch]
        self._cleaned: set[int] = set()

    @property
    def epoch(self) -> int:
        return self._tenure.epoch

    @property
    def path(self) -> Path:
        """RUN/state."""
        return self._tenure.state

    def load(self) -> Loaded | None:
        """Everything as it was when this process opened the folder; None if nothing was ever kept here. Call it once,
        before the first commit."""
        with self._tenure.writing():
            loaded, claims, reached = recover.patiently(self._load_once)
            recover.write_claims(self._tenure.folder, claims, reached)
        self._remove_empty_epochs()
        return loaded if loaded.rows or loaded.fragments or loaded.problems else None

    def _load_once(self) -> tuple[Loaded, dict[int, recover.Claim], dict[int, tuple[int, int]]]:
        loaded = Loaded(dict(self._opened.rows), {}, list(self._opened.problems))
        return loaded, *recover.load_fragments(self._tenure.state, loaded)

    def remember(self, rows: Mapping[str, Any | None]) -> None:
        """Append one atomic batch of rows (JSON values; None deletes). Not durable before the next `sync`."""
        self._tape.remember(rows)

    def note(self, record: Mapping[str, Any]) -> None:
        """Append a decision that has no key: history, for replay and for people."""
        self._tape.note(record)

    def rows(self) -> dict[str, Any]:
        """Every row as it stands now, durable or not: what goes into a snapshot."""
        return self._tape.rows()

    def sync(self) -> None:
        """Return when everything appended before this call is durable, and this syncer is still the newest."""
        with self._tenure.writing():
            self._tape.sync()
        self.check_epoch()

    def commit(self, fragment: int, version: int, arrays: Arrays, meta: Mapping[str, Any]) -> CommitStats:
        """Make a version durable. It may be published when this returns, and must not be when it raises.

        The arrays must not change meanwhile. After an OSError the same or a newer version may be committed again.
        """
        self.check_epoch()  # a fenced syncer finishes at most the commit that it was in
        with self._lock:
            slots = self._slots.get(fragment)
            if slots is None:
                path = recover.slots_path(self._tenure.folder, fragment)
                slots = self._slots[fragment] = SlotFile(path, self.epoch, fragment)
        with self._tenure.writing():
            stats = slots.commit(version, arrays, meta)
        self.check_epoch()
        self._log.in_slot(fragment, version)
        if fragment not in self._cleaned:
            self._delete_older(fragment)
        return stats

    def describe_log(self, about: Mapping[str, Any]) -> None:
        """What is needed to do the merges of the log again: the run, its settings, its tensors."""
        self._log.describe(about)

    def log_payloads(self, fragment: int, version: int, payloads: Sequence[Payload]) -> list[RecordPosition]:
        """Make what a version is made from durable. After an OSError nothing of it counts."""
        with self._tenure.writing():
            return self._log.payloads(fragment, version, payloads)

    def log_commit(
        self,
        fragment: int,
        version: int,
        meta: Mapping[str, Any],
        weights: Sequence[float],
        places: Sequence[RecordPosition],
    ) -> CommitStats:
        """As `commit`, by what the version was made from. The version before it must be durable in this epoch."""
        begun = time.monotonic_ns()
        self.check_epoch()
        with self._tenure.writing():
            size = self._log.commit(fragment, version, meta, weights, places)
        self.check_epoch()
        size += sum(place.end - place.offset for place in places)
        return CommitStats(size, 0, time.monotonic_ns() - begun)

    def drop(self, fragment: int) -> None:
        """Another store has this fragment now: nothing of it is found here any more. Raises OSError if that cannot be
        made durable; it may be called again."""
        self.check_epoch()
        with self._tenure.writing(), self._lock:
            self._slots.pop(fragment, None)
            for folder in (*self._older, self._tenure.folder):
                failpoints.hit("drop.slots")
                if folder.is_dir():
                    files.remove(recover.slots_path(folder, fragment))
                    files.sync_folder(folder, "slot.folder.sync")
        self._log.in_slot(fragment, recover.VERSION_MAX)  # its merges in the log are nobody's

    def recording(self) -> Recording:
        """Where this epoch records what its merges are made from."""
        return Recording(self.path, self.epoch)

    def handover(self) -> Handover:
        """What leaving learners have handed over."""
        return Handover(self.path / "handover")

    def reopen(self) -> RunStore:
        """Let go of the folder, and open it again under the next epoch."""
        self.close()
        return open_store(self.path)

    def check_epoch(self) -> None:
        """Raise FencedSyncerError if a newer syncer has taken over."""
        self._tenure.check()

    def while_newest(self, act: Callable[[], None]) -> None:
        """Do something short while nobody can take over; raise FencedSyncerError if somebody has."""
        with alone(self.path):
            self.check_epoch()
            act()

    def close(self) -> None:
        """Make durable what is left, and let go of the folder. A fenced syncer only lets go."""
        try:
            if not self._tenure.fenced:
                with self._tenure.writing():
                    self._tape.sync()
        finally:
            self._log.close()
            self._tape.close()
            self._tenure.release()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _delete_older(self, fragment: int) -> None:
        """The fragment now lives in this epoch; files of older ones go. A failure is tried again at its next commit."""
        with contextlib.suppress(OSError), self._lock:
            for folder in self._older:
                failpoints.hit("slot.older.delete")
                files.remove(recover.slots_path(folder, fragment))
            self._cleaned.add(fragment)
            self._remove_empty_epochs()

    def _remove_empty_epochs(self) -> None:
        for folder in list(self._older):
            with contextlib.suppress(OSError):
                if folder.is_dir():
                    recover.remove_epoch(folder)
                if not folder.exists():
                    self._older.remove(folder)
