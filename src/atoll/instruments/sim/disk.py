"""The syncer's disk: rows on a tape, two slots per fragment, files of leavers; and what a crash leaves of them.

It stands for `atoll.store`, whose own promises are tested on real files (tests/store): a commit is there whole or not
at all, a tape is a prefix of what was appended, what was synced stays. What may go wrong here: a power cut takes what
was not synced, a slot rots so that the older one must serve, the disk is full or dead for a while, or slow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from atoll.core import ContributionId, HandedOver

FragmentRecord = dict[str, Any]


@dataclass(slots=True)
class DiskSlot:
    version: int
    checksum: int
    fragment_record: str
    """As JSON: what comes back has been through a file."""
    stored: Any
    """The arrays, or what stands for them."""


@dataclass(slots=True)
class VirtualDisk:
    """Outlives every syncer of the run."""

    epoch: int = 0
    rows: dict[str, str] = field(default_factory=dict)
    """Synced."""
    pending: list[dict[str, str | None]] = field(default_factory=list)
    """Appended, in order, and not synced yet."""
    slots: dict[int, list[DiskSlot]] = field(default_factory=dict)
    """The newest first, at most two."""
    handed: dict[ContributionId, tuple[HandedOver, Any]] = field(default_factory=dict)
    broken: str = ""
    """Why every write fails at the moment."""
    slow: float = 1.0
    lossless: bool = True
    """False once anything was lost or could not be written: then what comes back need not be exact."""

    def open(self, dice: Random) -> int:
        """A syncer takes over; returns its epoch. What its predecessor had not synced may be there or not, and what
        that one still writes goes to a file that nobody reads."""
        self._keep(dice.randint(0, len(self.pending)))
        self.epoch += 1
        return self.epoch

    def append(self, epoch: int, rows: Mapping[str, Any]) -> None:
        if epoch < self.epoch:
            return
        self.pending.append({key: None if row is None else json.dumps(row) for key, row in rows.items()})

    def sync(self) -> None:
        """Everything appended is durable."""
        for batch in self.pending:
            self._put(batch)
        self.pending.clear()

    def _put(self, batch: Mapping[str, str | None]) -> None:
        for key, row in batch.items():
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row

    def commit(self, fragment: int, version: int, checksum: int, fragment_record: FragmentRecord, stored: Any) -> None:
        slot = DiskSlot(version, checksum, json.dumps(fragment_record), stored)
        self.slots[fragment] = [slot, *self.slots.get(fragment, [])][:2]

    # ------------------------------------------------------------ what goes wrong

    def process_died(self, dice: Random) -> None:
        """Written bytes survive their process; what was still in its memory is gone: some prefix of the batches."""
        self._keep(dice.randint(0, len(self.pending)))

    def power_cut(self, dice: Random) -> None:
        """Only what was synced is sure; of the rest any prefix may be there."""
        self._keep(dice.choice([0, 0, dice.randint(0, len(self.pending))]))

    def _keep(self, batches: int) -> None:
        for batch in self.pending[:batches]:
            self._put(batch)
        self.pending.clear()

    def rot(self, dice: Random) -> bool:
        """One slot that is in use cannot be read any more: the reader notices and takes the other. Only where there is
        one: a fragment that is nowhere cannot be had back by any protocol."""
        candidates = sorted(fragment for fragment, slots in self.slots.items() if len(slots) > 1)
        if not candidates:
            return False
        fragment = dice.choice(candidates)
        del self.slots[fragment][0]
        self.lossless = False
        return True

    def wipe(self) -> None:
        """Another machine with an empty disk takes its place. Epochs count on, as they do from what learners say."""
        self.rows, self.pending, self.slots, self.handed = {}, [], {}, {}
        self.lossless = False

    # ------------------------------------------------------------ coming back

    def read_rows(self) -> dict[str, Any]:
        return {key: json.loads(row) for key, row in sorted(self.rows.items())}

    def read_slots(self) -> dict[int, tuple[int, int, FragmentRecord, Any]]:
        found = {}
        for fragment, slots in sorted(self.slots.items()):
            if slots:
                slot = slots[0]
                found[fragment] = (slot.version, slot.checksum, json.loads(slot.fragment_record), slot.stored)
        return found
