"""A metrics port has no token, and is in the syncer's own process: strangers there must not take what it needs."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from pathlib import Path

from guarded import GuardedSyncer

from atoll.metrics.http import CONNECTIONS_MAX, SILENT_S

STRANGERS = 300
SPARED = 16
"""Descriptors that come and go meanwhile: learners' connections, files of the store."""


def test_silent_connections_to_the_metrics_port_leave_descriptors_for_commits(tmp_path: Path) -> None:
    syncer = GuardedSyncer(tmp_path, "--metrics", "127.0.0.1:0")
    training = syncer.train()
    try:
        syncer.wait_commits(2)
        (told,) = (tmp_path / "metrics").glob("syncer-*.json")
        host, port = json.loads(told.read_text())[0]["targets"][0].rsplit(":", 1)
        before, silent = syncer.descriptors, []
        for _ in range(STRANGERS):
            try:
                silent.append(socket.create_connection((host, int(port)), timeout=1.0))
            except OSError:  # the queue of those who wait for an answer is full
                continue
        assert len(silent) > CONNECTIONS_MAX
        syncer.wait_commits(2)
        assert syncer.descriptors <= before + CONNECTIONS_MAX + SPARED
        time.sleep(SILENT_S + 1.0)
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=30) as answer:
            assert b"atoll_commits" in answer.read(), "whoever says nothing was closed, and there is room again"
        for one in silent:
            one.close()
    finally:
        training.stopping.set()
        training.thread.join(60)
        syncer.stop()
