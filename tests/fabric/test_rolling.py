"""A rolling upgrade of everything between the learners: shards, relay and syncer are replaced one by one under load.

The previous release has neither shards nor relays, so that all processes here are of this one; `tests/compat` mixes
releases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster import TrainingThread, check_books
from shards import sharded_syncer
from test_relay import RelayProcess


def test_shards_relay_and_syncer_are_replaced_one_by_one_while_learners_train(tmp_path: Path) -> None:
    rhythm = ("--fragments", "2", "--sync-every", "4", "--learners", "2", "--quorum", "1")
    syncer, shards = sharded_syncer(tmp_path, 2, *rhythm)
    relay = RelayProcess(syncer.address, tmp_path / "relay.log")
    places = f"{relay.address},{syncer.address}"
    learners = [TrainingThread(places, f"l{i}", seed=i, step_s=0.02) for i in range(2)]

    def goes_on(what: str) -> dict[str, Any]:
        """Every fragment gets two more versions, every learner trains, and no token is missing."""
        before = syncer.wait_for(lambda s: len(s["versions"]) == 2, f"a run, {what}")["versions"]
        for learner in learners:
            learner.wait_steps(4)
        after = syncer.wait_for(
            lambda s: all(new >= old + 2 for new, old in zip(s["versions"], before, strict=True)), f"versions, {what}"
        )
        check_books(after)
        return after

    try:
        goes_on("at first")
        for shard in shards:
            assert shard.stop() == 0
            shard.start()
            shard.wait_ready()
            goes_on("after a shard was replaced")
        relay.process.terminate()
        relay.process.wait(60)
        relay = RelayProcess(syncer.address, tmp_path / "relay-2.log", address=relay.address)
        goes_on("after the relay was replaced")
        syncer.kill()  # SIGTERM would end the run
        syncer.again()
        last = goes_on("after the syncer was replaced")
        assert {one["learner"]: one["state"] for one in last["members"]} == {"l0": "active", "l1": "active"}
        assert last["epoch"] > 1 and not any(shard["away"] for shard in last["shards"])
    finally:
        for learner in learners:
            learner.stop()
        syncer.stop()
        relay.kill()
        for shard in shards:
            shard.stop()
    assert all(learner.error is None for learner in learners)
