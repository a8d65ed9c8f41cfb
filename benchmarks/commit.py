"""What durability costs: a commit against the plain writes it consists of, and loading a state after a restart.

    python benchmarks/commit.py [--params 4.2] [--commits 30] [--load-gb 1] [--folder .]

A commit makes one fragment durable: three fp32 arrays (Theta, momentum, residual) with checksums, written to the
inactive slot and synced, then the header record, synced. The comparison is pwrite and one fdatasync of the same bytes
into a file of the same kind, interleaved with it in the same run. Loading reads the state as a restarted syncer does,
checksums included, after the files were dropped from the page cache; the comparison reads the same files into memory.
Medians over all repetitions; the folder should be on the disk that the run would use.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.store import RunStore, open_store

NAMES = ("theta", "momentum", "residual")
GB = 1e9
META = {"round": 1, "learners": {f"learner-{i}": [i, i * 1000, i * 10] for i in range(16)}}
"""Of the size that the syncer stores with a fragment."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=4.2, help="millions of parameters per fragment")
    parser.add_argument("--commits", type=int, default=30)
    parser.add_argument("--load-gb", type=float, default=1.0, help="size of the state to load; 12 is 1B parameters")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write")
    arguments = parser.parse_args()
    arrays = make_arrays(int(arguments.params * 1e6))
    with folder_in(arguments.folder) as folder:
        commit_table(folder, arrays, arguments.commits)
    with folder_in(arguments.folder) as folder:
        load_table(folder, arrays, arguments.load_gb)


@contextmanager
def folder_in(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=parent, prefix="commit-benchmark-") as name:
        yield Path(name)


def make_arrays(size: int) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(size, dtype=np.float32) for name in NAMES}


def timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


# ------------------------------------------------------------ commit


def commit_table(folder: Path, arrays: dict[str, NDArray[np.float32]], count: int) -> None:
    total = sum(array.nbytes for array in arrays.values())
    plain = Plain(folder / "plain", total)
    commits: list[float] = []
    writes: list[float] = []
    syncs: list[float] = []
    plains: list[float] = []
    with open_store(folder / "state") as store:
        for version in range(2):  # both slots are used once before anything is measured
            store.commit(0, version, arrays, META)
            plain.write(arrays)
        for version in range(2, 2 + count):
            plains.append(timed(lambda: plain.write(arrays)))
            begun = time.perf_counter()
            stats = store.commit(0, version, arrays, META)
            commits.append(time.perf_counter() - begun)
            writes.append(stats.write_ns / 1e9)
            syncs.append(stats.sync_ns / 1e9)
    plain.close()
    print(f"one fragment, {total / 1e6:.1f} MB, {stats.bytes - total} bytes of meta data and header, {count} commits\n")
    print("| | ms | of which writes | of which syncs | GB/s |\n|---|---|---|---|---|")
    for name, seconds, write, sync in (
        ("commit", commits, writes, syncs),
        ("pwrite, fdatasync", plains, plain.writes, plain.syncs),
    ):
        middle = statistics.median(seconds)
        parts = f"{statistics.median(write) * 1e3:.1f} | {statistics.median(sync) * 1e3:.1f}"
        print(f"| {name} | {middle * 1e3:.1f} | {parts} | {total / middle / GB:.2f} |")
    ratios = sorted(a / b for a, b in zip(commits, plains, strict=True))
    quarter = len(ratios) // 4
    quartiles = f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
    print(f"\ncommit / plain: {statistics.median(ratios):.2f} (quartiles {quartiles})\n")


class Plain:
    """The obvious way: the arrays, one after the other, and one sync. Two places in turn, as in the slots."""

    def __init__(self, path: Path, total: int) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.posix_fallocate(self.descriptor, 0, 2 * total)
        self.total = total
        self.turn = 0
        self.writes: list[float] = []
        self.syncs: list[float] = []

    def write(self, arrays: dict[str, NDArray[np.float32]]) -> None:
        begun = time.perf_counter()
        offset, self.turn = self.turn * self.total, 1 - self.turn
        for array in arrays.values():
            view, done = array.view(np.uint8).data, 0
            while done < len(view):
                done += os.pwrite(self.descriptor, view[done:], offset + done)
            offset += done
        self.writes.append(time.perf_counter() - begun)
        self.syncs.append(timed(lambda: os.fdatasync(self.descriptor)))

    def close(self) -> None:
        os.close(self.descriptor)


# ------------------------------------------------------------ load


def load_table(folder: Path, arrays: dict[str, NDArray[np.float32]], gigabytes: float) -> None:
    size = sum(array.nbytes for array in arrays.values())
    count = max(1, round(gigabytes * GB / size))
    free = shutil.disk_usage(folder).free
    if 2.2 * count * size > free:
        raise SystemExit(
            f"{gigabytes} GB of state take {2 * gigabytes} GB on disk (two slots) and {free / GB:.0f} are free"
        )
    with open_store(folder / "state") as store:
        for fragment in range(count):
            store.commit(fragment, 0, arrays, META)
    total = count * size
    print(f"a state of {total / GB:.2f} GB ({total / 12 / 1e6:.0f}M parameters) in {count} fragments\n")
    print("| | s | s per GB | GB/s |\n|---|---|---|---|")
    paths = sorted((folder / "state").glob("epoch-*/*.slots"))
    report("plain read, cold", total, cold(paths, lambda: [read_whole(path, size) for path in paths]))
    report("load, cold", total, cold(paths, lambda: load_once(folder, count)))
    report("load, warm", total, timed(lambda: load_once(folder, count)))


def load_once(folder: Path, count: int) -> None:
    store: RunStore = open_store(folder / "state")
    loaded = store.load()
    store.close()
    assert loaded is not None and len(loaded.fragments) == count and not loaded.problems


def read_whole(path: Path, size: int) -> None:
    with path.open("rb", buffering=0) as file:
        target, done = np.empty(size, np.uint8), 0
        while done < size:
            done += file.readinto(target[done:].data)


def cold(paths: list[Path], action: Callable[[], object]) -> float:
    """Time without the page cache; the files were synced, so they can be dropped from it."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return timed(action)


def report(name: str, total: int, seconds: float) -> None:
    print(f"| {name} | {seconds:.2f} | {seconds / (total / GB):.2f} | {total / seconds / GB:.2f} |")


if __name__ == "__main__":
    main()
