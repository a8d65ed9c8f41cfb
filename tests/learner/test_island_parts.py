"""Every rank of an island pushes and fetches its own parts of payloads, over a connection of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import island_work
import numpy as np
import pytest
from cluster import SyncerThread
from island_ranks import Ranks
from test_island import config, theta

from atoll.codec import block_bytes
from atoll.learner.island.parameters import moved
from atoll.learner.island.parts import join_parts
from atoll.learner.island.payloads import PayloadShares
from atoll.wire import PART_BYTES_MIN, STRIPES_MAX

WIDTH = 9002
"""One fragment, of 2.3 MB as fp32 and 0.3 MB as int4: more than what goes over the control connection."""
STEPS = 12


@pytest.fixture
def syncers() -> Iterator[list[SyncerThread]]:
    started: list[SyncerThread] = []
    yield started
    for syncer in started:
        syncer.stop()


def run(syncers: list[SyncerThread], folder: Path, kind: str, size: int, codec: str, **options: Any) -> list[Any]:
    syncers.append(SyncerThread(config(codec_up=codec, codec_down=codec, fragments=1)))
    given = {"gradients": False, "width": WIDTH, "trouble": "", **options}
    ranks = Ranks(
        size, folder / f"{kind}-{size}-{codec}", island_work.several, [(kind, syncers[-1].address, STEPS, given)]
    )
    answers = ranks.results()
    assert all(isinstance(answer, list) for answer in answers), (answers, ranks.output(0))
    return [told for (told,) in answers]


@pytest.mark.parametrize(("kind", "size", "codec"), [("fsdp", 2, "fp32"), ("fsdp", 3, "int4"), ("tp", 2, "fp32")])
def test_every_rank_moves_its_own_parts_and_the_bits_are_those_of_one_process(
    syncers: list[SyncerThread], tmp_path: Path, kind: str, size: int, codec: str
) -> None:
    run(syncers, tmp_path, "plain", 1, codec)
    told = run(syncers, tmp_path, kind, size, codec, learner={"run_folder": str(tmp_path / "run")})
    assert theta(syncers[0]) == theta(syncers[1])
    ups, downs = zip(*(one["bytes"] for one in told), strict=True)
    assert min(ups) > 0 and min(downs) > 0, (ups, downs)
    assert max(ups) < 0.6 * sum(ups) and max(downs) < 0.6 * sum(downs), "no rank carries it all"
    written = [line for file in (tmp_path / "run/events").iterdir() for line in file.read_text().splitlines()]
    counted = [event for event in map(json.loads, written) if event["kind"] == "island_bytes"][-1]
    assert all(at_end >= before for at_end, before in zip(counted["up"] + counted["down"], ups + downs, strict=True))
    largest = max(one["largest"] for one in told)
    assert PART_BYTES_MIN <= largest < 0.6 * 4 * 64 * WIDTH, "no rank has a whole fragment"


@pytest.mark.parametrize(("kind", "size"), [("stages", 2), ("stages", 4), ("sharded stages", 4)])
def test_pipeline_stages_contribute_the_bits_of_one_process_that_has_the_whole_model(
    syncers: list[SyncerThread], tmp_path: Path, kind: str, size: int
) -> None:
    """With four ranks there are two replicas of each stage, or two ranks that share one."""
    run(syncers, tmp_path, "plain", 1, "int4")
    told = run(syncers, tmp_path, kind, size, "int4")
    assert theta(syncers[0]) == theta(syncers[1])
    first, last = told[0]["published"], told[-1]["published"]
    assert sorted(first) == ["0.bias", "0.weight"] and sorted(last) == ["2.bias", "2.weight"]
    columns = WIDTH // 2 if kind == "sharded stages" else WIDTH
    assert last["2.weight"] == [32, columns] and all(one["swapped"] for one in told)


@pytest.mark.parametrize("trouble", ["push_stripe", "fetch_range", "reach"])
def test_where_a_rank_cannot_move_its_parts_the_first_does_it_for_all(
    syncers: list[SyncerThread], tmp_path: Path, trouble: str
) -> None:
    run(syncers, tmp_path, "plain", 1, "fp32")
    told = run(syncers, tmp_path, "fsdp", 2, "fp32", trouble=trouble)
    assert theta(syncers[0]) == theta(syncers[1])
    assert told[1]["bytes"][trouble == "fetch_range"] == 0
    assert told[0]["handed_over"]


@pytest.mark.parametrize("ranks", [1, 2, 5, 20])
@pytest.mark.parametrize("codec", ["int4", "fp32"])
def test_parts_are_carried_once_and_put_together_as_one_process_would(ranks: int, codec: str) -> None:
    random, sections = np.random.default_rng(ranks), block_bytes(codec)
    owners = np.repeat(random.integers(0, ranks, 40), random.integers(1, 60, 40))
    blocks = [np.flatnonzero(owners == rank) for rank in range(ranks)]
    made = [random.integers(0, 256, sum(sections) * own.size, np.uint8) for own in blocks]
    all_shares = [PayloadShares(sections, blocks, rank) for rank in range(ranks)]
    whole = join_parts(sections, blocks, made)
    found, times = np.zeros_like(whole), np.zeros(whole.size, int)
    carried = _all_moved([shares.outward for shares in all_shares], made, all_shares[0].carried)
    for runs, data in zip(all_shares[0].carried, carried, strict=True):
        for start, stop, at in zip(runs.start, runs.stop, runs.at, strict=True):
            found[start:stop] = data[at : at + stop - start]
            times[start:stop] += 1
            assert start % all_shares[0].step == 0, "the wire takes whole parts only"
    assert np.array_equal(found, whole) and (times == 1).all()
    back = _all_moved([shares.inward for shares in all_shares], carried, all_shares[0].made)
    assert all(np.array_equal(one, again) for one, again in zip(made, back, strict=True))
    assert all_shares[0].carried[0] and all_shares[0].stripes <= STRIPES_MAX


def _all_moved(exchanges: list[Any], sources: list[Any], targets: list[Any]) -> list[Any]:
    """What every rank has after an exchange, without processes."""
    sent = {
        (giver, taker): pieces.take(sources[giver])
        for giver, exchange in enumerate(exchanges)
        for taker, pieces in exchange.sends.items()
    }

    def swap_of(me: int) -> Any:
        def swap(_: Any, receives: Any) -> None:
            for giver, array in receives.items():
                array[:] = sent.pop((giver, me))

        return swap

    found = [moved(exchange, sources[me], targets[me].count, swap_of(me)) for me, exchange in enumerate(exchanges)]
    assert not sent, "everything that is sent is received"
    return found
