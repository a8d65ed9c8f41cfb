"""bf16: 2n bytes, the upper 16 bits of the values, rounded to nearest, ties to even. A value that would round to
infinity becomes the largest bf16 of its sign."""

from __future__ import annotations

from atoll import kernels
from atoll.codec.kernel_codec import KernelCodec
from atoll.codec.protocol import BLOCK

BF16 = KernelCodec("bf16", kernels.BF16, lambda n: 2 * n, block_bytes=(2 * BLOCK,))
