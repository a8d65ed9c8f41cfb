"""Who leads a shard, and who is copied to a standby: a learner of the run, with the run's one token, does neither."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import WAIT_S, _remembered
from ports import quiet_port

from atoll.core import SyncConfig
from atoll.errors import RefusedError, UnreachableError
from atoll.launch.commands import learner_commands, linked, shard_commands, syncer_command
from atoll.launch.config import DurabilityConfig
from atoll.launch.folder import RunFolder
from atoll.syncer import relay_calls, replica_calls, shard_calls
from atoll.wire import ClientOptions, ShardConnection, fetch_status

TOKEN, LINK = "the-run-token-of-this-test", "what-only-syncer-and-shards-have"
LEADS = {
    "shard": (shard_calls.ATTACH, {"link": shard_calls.LINK_VERSION, "level": "none", "interval_s": 1.0, "record": 0}),
    "syncer": (replica_calls.REPLICATE, {"link": replica_calls.LINK_VERSION, "alone": False}),
}
STANDS_BY = {"shard": (), "syncer": ("--standby", "--replica")}


def start(kind: str, folder: Path, **environment: str) -> str:
    """A shard, or a standby that waits for its primary; its address."""
    address = f"127.0.0.1:{quiet_port()}"
    argv = [sys.executable, "-m", "atoll", kind, "--listen", address, "--run-folder", str(folder)]
    said = (folder / "said.log").open("w")
    own = {**os.environ, "ATOLL_TOKEN": TOKEN, **environment}
    _remembered(subprocess.Popen([*argv, *STANDS_BY[kind]], stdout=said, stderr=said, env=own))
    asyncio.run(_answers(address))
    return address


async def _answers(address: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await fetch_status(ClientOptions(address, token=TOKEN))
                return
            except UnreachableError:
                await asyncio.sleep(0.1)


async def lead(address: str, token: str, method: str, values: dict[str, Any]) -> dict[str, Any]:
    async def answer(*_: object) -> Any:
        return {}, b""

    greeting = {"run": "", "epoch": 2**40, "instance": "x", **values}
    async with asyncio.timeout(WAIT_S):
        while True:  # gRPC may say of a call that was refused only that it ended; who leads asks again, too
            async with ShardConnection(ClientOptions(address, token=token), answer) as link:
                try:
                    return (await link.peer.call(method, greeting))[0]
                except UnreachableError:
                    await asyncio.sleep(0.1)


@pytest.mark.parametrize("kind", ["shard", "syncer"])
def test_the_runs_token_leads_nobody_where_the_link_has_its_own(tmp_path: Path, kind: str) -> None:
    """With the run's token a learner took a shard over, for good: its epoch was newer than any that is to come."""
    address = start(kind, tmp_path, ATOLL_LINK_TOKEN=LINK)
    with pytest.raises(RefusedError, match="ATOLL_LINK_TOKEN"):
        asyncio.run(lead(address, TOKEN, *LEADS[kind]))
    with pytest.raises(RefusedError):
        asyncio.run(lead(address, "made-up", *LEADS[kind]))
    asyncio.run(lead(address, LINK, *LEADS[kind]))


def test_with_the_runs_token_a_relay_links_to_a_shard_and_can_ask_nothing_of_it(tmp_path: Path) -> None:
    """It is asked for what it holds, and leads nobody."""
    address = start("shard", tmp_path, ATOLL_LINK_TOKEN=LINK)

    async def attach() -> None:
        async def answer(*_: object) -> Any:
            return {}, b""

        async with asyncio.timeout(WAIT_S), ShardConnection(ClientOptions(address, token=TOKEN), answer) as link:
            named = {"version": relay_calls.RELAY_LINK_VERSION, "name": "a-relay"}
            assert (await link.peer.call(relay_calls.RELAY, named))[0] == {}
            for method in (shard_calls.COPY, shard_calls.MERGE, shard_calls.DROP, *LEADS["shard"][:1]):
                with pytest.raises(RefusedError):
                    await link.peer.call(method, {"fragment": 0, **LEADS["shard"][1], "run": "", "epoch": 1})

    asyncio.run(attach())


def test_a_launcher_gives_syncer_and_shards_a_token_that_learners_do_not_have(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    syncer = syncer_command(folder, SyncConfig(), DurabilityConfig(), token=TOKEN, first_start=True)
    syncer, shards = linked(syncer, shard_commands(folder, 2, token=TOKEN))
    given = {one.environment["ATOLL_LINK_TOKEN"] for one in (syncer, *shards)}
    assert len(given) == 1 and TOKEN not in given
    learners = learner_commands(folder, ["true"], count=2, threads=1, environment={"ATOLL_TOKEN": TOKEN})
    assert not any(given & set(one.environment.values()) for one in learners)
    assert not any(secret in " ".join(one.argv) for one in (syncer, *shards) for secret in (*given, TOKEN))
