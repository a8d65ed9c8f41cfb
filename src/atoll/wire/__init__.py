"""Bytes in flight: gRPC, mostly, between learners and the syncer. The contract is `generated/atoll.proto`.

    service.py     what a syncer must offer (SyncerService), how its port is opened (ServerOptions)
    server.py      serve(service, options) -> RunningServer;  sessions.py and transfers.py are its two halves
    channel.py     how a learner reaches the syncer (ClientOptions)
    cause.py       why a syncer cannot be reached;  certificate.py: what a syncer's own certificate says
    control.py     run_sessions: a control session that always comes back;  fetch_status, ask_to_leave,
                   take_snapshot, change_shards
    bulk.py        BulkClient: push and fetch payloads;  fetches.py: one fetch
    direct.py      large ones past gRPC, over a socket of their own;  direct_client.py, direct_server.py: its two ends
    convert.py     control messages <-> bytes;  parts.py: bulk messages <-> bytes;  records.py: what both are made of
    token.py       tokens, from strings and files
    checks.py      nothing is trusted;  versions.py: which protocol knows what
    limits.py      every bound, with where it comes from

Names are loaded on first use, so that importing the room does not start gRPC.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
