"""Connections that say nothing: they must neither use up descriptors nor stop commits."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

from certificates import certificate
from guarded import GuardedSyncer
from raw_http2 import RawConnection

from atoll.wire.limits import CONNECTIONS_MAX, DESCRIPTORS_RESERVED, STRANGERS_PER_NETWORK_MAX

SILENT = 1100
"""Connections of one attack: more than the 1024 descriptors that many systems give a process."""
OWN = 64
"""Descriptors that a small syncer has for itself and its one learner, at most."""


def open_silently(address: str, count: int) -> list[socket.socket]:
    host, port = address.rsplit(":", 1)
    opened = []
    for _ in range(count):
        with contextlib.suppress(OSError):  # the syncer may refuse
            opened.append(socket.create_connection((host, int(port)), timeout=10.0))
    return opened


def test_silent_connections_leave_descriptors_for_commits_where_there_are_few(tmp_path: Path) -> None:
    syncer = GuardedSyncer(tmp_path, descriptors=(1024, 1024))
    honest = syncer.train()
    syncer.wait_commits(2)
    silent = open_silently(syncer.address, SILENT)
    assert syncer.descriptors <= 1024 - DESCRIPTORS_RESERVED + OWN
    syncer.wait_commits(6)
    syncer.wait_descriptors(STRANGERS_PER_NETWORK_MAX + OWN)
    late = syncer.train("late")  # the door is free for whoever has the token
    late.wait_steps(20)
    syncer.wait_for(lambda status: status["active"] == 2, "a new learner is let in")
    syncer.wait_commits(4)
    for thread in (honest, late):
        thread.stop()
        assert thread.error is None
    assert "Too many open files" not in syncer.output()
    assert "did not show the run token" in syncer.output()
    for connection in silent:
        connection.close()
    syncer.stop()


def test_strangers_under_tls_are_trimmed_too(tmp_path: Path) -> None:
    pem, key = certificate(tmp_path, "localhost", "127.0.0.1")
    syncer = GuardedSyncer(tmp_path, "--tls-certificate", pem, "--tls-key", key, tls_ca=pem)
    honest = syncer.train()
    syncer.wait_commits(2)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(pem)
    context.set_alpn_protocols(["h2"])
    half = [RawConnection(syncer.address, context).greet() for _ in range(20)]  # shaken hands, and then nothing
    silent = open_silently(syncer.address, SILENT)
    syncer.wait_descriptors(STRANGERS_PER_NETWORK_MAX + OWN)
    for connection in half:
        assert not connection.read_until(lambda: False), "the oldest go first"
    syncer.wait_commits(4)
    honest.stop()
    assert honest.error is None
    for one in silent:
        one.close()
    syncer.stop()


def test_a_low_limit_is_raised_as_far_as_the_system_allows(tmp_path: Path) -> None:
    syncer = GuardedSyncer(tmp_path, descriptors=(512, 4096))
    assert syncer.descriptors_max == min(4096, CONNECTIONS_MAX + DESCRIPTORS_RESERVED)
    syncer.stop()


def test_where_descriptors_do_run_out_the_cause_is_told_and_commits_come_back(tmp_path: Path) -> None:
    syncer = GuardedSyncer(tmp_path)
    honest = syncer.train()
    syncer.wait_commits(2)
    before = syncer.descriptors_max
    syncer.limit_descriptors(syncer.descriptors)
    text = syncer.wait_output("not durable until this is mended")
    assert "Too many open files" in text and "the disk is fine" in text and "ulimit -n" in text
    assert "make room" not in text
    honest.wait_steps(20)
    syncer.limit_descriptors(before)
    syncer.wait_for(lambda status: not status["degraded"], "everything is on disk again")
    syncer.wait_commits(4)
    honest.stop()
    assert honest.error is None
    syncer.stop()
