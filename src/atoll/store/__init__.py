"""Bytes at rest: what the syncer must not lose, snapshots of it, and the model taken out of it.

open_store, RunStore       the state folder of a run: two slots per fragment, the tape, the epoch
read_state, read_history   the same folder read-only, of a living or a dead run
Recording                  with --record: what merges were made from (atoll.instruments.replay reads it)
SnapshotTarget             snapshots to any fsspec URL, claimed by one syncer (Hold); load_snapshot reads one
export_model               a safetensors file by parameter name
failpoints                 where tests and storms make this room die
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
