"""Arrays to bytes and back: the codecs, their payload layout, and the merge of encoded contributions."""

from __future__ import annotations

from atoll.codec.codecs import BLOCK, Codec, get_codec
from atoll.codec.merge import MODES, GradientSample, MergeResult, merge_fragment

__all__ = ["BLOCK", "MODES", "Codec", "GradientSample", "MergeResult", "get_codec", "merge_fragment"]
