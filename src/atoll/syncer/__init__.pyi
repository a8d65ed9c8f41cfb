from .log_replay import read_committed, replay_log
from .options import EXIT_FENCED, RelayOptions, ShardOptions, SyncerOptions, run_relay, run_shard, run_syncer
from .recording import DERIVED, HERE, RECORDED, ZERO
from .recover import SHARD_ROW, SHARDS_ROW
from .state import FragmentArrays, InspectedPayload, ModelState

__all__ = [
    "DERIVED",
    "EXIT_FENCED",
    "HERE",
    "RECORDED",
    "SHARDS_ROW",
    "SHARD_ROW",
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
