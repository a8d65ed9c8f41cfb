"""The lab's syncer looks at a contribution once, ahead of its arrival, and forgets what never comes to a merge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll.codec import get_codec
from atoll.core.config import SyncConfig
from atoll.core.layout import Layout, build_layout
from atoll.core.messages import TensorSpec
from atoll.instruments.lab.payloads import LabSyncer


def contribution(layout: Layout, seed: int) -> Any:
    size = layout.fragments[0].size
    return get_codec("int4").encode(np.random.default_rng(seed).standard_normal(size).astype(np.float32))


@pytest.fixture
def layout() -> Layout:
    return build_layout((TensorSpec("w", (8, 64), "float32", "rda"),), 1)


def make_syncer(layout: Layout) -> LabSyncer:
    syncer = LabSyncer(layout, SyncConfig(fragments=1), durable=False, rhos=[])
    syncer.state.restore({0: (0, 0, {})})
    return syncer


def count_looks(syncer: LabSyncer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    looks: list[int] = []
    real = syncer.state.inspect

    def counted(fragment: int, payload: Any, codec: str) -> Any:
        looks.append(fragment)
        return real(fragment, payload, codec)

    monkeypatch.setattr(syncer.state, "inspect", counted)
    return looks


def test_a_contribution_is_looked_at_once(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    syncer, plain = make_syncer(layout), make_syncer(layout)
    looks = count_looks(syncer, monkeypatch)
    ahead, late = contribution(layout, 1), contribution(layout, 2)
    syncer.look(0, ahead)
    assert [syncer.inspect(0, one) for one in (ahead, late)] == [plain.inspect(0, one) for one in (ahead, late)]
    assert len(looks) == 2
    made = syncer.merge(0, 1, [ahead, late], [0.5, 0.5], "int4")
    assert made.checksum == plain.merge(0, 1, [ahead, late], [0.5, 0.5], "int4").checksum != 0
    assert len(looks) == 2


def test_other_bytes_at_the_same_place_are_looked_at_again(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    syncer = make_syncer(layout)
    looks = count_looks(syncer, monkeypatch)
    one, other = contribution(layout, 1), contribution(layout, 2)
    norms = syncer.look(0, one)[1].norms
    syncer._looked[id(other)] = syncer._looked[id(one)]  # as if `one` were gone and `other` had its address
    assert not np.array_equal(syncer.look(0, other)[1].norms, norms)
    assert len(looks) == 2


def test_what_never_comes_to_a_merge_is_forgotten_with_its_bytes(layout: Layout) -> None:
    syncer = make_syncer(layout)
    kept = contribution(layout, 99)
    for seed in range(20):
        syncer.look(0, contribution(layout, seed))
    syncer.inspect(0, kept)
    assert list(syncer._looked) == [id(kept)]
    del kept
    assert not syncer._looked
