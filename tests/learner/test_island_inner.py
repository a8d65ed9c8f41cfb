"""Inner state over changes of the mesh: an island's checkpoints restore with other ranks, to the bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import island_inner
import numpy as np
import pytest
from cluster import SyncerThread
from island_ranks import WAIT_S, Ranks
from test_island import config, wait_merges

from atoll.core import inner_slots


@pytest.fixture
def syncers() -> Iterator[list[SyncerThread]]:
    made: list[SyncerThread] = []
    yield made
    for one in made:
        one.stop()


def merged(answers: list[Any], key: str) -> dict[str, Any]:
    """What all ranks told, which must agree where several tell the same."""
    found: dict[str, Any] = {}
    for answer in answers:
        assert isinstance(answer, dict), answer
        for name, value in answer[key].items():
            assert name not in found or np.array_equal(found[name], value), name
            found[name] = value
    return found


def assert_same_bits(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert sorted(first) == sorted(second)
    for name, value in first.items():
        assert value.dtype == second[name].dtype and value.tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize(
    ("giver", "joiners"), [(("fsdp", 2), [("plain", 1), ("tp", 2)]), (("plain", 1), [("fsdp", 2)])]
)
def test_a_joiner_has_the_inner_state_of_a_peer_whatever_the_meshes_of_both(
    syncers: list[SyncerThread],
    tmp_path: Path,
    giver: tuple[str, int],
    joiners: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inner_slots, "INNER_SILENCE_NS", 200 * 10**9)
    syncers.append(SyncerThread(config(overlap=2, quorum="50%", learners_expected=2)))
    (kind, size), over = giver, tmp_path / "over"
    giving = Ranks(size, tmp_path / "giver", island_inner.go_on, kind, syncers[0].address, str(over))
    deadline = time.monotonic() + WAIT_S
    while not (tmp_path / "giver/rank-0.log").exists() and time.monotonic() < deadline:
        time.sleep(0.1)  # the first ranks of all wait until torch is imported
    wait_merges(syncers[0], 4)
    begun = []
    for number, (joining, ranks) in enumerate(joiners):
        work = (island_inner.live, joining, syncers[0].address, 2, {"learner_id": f"joiner-{number}"})
        answers = Ranks(ranks, tmp_path / f"joiner-{number}", *work).results()
        begun.append(merged(answers, "begun"))
        assert all("of learner giver at its step" in answer["why"] for answer in answers), answers[0]["why"]
        assert answers[0]["lr"] == 1e-3
    over.touch()
    held = giving.results()[0]
    assert isinstance(held, dict), held
    for state in begun:
        assert island_inner.digest(state) == held[int(state["0.weight.step"])]


def test_the_optimizer_state_of_an_island_goes_on_with_any_other_mesh(
    syncers: list[SyncerThread], tmp_path: Path
) -> None:
    syncers.append(SyncerThread(config(overlap=2)))
    lives = [("fsdp", 2), ("fsdp", 4), ("ddp", 2), ("plain", 1), ("tp", 2), ("2d", 4), ("stages", 2), ("plain", 1)]
    before: dict[str, Any] = {}
    for number, (kind, size) in enumerate(lives):
        given = {"run_folder": tmp_path, "lr": 1e-3 * (number + 1)}
        work = (island_inner.live, kind, syncers[0].address, 6, given)
        answers = Ranks(size, tmp_path / f"life-{number}", *work).results()
        begun = merged(answers, "begun")
        assert_same_bits(before, begun)
        assert {answer["lr"] for answer in answers} == {1e-3}, "the groups' settings come back, too"
        before = merged(answers, "ended")
        assert {float(before["0.weight.step"])} == {6.0 * (number + 1)}
