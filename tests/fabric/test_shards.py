"""Shards on real processes: the same bits as one syncer, deaths of each part, and refusals."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from cluster import WAIT_S, SyncerProcess, TrainingThread, check_books
from shards import ShardProcess, sharded_syncer

from atoll.cli.options import shard_addresses
from atoll.core import Hello, TensorSpec
from atoll.errors import ConfigError, RefusedError
from atoll.store import read_state
from atoll.wire import ClientOptions, ControlClient

RHYTHM = ("--fragments", "4", "--sync-every", "4", "--overlap", "1")
STEPS = 24
EXACT = ("--fragments", "4", "--sync-every", "4", "--overlap", "0", "--quorum", "all", "--grace-cap", "0")
"""Synchronous: what is merged follows from the data alone, never from who was faster."""


def test_two_shards_make_the_same_bits_as_one_syncer(tmp_path: Path) -> None:
    def train(address: str) -> None:
        learners = [TrainingThread(address, f"l{i}", seed=i, steps=STEPS, step_s=0.0) for i in range(2)]
        for learner in learners:
            learner.thread.join(100)
            assert learner.error is None, learner.error

    alone = tmp_path / "alone"
    alone.mkdir()
    single = SyncerProcess(alone, *EXACT, "--learners", "2")
    train(single.address)
    assert single.stop() == 0, single.output()
    expected = {
        f: (one.version, int(one.meta["checksum"]))
        for f, one in read_state(alone / "state", only=("theta",)).fragments.items()
    }
    syncer, shards = sharded_syncer(tmp_path, 2, *EXACT, "--learners", "2")
    train(syncer.address)
    assert syncer.stop() == 0, syncer.output()
    assert [shard.stop() for shard in shards] == [0, 0]
    found = [shard.checksums() for shard in shards]
    assert found[0].keys().isdisjoint(found[1])
    assert found[0] | found[1] == expected
    assert min(version for version, _ in expected.values()) >= STEPS // 4
    model = [(folder / "model.safetensors").read_bytes() for folder in (alone, tmp_path / "run")]
    assert model[0] == model[1]


def test_the_run_outlives_the_death_of_each_part(tmp_path: Path) -> None:
    """One run, and one after the other: a shard dies, a shard loses its disk, the coordinator dies, and one wakes up
    when another leads its shards."""
    syncer, shards = sharded_syncer(tmp_path, 2, *RHYTHM, "--learners", "2")
    learners = [TrainingThread(syncer.address, f"l{i}", seed=i) for i in range(2)]
    try:
        a_shard_dies(syncer, shards)
        a_disk_is_lost(syncer, shards)
        the_coordinator_dies(syncer, learners)
        a_newer_one_leads(syncer, shards, tmp_path)
        assert all(learner.error is None for learner in learners)
    finally:
        for learner in learners:
            learner.stopping.set()
        for shard in shards:
            shard.kill()


def a_shard_dies(syncer: SyncerProcess, shards: list[ShardProcess]) -> None:
    """Its fragments stop and no others, until it is back."""
    status = syncer.wait_for(lambda s: min(s["versions"], default=0) >= 2, "two versions of every fragment")
    dead, alive = (shard["fragments"] for shard in status["shards"])
    shards[0].kill()
    before = syncer.wait_for(lambda s: bool(s["shards"][0]["away"]), "its death is noticed")["versions"]
    after = syncer.wait_for(
        lambda s: all(s["versions"][f] >= before[f] + 3 for f in alive), "the others go on without it"
    )["versions"]
    assert [after[f] for f in dead] == [before[f] for f in dead]
    shards[0].start()
    goes_on(syncer, after, "")


def a_disk_is_lost(syncer: SyncerProcess, shards: list[ShardProcess]) -> None:
    """Learners bring back what it held."""
    shards[1].kill()
    shutil.rmtree(shards[1].folder / "state")
    before = syncer.wait_for(lambda s: bool(s["shards"][1]["away"]), "its death is noticed")
    shards[1].start()
    status = goes_on(syncer, before["versions"], "", "shards")
    if status["recovered_from"]:  # its last version was published and fetched by nobody: what is left is the one before
        assert "nobody holds the newest version" in syncer.output()
    else:
        assert status["epoch"] == before["epoch"], "the others need not begin anew for it"


def the_coordinator_dies(syncer: SyncerProcess, learners: list[TrainingThread]) -> None:
    """Learners train on, and shards hold what they held."""
    before = syncer.status()
    syncer.kill()
    for learner in learners:
        learner.wait_steps(5)
    syncer.again()
    status = goes_on(syncer, before["versions"])
    assert status["run"] == before["run"] and status["epoch"] > before["epoch"]


def a_newer_one_leads(syncer: SyncerProcess, shards: list[ShardProcess], tmp_path: Path) -> None:
    """The frozen coordinator has a disk of its own, so that its shards alone can tell it."""
    os.kill(syncer.process.pid, signal.SIGSTOP)
    folder = tmp_path / "second"
    shutil.copytree(tmp_path / "run", folder)
    addresses = ",".join(shard.address for shard in shards)
    second = SyncerProcess(folder, "--shards", addresses, "--take-over")
    os.kill(syncer.process.pid, signal.SIGCONT)
    assert syncer.process.wait(WAIT_S) == 3, syncer.output()
    second.kill()


def goes_on(syncer: SyncerProcess, versions: list[int], *sources: str) -> dict[str, Any]:
    status = syncer.wait_for(
        lambda s: all(s["versions"][f] >= versions[f] + 2 for f in range(4)), "every fragment goes on"
    )
    assert status["recovered_from"] in (sources or ("shards",))
    check_books(status)
    return status


def test_two_dead_shards_stop_their_own_fragments_and_no_others(tmp_path: Path) -> None:
    """Also for a coordinator that starts while one is dead, which then takes it in."""
    syncer, shards = sharded_syncer(tmp_path, 3, *RHYTHM, "--learners", "2")
    learners = [TrainingThread(syncer.address, f"l{i}", seed=i) for i in range(2)]
    try:
        status = syncer.wait_for(lambda s: min(s["versions"], default=0) >= 2, "two versions of every fragment")
        epoch, owned = status["epoch"], [shard["fragments"] for shard in status["shards"]]
        shards[0].kill()
        shards[1].kill()
        grows(syncer, owned[2], [])
        shards[1].start()
        grows(syncer, [*owned[1], *owned[2]], owned[0])
        assert syncer.status()["epoch"] == epoch
        syncer.kill()
        syncer.again()
        status = grows(syncer, [*owned[1], *owned[2]], owned[0])
        assert status["epoch"] > epoch and status["shards"][0]["away"]
        check_books(status)
        shards[0].start()
        check_books(grows(syncer, range(4), []))
        assert all(learner.error is None for learner in learners)
    finally:
        for learner in learners:
            learner.stopping.set()
        for shard in shards:
            shard.kill()


def grows(syncer: SyncerProcess, going: Iterable[int], stopped: list[int]) -> dict[str, Any]:
    """These fragments get versions, and those do not."""
    first = syncer.wait_for(lambda s: len(s["versions"]) == 4 and s["active"] == 2, "both learners train")["versions"]
    after = syncer.wait_for(lambda s: all(s["versions"][f] >= first[f] + 3 for f in going), f"{going} go on")
    assert [after["versions"][f] for f in stopped] == [first[f] for f in stopped]
    return after


def test_without_a_disk_the_run_outlives_a_shard_all_the_same(tmp_path: Path) -> None:
    syncer, shards = sharded_syncer(tmp_path, 2, *RHYTHM, "--learners", "2", "--durability", "none")
    learners = [TrainingThread(syncer.address, f"l{i}", seed=i) for i in range(2)]
    try:
        before = syncer.wait_for(lambda s: min(s["versions"], default=0) >= 2, "two versions of every fragment")
        shards[0].kill()
        syncer.wait_for(lambda s: bool(s["shards"][0]["away"]), "its death is noticed")
        shards[0].start()
        after = syncer.wait_for(
            lambda s: all(s["versions"][f] >= before["versions"][f] + 3 for f in range(4)), "every fragment goes on"
        )
        assert after["run"] == before["run"]
        check_books(after)
    finally:
        for learner in learners:
            learner.stopping.set()
        for shard in shards:
            shard.kill()


def test_a_wrong_token_or_a_syncers_address_is_a_clear_refusal(tmp_path: Path) -> None:
    shard = ShardProcess(tmp_path / "shard", "--token", "right")
    shard.wait_ready()
    where = ("--listen", "127.0.0.1:0", "--run-folder", str(tmp_path / "run"))
    assert "refuses this syncer" in refusal("syncer", *where, "--shards", shard.address, "--token", "wrong")
    shard.stop()
    (tmp_path / "other").mkdir()
    other = SyncerProcess(tmp_path / "other")
    assert "is a syncer" in refusal("syncer", *where, "--shards", other.address)
    other.stop()


def refusal(*argv: str) -> str:
    done = subprocess.run([sys.executable, "-m", "atoll", *argv], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        ("127.0.0.1:7100,127.0.0.1:7100", "is given twice"),
        ("127.0.0.1", "is not host:port"),
        ("127.0.0.1:0", "port 0"),
    ],
)
def test_a_wrong_list_of_shards_is_refused(shards: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shard_addresses(shards)


async def old_hello(address: str) -> None:
    async with ControlClient(ClientOptions(address=address)) as client:
        await client.open(Hello("old", "i", 3, (TensorSpec("w", (256,), "float32"),)))


def test_older_learners_and_shards_of_another_run_or_of_one_folder_are_refused(tmp_path: Path) -> None:
    syncer, shards = sharded_syncer(tmp_path, 2, *RHYTHM)
    learner = TrainingThread(syncer.address, "only")
    syncer.wait_for(lambda s: min(s["versions"], default=0) >= 1, "a version of every fragment")
    with pytest.raises(RefusedError, match="older than shards"):
        asyncio.run(old_hello(syncer.address))
    learner.stop()
    assert syncer.stop() == 0, syncer.output()
    first, second = (shard.address for shard in shards)
    own = ("--shards", f"{first},{second}", "--listen", "127.0.0.1:0")
    assert "is using" in refusal("shard", "--listen", "127.0.0.1:0", "--run-folder", str(shards[0].folder))
    assert "holds fragments of run" in refusal("syncer", "--run-folder", str(tmp_path / "other"), *own)
    assert "are on shards" in refusal("syncer", "--run-folder", str(tmp_path / "run"), "--listen", "127.0.0.1:0")
    shards[1].kill()
    shutil.rmtree(shards[1].folder)
    shutil.copytree(shards[0].folder, shards[1].folder)
    (shards[1].folder / "shard.json").unlink()
    shards[1].start()
    shards[1].wait_ready()
    assert "copies of one folder" in refusal("syncer", "--run-folder", str(tmp_path / "run"), *own)
    shards[0].stop()
    shards[1].stop()
