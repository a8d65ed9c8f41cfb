"""Recorded runs with the settings of the outer step are made again, to the bit, through crashes and changes of mind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_run import RecordedRun
from safetensors.numpy import load_file
from toys import OWN, register

from atoll.instruments.replay.recording_reader import SegmentReader
from atoll.instruments.replay.replay import replay
from atoll.store import segment_files
from atoll.syncer.log_replay import read_committed


def check_same(folder: Path) -> int:
    report = replay(folder, export=folder / "again.safetensors")
    assert report.identical and report.mismatch is None and report.missing == []
    again, model = load_file(folder / "again.safetensors"), load_file(folder / "model.safetensors")
    assert {n: a.tobytes() for n, a in again.items()} == {n: a.tobytes() for n, a in model.items()}
    return report.merges


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"codec_up": "int2", "codec_down": "int2"}, id="int2"),
        pytest.param({"codec_up": "topk:10%", "codec_down": "topk:10%"}, id="topk both ways"),
        pytest.param({"adaptive": "network", "period_min": 1}, id="adaptive: int4 and topk in one round"),
        pytest.param({"outer": "delayed"}, id="delayed momentum"),
        pytest.param({"outer": "rownorm"}, id="rownorm"),
        pytest.param({"feedback_down": False, "momentum_restart": 2}, id="no feedback, restarts"),
        pytest.param(
            {"correction": "heloco", "outer_schedule": "linear", "tokens_budget": 2000}, id="heloco, schedule"
        ),
    ],
)
def test_a_run_through_a_crash_is_made_again(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = RecordedRun(tmp_path, **changes)
    run.live(9, crash=True)
    run.live(9)
    assert check_same(tmp_path) >= 17


def test_updates_in_another_codec_are_made_again(tmp_path: Path) -> None:
    """In int4 at first, in int2 after a crash of the syncer, and at last in int4 again."""
    run = RecordedRun(tmp_path, adaptive="network", period_min=1)
    run.live(6, crash=True)
    run.down = "int2"
    run.live(9, crash=True)
    assert {name for puppet in run.puppets for name in puppet.read_in} == {"int4", "int2"}
    run.live(6, adaptive="off")
    assert check_same(tmp_path) >= 20


def test_updates_in_another_codec_come_back_from_the_log(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, record=False, adaptive="network", period_min=1)
    run.down = "int2"
    run.live(12, crash=True)
    found = read_committed(tmp_path / "state")
    assert not found.problems, found.problems
    assert {fragment: one.version for fragment, one in found.fragments.items()} == {0: 4, 1: 4, 2: 4}
    for fragment, one in found.fragments.items():
        held = [puppet for puppet in run.puppets if puppet.versions[fragment] == one.version]
        assert all(np.array_equal(puppet.thetas[fragment], one.arrays["theta"]) for puppet in held)


def test_settings_may_change_when_the_syncer_comes_back(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, correction="heloco")
    run.live(6)
    run.live(6, crash=True, feedback_down=False, outer_schedule="cosine", tokens_budget=2000)
    run.live(6, feedback_down=True, momentum_restart=3)
    assert check_same(tmp_path) >= 16


def test_a_schedule_is_on_record_as_the_sum_of_the_weights(tmp_path: Path) -> None:
    RecordedRun(tmp_path, outer_schedule="linear", tokens_budget=1000).live(12)
    shares = []
    for segment in segment_files(tmp_path / "state" / "recording"):
        with SegmentReader(segment) as reader:
            shares += [sum(record.head["weights"]) for record in reader.records() if record.kind == "merge"]
    assert len(shares) >= 12 and shares[0] > shares[-1] >= 0.1
    assert shares == sorted(shares, reverse=True)


def merged_by(folder: Path) -> list[set[str]]:
    """Who is in each merge of the recording."""
    found = []
    for segment in segment_files(folder / "state" / "recording"):
        with SegmentReader(segment) as reader:
            merges = [record.head["contributions"] for record in reader.records() if record.kind == "merge"]
        found += [{str(name) for name, *_ in contributions} for contributions in merges]
    return found


@pytest.mark.parametrize("correction", ["none", "heloco"])
def test_a_run_that_left_a_liar_out_is_made_again(tmp_path: Path, correction: str) -> None:
    run = RecordedRun(tmp_path, ways=(1.0, 1.0, 1.0, -1.0), robust="cosine", correction=correction)
    run.live(9, crash=True)
    run.live(9)
    assert check_same(tmp_path) >= 17
    assert all(names == {"p0", "p1", "p2"} for names in merged_by(tmp_path))


def test_without_it_the_liar_is_in(tmp_path: Path) -> None:
    RecordedRun(tmp_path, ways=(1.0, 1.0, 1.0, -1.0)).live(4)
    assert all("p3" in names for names in merged_by(tmp_path))


def test_a_codec_a_merge_and_an_outer_optimizer_of_a_users_own_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch)
    run = RecordedRun(tmp_path, **OWN)
    run.live(9, crash=True)
    run.live(9)
    assert check_same(tmp_path) >= 17
