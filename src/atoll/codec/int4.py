"""int4: 132 bytes per block: the scales, then 128 bytes of codes per block (`blocks`).

Byte i of a block holds element i in its low and element i + 128 in its high nibble, both in two's complement, -8 .. 7.
(So a decoder reads and writes contiguous memory.) The uniform grid was chosen over powers of two by measured error on
real deltas: docs/results/int4_grid.md.
"""

from __future__ import annotations

from atoll import kernels
from atoll.codec.blocks import block_codec

INT4 = block_codec("int4", kernels.INT4, bits=4)
