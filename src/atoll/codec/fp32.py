"""fp32: 4n bytes, the values. Also how whole parameters and sums of contributions travel."""

from __future__ import annotations

from atoll import kernels
from atoll.codec.kernel_codec import KernelCodec
from atoll.codec.protocol import BLOCK

FP32 = KernelCodec("fp32", kernels.FP32, lambda n: 4 * n, lossless=True, block_bytes=(4 * BLOCK,))
