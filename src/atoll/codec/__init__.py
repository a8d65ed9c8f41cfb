"""Arrays to bytes and back: the codecs, their payload layout, and the merge of encoded contributions."""

from __future__ import annotations

from atoll.codec.codecs import BLOCK, Codec, get_codec
from atoll.codec.merge import MODES, GradientSample, MergeResult, merge_fragment
from atoll.codec.rates import needed_bytes_s

__all__ = ["BLOCK", "MODES", "Codec", "GradientSample", "MergeResult", "get_codec", "merge_fragment", "needed_bytes_s"]
