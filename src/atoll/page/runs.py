"""Which runs a page shows: one folder, every run in a folder of runs, or the syncer at an address."""

from __future__ import annotations

import threading
from pathlib import Path

from atoll.errors import LaunchError
from atoll.launch import RunFolder, run_folder_of
from atoll.launch import reach as find_syncer
from atoll.page.options import PageOptions
from atoll.page.status_feed import StatusFeed, SyncerPlaces
from atoll.page.watching import FolderFeed, WatchedRun

RUNS_MAX = 200
"""Runs of one folder that are listed, the newest first."""
LOG_BYTES_MAX = 256 << 10
"""Of the end of a log."""


class Runs:
    """The runs of one page, each watched from when it is first asked for."""

    def __init__(self, target: str, options: PageOptions) -> None:
        self._options = options
        self._watched: dict[str, WatchedRun] = {}
        self._lock = threading.Lock()
        self._parent: Path | None = None
        self._only = ""
        self._folder: RunFolder | None = None
        path = Path(target).expanduser()
        if path.is_dir() and _runs_in(path) and not _is_run(path):
            self._parent = path
            return
        folder = run_folder_of(target)
        self._only = folder.path.resolve().name if folder is not None else target
        if folder is not None:
            self._folder = folder
            self._watched[self._only] = WatchedRun(self._only, self._feed(folder))
        else:
            where = options.syncer or find_syncer(target).options
            self._watched[self._only] = WatchedRun(self._only, StatusFeed(where))

    def names(self) -> list[str]:
        if self._parent is None:
            return [self._only]
        return [path.name for path in _runs_in(self._parent)]

    def get(self, name: str) -> WatchedRun | None:
        """The run of that name; None if the page does not show one."""
        with self._lock:
            if name not in self._watched and name in self.names() and self._parent is not None:
                folder = RunFolder(self._parent / name)
                self._watched[name] = WatchedRun(name, self._feed(folder))
            return self._watched.get(name)

    def folder(self, name: str) -> RunFolder | None:
        """Its folder; None for a run that is only known by its syncer."""
        if self._parent is not None:
            return RunFolder(self._parent / name) if name in self.names() else None
        return self._folder if name == self._only else None

    def close(self) -> None:
        for run in self._watched.values():
            run.close()

    def _feed(self, folder: RunFolder) -> FolderFeed:
        places = SyncerPlaces(lambda: self._options.syncer or find_syncer(str(folder.path)).options)
        return FolderFeed(folder.path, places, lambda: places.parts)


def log_tail(folder: RunFolder, learner: str) -> bytes | None:
    """The end of what a learner printed; None if this folder has no such log. Only plain files of its logs are read."""
    path = folder.log_of(learner)
    if path is None:
        return None
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - LOG_BYTES_MAX))
        return file.read(LOG_BYTES_MAX)


def _runs_in(parent: Path) -> list[Path]:
    try:
        found = [path for path in parent.iterdir() if not path.is_symlink() and _is_run(path)]
        return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[:RUNS_MAX]
    except OSError:
        return []


def _is_run(path: Path) -> bool:
    try:
        return run_folder_of(str(path)) is not None if path.is_dir() else False
    except LaunchError:
        return False
