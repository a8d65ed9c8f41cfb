"""Shards with keys: tokens of their own for learners and syncer, TLS everywhere, and nobody else is let in."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import WAIT_S, SyncerProcess, TrainingThread
from shards import ShardProcess
from test_shards import refusal

from atoll.errors import AtollError, RefusedError
from atoll.wire import ClientOptions, change_shards, fetch_status

pytest.importorskip("cryptography")


def atoll(folder: Path, *argv: str) -> None:
    subprocess.run([sys.executable, "-m", "atoll", *argv], cwd=folder, check=True, capture_output=True, timeout=120)


def check_revocation(folder: Path, shard: ShardProcess, token: str, authority: str) -> None:
    """A key that is revoked in the shard's own copy of the registry opens nothing there within seconds. (The shard
    looked at its copy only when a stranger came.)"""
    place, deadline = ClientOptions(address=shard.address, token=token, tls_ca=authority), time.monotonic() + WAIT_S
    assert asyncio.run(fetch_status(place))["led"]
    atoll(folder, "keys", "revoke", "copy", "l0")
    while True:
        try:
            asyncio.run(fetch_status(place))
        except AtollError as error:
            assert "revoked" in str(error)
            return
        assert time.monotonic() < deadline, "a revoked key is served"
        time.sleep(0.2)


def test_a_run_with_keys_and_tls_trains_through_its_shards_and_strangers_do_not(tmp_path: Path) -> None:
    atoll(tmp_path, "keys", "init", "keys", "--name", "127.0.0.1")
    for name, role in (("l0", "learner"), ("boss", "operator")):
        atoll(tmp_path, "keys", "issue", "keys", name, "--role", role, "--to", f"{name}.token")
    shutil.copytree(tmp_path / "keys", tmp_path / "copy")
    authority, token = str(tmp_path / "keys" / "ca.pem"), (tmp_path / "l0.token").read_text().strip()
    shards = [ShardProcess(tmp_path / f"shard-{n}", "--keys", str(tmp_path / "copy")) for n in range(2)]
    (tmp_path / "run").mkdir()
    where = ("--shards", ",".join(shard.address for shard in shards), "--tls-ca", authority)
    own = ("--keys", str(tmp_path / "keys"), "--fragments", "2", "--sync-every", "4")
    for shard in shards:
        shard.wait_ready()
    wrong = ("--run-folder", str(tmp_path / "wrong"), "--listen", "127.0.0.1:0", "--token-file", "l0.token")
    said = refusal("syncer", *where, *own, *wrong[:-1], str(tmp_path / "l0.token"))
    assert "refuses this syncer" in said and "operator" in said
    syncer = SyncerProcess(tmp_path / "run", *where, *own, "--token-file", str(tmp_path / "boss.token"))
    learner = TrainingThread(syncer.address, "l0", token=token, tls_ca=authority)
    place = ClientOptions(address=syncer.address, token=token, tls_ca=authority)
    deadline = time.monotonic() + WAIT_S
    try:
        while min(asyncio.run(fetch_status(place))["versions"], default=0) < 2:
            assert time.monotonic() < deadline and learner.error is None, syncer.output()
            time.sleep(0.1)
        with pytest.raises(RefusedError, match="cannot move fragments between shards; use one with --role operator"):
            asyncio.run(change_shards(place, "move", shards[0].address, [0]))
        boss = ClientOptions(
            address=syncer.address, token=(tmp_path / "boss.token").read_text().strip(), tls_ca=authority
        )
        asyncio.run(change_shards(boss, "move", shards[0].address, [0, 1]))
        while [shard["fragments"] for shard in asyncio.run(fetch_status(place))["shards"]] != [[0, 1], []]:
            assert time.monotonic() < deadline and learner.error is None, syncer.output()
            time.sleep(0.1)
    finally:
        learner.stopping.set()
        learner.thread.join(60)
        try:
            check_revocation(tmp_path, shards[0], token, authority)
        finally:
            codes = [syncer.stop(), *(shard.stop() for shard in shards)]
    assert learner.error is None and codes == [0, 0, 0], syncer.output()
