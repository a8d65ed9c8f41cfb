"""What the crash test kills: a process that forks children which work on a store until a failpoint kills them.

Reads lines "FOLDER POINT:N" and answers "STATUS HITS" for each: how the child ended, and whether the point was reached.
Forking from a process that has imported everything makes a child in milliseconds; the SIGKILL is a real one.

The child tells the journal what it is about to do and what it was promised, one line before and one after each step.
A line is one write: what was written before a SIGKILL stays.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from store_helpers import arrays_of, commit_any, follow, meta_of, rows_batch

from atoll.instruments.chaos.failpoints import arm
from atoll.store import Loaded, RunStore, SnapshotTarget, export_model, failpoints, open_store
from atoll.store.handover import Handover

FRAGMENTS = 2
ROUNDS = 8
LOGGED = (1, 3, 4, 5, 7)
"""Rounds whose versions go into the log; the first of an epoch goes into a slot."""
TENSORS = [["w", [2, 768], "float32", "rda"], ["b", [1536], "float32", "mean"]]
"""A model of two tensors that fills the two fragments of the helpers' size."""


def main() -> None:
    SnapshotTarget("anywhere")  # imports fsspec here, once, and not in every child
    for line in sys.stdin:
        folder, plan = line.split()
        pid = os.fork()
        if pid == 0:
            with arm(plan):
                work(Path(folder))
            os._exit(0)
        print(os.waitpid(pid, 0)[1], flush=True)


def work(folder: Path) -> None:
    journal = os.open(folder / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(*words: object) -> None:
        os.write(journal, (" ".join(map(str, words)) + "\n").encode())

    store = open_store(folder / "state", tape_bytes_max=600, tape_files_kept=2)
    store._log._segments._bytes_max = 1  # every record but the first of a segment begins another
    loaded = follow(store.load() or Loaded())
    for fragment, found in loaded.fragments.items():
        tell("loaded", fragment, found.version)
    tell("loaded-rows", loaded.rows.get("count", 0))
    versions = {f: loaded.fragments[f].version if f in loaded.fragments else -1 for f in range(FRAGMENTS)}
    number = int(loaded.rows.get("count", 0))
    for turn in range(ROUNDS):
        for fragment in range(FRAGMENTS):
            version = versions[fragment] + 1
            tell("commit", fragment, version)
            # The third round's meta data outgrows its room, so that a new file is made on the way, too.
            room = 150_000 if turn == 2 else 10
            commit_any(store, fragment, version, meta_of(fragment, version, room), log=turn in LOGGED)
            failpoints.hit("commit.before_publish")
            tell("committed", fragment, version)
            failpoints.hit("commit.after_publish")
            versions[fragment] = version
        number += 1
        tell("remember", number)
        store.remember(rows_batch(number))
        store.note({"n": number})
        store.sync()
        tell("synced", number)
        hand_over(folder, number, tell)
        if turn % 2 == 1:
            snapshot(folder, store, versions, tell)
    store.close()


def hand_over(folder: Path, number: int, tell) -> None:
    """What a learner that leaves gives: the newest is kept, the one before is merged."""
    held = Handover(folder / "state" / "handover")
    tell("hand", number)
    held.put(f"c{number}", {"n": number}, handed(number))
    tell("handed", number)
    held.drop(f"c{number - 1}")


def handed(number: int) -> NDArray[np.uint8]:
    return arrays_of(9, number)["theta"].view(np.uint8)


def snapshot(folder: Path, store: RunStore, versions: dict[int, int], tell) -> None:
    target = SnapshotTarget(str(folder / "snapshots"), keep=2)
    draft = target.begin(0)
    tell("snapshot", draft.label, *versions.values(), store.rows()["count"])
    arrays = {fragment: arrays_of(fragment, version) for fragment, version in versions.items()}
    for fragment, version in versions.items():
        draft.put_fragment(fragment, version, arrays[fragment], meta_of(fragment, version))
    draft.finish(store.rows(), {"run": "crash"})
    tell("finished", draft.label)
    loaded, _ = target.load_newest()
    assert loaded is not None
    rows = {"run": {"tensors": TENSORS, "fragments": FRAGMENTS}}
    tell("export", *versions.values())
    export_model(rows, loaded.fragments, folder / "model.safetensors")
    tell("exported", *itertools.islice(versions.values(), FRAGMENTS))


if __name__ == "__main__":
    main()
