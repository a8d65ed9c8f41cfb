from .options import EXIT_FENCED, ShardOptions, SyncerOptions, run_shard, run_syncer
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
    "ShardOptions",
    "SyncerOptions",
    "run_shard",
    "run_syncer",
]
