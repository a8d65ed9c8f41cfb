"""Codecs of small whole numbers, with a scale for each block of 256 values.

    4 blocks bytes       the scales, one float32 per block; blocks = ceil(n / 256)
    then, per block      256 codes in two's complement, packed into bytes

A short last block is stored whole: its missing elements have code 0, and decoders ignore them.

int8, int4: value = float32(code) * scale, one float32 multiplication with its usual rounding. Decoding into a target is
one multiplication and then one separate addition, never a fused one: every holder of Theta must get the same bits.
The encoder's scale is -p / 8 (int4) or -p / 128 (int8), p being the value of largest magnitude in the block (of two
that tie, the negative one): p itself gets the lowest code and is kept exactly, the grid has one level more than a
symmetric one, and no finite input can decode to infinity. The codes are round-half-even(value * (1 / scale)), at most 7
or 127.
If the scale would be subnormal the whole block is zero (error feedback keeps what was dropped). Decoders accept any
scale of magnitude up to FLT_MAX / 8 (or / 128); payloads with larger, infinite or NaN scales are refused.
"""

from __future__ import annotations

from atoll.codec.kernel_codec import KernelCodec
from atoll.codec.protocol import BLOCK


def block_codec(name: str, kind: int, *, bits: int) -> KernelCodec:
    """A codec of so many bits per value, and 32 per block."""
    codes = BLOCK * bits // 8
    return KernelCodec(name, kind, lambda n: -(-n // BLOCK) * (4 + codes), block_bytes=(4, codes))
