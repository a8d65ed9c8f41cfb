"""Receive buffers that are used again.

A fresh buffer of many megabytes costs page faults and cleared pages for all of it: a fifth of a push in our profile.
Contributions come and go round after round in the same sizes, so the wire keeps the buffers it handed out and looks
which of them nobody holds any more.
"""

from __future__ import annotations

import sys

import numpy as np

from atoll.wire.limits import POOL_BYTES_MAX, POOLED_BYTES_MIN
from atoll.wire.service import Bytes


def _references(buffers: list[Bytes], index: int) -> int:
    return sys.getrefcount(buffers[index])


_REFERENCES_UNUSED = _references([np.empty(0, np.uint8)], 0)
"""Of a buffer that nobody but a list holds. Counted, not written down: interpreters differ in their temporaries."""


class Buffers:
    """A bounded pool. The caller just drops an array when it is done: every view of it, however derived, holds a
    reference to the pooled array, so that its reference count tells whether it is in use."""

    def __init__(self, bytes_max: int = POOL_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._pooled: list[Bytes] = []

    def take(self, size: int) -> Bytes:
        """An array of `size` bytes with undefined content."""
        if size < POOLED_BYTES_MIN:
            return np.empty(size, np.uint8)
        unused: list[int] = []
        for index in range(len(self._pooled)):
            if _references(self._pooled, index) == _REFERENCES_UNUSED:
                # Fragments differ by some percent; a buffer is not spent on a payload of less than half its size.
                if size <= self._pooled[index].nbytes <= 2 * size:
                    return self._pooled[index][:size]
                unused.append(index)
        for index in reversed(unused):
            if self._pooled_bytes() + size <= self._bytes_max:
                break
            del self._pooled[index]
        fresh = np.empty(size, np.uint8)
        if self._pooled_bytes() + size <= self._bytes_max:
            self._pooled.append(fresh)
        return fresh[:]

    def _pooled_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._pooled)
