"""What somebody can make the port hold in memory, by bodies without an end and by bytes that stand for many more."""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path

from guarded import METHODS, WITH_TOKEN, GuardedSyncer
from raw_http2 import RawConnection, grpc_message

from atoll.wire.limits import MESSAGE_BYTES_MAX, MIB, STREAMS_MAX

BODY_BYTES = 100 * MIB
"""Sent, or tried to be, on each connection. Before, the port held all of it: five were 600 MiB."""
STRANGERS_BYTES_MAX = 48 * MIB
"""All that these attacks may cost: windows of 4 MiB on each connection, until the refusal is there, twice over, and
some of Python's own."""


UNIMPLEMENTED = b"grpc-status\x0212"


def bomb() -> bytes:
    """100 MiB in 100 KiB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(BODY_BYTES // MIB)) + packer.flush()


def test_bodies_without_an_end_cost_nothing_without_the_token(tmp_path: Path) -> None:
    syncer = GuardedSyncer(tmp_path)
    syncer.status()
    before = syncer.memory_peak
    connections = [RawConnection(syncer.address).greet() for _ in METHODS]
    for connection, method in zip(connections, METHODS, strict=True):
        connection.send_body(connection.begin_call(method), grpc_message(bytes(BODY_BYTES), size=BODY_BYTES + 1))
    syncer.status()
    assert syncer.memory_peak - before < STRANGERS_BYTES_MAX
    syncer.stop()


def test_what_is_compressed_is_never_unpacked(tmp_path: Path) -> None:
    syncer = GuardedSyncer(tmp_path)
    syncer.status()
    before, packed = syncer.memory_peak, grpc_message(bomb(), compressed=True)
    for headers, encoding, method in itertools.product(((), WITH_TOKEN), ("gzip", "deflate", ""), METHODS):
        told = (("grpc-encoding", encoding),) if encoding else ()
        connection = RawConnection(syncer.address).greet()
        stream = connection.begin_call(method, (*headers, *told))
        connection.send_body(stream, packed)
        case = f"{method}, {encoding or 'without a word'}, {'learner' if headers else 'stranger'}"
        assert connection.read_until(lambda c=connection: bool(c.ended)), f"{case} is taken"
        assert not told or UNIMPLEMENTED in connection.ended[stream], f"{case} was unpacked before it was refused"
        syncer.status()
        assert syncer.memory_peak - before < STRANGERS_BYTES_MAX, case
    syncer.stop()


def test_a_learner_makes_one_connection_hold_no_more_than_its_calls_may_have(tmp_path: Path) -> None:
    syncer = GuardedSyncer(tmp_path)
    syncer.status()
    before = syncer.memory_peak
    connection = RawConnection(syncer.address).greet()
    for number in range(2 * STREAMS_MAX):
        stream = connection.begin_call(METHODS[number % len(METHODS)], WITH_TOKEN)
        size = MESSAGE_BYTES_MAX if number % 8 else BODY_BYTES
        connection.send_body(stream, grpc_message(bytes(size - 1), size=size))
    syncer.status()
    assert syncer.memory_peak - before < 1.25 * STREAMS_MAX * MESSAGE_BYTES_MAX + STRANGERS_BYTES_MAX
    syncer.stop()
