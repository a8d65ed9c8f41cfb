from .merge import SAMPLE_ALL_MAX, SAMPLE_EVERY, GradientSample, MergeResult, OuterTarget, merge_fragment
from .merges import MergeMethod, SliceSums, get_merge
from .outer import OuterOptimizer, OuterRates, get_outer
from .partial import MergedGradient, Partial, combine, finish, reduce
from .plain_codec import PlainCodec
from .protocol import BLOCK, Codec, get_codec
from .rates import needed_bytes_s

__all__ = [
    "BLOCK",
    "SAMPLE_ALL_MAX",
    "SAMPLE_EVERY",
    "Codec",
    "GradientSample",
    "MergeMethod",
    "MergeResult",
    "MergedGradient",
    "OuterOptimizer",
    "OuterRates",
    "OuterTarget",
    "Partial",
    "PlainCodec",
    "SliceSums",
    "combine",
    "finish",
    "get_codec",
    "get_merge",
    "get_outer",
    "merge_fragment",
    "needed_bytes_s",
    "reduce",
]
