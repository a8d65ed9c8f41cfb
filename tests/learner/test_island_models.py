"""What people train, as an island: the same bits and the same training as in one process, and state that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import island_models
import pytest
from cluster import SyncerThread
from island_models import BATCH, BITS_STEPS, KINDS, STEPS
from island_ranks import Ranks
from torch import nn

from atoll.core.config import SyncConfig
from atoll.errors import ConfigError
from atoll.learner.island.link import RankLink
from atoll.learner.island.torch_island import meet
from atoll.learner.island.torch_ranks import fingerprint
from atoll.learner.torch_parameters import describe


def start(**changes: Any) -> SyncerThread:
    settings = {"sync_every": 4, "fragments": 2, "overlap": 0, "quorum": "all", "learners_expected": 1}
    return SyncerThread(SyncConfig(**{**settings, **changes}))


def theta(syncer: SyncerThread) -> list[tuple[int, int]]:
    """Version and checksum of every fragment."""
    return syncer.ask(lambda shell: [(f.version, f.checksum) for f in shell.state.fragments])  # type: ignore[no-any-return]


class Trained:
    """All kinds, in one process and on two ranks."""

    def __init__(self, folder: Path) -> None:
        self.answers: dict[int, list[Any]] = {}
        self.syncers: dict[int, dict[str, tuple[SyncerThread, SyncerThread]]] = {}
        self.said = ""
        for size in (1, 2):
            syncers = self.syncers[size] = {kind: (start(), start()) for kind in KINDS}
            runs = {kind: (one.address, two.address) for kind, (one, two) in syncers.items()}
            ranks = Ranks(size, folder / str(size), island_models.each, runs)
            self.answers[size] = ranks.results()
            self.said += ranks.output(0)[-4000:]

    def stop(self) -> None:
        for syncers in self.syncers.values():
            for pair in syncers.values():
                for syncer in pair:
                    syncer.stop()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = Trained(tmp_path_factory.mktemp("kinds"))
    yield found
    found.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_this_kind_on_two_ranks_is_that_of_one_process(trained: Trained, kind: str) -> None:
    alone, *ranks = [answer[kind] for size in (1, 2) for answer in trained.answers[size]]
    assert all(isinstance(told, tuple) for told in (alone, *ranks)), (alone, ranks, trained.said)
    for index, steps in ((0, BITS_STEPS), (1, STEPS)):
        assert all(told[index]["step"] == steps and told[index]["handed_over"] for told in (alone, *ranks))
        for size in (1, 2):
            stats = trained.syncers[size][kind][index].check_ledger()
            assert stats["tokens_processed"] == stats["tokens_merged"] == BATCH * steps
    assert theta(trained.syncers[2][kind][0]) == theta(trained.syncers[1][kind][0]), "the same bits"
    close = {"bf16": 2e-2, "mixed": 2e-2}.get(kind, 1e-4)
    assert [told[1]["loss"] for told in ranks] == pytest.approx([alone[1]["loss"]] * 2, rel=close)
    assert alone[1]["loss"] < 0.98 * alone[0]["loss"] or kind == "lora", "it trains"
    assert ranks[0][0]["names"] == alone[0]["names"], "named as in one process"
    assert ranks[0][0]["frozen"] == alone[0]["frozen"] and bool(alone[0]["frozen"]) == (kind == "lora")


def test_learners_side_by_side_in_one_world_are_told_apart_by_mesh_or_group(tmp_path: Path) -> None:
    syncer = start(learners_expected=2)
    try:
        answers = Ranks(4, tmp_path, island_models.side_by_side, syncer.address).results()
        assert all(isinstance(answer, dict) for answer in answers), answers
        assert [(a["id"], a["rank"], a["size"]) for a in answers] == [(f"l{n}", r, 2) for n in (0, 1) for r in (0, 1)]
        names = [answer["name"] for answer in answers]
        assert names[0] == names[1] != names[2] == names[3], "keys of one are no keys of the other"
        stats = syncer.check_ledger()
        assert all(a["handed_over"] for a in answers) and stats["tokens_merged"] == 2 * 2 * 4 * STEPS
    finally:
        syncer.stop()


def test_frozen_parameters_that_are_cut_have_the_checksum_of_whole_ones(tmp_path: Path) -> None:
    answers = Ranks(2, tmp_path, island_models.frozen_sums).results()
    assert len({*answers[0], *answers[1]}) == 1 and answers[0][0] != 0, answers


def test_inner_state_of_another_mesh_is_refused_though_its_shapes_fit(tmp_path: Path) -> None:
    for rows, columns in Ranks(2, tmp_path, island_models.other_mesh).results():
        assert rows == "restored"
        assert "S(1)" in columns and "S(0)" in columns and "without the state" in columns


def test_where_one_rank_cannot_restore_its_checkpoint_none_does(tmp_path: Path) -> None:
    syncer = start(overlap=2)
    try:
        given = (island_models.adam_here, syncer.address, tmp_path)
        first = Ranks(2, tmp_path / "first", *given, (0, 1)).results()
        assert [told["moments"] for told in first] == [0, 0], first
        again = Ranks(2, tmp_path / "again", *given, (0, 1)).results()
        assert [(told["moments"], told["counted"]) for told in again] == [(4, 8), (4, 8)], again
        other = Ranks(2, tmp_path / "other", *given, (0,)).results()
        assert [(told["moments"], told["counted"]) for told in other] == [(0, 0), (0, 0)], other
        assert all("does not fit" in told["why"] and "SGD" in told["why"] for told in other), other
    finally:
        syncer.stop()


def test_ranks_that_do_not_fit_together_or_do_not_come_are_said_within_the_deadline(tmp_path: Path) -> None:
    syncer = start(overlap=2)
    try:
        first, second = Ranks(2, tmp_path, island_models.unlike, syncer.address).results()
    finally:
        syncer.stop()
    for said in (first, second):
        assert "differ in their version of atoll: rank 0 has 9.0, rank 1 has 9.1" in said["version"][0]
        assert "same script, environment and installation" in said["version"][0]
        assert "meta" in said["device"][0] and "optimizer" in said["optimizer"][0]
        assert all("Error: " in said[what][0] for what in ("device", "optimizer"))
        assert max(said[what][1] for what in ("version", "device", "optimizer")) < 20.0, "nobody waits in vain"
    assert (
        "has not come for 3 s" in first["never steps"][0]
        and "call learner.step on every rank" in first["never steps"][0]
    )
    assert "IslandError" in second["never steps"][0], "it hears it when it comes"
    assert "IslandError" in first["never made"][0] and second["never made"][0] == "nothing"


def test_ranks_on_different_types_of_devices_are_refused() -> None:
    """Every machine has the type `meta`; the ranks of a real one have cpu and cuda."""
    specs = describe(nn.Linear(2, 2), {})
    own, other = (fingerprint(nn.Linear(2, 2, device=kind), specs, "1") for kind in ("cpu", "meta"))
    assert {key for key in own if own[key] != other[key]} == {"type of device"}

    class Told:
        def compare(self, text: str) -> list[str]:
            return [text, json.dumps(other)]

    with pytest.raises(ConfigError, match="differ in their type of device: rank 0 has cpu, rank 1 has meta; start all"):
        meet(cast(RankLink, Told()), lambda: own)
