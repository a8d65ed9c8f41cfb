"""The lab's syncer looks at a contribution once, ahead of its arrival, and forgets what never comes to a merge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll.codec import get_codec
from atoll.core.config import SyncConfig
from atoll.core.layout import Layout, build_layout
from atoll.core.messages import TensorSpec
from atoll.lab import payloads
from atoll.lab.payloads import LabSyncer


def contribution(layout: Layout, seed: int) -> Any:
    size = layout.fragments[0].size
    return get_codec("int4").encode(np.random.default_rng(seed).standard_normal(size).astype(np.float32))


@pytest.fixture
def layout() -> Layout:
    return build_layout((TensorSpec("w", (8, 64), "float32", "rda"),), 1)


def make_syncer(layout: Layout) -> LabSyncer:
    syncer = LabSyncer(layout, SyncConfig(fragments=1), durable=False)
    syncer.state.restore({0: (0, 0, {})})
    return syncer


def count_looks(syncer: LabSyncer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    looks: list[int] = []
    real = syncer.state.inspect

    def counted(fragment: int, payload: Any) -> Any:
        looks.append(fragment)
        return real(fragment, payload)

    monkeypatch.setattr(syncer.state, "inspect", counted)
    return looks


def test_a_contribution_is_looked_at_once(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    syncer, plain = make_syncer(layout), make_syncer(layout)
    looks = count_looks(syncer, monkeypatch)
    ahead, late = contribution(layout, 1), contribution(layout, 2)
    syncer.look(0, ahead)
    assert [syncer.inspect(0, one) for one in (ahead, late)] == [plain.inspect(0, one) for one in (ahead, late)]
    assert len(looks) == 2
    made = syncer.merge(0, 1, [ahead, late], [0.5, 0.5])
    assert made.checksum == plain.merge(0, 1, [ahead, late], [0.5, 0.5]).checksum != 0
    assert len(looks) == 2 and not syncer._looked


def test_other_bytes_at_the_same_place_are_looked_at_again(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    syncer = make_syncer(layout)
    looks = count_looks(syncer, monkeypatch)
    one, other = contribution(layout, 1), contribution(layout, 2)
    norms = syncer.look(0, one)[1].norms
    syncer._looked[id(other)] = syncer._looked.pop(id(one))  # as if `one` were gone and `other` had its address
    assert not np.array_equal(syncer.look(0, other)[1].norms, norms)
    assert len(looks) == 2


def test_what_was_lost_on_the_way_is_forgotten(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "LOOKED_MAX", 4)
    syncer = make_syncer(layout)
    for seed in range(20):
        syncer.look(0, contribution(layout, seed))
    kept = contribution(layout, 99)
    syncer.inspect(0, kept)
    assert len(syncer._looked) == 4 and id(kept) in syncer._looked
