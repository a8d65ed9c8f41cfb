"""A syncer's process, reduced to its store, for tests that freeze or kill one. Talks in lines on stdin and stdout.

store_child.py hold STATE            open, say "open", keep the lock until stdin closes
store_child.py freeze STATE POINT    commit versions 0 to 3 of two fragments, then stop itself (SIGSTOP) inside the
                                     commit of version 4, at the failpoint POINT; when continued, finish it
store_child.py open STATE [POINT]    open by taking over, stopping itself at POINT, and check the epoch; say "open N"
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from store_helpers import arrays_of, meta_of, rows_batch

from atoll.errors import FencedSyncerError
from atoll.store import failpoints, open_store

FENCED = 7
"""Exit status of a process that found itself fenced."""


def hold(state: Path) -> None:
    with open_store(state):
        print("open", flush=True)
        sys.stdin.read()


def stop_once_at(point: str) -> None:
    stopped = False

    def hit(name: str) -> None:
        nonlocal stopped
        if name == point and not stopped:
            stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)

    failpoints.armed = lambda name: name == point
    failpoints.hit = hit


def freeze(state: Path, point: str) -> None:
    with open_store(state) as store:
        store.load()
        for version in range(4):
            for fragment in range(2):
                store.commit(fragment, version, arrays_of(fragment, version), meta_of(fragment, version))
        store.remember(rows_batch(1))
        store.sync()
        print("committed", flush=True)
        stop_once_at(point)
        try:
            store.remember(rows_batch(2))
            store.commit(0, 4, arrays_of(0, 4), meta_of(0, 4))
            print("published", flush=True)
            store.sync()
        except FencedSyncerError as error:
            print(f"fenced: {error}", flush=True)
            sys.exit(FENCED)


def open_and_check(state: Path, point: str = "") -> None:
    stop_once_at(point)
    try:
        with open_store(state, take_over=True) as store:
            if point:
                store.check_epoch()
            print(f"open {store.epoch}", flush=True)
    except FencedSyncerError as error:
        print(f"fenced: {error}", flush=True)
        sys.exit(FENCED)


if __name__ == "__main__":
    what = {"hold": hold, "freeze": freeze, "open": open_and_check}[sys.argv[1]]
    what(Path(sys.argv[2]), *sys.argv[3:])
