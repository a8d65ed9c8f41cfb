"""gRPC itself: the only module that imports it, so that its process-wide settings are made first."""

from __future__ import annotations

import gc
import os

# Users fork (PyTorch DataLoader workers). gRPC's own fork handlers would stop our background threads around each fork
# and can deadlock with them; the children do not use gRPC, so the handlers are not needed.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Broken connections are normal here and reported by us; gRPC would print each of them to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio

from atoll.wire import limits

# A forked child must not clear away connections that were garbage in its parent: gRPC's threads are not there, and it
# dies.
os.register_at_fork(after_in_child=gc.freeze)
# gRPC stops its poller with the last connection, and waits for it. The garbage collector may do that in any thread and
# inside any statement; such a thread was seen to wait for ever, and every later connection behind it. One user that
# never leaves keeps the poller.
grpc.aio.init_grpc_aio()

__all__ = ["EOF", "bulk_channel_arguments", "control_channel_arguments", "grpc", "keep_heap", "server_arguments"]

EOF = grpc.aio.EOF

SESSION_METHOD = "/atoll.v1.Control/Session"
STATUS_METHOD = "/atoll.v1.Control/Status"
LEAVE_METHOD = "/atoll.v1.Control/AskToLeave"
SNAPSHOT_METHOD = "/atoll.v1.Control/TakeSnapshot"
SHARDS_METHOD = "/atoll.v1.Control/ChangeShards"
PUSH_METHOD = "/atoll.v1.Bulk/Push"
FETCH_METHOD = "/atoll.v1.Bulk/Fetch"
ATTACH_METHOD = "/atoll.v1.Shard/Attach"
TOKEN_KEY = "atoll-token"
REPLY_BYTES_KEY = "atoll-reply-bytes"
"""Asks for a status of at least so many bytes: see `probe`."""
PIECES_KEY = "atoll-hello-pieces"
"""In the headers of a session: in how many messages its Hello comes, if not in one."""

Arguments = list[tuple[str, int | str]]


def server_arguments(connections_max: int) -> Arguments:
    return [
        # What is beyond is closed before anything is read from it.
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.server_handshake_timeout_ms", round(1000 * limits.STRANGER_S)),
        ("grpc.max_concurrent_streams", limits.STREAMS_MAX),
        ("grpc.max_metadata_size", limits.METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", limits.METADATA_BYTES_MAX),
        # Nobody compresses, and 1 MB of gzip can be 1 GB: the headers of such a call end it (1: the identity alone),
        # and what claims to be compressed without saying so there is not unpacked either.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.per_message_decompression", 0),
        ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", limits.SYNCER_MESSAGE_BYTES_MAX),
        # Without this two syncers could share one port, and learners would reach either.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", limits.KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", limits.BULK_KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", limits.BULK_KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", limits.KEEPALIVE_ACCEPTED_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def control_channel_arguments() -> Arguments:
    return _channel_arguments(limits.CONTROL_KEEPALIVE_TIMEOUT_MS)


def bulk_channel_arguments() -> Arguments:
    return _channel_arguments(limits.BULK_KEEPALIVE_TIMEOUT_MS)


def _channel_arguments(keepalive_timeout_ms: int) -> Arguments:
    return [
        ("grpc.max_receive_message_length", limits.SYNCER_MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", limits.HELLO_BYTES_MAX),  # to a syncer of protocol 2, in one piece
        # Each channel gets a connection of its own; by default gRPC would put all of them on one.
        ("grpc.use_local_subchannel_pool", 1),
        # gRPC's own waits between connection attempts grow to 2 minutes by default; a call in between fails at once.
        ("grpc.initial_reconnect_backoff_ms", round(1000 * limits.BACKOFF_S_MIN)),
        ("grpc.min_reconnect_backoff_ms", round(1000 * limits.CONNECT_S)),
        ("grpc.max_reconnect_backoff_ms", round(1000 * limits.BACKOFF_S_MAX)),
        # We retry ourselves, with knowledge of what arrived.
        ("grpc.enable_retries", 0),
        ("grpc.keepalive_time_ms", limits.KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", keepalive_timeout_ms),
        # Pings of its own, which measure the connection, have another limit (a minute if nothing is said).
        ("grpc.http2.ping_timeout_ms", keepalive_timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def keep_heap() -> None:
    """Let the C allocator keep freed memory for the next part instead of giving it back to the kernel.

    gRPC allocates and frees several copies of every part. glibc hands blocks above its threshold (128 KiB at first)
    back at once, and the kernel clears the same pages again and again: without that a bare stream went from 0.3-0.9 to
    1.2-1.5 GB/s. Freeing one large block raises glibc's threshold to its size for the rest of the process (mallopt(3),
    M_MMAP_THRESHOLD; 32 MiB is the maximum). It costs at most twice that in idle heap; other allocators just see one
    block come and go.
    """
    block = bytes(31 * limits.MIB)
    del block
