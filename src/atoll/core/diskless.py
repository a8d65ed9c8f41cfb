"""A platform for a SyncerDriver whose gate is at level `none`: what it would ask of a disk does not happen, and nothing
that stands for parameters is small enough, healed or compared. A world without a disk begins here and adds links and
merges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atoll.core import effects as fx
from atoll.core.layout import Layout
from atoll.core.learner_host import Payload
from atoll.core.rounds import ContributionId, ContributionRecord
from atoll.core.syncer_driver import StoreOutcome, VersionToStore


class DisklessPlatform:
    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        raise AssertionError("without a disk there is nothing to look after")

    def note(self, note: fx.Note) -> None:
        return

    def end_fenced(self, reason: str) -> None:
        return

    def lay_out(self, layout: Layout, *, lost: bool) -> None:
        return

    def compare(self, compare: fx.Compare, payloads: list[Payload], done: Callable[[fx.Compared], None]) -> None:
        raise AssertionError("nothing that stands for parameters has a direction")

    def heal(self, heal: fx.CommitHealed, payload: Payload, done: Callable[[], None]) -> None:
        raise AssertionError("without a disk there is no earlier run")

    def inline_update(self, fragment: int, version: int) -> bytes | None:
        return None

    def publish(self, merge: fx.Merge, announce: Callable[[], None]) -> None:
        announce()

    def append(self, rows: Mapping[str, Any]) -> None:
        raise AssertionError("there is no tape")

    def sync(self, done: Callable[[str], None]) -> None:
        raise AssertionError("there is no tape")

    def store(self, item: VersionToStore, done: Callable[[StoreOutcome], None]) -> None:
        raise AssertionError("there is no disk")

    def check_epoch(self, done: Callable[[], None]) -> None:
        done()

    def durability_lost(self, reason: str) -> None:
        return

    def durability_back(self, reason: str) -> None:
        return

    def keep_handed(
        self, items: list[tuple[ContributionRecord, Payload]], processed: int, done: Callable[[], None]
    ) -> None:
        done()

    def drop_handed(self, identity: ContributionId) -> None:
        return

    def forget_inner(self, slot: int) -> None:
        return
