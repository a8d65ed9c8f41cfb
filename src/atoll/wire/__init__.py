"""Bytes in flight: gRPC between learners and the syncer. The contract is `generated/atoll.proto`.

    service.py     what a syncer must offer (SyncerService), how its port is opened (ServerOptions)
    server.py      serve(service, options) -> RunningServer;  sessions.py and transfers.py are its two halves
    channel.py     how a learner reaches the syncer (ClientOptions)
    cause.py       why a syncer cannot be reached;  certificate.py: what a syncer's own certificate says
    control.py     run_sessions: a control session that always comes back;  fetch_status, ask_to_leave
    bulk.py        BulkClient: push and fetch payloads
    convert.py     control messages <-> bytes;  parts.py: bulk messages <-> bytes;  records.py: what both are made of
    checks.py      nothing is trusted;  versions.py: which protocol knows what
    limits.py      every bound, with where it comes from

Names are loaded on first use, so that importing the room does not start gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.wire.bulk import BulkClient
    from atoll.wire.cause import Cause, find_cause
    from atoll.wire.channel import ClientOptions
    from atoll.wire.control import (
        SYNCER_ENDED,
        ControlClient,
        SendToSyncer,
        SessionHandler,
        ask_to_leave,
        fetch_status,
        run_sessions,
    )
    from atoll.wire.server import RunningServer, serve
    from atoll.wire.service import SendToLearner, ServerOptions, SyncerService

__all__ = [
    "SYNCER_ENDED",
    "BulkClient",
    "Cause",
    "ClientOptions",
    "ControlClient",
    "RunningServer",
    "SendToLearner",
    "SendToSyncer",
    "ServerOptions",
    "SessionHandler",
    "SyncerService",
    "ask_to_leave",
    "fetch_status",
    "find_cause",
    "run_sessions",
    "serve",
]

_HOMES = {
    "SYNCER_ENDED": "control",
    "BulkClient": "bulk",
    "Cause": "cause",
    "find_cause": "cause",
    "ClientOptions": "channel",
    "ControlClient": "control",
    "SendToSyncer": "control",
    "SessionHandler": "control",
    "ask_to_leave": "control",
    "fetch_status": "control",
    "run_sessions": "control",
    "RunningServer": "server",
    "serve": "server",
    "SendToLearner": "service",
    "ServerOptions": "service",
    "SyncerService": "service",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"atoll.wire.{_HOMES[name]}"), name)
