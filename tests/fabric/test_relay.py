"""A relay on real processes: the syncer sees learners, updates cross the link once, and its death costs nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from cluster import WAIT_S, TrainingThread, _remembered, check_books, small_model
from ports import quiet_port
from shards import sharded_syncer
from torch import nn

from atoll.wire import ClientOptions, fetch_status

WIDE = 2400
"""Makes updates too large to travel inside their notices."""


class RelayProcess:
    def __init__(self, upstream: str, log: Path) -> None:
        self.address = f"127.0.0.1:{quiet_port()}"
        self.log = log.open("a")
        argv = [sys.executable, "-m", "atoll", "relay", "--upstream", upstream, "--listen", self.address]
        self.process = _remembered(subprocess.Popen(argv, stdout=self.log, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + WAIT_S
        while "listens on" not in log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def status(self) -> dict[str, Any]:
        return asyncio.run(fetch_status(ClientOptions(address=self.address)))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def same_model() -> nn.Module:
    """Whoever comes with the run's first parameters need not fetch them."""
    torch.manual_seed(0)
    return small_model(WIDE)


def test_a_site_fetches_each_update_once_and_outlives_its_relay(tmp_path: Path) -> None:
    rhythm = ("--fragments", "1", "--sync-every", "4", "--overlap", "2", "--quorum", "all", "--learners", "2")
    syncer, shards = sharded_syncer(tmp_path, 1, *rhythm)
    relay = RelayProcess(syncer.address, tmp_path / "relay.log")
    places = f"{relay.address},{syncer.address}"
    learners = [TrainingThread(places, f"l{i}", seed=i, step_s=0.05, model=same_model()) for i in range(2)]
    try:
        status = syncer.wait_for(lambda s: min(s["versions"], default=0) >= 8, "eight versions through the relay")
        members = {one["learner"]: one for one in status["members"]}
        assert members.keys() == {"l0", "l1"} and status["contributions_merged"] >= 16
        check_books(status)
        told = relay.status()
        assert told["learners"] == ["l0", "l1"]
        # Both learners were served every update; the link to the syncer carried each once.
        assert told["bytes_served"] >= 1.8 * told["bytes_fetched"] > 0
        relay.kill()
        after = syncer.wait_for(lambda s: min(s["versions"]) >= status["versions"][0] + 4, "they go on without it")
        assert {one["learner"] for one in after["members"] if one["state"] == "active"} == {"l0", "l1"}
        check_books(after)
    finally:
        for learner in learners:
            learner.stop()
        syncer.stop()
        shards[0].stop()
    assert all(learner.error is None for learner in learners)


def test_a_relay_to_nowhere_says_so() -> None:
    argv = [sys.executable, "-m", "atoll", "relay", "--upstream", f"127.0.0.1:{quiet_port()}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no syncer listens on that port" in done.stderr
