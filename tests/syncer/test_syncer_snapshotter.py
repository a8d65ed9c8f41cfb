"""Snapshots of two syncers at one place: the older one was frozen and does not know yet that it has a successor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.core.config import SyncConfig
from atoll.errors import FencedSyncerError
from atoll.observe import NullWriter
from atoll.store import SnapshotTarget
from atoll.syncer.snapshotter import Snapshotter


class Life:
    """What a snapshotter sees of a syncer."""

    def __init__(self, epoch: int, version: int) -> None:
        self.state, self.fenced = object(), ""
        config = SyncConfig(fragments=2)
        self.machine = SimpleNamespace(epoch=epoch, run="r", config=config, rows=lambda: {"epoch": epoch})
        self.keeper = self
        self.version = version
        self.overtaken = False
        self.interruption: Any = None
        """Called before the copy of the fragment that it names."""

    def check_epoch(self) -> None:
        if self.overtaken:
            raise FencedSyncerError("a newer syncer has taken over")

    async def copy_fragment(self, fragment: int) -> tuple[int, dict[str, Any], dict[str, Any]]:
        if self.interruption is not None and self.interruption[0] == fragment:
            await self.interruption[1]()
        return self.version, {"theta": np.full(8, self.version, np.float32)}, {"checksum": 0}


def snapshotter(life: Life, place: Path) -> Snapshotter:
    return Snapshotter(life, SnapshotTarget(str(place)), 1e9, NullWriter())  # type: ignore[arg-type]


@pytest.mark.parametrize("fragment", [0, 1], ids=["before its first file", "between two files"])
def test_an_overtaken_syncer_neither_damages_nor_deletes_its_successors_snapshot(tmp_path: Path, fragment: int) -> None:
    async def story() -> None:
        old, new = Life(1, 3), Life(2, 9)

        async def successor() -> None:
            old.overtaken = True
            await snapshotter(new, tmp_path).close()

        old.interruption = (fragment, successor)
        await snapshotter(old, tmp_path).close()

    asyncio.run(story())
    loaded, problems = SnapshotTarget(str(tmp_path)).load_newest()
    assert loaded is not None and problems == []
    assert loaded.about["epoch"] == 2 and {f.version for f in loaded.fragments.values()} == {9}
    assert len(list(tmp_path.iterdir())) == 1  # the older one has taken its own half away


def test_labels_count_on_from_epoch_to_epoch(tmp_path: Path) -> None:
    async def story() -> None:
        for epoch in (1, 1, 2, 7):
            await snapshotter(Life(epoch, epoch), tmp_path).close()

    asyncio.run(story())
    names = sorted(path.name for path in tmp_path.iterdir())
    # Three are kept, and of older epochs as many, until the newest has three of its own.
    assert names == ["snapshot-01000001", "snapshot-01000002", "snapshot-02000001", "snapshot-07000001"]


def test_a_fenced_syncer_writes_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        old = Life(1, 3)
        old.overtaken = True
        await snapshotter(old, tmp_path).close()

    asyncio.run(story())
    assert list(tmp_path.iterdir()) == []
