"""Large payloads past gRPC in a run of real processes: a syncer in clear and under TLS, and shards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from certificates import certificate
from cluster import WAIT_S, SyncerProcess
from shards import sharded_syncer
from test_relay import RelayProcess

from atoll.learner import Learner

SETTINGS = ("--sync-every", "2", "--fragments", "2", "--codec-up", "fp32", "--codec-down", "fp32", "--learners", "1")
FRAGMENT_BYTES = 2 << 20
"""Half of a layer of 1024 x 1024."""


def train(
    address: str, *, tls_ca: str | None = None, token: str | None = None, until: Callable[[int, int], bool]
) -> tuple[int, int]:
    """Steps until the bytes past gRPC and the versions adopted are as wished; returns both."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(4, 1024)
    deadline = time.monotonic() + WAIT_S
    given = {"address": address, "learner_id": "a", "tls_ca": tls_ca, "token": token, "checkpoint_every_s": 0}
    with Learner(model, optimizer, **given) as learner:  # type: ignore[arg-type]
        while True:
            optimizer.zero_grad()
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            learner.step(tokens=4, loss=loss.detach())
            bulk = learner._shell._bulk  # type: ignore[union-attr]
            past, versions = bulk.bytes_past_grpc, min(learner._machine.bases)  # type: ignore[union-attr]
            if until(past, versions):
                return past, versions
            assert time.monotonic() < deadline, (past, versions)
            time.sleep(0.005)


def both_ways(past: int, versions: int) -> bool:
    """Each fragment came and went past gRPC at least twice."""
    return past >= 8 * FRAGMENT_BYTES and versions >= 4


@pytest.fixture
def ending() -> Iterator[list[SyncerProcess]]:
    running: list[SyncerProcess] = []
    yield running
    for process in running:
        process.process.terminate()
        process.process.wait(WAIT_S)
        process.log.close()


def test_a_syncer_in_clear(tmp_path: Path, ending: list[SyncerProcess]) -> None:
    ending.append(syncer := SyncerProcess(tmp_path, *SETTINGS))
    train(syncer.address, until=both_ways)
    assert "refused" not in syncer.output() and "Traceback" not in syncer.output()


def test_a_syncer_under_tls_with_a_token(tmp_path: Path, ending: list[SyncerProcess]) -> None:
    pem, key = certificate(tmp_path, "127.0.0.1")
    secured = ("--tls-certificate", pem, "--tls-key", key, "--token", "a-token-of-the-run")
    ending.append(syncer := SyncerProcess(tmp_path, *SETTINGS, *secured))
    train(syncer.address, tls_ca=pem, token="a-token-of-the-run", until=both_ways)
    assert "Traceback" not in syncer.output()


def test_off_means_off(tmp_path: Path, ending: list[SyncerProcess]) -> None:
    ending.append(syncer := SyncerProcess(tmp_path, *SETTINGS, "--bulk-port", "off"))
    past, _ = train(syncer.address, until=lambda _, versions: versions >= 4)
    assert past == 0


@pytest.mark.parametrize("merge", [True, False])
def test_a_relay_serves_it_and_uses_it(tmp_path: Path, ending: list[SyncerProcess], merge: bool) -> None:
    ending.append(syncer := SyncerProcess(tmp_path, *SETTINGS))
    relay = RelayProcess(syncer.address, tmp_path / "relay.log", *([] if merge else ["--no-merge"]))
    try:
        train(relay.address, until=both_ways)
        assert relay.status()["bytes_served"] >= 4 * FRAGMENT_BYTES
        log = (tmp_path / "relay.log").read_text()
        assert "Traceback" not in log and "Traceback" not in syncer.output()
    finally:
        relay.kill()


def test_shards_serve_it_themselves(tmp_path: Path, ending: list[SyncerProcess]) -> None:
    syncer, shards = sharded_syncer(tmp_path, 2, *SETTINGS)
    ending.append(syncer)
    try:
        train(syncer.address, until=both_ways)
    finally:
        for shard in shards:
            assert "Traceback" not in shard.output()
            shard.kill()
