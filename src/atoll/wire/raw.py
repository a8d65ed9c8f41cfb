"""The contract by hand, for whoever must be able to break it: the conformance kit and its tests.

Everybody else speaks through `ControlClient`, `BulkClient` and `serve`, which keep the contract by themselves.
"""

from __future__ import annotations

from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.limits import PART_BYTES_MAX, PART_BYTES_MIN, STRIPES_MAX
from atoll.wire.seal import seal, unseal
from atoll.wire.transport import (
    EOF,
    FETCH_METHOD,
    LEAVE_METHOD,
    PUSH_METHOD,
    SESSION_METHOD,
    STATUS_METHOD,
    TOKEN_KEY,
    bulk_channel_arguments,
    control_channel_arguments,
    grpc,
    server_arguments,
)
from atoll.wire.versions import settings_in

__all__ = [
    "EOF",
    "FETCH_METHOD",
    "LEAVE_METHOD",
    "PART_BYTES_MAX",
    "PART_BYTES_MIN",
    "PUSH_METHOD",
    "SESSION_METHOD",
    "STATUS_METHOD",
    "STRIPES_MAX",
    "TOKEN_KEY",
    "bulk_channel_arguments",
    "control_channel_arguments",
    "grpc",
    "pb",
    "seal",
    "server_arguments",
    "settings_in",
    "unseal",
]
