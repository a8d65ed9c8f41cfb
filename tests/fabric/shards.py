"""Real shard processes for tests, and what they and their syncer hold on disk."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cluster import WAIT_S, SyncerProcess, _remembered
from ports import quiet_port

from atoll.store import read_state
from atoll.wire import ClientOptions, change_shards, fetch_status


class ShardProcess:
    """`atoll shard` as a real process, to be killed and started again."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"127.0.0.1:{quiet_port()}"
        self._options = options
        self.start(**environment)

    def start(self, *options: str, **environment: str) -> None:
        where = ("--listen", self.address, "--run-folder", str(self.folder))
        self.log = (self.folder / "shard.log").open("a")
        self.process = _remembered(
            subprocess.Popen(
                [sys.executable, "-m", "atoll", "shard", *where, *self._options, *options],
                stdout=self.log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "ATOLL_PRELOAD": "atoll.instruments.chaos.inside", **environment},
            )
        )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                if json.loads((self.folder / "shard.json").read_text())["pid"] == self.process.pid:
                    return
            except (OSError, ValueError):
                pass
            assert self.process.poll() is None, self.output()
            time.sleep(0.02)
        raise AssertionError(f"the shard was not ready: {self.output()}")

    def output(self) -> str:
        return (self.folder / "shard.log").read_text()

    def status(self) -> dict[str, Any]:
        return asyncio.run(fetch_status(ClientOptions(address=self.address)))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(WAIT_S)
        self.log.close()
        return code

    def checksums(self) -> dict[int, tuple[int, int]]:
        """Version and checksum of each fragment on its disk."""
        loaded = read_state(self.folder / "state", only=("theta",))
        return {f: (one.version, int(one.meta["checksum"])) for f, one in loaded.fragments.items()}


def change(syncer: SyncerProcess, action: str, shard: str, *fragments: int) -> dict[str, Any]:
    """Have the run's shards changed, and wait until that is over; returns the status then."""
    _, number = asyncio.run(change_shards(ClientOptions(address=syncer.address), action, shard, fragments))
    return syncer.wait_for(
        lambda s: s["shard_change"]["number"] == number and s["shard_change"]["state"] != "under way",
        f"{action} {shard} {fragments}",
    )


def owners(status: dict[str, Any]) -> dict[int, str]:
    """By fragment: the name of its shard. No two have one."""
    found = [(f, shard["name"]) for shard in status["shards"] for f in shard["fragments"]]
    assert len(dict(found)) == len(found)
    return dict(found)


def sharded_syncer(folder: Path, count: int, *options: str) -> tuple[SyncerProcess, list[ShardProcess]]:
    """A coordinator and its shards, all ready."""
    shards = [ShardProcess(folder / f"shard-{index}") for index in range(count)]
    run = folder / "run"
    run.mkdir()
    addresses = ",".join(shard.address for shard in shards)
    return SyncerProcess(run, "--shards", addresses, *options), shards
