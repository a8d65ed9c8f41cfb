"""Bytes, memory and disk of a plan, against the real layout, the real state, the real store and measured runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll.core.config import SyncConfig
from atoll.core.layout import build_layout
from atoll.core.messages import TensorSpec
from atoll.instruments.plan import Job
from atoll.instruments.plan.traffic import (
    all_reduce_total_bytes,
    disk_of,
    first_bytes,
    fragment_of,
    memory_of,
    total_bytes,
)
from atoll.store import open_store
from atoll.syncer.state import ModelState

TENSORS = [TensorSpec(f"layer{i}", (512, 700), "float32", "rda") for i in range(8)]
PARAMETERS = 8 * 512 * 700


def job(parameters: int, learners: int = 4) -> Job:
    return Job(parameters=parameters, learners=learners, step_s=1.0, up_gbit=1.0)


def test_a_measured_run() -> None:
    """docs/results/bytes.md: 4 learners x 240 steps, 0.46M parameters, 7 fragments, H=24, int4 both ways."""
    tiny, sync = job(460_660), SyncConfig(sync_every=24, fragments=7, learners_expected=4)
    ours = total_bytes(tiny, sync, steps=240)
    without_first = ours - 4 * first_bytes(tiny.parameters)
    assert all_reduce_total_bytes(tiny, exchanges=240) == pytest.approx(1326.7e6, rel=1e-3)
    assert without_first * 77 / 70 == pytest.approx(19.84e6, rel=0.06)  # it had 77 commits where 70 were due
    assert 4 * first_bytes(tiny.parameters) == pytest.approx(27.18e6 - 19.84e6, rel=0.01)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_a_fragment_is_that_of_the_layout(codec: str) -> None:
    sync = SyncConfig(fragments=5, codec_up=codec, codec_down=codec)
    state = ModelState(build_layout(TENSORS, 5), sync)
    real = [state.contribution_size_max(fragment) for fragment in range(5)]
    assert fragment_of(PARAMETERS, sync).up_bytes == pytest.approx(sum(real) / 5, rel=0.01)


@pytest.mark.parametrize(("codec", "feedback"), [("fp32", True), ("int4", True), ("int4", False)])
def test_memory_is_that_of_the_real_state(codec: str, feedback: bool) -> None:
    sync = SyncConfig(fragments=5, codec_down=codec, feedback_down=feedback, learners_expected=4)
    state = ModelState(build_layout(TENSORS, 5), sync)
    for index, fragment in enumerate(state.layout.fragments):
        state.put_seed(index, np.zeros(fragment.size, np.float32).view(np.uint8))
    state.commit_seed()
    held = [a for f in state.fragments for a in f.named().values()]
    assert memory_of(job(PARAMETERS), sync).state == pytest.approx(sum(a.nbytes for a in held), rel=0.01)


def test_memory_per_parameter_of_a_large_model() -> None:
    """docs/results/merge.md: 12.00 bytes of state and 0.25 of the gradient sample; then 8 updates of 0.516 bytes."""
    memory = memory_of(job(12 * 10**9), SyncConfig(fragments=24, learners_expected=4))
    per_parameter = [part / 12e9 for part in (memory.state, memory.sample, memory.updates)]
    assert per_parameter == pytest.approx([12.0, 0.25, 8 * 132 / 256], rel=1e-3)
    assert memory.total == memory.state + memory.sample + memory.updates + memory.contributions


def test_a_commit_writes_what_was_planned(tmp_path: Path) -> None:
    sync = SyncConfig(fragments=1)
    values = np.zeros(fragment_of(PARAMETERS, sync).parameters, np.float32)
    with open_store(tmp_path / "state") as store:
        stats = store.commit(0, 1, {"theta": values, "momentum": values, "residual": values}, {})
    assert disk_of(job(PARAMETERS), sync).slot == pytest.approx(stats.bytes, rel=1e-3)
    assert disk_of(job(100_000_000), SyncConfig(fragments=24)).slot == pytest.approx(49.99e6, rel=0.001)


def test_commits_between_slots_write_what_they_were_made_from() -> None:
    """docs/results/fabric.md: 100M parameters, 24 fragments, 4 learners; slots of 50.0 MB, merges of 8.6: eleven
    merges are logged before the next slot."""
    four = disk_of(job(100_000_000), SyncConfig(fragments=24))
    merge = (four.commit * 12 - four.slot) / 11
    assert merge == pytest.approx(4 * 100e6 / 24 * 132 / 256, rel=0.01)
    assert four.state == pytest.approx(24 * (2 * four.slot + 11 * merge), rel=1e-6)
    many = disk_of(job(100_000_000, learners=16), SyncConfig(fragments=24))
    assert many.commit == many.slot  # what takes half a slot or more goes into one
