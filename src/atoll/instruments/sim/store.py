"""A state folder on a simulated disk: what production's keeper, standby and shards ask of `store.RunStore`.

It models the promise, not the bytes, as `disk` does: a commit is there whole or not at all, and every commit is a slot.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import FencedSyncerError, StoreError
from atoll.instruments.sim.disk import VirtualDisk
from atoll.store import CommitStats, Loaded, LoadedFragment
from atoll.syncer import SHARDS_ROW

if TYPE_CHECKING:
    from atoll.instruments.sim.loop import LoopProcess

Committed = Callable[[int, int, int], None]
"""Told of a commit when it is on disk: fragment, version, checksum."""


@dataclass(slots=True)
class FolderDisk(VirtualDisk):
    """A run folder: the state, who holds its lock, and what RUN/syncer.json says."""

    name: str = ""
    holder: LoopProcess | None = None
    told: dict[str, Any] | None = None
    left: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """What leavers handed over, by the names of the files."""
    mapped: Callable[[FolderDisk], None] | None = None
    """Told when the tape says anew who has which fragment."""

    @property
    def held(self) -> bool:
        return self.holder is not None and not self.holder.dead

    def sync(self) -> None:
        told = any(SHARDS_ROW in batch for batch in self.pending)
        VirtualDisk.sync(self)
        if self.mapped is not None and told:  # once: what could not be synced was set back (draw 7, seed 5725)
            self.mapped(self)

    def _keep(self, batches: int) -> None:
        told = any(SHARDS_ROW in batch for batch in self.pending[:batches])
        VirtualDisk._keep(self, batches)
        if self.mapped is not None and told:
            self.mapped(self)

    def wipe(self) -> None:
        VirtualDisk.wipe(self)
        self.left, self.told = {}, None


def open_virtual(
    disk: FolderDisk, process: LoopProcess, committed: Committed = lambda *_: None, *, take_over: bool = False
) -> VirtualStore:
    """As `store.open_store`."""
    if disk.held and disk.holder is not process and not take_over:
        raise StoreError(f"{disk.name} is in use; wait until that process has ended")
    disk.holder = process
    return VirtualStore(disk, process, committed)


class VirtualStore:
    """As `store.RunStore`."""

    def __init__(self, disk: FolderDisk, process: LoopProcess, committed: Committed) -> None:
        self.epoch = disk.open(process.world.dice_disk)
        self.path = Path(disk.name)
        self.opened_rows = disk.read_rows()
        self._disk, self._process, self._committed = disk, process, committed
        self._rows = dict(self.opened_rows)
        self._closed = False

    # ------------------------------------------------------------ coming back

    def load(self) -> Loaded | None:
        found = {
            fragment: LoadedFragment(version, record, {name: array.copy() for name, array in arrays.items()})
            for fragment, (version, _, record, arrays) in self._disk.read_slots().items()
        }
        return Loaded(dict(self.opened_rows), found) if self.opened_rows or found else None

    # ------------------------------------------------------------ writing

    def remember(self, rows: Mapping[str, Any]) -> None:
        """What is in memory goes through JSON, as what is read does."""
        if self._dead:
            return
        self._disk.append(self.epoch, rows)
        for key, row in rows.items():
            if row is None:
                self._rows.pop(key, None)
            else:
                self._rows[key] = json.loads(json.dumps(row))

    def note(self, record: Mapping[str, Any]) -> None:
        """Decisions are for people."""

    def rows(self) -> dict[str, Any]:
        return dict(self._rows)

    def sync(self) -> None:
        self.check_epoch()
        self._check_disk()
        if not self._dead:
            self._disk.sync()

    def commit(
        self, fragment: int, version: int, arrays: Mapping[str, Any], fragment_record: Mapping[str, Any]
    ) -> CommitStats:
        self.check_epoch()
        self._check_disk()
        if not self._dead:
            copies = {name: np.array(array) for name, array in arrays.items()}
            checksum = int(fragment_record["checksum"])
            self._disk.commit(fragment, version, checksum, dict(fragment_record), copies)
            self._committed(fragment, version, checksum)
        return CommitStats(0, 0, 0)

    def drop(self, fragment: int) -> None:
        self.check_epoch()
        self._check_disk()
        if not self._dead:
            self._disk.slots.pop(fragment, None)

    def describe_log(self, about: Mapping[str, Any]) -> None:
        """There is none."""

    def log_payloads(self, *_: Any) -> Any:
        raise OSError(errno.EOPNOTSUPP, "every commit is a slot here")

    def check_epoch(self) -> None:
        if self._disk.epoch > self.epoch:
            raise FencedSyncerError(f"epoch {self._disk.epoch} has opened {self._disk.name}")

    def handover(self) -> VirtualHandover:
        return VirtualHandover(self._disk, self)

    def reopen(self) -> VirtualStore:
        self.close()
        return open_virtual(self._disk, self._process, self._committed)

    def close(self) -> None:
        if not self._dead and self._disk.epoch == self.epoch and not self._disk.broken:
            self._disk.sync()
        self._closed = True
        if self._disk.holder is self._process and self._disk.epoch == self.epoch:
            self._disk.holder = None

    @property
    def _dead(self) -> bool:
        return self._process.dead or self._closed

    def _check_disk(self) -> None:
        if self._disk.broken:
            raise OSError(errno.ENOSPC, self._disk.broken)

    def check_room(self) -> None:
        """Whether a file can be written."""
        self._check_disk()

    @property
    def writes(self) -> bool:
        """False for a process that is dead or was overtaken: nothing of it arrives."""
        return not self._dead and self._disk.epoch == self.epoch


class VirtualHandover:
    """As `store.Handover`."""

    def __init__(self, disk: FolderDisk, store: VirtualStore) -> None:
        self._disk, self._store = disk, store

    def put(self, name: str, about: Mapping[str, Any], payload: Any) -> None:
        self._store.check_room()
        if self._store.writes:
            self._disk.left[name] = (json.dumps(dict(about)), np.array(payload))

    def drop(self, name: str) -> None:
        if self._store.writes and not self._disk.broken:
            self._disk.left.pop(name, None)

    def load(self) -> tuple[dict[str, tuple[dict[str, Any], Any]], list[str]]:
        return {name: (json.loads(about), payload) for name, (about, payload) in sorted(self._disk.left.items())}, []
