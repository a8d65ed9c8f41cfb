"""Commits by the log: a syncer that dies comes back with every version to the bit, and says what it cannot have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atoll.codec import get_codec
from atoll.core import ContributionId, Merge, SyncConfig, TensorSpec, VersionToStore, build_layout
from atoll.observe import NullWriter
from atoll.store import open_store
from atoll.syncer.fragment_work import merge_contributions, store_version
from atoll.syncer.log_replay import read_committed
from atoll.syncer.logged_since import SLOT_EVERY
from atoll.syncer.state import InspectedPayload, ModelState
from atoll.syncer.state_writer import StateWriter

TENSORS = [TensorSpec("w", (40, 256), "float32"), TensorSpec("e", (24, 256), "float32", "mean")]
FRAGMENTS = 2


class Host:
    """Arrays and their disk, as in the syncer and in a shard."""

    def __init__(self, folder: Path, config: SyncConfig, *, level: str = "commit") -> None:
        self.config = config
        self.layout = build_layout(TENSORS, FRAGMENTS)
        self.state = ModelState(self.layout, config)
        self.copies = {}
        self.store = open_store(folder)
        self.loaded = self.store.load()
        self.keeper = StateWriter(self.store, level, 0.0, NullWriter())
        self.keeper.begin("run", config, self.layout)
        self.bytes: list[int] = []

    async def on_a_worker(self, function: Callable, *arguments: object):
        return await asyncio.to_thread(function, *arguments)

    async def seed(self) -> None:
        dice = np.random.default_rng(0)
        for fragment, shape in enumerate(self.layout.fragments):
            self.state.put_seed(fragment, dice.standard_normal(shape.size, dtype=np.float32).view(np.uint8))
        for fragment, checksum in enumerate(self.state.commit_seed()):
            record = {"version": 0, "checksum": checksum}
            await store_version(self, VersionToStore(fragment, 0, checksum, record, seed=True))

    async def round(self, fragment: int, learners: int = 3, *, store: bool = True) -> None:
        version = self.state.fragments[fragment].version + 1
        size = self.layout.fragments[fragment].size
        held, ids = [], []
        for learner in range(learners):
            dice = np.random.default_rng([fragment, version, learner])
            delta = 0.01 * dice.standard_normal(size, dtype=np.float32)
            held.append(self._held(fragment, delta))
            ids.append(ContributionId(f"l{learner}", 1, fragment, version))
        weights = tuple(1.0 / learners for _ in range(learners))
        done = await merge_contributions(self, Merge(fragment, version, version, tuple(ids), weights), held)
        record = {"version": version, "checksum": done.checksum, "note": f"{fragment}/{version}"}
        if store:
            outcome = await store_version(self, VersionToStore(fragment, version, done.checksum, record))
            assert not outcome.error
            self.bytes.append(outcome.bytes)

    def _held(self, fragment: int, delta: np.ndarray) -> InspectedPayload:
        codec = get_codec(self.config.codec_up)
        payload = codec.encode(delta)
        return self.state.inspect(fragment, np.asarray(payload, np.uint8))[1]

    def check(self, folder: Path, *, versions: list[int] | None = None) -> list[str]:
        """What is found on disk is what is here, array by array."""
        found = read_committed(folder)
        for fragment, arrays in enumerate(self.state.fragments):
            one = found.fragments[fragment]
            assert one.version == (versions or [a.version for a in self.state.fragments])[fragment]
            if one.version == arrays.version:
                named = arrays.named()
                assert one.arrays.keys() == named.keys()
                assert all(one.arrays[name].tobytes() == array.tobytes() for name, array in named.items())
                assert one.meta.get("note", f"{fragment}/0") == f"{fragment}/{one.version}"
        return found.problems


@pytest.mark.parametrize(
    "settings",
    [{}, {"correction": "heloco"}, {"momentum_restart": 3}, {"robust": "cosine"}, {"codec_up": "int8", "merge": "rda"}],
)
def test_every_version_comes_back_to_the_bit(tmp_path: Path, settings: dict[str, object]) -> None:
    async def run() -> None:
        host = Host(tmp_path, SyncConfig(fragments=FRAGMENTS, **settings))  # type: ignore[arg-type]
        await host.seed()
        for version in range(1, 2 * SLOT_EVERY + 3):
            await host.round(0)
            if version % 3 == 0:
                await host.round(1)
            if version in (1, 5, SLOT_EVERY - 1, SLOT_EVERY, SLOT_EVERY + 1, 2 * SLOT_EVERY + 2):
                assert host.check(tmp_path) == []
        slot = 12 * host.layout.fragments[0].size
        assert 2 <= sum(size > slot for size in host.bytes) <= len(host.bytes) / 6
        assert sum(host.bytes) < len(host.bytes) * slot / (2 if "codec_up" in settings else 3.5)
        host.keeper.fill_slots(host.state)
        assert host.check(tmp_path) == []
        host.keeper.close()
        assert not read_committed(tmp_path).logged

    asyncio.run(run())


def test_the_next_syncer_may_have_other_settings(tmp_path: Path) -> None:
    """What is in the log was merged under those of its time."""

    async def run() -> None:
        host = Host(tmp_path, SyncConfig(fragments=FRAGMENTS))
        await host.seed()
        for _ in range(4):
            await host.round(0)
        host.keeper.close()
        second = Host(tmp_path, SyncConfig(fragments=FRAGMENTS, outer_lr=0.1, codec_up="fp32"))
        assert host.check(tmp_path) == []
        second.keeper.close()

    asyncio.run(run())


def test_a_damaged_payload_costs_the_versions_after_it_and_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        host = Host(tmp_path, SyncConfig(fragments=FRAGMENTS))
        await host.seed()
        for _ in range(4):
            await host.round(0)
        host.keeper.close()
        [segment] = tmp_path.glob("epoch-*/log-*.log")
        data = bytearray(segment.read_bytes())
        data[len(data) // 2 + 900] ^= 0x40
        segment.write_bytes(data)
        found = read_committed(tmp_path)
        assert 0 <= found.fragments[0].version < 4
        assert found.fragments[0].version == 0 or found.fragments[0].meta["note"].startswith("0/")

    asyncio.run(run())


def test_what_was_not_committed_is_never_built_upon(tmp_path: Path) -> None:
    """A disk that failed for a version: the next one goes into a slot, whole."""

    async def run() -> None:
        host = Host(tmp_path, SyncConfig(fragments=FRAGMENTS))
        await host.seed()
        await host.round(0)
        await host.round(0, store=False)
        assert host.check(tmp_path, versions=[1, 0]) == []
        await host.round(0)
        assert host.bytes[-1] > 12 * host.layout.fragments[0].size
        assert host.check(tmp_path) == []
        host.keeper.close()

    asyncio.run(run())


def test_many_contributions_are_not_kept_twice(tmp_path: Path) -> None:
    """More bytes than half a slot: the slot itself is written."""

    async def run() -> None:
        host = Host(tmp_path, SyncConfig(fragments=FRAGMENTS))
        await host.seed()
        await host.round(0, learners=24)
        assert host.bytes == [host.bytes[0]] and host.bytes[0] > 12 * host.layout.fragments[0].size
        assert not list(tmp_path.glob("epoch-*/log-*.log"))
        host.keeper.close()

    asyncio.run(run())
