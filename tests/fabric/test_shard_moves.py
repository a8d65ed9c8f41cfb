"""Fragments move between shards while the run goes on: the same bits, one owner whatever dies, learners follow."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from cluster import SyncerProcess, TrainingThread, check_books
from shards import ShardProcess, change, owners, sharded_syncer
from test_shards import EXACT, RHYTHM, grows

from atoll.errors import AtollError
from atoll.store import read_state
from atoll.wire import ClientOptions, change_shards

STEPS = 64


def test_moves_change_no_bit(tmp_path: Path) -> None:
    """A shard is added, fragments go there and back, and it is taken out again, while both learners train."""
    alone = tmp_path / "alone"
    alone.mkdir()
    single = SyncerProcess(alone, *EXACT, "--learners", "2")
    for learner in [TrainingThread(single.address, f"l{i}", seed=i, steps=STEPS, step_s=0.0) for i in range(2)]:
        learner.thread.join(100)
        assert learner.error is None, learner.error
    assert single.stop() == 0, single.output()
    loaded = read_state(alone / "state", only=("theta",)).fragments
    expected = {f: (one.version, int(one.meta["checksum"])) for f, one in loaded.items()}

    syncer, shards = sharded_syncer(tmp_path, 2, *EXACT, "--learners", "2")
    shards.append(ShardProcess(tmp_path / "shard-2"))
    shards[2].wait_ready()
    learners = [TrainingThread(syncer.address, f"l{i}", seed=i, steps=STEPS, step_s=0.1) for i in range(2)]
    status = syncer.wait_for(lambda s: min(s["versions"], default=0) >= 1, "a version of every fragment")
    before = owners(status)
    added = change(syncer, "add", shards[2].address)
    name = added["shards"][2]["name"]
    assert added["shard_change"]["state"] == "done" and name in owners(added).values()
    for fragment in range(4):
        status = change(syncer, "move", name, fragment)
        assert owners(status)[fragment] == name, status["shard_change"]
    assert [len(shard["fragments"]) for shard in status["shards"]] == [0, 0, 4]
    back = change(syncer, "move", before[1], 1)
    assert owners(back)[1] == before[1]
    out = change(syncer, "remove", name)
    assert name not in owners(out).values() and len(out["shards"]) == 2
    assert min(out["versions"]) < STEPS // 4, "all of this was while they trained"
    for learner in learners:
        learner.thread.join(100)
        assert learner.error is None, learner.error
    assert syncer.stop() == 0, syncer.output()
    assert [shard.stop() for shard in shards] == [0, 0, 0]
    found = [shard.checksums() for shard in shards]
    assert found[2] == {} and found[0].keys().isdisjoint(found[1])
    assert found[0] | found[1] == expected
    model = [(folder / "model.safetensors").read_bytes() for folder in (alone, tmp_path / "run")]
    assert model[0] == model[1]


COORDINATOR_DIES = ("move.installed", "move.recorded")
"""Just before the move counts, and just after; test_moves_here has the others."""


def test_the_coordinator_dies_in_the_middle_of_a_move_and_each_fragment_has_one_owner(tmp_path: Path) -> None:
    syncer, shards = sharded_syncer(tmp_path, 2, *RHYTHM, "--learners", "2")
    learners = [TrainingThread(syncer.address, f"l{i}", seed=i) for i in range(2)]
    try:
        syncer.wait_for(lambda s: min(s["versions"], default=0) >= 2, "two versions of every fragment")
        for point in COORDINATOR_DIES:
            syncer.kill()
            syncer.again(ATOLL_FAILPOINT=f"{point}:1")
            status = grows(syncer, range(4), [])
            before, versions = owners(status), status["versions"]
            other = next(shard["name"] for shard in status["shards"] if shard["name"] != before[0])
            with contextlib.suppress(AtollError):  # it may die before it answers
                asyncio.run(change_shards(ClientOptions(address=syncer.address), "move", other, [0]))
            assert syncer.process.wait(60) == -9, syncer.output()
            syncer.again()
            status = grows(syncer, range(4), [])
            moved = point == "move.recorded"
            assert owners(status)[0] == (other if moved else before[0]), point
            assert all(now >= then for now, then in zip(status["versions"], versions, strict=True)), "nothing is lost"
            check_books(status)
            one_copy(shards)
        assert all(learner.error is None for learner in learners)
    finally:
        for learner in learners:
            learner.stopping.set()
        for shard in shards:
            shard.kill()


def one_copy(shards: list[ShardProcess]) -> None:
    """On the disks, too, each fragment is there once."""
    found = [set(shard.checksums()) for shard in shards]
    assert sorted(f for one in found for f in one) == [0, 1, 2, 3], found


SOURCE_DIES = ("move.read:1", "drop.slots:1")
TARGET_DIES = ("slot.flipped:1",)


def test_source_and_target_die_in_the_middle_of_a_move_and_nothing_is_lost(tmp_path: Path) -> None:
    syncer, shards = sharded_syncer(tmp_path, 1, *RHYTHM, "--learners", "2")
    learners = [TrainingThread(syncer.address, f"l{i}", seed=i) for i in range(2)]
    spare = ShardProcess(tmp_path / "spare")
    spare.wait_ready()
    try:
        syncer.wait_for(lambda s: min(s["versions"], default=0) >= 2, "two versions of every fragment")
        for point in TARGET_DIES:  # it has nothing yet: its first commit is that of the fragment that comes
            spare.kill()
            spare.start(ATOLL_FAILPOINT=point)
            spare.wait_ready()
            failed = change(syncer, "add", spare.address)
            assert failed["shard_change"]["state"] == "failed", failed["shard_change"]
            assert spare.process.wait(60) == -9
            spare.start()
            status = grows(syncer, range(4), [])
            assert set(owners(status).values()) == {status["shards"][0]["name"]}
            syncer.wait_for(lambda s: not s["shards"][1]["away"], "the shard is back")
            one_copy([*shards, spare])
            name = status["shards"][1]["name"]
            assert change(syncer, "remove", name)["shard_change"]["state"] == "done"
        assert change(syncer, "add", spare.address)["shard_change"]["state"] == "done"
        for point in SOURCE_DIES:
            shards[0].kill()
            shards[0].start(ATOLL_FAILPOINT=point)
            status = grows(syncer, range(4), [])
            fragment = status["shards"][0]["fragments"][0]
            status = change(syncer, "move", status["shards"][1]["name"], fragment)
            assert shards[0].process.wait(60) == -9
            moved = point.startswith("drop")
            assert status["shard_change"]["state"] == ("done" if moved else "failed"), status["shard_change"]
            shards[0].start()
            status = grows(syncer, range(4), [])
            assert (fragment in status["shards"][1]["fragments"]) == moved
            check_books(status)
            one_copy([*shards, spare])
        assert all(learner.error is None for learner in learners)
    finally:
        for learner in learners:
            learner.stopping.set()
        for shard in (*shards, spare):
            shard.kill()
        syncer.kill()
