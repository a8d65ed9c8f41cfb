"""int8: 260 bytes per block: the scales, then 256 signed bytes per block (`blocks`)."""

from __future__ import annotations

from atoll import kernels
from atoll.codec.blocks import block_codec

INT8 = block_codec("int8", kernels.INT8, bits=8)
