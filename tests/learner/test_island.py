"""Several ranks as one learner, through the real wire: the same bits as one process, and one end for all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import island_work
import pytest
from cluster import SyncerThread
from island_ranks import WAIT_S, Ranks

from atoll.core.config import SyncConfig

CODECS = ("int4", "fp32")
TRAINED = [(kind, codec) for kind in ("ddp", "fsdp", "tp") for codec in CODECS]
RUNS = {
    1: [("plain", codec) for codec in CODECS],
    2: TRAINED,
    4: [*TRAINED, ("hsdp", "int4"), ("2d", "int4")],
}
STEPS = 10


def config(**changes: Any) -> SyncConfig:
    settings = {"sync_every": 4, "fragments": 4, "overlap": 0, "quorum": "all", "learners_expected": 1}
    return SyncConfig(**{**settings, **changes})


@pytest.fixture
def syncers() -> Iterator[list[SyncerThread]]:
    started: list[SyncerThread] = []
    yield started
    for syncer in started:
        syncer.stop()


def theta(syncer: SyncerThread) -> list[tuple[int, int]]:
    """Version and checksum of every fragment."""
    return syncer.ask(lambda shell: [(f.version, f.checksum) for f in shell.state.fragments])  # type: ignore[no-any-return]


def test_every_kind_of_island_contributes_the_bits_of_one_process(syncers: list[SyncerThread], tmp_path: Path) -> None:
    """Published versions are sums of decoded contributions: equal checksums, equal contributions."""
    seen: dict[tuple[str, str, int], Any] = {}
    for size, wanted in RUNS.items():
        runs, names = [], []
        for kind, codec in wanted:
            syncers.append(SyncerThread(config(codec_up=codec, codec_down=codec)))
            runs.append((kind, syncers[-1].address, STEPS, {"gradients": False}))
            names.append((codec, kind, size, syncers[-1]))
        ranks = Ranks(size, tmp_path / str(size), island_work.several, runs)
        answers = ranks.results()
        assert all(isinstance(answer, list) for answer in answers), (answers, ranks.output(0))
        for index, (codec, kind, _, syncer) in enumerate(names):
            for rank, answer in enumerate(answers):
                told = answer[index]
                assert (told["rank"], told["size"], told["step"], told["number"]) == (rank, size, STEPS, 0)
                assert told["handed_over"] and told["bases"] == answers[0][index]["bases"]
            stats = syncer.check_ledger()
            assert stats["tokens_processed"] == stats["tokens_merged"] == 8 * STEPS
            seen[codec, kind, size] = theta(syncer)
    for (codec, kind, size), versions in seen.items():
        assert versions == seen[codec, "plain", 1], (codec, kind, size)
    assert seen["int4", "plain", 1] != seen["fp32", "plain", 1]


@pytest.mark.parametrize("size", [2, 4])
def test_training_of_islands_is_that_of_one_process(size: int, syncers: list[SyncerThread], tmp_path: Path) -> None:
    """50 steps with gradients. Ranks add up in another order, and int4 may round the last bit to another value."""
    losses: dict[tuple[str, str], list[float]] = {}
    for ranks, wanted in ((1, RUNS[1]), (size, TRAINED)):
        runs = []
        for kind, codec in wanted:
            syncers.append(SyncerThread(config(codec_up=codec, codec_down=codec)))
            runs.append((kind, syncers[-1].address, 50, {}))
        answers = Ranks(ranks, tmp_path / str(ranks), island_work.several, runs).results()
        assert all(isinstance(answer, list) for answer in answers), answers
        assert all(one["model_changed"] == [] for answer in answers for one in answer), "gathering changes no model"
        losses |= {one: [answer[index]["loss"] for answer in answers] for index, one in enumerate(wanted)}
    for (kind, codec), parts in losses.items():
        (whole,) = losses["plain", codec]
        assert whole < 0.9, "it trains"
        close = 1e-4 if codec == "fp32" else 1e-3
        assert parts == pytest.approx([whole] * len(parts), rel=close), (kind, codec)


def test_a_model_that_is_changed_after_joining_is_told_on_every_rank(
    syncers: list[SyncerThread], tmp_path: Path
) -> None:
    for kind in ("ddp", "fsdp"):
        syncers.append(SyncerThread(config()))
        run = (kind, syncers[-1].address, 12, {"gradients": False, "add_after": 1})
        for (told,) in Ranks(2, tmp_path / kind, island_work.several, [run]).results():
            [text] = told["model_changed"]
            assert "added: 'extra'" in text


def island(syncer: SyncerThread, folder: Path, *, steps: int = 10**6, **options: Any) -> Ranks:
    given = {"gradients": False, "pause_s": 0.005, **options}
    return Ranks(2, folder, island_work.train, "plain", syncer.address, steps, given)


def wait_merges(syncer: SyncerThread, count: int) -> None:
    syncer.wait_for(lambda shell: shell.machine.stats()["contributions_merged"] >= count, f"{count} merges")


def test_a_rank_that_dies_ends_its_island_and_the_next_generation_goes_on(
    syncers: list[SyncerThread], tmp_path: Path
) -> None:
    syncers.append(SyncerThread(config(overlap=2)))
    first = island(syncers[0], tmp_path / "first")
    wait_merges(syncers[0], 2)
    first.processes[1].kill()
    answers = first.results()
    assert answers[1] is None and "IslandError" in answers[0] and "start all ranks again" in answers[0]
    before = sum(version for version, _ in theta(syncers[0]))
    again = island(syncers[0], tmp_path / "again", steps=20).results()
    assert [answer["generation"] for answer in again] == [2, 2] and all(answer["handed_over"] for answer in again)
    assert sum(version for version, _ in theta(syncers[0])) > before
    stats = syncers[0].check_ledger()
    assert stats["tokens_pending"] == 0


def test_a_rank_that_stands_still_for_a_while_loses_nothing(syncers: list[SyncerThread], tmp_path: Path) -> None:
    syncers.append(SyncerThread(config(overlap=2)))
    ranks = island(syncers[0], tmp_path / "ranks", steps=60)
    wait_merges(syncers[0], 1)
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(ranks.processes[1].pid, signal.SIGCONT)
    answers = ranks.results()
    assert [answer["step"] for answer in answers] == [60, 60], answers
    stats = syncers[0].check_ledger()
    assert stats["tokens_processed"] == stats["tokens_merged"] == 8 * 60


def test_a_rank_that_never_comes_is_an_error_after_the_deadline(syncers: list[SyncerThread], tmp_path: Path) -> None:
    syncers.append(SyncerThread(config(overlap=2)))
    ranks = island(syncers[0], tmp_path / "ranks", learner={"island_timeout_s": 5.0})
    wait_merges(syncers[0], 1)
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    deadline = time.monotonic() + WAIT_S
    while ranks.processes[0].is_alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks.processes[1].kill()
    answer = ranks.results()[0]
    assert "IslandError" in answer and "has not come for 5 s" in answer


def test_a_defect_on_one_rank_ends_all_of_them_where_they_wait_for_its_arrays(
    syncers: list[SyncerThread], tmp_path: Path
) -> None:
    syncers.append(SyncerThread(config(overlap=2, learners_expected=1)))
    answers = Ranks(2, tmp_path, island_work.defect, syncers[0].address).results()
    assert answers[0].startswith("IslandError: rank 1 of this learner cannot go on"), answers[0]
    assert answers[1] == "ValueError: a defect"


def test_what_does_not_fit_together_is_said_on_every_rank(syncers: list[SyncerThread], tmp_path: Path) -> None:
    syncers.append(SyncerThread(config(overlap=2, learners_expected=1)))
    ranks = Ranks(2, tmp_path, island_work.failing, syncers[0].address)
    for said in ranks.results():
        assert "differ in their model" in said["model"] and "same script" in said["model"]
        assert "differ in their model" in said["partly"], "tensors in common, and others: no stages of a pipeline"
        assert "copies_on_device" in said["device"] and "leave it out" in said["device"]
        assert "no trainable parameters" in said["frozen"]
        assert "FSDP1" in said["fsdp1"]
        assert "IslandError" in said["uneven"] and "do different things" in said["uneven"]


def test_an_island_continues_from_checkpoints_of_its_ranks_with_as_many_and_with_more(
    syncers: list[SyncerThread], tmp_path: Path
) -> None:
    syncers.append(SyncerThread(config(overlap=2)))
    options = {"adam": True, "learner": {"run_folder": tmp_path, "checkpoint_every_s": 60.0}}
    given = (island_work.train, "fsdp", syncers[0].address)
    first = Ranks(2, tmp_path / "first", *given, 12, options).results()
    again = Ranks(2, tmp_path / "again", *given, 6, options).results()
    wider = Ranks(4, tmp_path / "wider", *given, 6, options).results()
    assert [answer["optimizer_steps"] for answer in first] == [[12], [12]], first
    assert [answer["optimizer_steps"] for answer in again] == [[18], [18]], again
    assert all("of step 12, generation 1" in answer["inner"] for answer in again)
    assert [answer["optimizer_steps"] for answer in wider] == [[24]] * 4, wider
    assert all("which 2 ranks wrote" in answer["inner"] for answer in wider)
    names = {path.parent.name for path in (tmp_path / "learners" / "l").glob("*/inner-*.safetensors")}
    assert {"rank-0-of-2", "rank-1-of-2"} <= names


def test_a_rank_waits_for_a_slow_end_of_the_one_that_speaks(syncers: list[SyncerThread], tmp_path: Path) -> None:
    """A rank that ended with its worker in a collective was aborted, and its island started again."""
    syncers.append(SyncerThread(config(overlap=2)))
    ranks = island(syncers[0], tmp_path, steps=12, slow_end_s=2.0)
    answers = ranks.results()
    assert [(answer["step"], answer["workers_left"]) for answer in answers] == [(12, 0), (12, 0)], answers
