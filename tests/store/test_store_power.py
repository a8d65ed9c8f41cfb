"""Power cuts, replayed: a disk that keeps only what was synced, and any part of what was not.

The store runs once, with every write, sync, rename and deletion recorded. Then the power is cut after each of them:
the folder is built anew from what had been synced by then, plus a random part of the rest, sector by sector for
contents and operation by operation for names. From every such folder the store must come back with all that it had
promised.

Rules of this disk: contents are durable after a sync of the file, names after a sync of the folder; unsynced sectors
survive or not, each for itself; unsynced changes of one folder survive up to any one of them.
"""

from __future__ import annotations

import os
import random
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from store_helpers import assert_fragment, commit_any, follow, meta_of, rows_at, rows_batch

from atoll.store import files, open_store

SECTOR = 512


@dataclass
class Recorder:
    """Stands in the place of `os` inside atoll.store.files, and of its three functions that change names."""

    log: list[tuple[Any, ...]] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)  # inode -> our number for the file, as inodes are reused
    files: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "os", self)
        rename, remove, make_folder = files.rename, files.remove, files.make_folder
        for name, record in (("rename", rename), ("remove", remove), ("make_folder", make_folder)):
            monkeypatch.setattr(files, name, self._recorded(name, record))

    def _recorded(self, name: str, real: Any) -> Any:
        def call(*arguments: Any) -> None:
            paths = [argument for argument in arguments if isinstance(argument, Path)]
            if name == "make_folder":
                self.log.append((name, *paths))  # before it is synced
                real(*arguments)
            else:
                real(*arguments)
                self.log.append((name, *paths))

        return call

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        existed = Path(path).exists()
        descriptor = os.open(path, flags, mode)
        if flags & os.O_CREAT and not existed:
            self.files += 1
            self.numbers[os.fstat(descriptor).st_ino] = self.files
            self.log.append(("create", Path(path), self.files))
        return descriptor

    def _number(self, descriptor: int) -> int:
        return self.numbers[os.fstat(descriptor).st_ino]

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        count = os.pwrite(descriptor, data, offset)
        self.log.append(("write", self._number(descriptor), offset, bytes(data[:count])))
        return count

    def posix_fallocate(self, descriptor: int, offset: int, size: int) -> None:
        os.posix_fallocate(descriptor, offset, size)
        self.log.append(("size", self._number(descriptor), offset + size))

    def fdatasync(self, descriptor: int) -> None:
        self.log.append(("sync", self._number(descriptor)))

    def fsync(self, descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self.log.append(("sync_folder", Path(f"/proc/self/fd/{descriptor}").readlink()))
        else:
            self.fdatasync(descriptor)


class Disk:
    """The contents and names that are durable, and those that are not yet."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.contents: dict[int, bytearray] = {}
        self.unsynced: dict[int, list[tuple[int, bytes]]] = {}
        self.names: dict[Path, int] = {}  # 0: a folder
        self.changes: dict[Path, list[tuple[Any, ...]]] = {}

    def apply(self, operation: tuple[Any, ...]) -> None:
        match operation:
            case ("create", path, number):
                self.contents[number], self.unsynced[number] = bytearray(), []
                self._change(path, operation)
            case ("make_folder" | "remove" | "rename", path, *_):
                self._change(path, operation)
            case ("write", number, offset, data):
                self.unsynced[number].append((offset, data))
            case ("size", number, size):
                self.unsynced[number].append((size, b""))
            case ("sync", number):
                for offset, data in self.unsynced.pop(number):
                    self._put(number, offset, data)
                self.unsynced[number] = []
            case ("sync_folder", folder):
                for change in self.changes.pop(folder, []):
                    self._rename(change)

    def _change(self, path: Path, operation: tuple[Any, ...]) -> None:
        self.changes.setdefault(path.parent, []).append(operation)

    def _rename(self, change: tuple[Any, ...]) -> None:
        match change:
            case ("create", path, number):
                self.names[path] = number
            case ("make_folder", path):
                self.names[path] = 0
            case ("remove", path):
                self.names.pop(path, None)
            case ("rename", source, target):
                self.names[target] = self.names.pop(source)

    def _put(self, number: int, offset: int, data: bytes) -> None:
        content = self.contents[number]
        content.extend(bytes(max(0, offset + len(data) - len(content))))
        content[offset : offset + len(data)] = data

    def cut(self, root: Path, target: Path) -> None:
        """The power goes: keep a part of what is not durable, and build the folder that is found afterwards."""
        for folder in sorted(self.changes):
            changes = self.changes[folder]
            for change in changes[: self.chance.randint(0, len(changes))]:
                self._rename(change)
        for number, writes in self.unsynced.items():
            share = self.chance.choice([0.0, 1.0, self.chance.random()])
            for offset, data in writes:
                starts = range(0, max(len(data), 1), SECTOR)
                for start in starts:
                    if self.chance.random() < share:
                        self._put(number, offset + start, data[start : start + SECTOR])
        for path, number in sorted(self.names.items()):
            place = target / path.relative_to(root)
            if not place.parent.is_dir():
                continue  # its folder did not survive
            if number == 0:
                place.mkdir()
            else:
                place.write_bytes(self.contents[number])


def work(state: Path, recorder: Recorder) -> None:
    """Two epochs, with commits in place and into new files, rotations and deletions."""
    number, version = 0, -1
    for epoch in (1, 2):
        store = open_store(state, tape_bytes_max=500, tape_files_kept=2)
        recorder.log.append(("promise", "epoch", epoch))
        store.load()
        for turn in range(6):
            version += 1
            for fragment in range(2):
                recorder.log.append(("promise", f"begun {fragment}", version))
                # A slot first, then the log, then a slot that outgrows its room, and the log after that.
                meta = meta_of(fragment, version, 70_000 * (turn == 3))
                commit_any(store, fragment, version, meta, log=turn in (1, 2, 4, 5))
                recorder.log.append(("promise", f"done {fragment}", version))
            for _ in range(3):
                number += 1
                recorder.log.append(("promise", "begun rows", number))
                store.remember(rows_batch(number))
                store.sync()
                recorder.log.append(("promise", "done rows", number))
        store.close()


def test_after_a_power_cut_at_any_moment_every_promise_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    recorder = Recorder()
    with monkeypatch.context() as patch:
        recorder.install(patch)
        work(root / "run" / "state", recorder)
    log = recorder.log
    assert {operation[0] for operation in log} >= {"write", "sync", "sync_folder", "rename", "remove", "make_folder"}
    for cut in range(1, len(log) + 1):
        if cut < len(log) and log[cut - 1][0] in ("promise", "create"):
            continue  # nothing new
        seed = cut
        disk = Disk(random.Random(seed))
        promises: dict[str, int] = {}
        for operation in log[:cut]:
            if operation[0] == "promise":
                promises[operation[1]] = operation[2]
            else:
                disk.apply(operation)
        target = tmp_path / f"cut-{cut}"
        target.mkdir()
        disk.cut(root, target)
        check(target / "run" / "state", promises)


def check(state: Path, promises: dict[str, int]) -> None:
    with open_store(state) as store:
        loaded = store.load()
        loaded = follow(loaded) if loaded is not None else None
        assert store.epoch > promises.get("epoch", 0)
    fragments = loaded.fragments if loaded is not None else {}
    rows = loaded.rows if loaded is not None else {}
    for fragment in range(2):
        found = fragments[fragment].version if fragment in fragments else -1
        assert promises.get(f"done {fragment}", -1) <= found <= promises.get(f"begun {fragment}", -1)
        if found >= 0:
            assert_fragment(fragments[fragment], fragment, found)
    count = rows.get("count", 0)
    assert promises.get("done rows", 0) <= count <= promises.get("begun rows", 0)
    assert rows == (rows_at(count) if count else {})
