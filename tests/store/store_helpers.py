"""Arrays, meta data and rows that follow from a number, so that what comes back can be compared bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.store import Loaded, LoadedFragment, RunStore

SIZE = 1536
"""Elements per array: one and a half sectors, so that nothing is aligned by accident."""
ROW_KEYS = 5


def arrays_of(fragment: int, version: int, size: int = SIZE) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng([fragment, version])
    return {name: generator.standard_normal(size, dtype=np.float32) for name in ("theta", "momentum", "residual")}


def meta_of(fragment: int, version: int, room: int = 0) -> dict[str, Any]:
    return {"fragment": fragment, "version": version, "counters": [version] * 3, "room": "x" * room}


def rows_batch(number: int) -> dict[str, Any]:
    """The batch that leads from rows_at(number - 1) to rows_at(number): two rows that must agree, one that rotates and
    one that comes and goes."""
    ghost = {"text": f"here since {number}"} if number % 3 == 0 else None
    return {"count": number, "twin": [number, str(number)], f"row{number % ROW_KEYS}": number, "ghost": ghost}


def rows_at(number: int) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for batch in range(max(1, number - 2 * ROW_KEYS), number + 1):
        rows.update(rows_batch(batch))
    return {key: value for key, value in rows.items() if value is not None}


def assert_fragment(found: LoadedFragment, fragment: int, version: int, size: int = SIZE) -> None:
    """Exactly this version, bit for bit, and fit to be trained on."""
    assert found.version == version
    assert {**found.meta, "room": ""} == meta_of(fragment, version)
    expected = arrays_of(fragment, version, size)
    assert found.arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert found.arrays[name].tobytes() == array.tobytes(), f"{name} of fragment {fragment}"
        assert found.arrays[name].flags.writeable and found.arrays[name].dtype == np.float32


def commit_any(store: RunStore, fragment: int, version: int, meta: dict[str, Any], *, log: bool) -> None:
    """Into a slot, or (`log`) as what it was made from: stands for two contributions."""
    arrays = arrays_of(fragment, version)
    if not log:
        store.commit(fragment, version, arrays, meta)
        return
    payloads = [("int4", arrays[name].view(np.uint8)) for name in ("theta", "momentum")]
    places = store.log_payloads(fragment, version, payloads)
    store.log_commit(fragment, version, meta, [0.25, 0.75], places)


def follow(loaded: Loaded) -> Loaded:
    """Do what the log says, as far as these payloads go: each is an array of the version that it leads to."""
    for fragment, merges in loaded.logged.items():
        for merge in merges:
            assert merge.version == loaded.fragments[fragment].version + 1 and merge.weights == (0.25, 0.75)
            expected = arrays_of(fragment, merge.version)
            for (codec, payload), name in zip(merge.payloads(), ("theta", "momentum"), strict=True):
                assert codec == "int4" and payload.tobytes() == expected[name].tobytes()
            before = loaded.fragments[fragment]
            loaded.fragments[fragment] = LoadedFragment(
                merge.version, merge.meta, expected, before.epoch, before.sequence
            )
    loaded.logged = {}
    return loaded


def versions_of(loaded: Loaded | None) -> dict[int, int]:
    assert loaded is not None
    for index, fragment in loaded.fragments.items():
        assert_fragment(fragment, index, fragment.version, fragment.arrays["theta"].size)
    return {index: fragment.version for index, fragment in loaded.fragments.items()}


def slot_files(state: Path) -> list[Path]:
    return sorted(state.glob("epoch-*/*.slots"))
