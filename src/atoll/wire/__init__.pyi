from . import raw
from .address import join_address, split_address, split_addresses
from .bulk import BulkClient
from .cause import certificate_until, find_cause
from .certificate import read_certificate
from .channel import ClientOptions
from .control import (
    REFUSED_FOR_NOW,
    SYNCER_ENDED,
    ControlClient,
    SendToSyncer,
    SessionHandler,
    ask_to_leave,
    change_shards,
    fetch_status,
    run_sessions,
    take_snapshot,
)
from .headers import read_push_header
from .limits import (
    BACKOFF_FACTOR,
    BACKOFF_JITTER,
    BACKOFF_S_MAX,
    BACKOFF_S_MIN,
    BULK_DEADLINE_S_MIN,
    CONNECT_S,
    CONTROL_KEEPALIVE_TIMEOUT_MS,
    KEEPALIVE_TIME_MS,
    LEARNER_CHARS_MAX,
    MIB,
    PART_BYTES,
    PART_BYTES_MIN,
    RELAY_LOOK_S,
    SHARD_ATTACH_S,
    SHARDS_MAX,
    STRIPES_MAX,
)
from .probe import LinkSpeed, probe_link
from .resources import memory_bytes
from .routes import RoutedBulk
from .server import RunningServer, check_options, check_ports, serve
from .service import Bytes, KeyBook, SendToLearner, ServerOptions, SyncerService
from .shard_peer import ShardConnection, ShardPeer, attach_handler
from .token import KEY_PREFIX, read_token, split_key
from .transport import EOF
from .versions import build_version

__all__ = [
    "BACKOFF_FACTOR",
    "BACKOFF_JITTER",
    "BACKOFF_S_MAX",
    "BACKOFF_S_MIN",
    "BULK_DEADLINE_S_MIN",
    "CONNECT_S",
    "CONTROL_KEEPALIVE_TIMEOUT_MS",
    "EOF",
    "KEEPALIVE_TIME_MS",
    "KEY_PREFIX",
    "LEARNER_CHARS_MAX",
    "MIB",
    "PART_BYTES",
    "PART_BYTES_MIN",
    "REFUSED_FOR_NOW",
    "RELAY_LOOK_S",
    "SHARDS_MAX",
    "SHARD_ATTACH_S",
    "STRIPES_MAX",
    "SYNCER_ENDED",
    "BulkClient",
    "Bytes",
    "ClientOptions",
    "ControlClient",
    "KeyBook",
    "LinkSpeed",
    "RoutedBulk",
    "RunningServer",
    "SendToLearner",
    "SendToSyncer",
    "ServerOptions",
    "SessionHandler",
    "ShardConnection",
    "ShardPeer",
    "SyncerService",
    "ask_to_leave",
    "attach_handler",
    "build_version",
    "certificate_until",
    "change_shards",
    "check_options",
    "check_ports",
    "fetch_status",
    "find_cause",
    "join_address",
    "memory_bytes",
    "probe_link",
    "raw",
    "read_certificate",
    "read_push_header",
    "read_token",
    "run_sessions",
    "serve",
    "split_address",
    "split_addresses",
    "split_key",
    "take_snapshot",
]
