"""Pieces of a peer's inner state on their way to a joiner: a few at a time, so that memory stays small.

The peer's push of a piece is answered when there is room for it, the joiner's fetch when the piece is there. Both waits
have a bound; what does not come in time is refused as busy and tried again or given up by the learners.
"""

from __future__ import annotations

import asyncio

import numpy as np
import xxhash
from numpy.typing import NDArray

PIECES_HELD = 4
"""32 MiB per inner slot: a joiner's link is kept busy while the peer sends the next."""
WAIT_S = 20.0
"""Longest wait of one push or fetch. Below the wire's own deadline for a small transfer."""


class InnerBuffer:
    def __init__(self) -> None:
        self._pieces: dict[int, tuple[NDArray[np.uint8], int]] = {}
        self._changed = asyncio.Condition()
        self._low = 0
        self.closed = False

    async def put(self, index: int, payload: NDArray[np.uint8]) -> bool:
        """Keep a piece once there is room; False if there was none in time or nobody wants it any more."""
        async with self._changed:
            room = await self._wait_for(lambda: len(self._pieces) < PIECES_HELD or index in self._pieces)
            if not room or index < self._low:
                return index < self._low and not self.closed
            self._pieces[index] = (payload, xxhash.xxh3_64_intdigest(payload.data))
            self._changed.notify_all()
            return True

    async def get(self, index: int) -> tuple[NDArray[np.uint8], int] | None:
        """A piece and its checksum once it is there. Asking for it says that all before it have arrived."""
        async with self._changed:
            self._low = max(self._low, index)
            for old in [i for i in self._pieces if i < index]:
                del self._pieces[old]
            self._changed.notify_all()
            found = await self._wait_for(lambda: index in self._pieces)
            return self._pieces[index] if found else None

    async def close(self) -> None:
        async with self._changed:
            self.closed = True
            self._pieces.clear()
            self._changed.notify_all()

    async def _wait_for(self, condition: object) -> bool:
        assert callable(condition)
        try:
            await asyncio.wait_for(self._changed.wait_for(lambda: self.closed or bool(condition())), WAIT_S)
        except TimeoutError:
            return False
        return not self.closed
