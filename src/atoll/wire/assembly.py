"""One payload being put together from parts that may come in any order over several connections."""

from __future__ import annotations

import numpy as np
import xxhash

from atoll.core import Refusal
from atoll.errors import RefusedError
from atoll.wire.parts import RawPart
from atoll.wire.service import Bytes


class Assembly:
    """A buffer, which of its parts are there, and the checksum of the prefix without gaps.

    The payload is cut at multiples of `part_bytes`. So one flag per part is enough to refuse overlapping and repeated
    parts, and nothing has to be sorted. The checksum of the whole follows the prefix: the bytes are still in the cache
    then, which makes it nearly free (measured: 41 GB/s hot, 10 GB/s cold).
    """

    def __init__(self, buffer: Bytes, part_bytes: int) -> None:
        size = len(buffer)
        self._buffer = buffer
        self._part_bytes = part_bytes
        self._parts_count = -(-size // part_bytes)
        self._present = bytearray(self._parts_count)
        self._missing_count = self._parts_count
        self._hasher = xxhash.xxh3_64()
        self._hashed_count = 0

    @property
    def complete(self) -> bool:
        return self._missing_count == 0

    def place(self, part: RawPart) -> int:
        """Copy one part in; returns its length. Raises RefusedError if it overlaps another one or does not fit."""
        size = len(self._buffer)
        index, rest = divmod(part.offset, self._part_bytes)
        length = min(self._part_bytes, size - part.offset)
        if size == 0 and part.offset == 0 and part.data.nbytes == 0:
            return 0
        if rest or index >= self._parts_count or part.data.nbytes != length:
            raise RefusedError(
                Refusal.SIZE,
                f"a part of {part.data.nbytes} bytes at offset {part.offset} does not fit a payload of {size} bytes "
                f"cut every {self._part_bytes}; send the payload again",
            )
        if self._present[index]:
            raise RefusedError(Refusal.SIZE, f"two parts overlap at offset {part.offset}; send the payload again")
        self._buffer[part.offset : part.offset + length] = np.frombuffer(part.data, np.uint8)
        self._present[index] = 1
        self._missing_count -= 1
        if index == self._hashed_count:
            self._hasher.update(part.data)
            self._hashed_count += 1
        return length

    def verify(self, checksum: int) -> Bytes:
        """The complete payload, or RefusedError if its checksum is another. Reads what was not hashed on arrival: for
        a large payload call this off the event loop (xxhash releases the interpreter lock)."""
        assert self.complete
        self._hasher.update(self._buffer[self._hashed_count * self._part_bytes :].data)
        if self._hasher.intdigest() != checksum:
            raise RefusedError(
                Refusal.CHECKSUM,
                f"all parts arrived whole but the payload's checksum is {self._hasher.intdigest():016x}, not "
                f"{checksum:016x} as announced; compute it over the bytes that are sent",
            )
        return self._buffer
