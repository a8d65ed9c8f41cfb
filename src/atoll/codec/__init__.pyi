from .fragments import fragment_codec, update_codec
from .merge import SAMPLE_ALL_MAX, SAMPLE_EVERY, GradientSample, MergeResult, OuterTarget, merge_fragment
from .merges import MergeMethod, SliceSums, get_merge
from .outer import OuterOptimizer, OuterRates, get_outer
from .partial import NORM_MAX, Partial, combine, finish, reduce
from .plain_codec import PlainCodec
from .protocol import BLOCK, Codec, block_bytes, get_codec, not_finite
from .rates import needed_bytes_s, run_bytes
from .robust import agreement, balanced, trimmed

__all__ = [
    "BLOCK",
    "NORM_MAX",
    "SAMPLE_ALL_MAX",
    "SAMPLE_EVERY",
    "Codec",
    "GradientSample",
    "MergeMethod",
    "MergeResult",
    "OuterOptimizer",
    "OuterRates",
    "OuterTarget",
    "Partial",
    "PlainCodec",
    "SliceSums",
    "agreement",
    "balanced",
    "block_bytes",
    "combine",
    "finish",
    "fragment_codec",
    "get_codec",
    "get_merge",
    "get_outer",
    "merge_fragment",
    "needed_bytes_s",
    "not_finite",
    "reduce",
    "run_bytes",
    "trimmed",
    "update_codec",
]
