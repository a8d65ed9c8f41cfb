from .log_replay import read_committed, replay_log
from .options import EXIT_FENCED, RelayOptions, ShardOptions, SyncerOptions, run_relay, run_shard, run_syncer
from .recording import DERIVED, HERE, RECORDED, ZERO
from .state import FragmentArrays, InspectedPayload, ModelState

__all__ = [
    "DERIVED",
    "EXIT_FENCED",
    "HERE",
    "RECORDED",
    "ZERO",
    "FragmentArrays",
    "InspectedPayload",
    "ModelState",
    "RelayOptions",
    "ShardOptions",
    "SyncerOptions",
    "read_committed",
    "replay_log",
    "run_relay",
    "run_shard",
    "run_syncer",
]
