"""Arrays to bytes and back: the codecs, the merge of encoded contributions, and the outer step."""

from __future__ import annotations

from atoll.codec.merge import GradientSample, MergeResult, OuterTarget, merge_fragment
from atoll.codec.merges import MergeMethod, SliceSums, get_merge
from atoll.codec.outer import OuterOptimizer, OuterRates, get_outer
from atoll.codec.partial import MergedGradient, Partial, combine, finish, reduce
from atoll.codec.plain_codec import PlainCodec
from atoll.codec.protocol import BLOCK, Codec, get_codec
from atoll.codec.rates import needed_bytes_s

__all__ = [
    "BLOCK",
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
