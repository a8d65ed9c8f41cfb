"""int2: 68 bytes per block: the scales, then 64 bytes of codes per block (`blocks`).

Byte i of a block holds the elements i, i + 64, i + 128 and i + 192, two bits each from the lowest up, in two's
complement, -2 .. 1.

value = float32(2 * code + b) * scale, where b is the lowest bit of the scale's 32. So a block has the levels -3, -1, 1,
3 (b = 1) or -4, -2, 0, 2 (b = 0) times its scale. The encoder takes b = 0, with a scale of the sign opposite to the
largest value's, for blocks that contain a zero, so that a zero stays one; otherwise b = 1 and a positive scale. The
scale is fitted: from the root mean square of what is not zero, two rounds of nearest codes and the scale of least
squared error for them. A block whose largest value is below 2**-111 is zero. Decoders accept scales up to FLT_MAX / 4.
How the grid was chosen, by measured error: docs/results/int2_grid.md. int2 loses a tenth of the squares it is given
and is meant to be used with error feedback.
"""

from __future__ import annotations

from atoll import kernels
from atoll.codec.blocks import block_codec

INT2 = block_codec("int2", kernels.INT2, bits=2)
