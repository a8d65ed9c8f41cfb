"""Callers that begin calls and never finish them. Honest ones must not notice."""

from __future__ import annotations

from pathlib import Path

import pytest
from guarded import METHODS, WITH_TOKEN, GuardedSyncer
from raw_http2 import RawConnection, grpc_message

from atoll.wire.limits import REFUSALS_MAX, STREAMS_MAX

CALLS = 2000
"""Unfinished calls of each attack. The port took 32,768 of them before it locked everybody out; now it holds none, so
that any number shows it."""
UNAUTHENTICATED = b"grpc-status\x0216"


@pytest.mark.parametrize("body", [b"", grpc_message(b"half of it", size=1000)], ids=["headers", "half-a-body"])
def test_unfinished_calls_without_the_token_are_refused_on_their_headers(tmp_path: Path, body: bytes) -> None:
    syncer = GuardedSyncer(tmp_path)
    honest = syncer.train()
    for method in METHODS:
        connection = RawConnection(syncer.address).greet()
        for _ in range(STREAMS_MAX):
            connection.send_body(connection.begin_call(method), body)
        assert connection.read_until(lambda c=connection: len(c.ended) == STREAMS_MAX), f"{method} is held"
        assert all(UNAUTHENTICATED in end for end in connection.ended.values())
        connection.close()
    syncer.wait_commits(4)
    honest.stop()
    assert honest.error is None
    syncer.stop()


def test_thousands_of_unfinished_calls_lock_nobody_out(tmp_path: Path) -> None:
    syncer = GuardedSyncer(tmp_path)
    honest = syncer.train()
    syncer.wait_commits(2)
    peak = syncer.memory_peak
    sent = 0
    while sent < CALLS:
        connection = RawConnection(syncer.address).greet()
        while connection.is_open and sent < CALLS:  # the syncer closes it soon
            connection.begin_call(METHODS[sent % len(METHODS)])
            connection.read()
            sent += 1
    syncer.wait_commits(4)  # status, pushes and fetches all work
    assert syncer.memory_peak - peak < 64 * 2**20
    honest.stop()
    assert honest.error is None
    syncer.stop()


def test_a_connection_that_is_refused_again_and_again_is_closed(tmp_path: Path) -> None:
    syncer = GuardedSyncer(tmp_path)
    connection = RawConnection(syncer.address).greet()
    for _ in range(REFUSALS_MAX + 1):
        stream = connection.begin_call("/atoll.v1.Control/NoSuchMethod")
        assert connection.read_until(lambda s=stream: s in connection.ended)
    assert not connection.read_until(lambda: False) and not connection.is_open
    syncer.status()
    assert "did not show the run token" in syncer.wait_output("closed 1 connections")
    syncer.stop()


def test_with_the_token_one_connection_has_a_few_calls_at_a_time(tmp_path: Path) -> None:
    syncer = GuardedSyncer(tmp_path)
    connection = RawConnection(syncer.address).greet()
    for number in range(CALLS):
        connection.begin_call(METHODS[number % len(METHODS)], WITH_TOKEN)
        connection.read()
    assert connection.read_until(lambda: len(connection.ended) >= CALLS - STREAMS_MAX or not connection.is_open)
    honest = syncer.train()
    syncer.wait_commits(4)
    honest.stop()
    assert honest.error is None
    syncer.stop()
