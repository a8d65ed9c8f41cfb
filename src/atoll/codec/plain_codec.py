"""A codec of a user's own, told how to encode and how to decode: the rest is worked out from decoded values, in numpy.

    class Halves(PlainCodec):
        name = "fp16"

        def size_max(self, n: int) -> int:
            return 2 * n

        def encode(self, values: F32) -> bytes:
            return values.astype("<f2").tobytes()

        def decode(self, payload: U8, n: int) -> F32:
            return payload.view("<f2").astype(np.float32)

    atoll.register_codec("fp16", Halves())

It holds one decoded fragment more than the built-in codecs and runs at numpy's speed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from atoll.codec.fp32 import FP32
from atoll.codec.protocol import BLOCK, F32, F64, I64, U8, Payload, flat_bytes, not_finite
from atoll.errors import PayloadError


class PlainCodec(ABC):
    """A codec (`protocol.Codec`) from three methods. Both directions must give the same bits on every machine."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = False

    @abstractmethod
    def size_max(self, n: int) -> int:
        """The most bytes that `encode` makes of n values."""

    @abstractmethod
    def encode(self, values: F32) -> bytes:
        """The payload of finite values."""

    @abstractmethod
    def decode(self, payload: U8, n: int) -> F32:
        """The n values of a payload. It may come from anywhere: raise any exception for one that is none."""

    def encode_delta(
        self, snapshot: F32, base: F32 | None, residual: F32 | None, *, feedback: bool = True
    ) -> tuple[U8, F32 | None]:
        feedback = feedback and not self.lossless
        x = snapshot if base is None else snapshot - base
        x = x + residual if residual is not None and feedback else x
        if not np.isfinite(x).all():
            raise not_finite(self.name)
        payload = np.frombuffer(self.encode(x), np.uint8)
        return payload, x - self._values(payload, x.size) if feedback else None

    def decode_add(self, payload: Payload, target: F32) -> None:
        target += self._values(payload, target.size)

    def inspect(self, payload: Payload, n: int, slice_blocks: I64) -> tuple[bool, F64]:
        return FP32.inspect(self._values(payload, n).view(np.uint8), n, slice_blocks)

    def accumulate(self, payloads: Sequence[Payload], coefficients: F64, slice_blocks: I64) -> F32:
        sizes = np.diff(slice_blocks) * BLOCK
        total = np.zeros(int(sizes.sum()), np.float32)
        for payload, column in zip(payloads, coefficients.T, strict=True):
            total += np.repeat(column.astype(np.float32), sizes) * self._values(payload, total.size)
        return total

    def _values(self, payload: Payload, n: int) -> F32:
        data, most = flat_bytes(payload), self.size_max(n)
        if data.size > most:
            raise PayloadError(
                f"{self.name} payload of {data.size} bytes, at most {most} for {n} elements; send it again"
            )
        try:
            values = np.ascontiguousarray(self.decode(data, n), np.float32)
        except Exception as error:
            # The bytes may be anybody's, and the codec is not ours: whatever it says of them, they are refused.
            raise PayloadError(f"this is no {self.name} payload of {n} elements ({error}); send it again") from error
        if values.shape != (n,):
            raise PayloadError(f"a {self.name} payload decodes to {values.shape}, expected {n} elements; send it again")
        return values
