from .begin import epoch_of
from .log_replay import read_committed, replay_log
from .logged_since import written_per_commit
from .options import EXIT_FENCED, RelayOptions, ShardOptions, SyncerOptions, run_relay, run_shard, run_syncer
from .platform import AsyncioPlatform
from .recording import DERIVED, HERE, RECORDED, ZERO
from .recover import SHARD_ROW, SHARDS_ROW, agree_on_settings, recover
from .relay import Relay
from .relay_peers import AtRelay
from .replica import StandbyReplica, forget_unbegun, mark_led, refused_primary, watch_primary
from .replicate import Replicator
from .shard import ShardService
from .shard_arrays import ShardArrays
from .shard_changes import ACTIONS, ShardChanges
from .shard_fleet import Lead, MoveRecord, ShardFleet, ShardLink
from .shard_moves import FragmentMoves
from .shard_recover import PATIENCE_AGAIN_S, PATIENCE_S, find_rows, with_shards
from .sharded import ShardedPlatform, ShardedShell
from .shell import SyncerShell
from .standby import ENDED, SILENT_S, FolderWatch
from .state import FragmentArrays, InspectedPayload, ModelState
from .state_writer import StateWriter

__all__ = [
    "ACTIONS",
    "DERIVED",
    "ENDED",
    "EXIT_FENCED",
    "HERE",
    "PATIENCE_AGAIN_S",
    "PATIENCE_S",
    "RECORDED",
    "SHARDS_ROW",
    "SHARD_ROW",
    "SILENT_S",
    "ZERO",
    "AsyncioPlatform",
    "AtRelay",
    "FolderWatch",
    "FragmentArrays",
    "FragmentMoves",
    "InspectedPayload",
    "Lead",
    "ModelState",
    "MoveRecord",
    "Relay",
    "RelayOptions",
    "Replicator",
    "ShardArrays",
    "ShardChanges",
    "ShardFleet",
    "ShardLink",
    "ShardOptions",
    "ShardService",
    "ShardedPlatform",
    "ShardedShell",
    "StandbyReplica",
    "StateWriter",
    "SyncerOptions",
    "SyncerShell",
    "agree_on_settings",
    "epoch_of",
    "find_rows",
    "forget_unbegun",
    "mark_led",
    "read_committed",
    "recover",
    "refused_primary",
    "replay_log",
    "run_relay",
    "run_shard",
    "run_syncer",
    "watch_primary",
    "with_shards",
    "written_per_commit",
]
