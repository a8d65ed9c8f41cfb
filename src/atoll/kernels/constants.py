"""Numbers that kernels, codecs and the merge share."""

from __future__ import annotations

from typing import Final

BLOCK: Final = 256
"""Elements per block. Each block of an integer codec has its own scale."""

FP32: Final = 0
BF16: Final = 1
INT8: Final = 2
INT4: Final = 3
INT2: Final = 4
TOPK2: Final = 5
TOPK4: Final = 6
"""The kinds of payload, as the compiled loops know them. Of the last two the values that a block keeps are part of the
number: `sparse_kind`."""
KEPT_MAX: Final = 64
"""Values that a sparse block may keep: a quarter, beyond which int2 has as few bits."""


def sparse_kind(kind: int, kept: int) -> int:
    """TOPK2 or TOPK4 with so many of a block's values."""
    return kind + (kept << 8)


SEGMENT_BLOCKS: Final = 1024
"""Most blocks per partial sum and per unit of work of a thread: 256k elements, about 0.4 ms of merging. Results depend
on this number in the last bit of the sums, so changing it changes what a replayed tape gives."""
