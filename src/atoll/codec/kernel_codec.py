"""Codecs that the compiled loops know: what the built-in ones have in common.

A payload encodes n float32 values, in blocks of 256; the last block may be short. Everything is little-endian. The
modules fp32, bf16, int8, int4, int2 and topk are the written contract of the rest, so that others can write learners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll import kernels
from atoll.codec.protocol import BLOCK, F32, F64, I64, U8, Payload, flat_bytes, not_finite
from atoll.errors import PayloadError
from atoll.kernels import check_floats, cut_segments


@dataclass(frozen=True, slots=True)
class KernelCodec:
    """A codec (`protocol.Codec`) by the number under which the loops know it. Its payloads have one size for each n."""

    name: str
    kind: int
    size: Callable[[int], int]
    lossless: bool = False
    block_bytes: tuple[int, ...] = ()
    """`protocol.block_bytes`."""

    def size_max(self, n: int) -> int:
        """Bytes of a payload for n elements, exactly."""
        if n < 0:
            raise PayloadError(f"a payload cannot have {n} elements")
        return self.size(n)

    def encode(self, values: F32) -> U8:
        """Encode; PayloadError if a value is not finite."""
        return self.encode_delta(values, None, None, feedback=False)[0]

    def encode_delta(
        self, snapshot: F32, base: F32 | None, residual: F32 | None, *, feedback: bool = True
    ) -> tuple[U8, F32 | None]:
        payload = np.empty(self.size_max(check_floats("snapshot", snapshot)), np.uint8)
        feedback = feedback and not self.lossless
        residual = residual if feedback else None
        new_residual = np.empty_like(snapshot) if feedback else None
        if not kernels.encode(self.kind, snapshot, payload, base=base, residual=residual, new_residual=new_residual):
            raise not_finite(self.name)
        return payload, new_residual

    def decode(self, payload: Payload, n: int) -> F32:
        """The n values of a payload."""
        data = self.check(payload, n)
        values = np.empty(n, np.float32)
        kernels.decode(self.kind, data, values, add=False)
        return values

    def decode_add(self, payload: Payload, target: F32) -> None:
        data = self.check(payload, check_floats("target", target, writable=True))
        kernels.decode(self.kind, data, target, add=True)

    def inspect(self, payload: Payload, n: int, slice_blocks: I64) -> tuple[bool, F64]:
        data = self.check(payload, n)
        finite, squares = kernels.inspect(self.kind, data, n, cut_segments(slice_blocks, -(-n // BLOCK)))
        return finite, np.sqrt(squares)

    def accumulate(self, payloads: Sequence[Payload], coefficients: F64, slice_blocks: I64) -> F32:
        blocks = int(slice_blocks[-1])
        data = [self.check(payload, blocks * BLOCK) for payload in payloads]
        return kernels.accumulate([self.kind] * len(data), data, coefficients, cut_segments(slice_blocks, blocks))

    def check(self, payload: Payload, n: int) -> U8:
        """The payload as a flat, aligned uint8 array (a view where possible), if its size is right for n elements."""
        data, expected = flat_bytes(payload), self.size_max(n)
        if data.size != expected:
            raise PayloadError(
                f"{self.name} payload of {data.size} bytes, expected {expected} for {n} elements: truncated, oversized "
                "or made with another codec or layout; send it again with the run's codec"
            )
        # Network buffers start anywhere; float32 scales want a multiple of 4.
        return data if data.ctypes.data % 4 == 0 else data.copy()
