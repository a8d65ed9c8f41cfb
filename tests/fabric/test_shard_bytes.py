"""What shards tell their coordinator of bytes: `atoll status`, reports and the choice of codecs go by it."""

from __future__ import annotations

from pathlib import Path

from cluster import TrainingThread
from here import ShardsHere

from atoll.core import SyncConfig

CONFIG = SyncConfig.from_dict({"fragments": 4, "sync_every": 4, "overlap": 1, "learners_expected": 1})


def test_a_fetch_counts_what_it_brought_and_not_what_it_asked_for(tmp_path: Path) -> None:
    """A learner with several connections asks for a first stripe of 4 MiB, whatever there is."""
    run = ShardsHere(CONFIG, tmp_path, 2)
    learner = TrainingThread(run.address, "a", step_s=0.02)
    try:
        run.grows()
        told = run.wait_for(lambda s: s["members"][0]["down_bytes"] > 0, "a fetch")
        fetches = sum(told["versions"]) + 8
        assert told["members"][0]["down_bytes"] < fetches * 100_000, told["members"][0]
    finally:
        learner.stop()
        run.stop()
