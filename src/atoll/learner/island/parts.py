"""Payloads and parameters of a fragment, put together from blocks of several ranks and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.core import BLOCK

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
WHOLE = (4 * BLOCK,)
"""Bytes for each block of parameters as they are (`codec.block_bytes` of fp32)."""


def part_bytes(sections: Sequence[int], blocks: int) -> int:
    """Bytes of so many blocks."""
    return sum(sections) * blocks


def join_parts(sections: Sequence[int], blocks: Sequence[I64], parts: Sequence[U8]) -> U8:
    """The payload of all blocks, from one for each rank's own. `blocks` says which ones those are."""
    count = sum(own.size for own in blocks)
    whole = np.empty(part_bytes(sections, count), np.uint8)
    for at, width, own, part, start in _cuts(sections, blocks):
        view = whole[at : at + width * count].reshape(count, width)
        view[own] = parts[part][start : start + width * own.size].reshape(own.size, width)
    return whole


def split_parts(sections: Sequence[int], blocks: Sequence[I64], whole: U8) -> list[U8]:
    """The other way round."""
    count = sum(own.size for own in blocks)
    parts = [np.empty(part_bytes(sections, own.size), np.uint8) for own in blocks]
    for at, width, own, part, start in _cuts(sections, blocks):
        view = whole[at : at + width * count].reshape(count, width)
        parts[part][start : start + width * own.size] = view[own].reshape(-1)
    return parts


def _cuts(sections: Sequence[int], blocks: Sequence[I64]) -> list[tuple[int, int, I64, int, int]]:
    """(where the section begins, bytes per block, a rank's blocks, the rank, where the section begins in its part)"""
    count = sum(own.size for own in blocks)
    found, at, within = [], 0, 0
    for width in sections:
        found += [(at, width, own, rank, within * own.size) for rank, own in enumerate(blocks)]
        at += width * count
        within += width
    return found
