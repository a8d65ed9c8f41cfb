"""The codecs and the written contract of their payloads, so that others can write learners.

A payload encodes n float32 values, in blocks of 256; the last block may be short. Everything is little-endian.
blocks = ceil(n / 256).

    fp32   4n bytes           the values.
    bf16   2n bytes           the upper 16 bits of the values, rounded to nearest, ties to even. A value that would
                              round to infinity becomes the largest bf16 of its sign.
    int8   260 blocks bytes   first all scales (one float32 per block), then the codes: 256 signed bytes per block.
    int4   132 blocks bytes   first all scales (one float32 per block), then the codes: 128 bytes per block. Byte i of a
                              block holds element i in its low and element i + 128 in its high nibble, both in two's
                              complement, -8 .. 7. (So a decoder reads and writes contiguous memory.)
    int2   68 blocks bytes    first all scales (one float32 per block), then the codes: 64 bytes per block. Byte i of a
                              block holds the elements i, i + 64, i + 128 and i + 192, two bits each from the lowest
                              up, in two's complement, -2 .. 1.

A short last block is stored whole: its missing elements have code 0, and decoders ignore them.

int8, int4: value = float32(code) * scale, one float32 multiplication with its usual rounding. Decoding into a target is
one multiplication and then one separate addition, never a fused one: every holder of Theta must get the same bits.
The encoder's scale is -p / 8 (int4) or -p / 128 (int8), p being the value of largest magnitude in the block (of two
that tie, the negative one): p itself gets the lowest code and is kept exactly, the grid has one level more than a
symmetric one, and no finite input can decode to infinity. The codes are round-half-even(value * (1 / scale)), at most 7
or 127.
If the scale would be subnormal the whole block is zero (error feedback keeps what was dropped). Decoders accept any
scale of magnitude up to FLT_MAX / 8 (or / 128); payloads with larger, infinite or NaN scales are refused.

int2: value = float32(2 * code + b) * scale, where b is the lowest bit of the scale's 32. So a block has the levels -3,
-1, 1, 3 (b = 1) or -4, -2, 0, 2 (b = 0) times its scale. The encoder takes b = 0, with a scale of the sign opposite to
the largest value's, for blocks that contain a zero, so that a zero stays one; otherwise b = 1 and a positive scale. The
scale is fitted: from the root mean square of what is not zero, two rounds of nearest codes and the scale of least
squared error for them. A block whose largest value is below 2**-111 is zero. Decoders accept scales up to FLT_MAX / 4.
How the grid was chosen, by measured error: docs/results/int2_grid.md. int2 loses a tenth of the squares it is given
and is meant to be used with error feedback.

The uniform int4 grid was chosen over powers of two by measured error on real deltas: docs/results/int4_grid.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.core.config import CODECS, one_of
from atoll.errors import PayloadError
from atoll.kernels.run import check_floats, cut_segments

BLOCK = kernels.BLOCK

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Payload = U8 | bytes | bytearray | memoryview

_BITS = {kernels.INT8: 8, kernels.INT4: 4, kernels.INT2: 2}
_KINDS = {"fp32": kernels.FP32, "bf16": kernels.BF16, "int8": kernels.INT8, "int4": kernels.INT4, "int2": kernels.INT2}


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to turn a flat float32 array into bytes. Holds no state; use `get_codec`."""

    name: str
    kind: int

    @property
    def lossless(self) -> bool:
        """True if nothing is rounded, so that there is no residual."""
        return self.kind == kernels.FP32

    def encoded_size(self, n: int) -> int:
        """Exact bytes of a payload for n elements."""
        if n < 0:
            raise PayloadError(f"a payload cannot have {n} elements")
        if self.kind == kernels.FP32:
            return 4 * n
        if self.kind == kernels.BF16:
            return 2 * n
        return -(-n // BLOCK) * (4 + BLOCK * _BITS[self.kind] // 8)

    def encode(self, values: F32) -> U8:
        """Encode; PayloadError if a value is not finite."""
        payload = np.empty(self.encoded_size(check_floats("values", values)), np.uint8)
        if not kernels.encode(self.kind, values, payload):
            raise _not_finite(self.name)
        return payload

    def encode_delta(
        self, snapshot: F32, base: F32, residual: F32 | None, *, feedback: bool = True
    ) -> tuple[U8, F32 | None]:
        """Encode x = snapshot - base + residual; also returns the new residual, x - decode(payload).

        The residual that came in is left as it is: it is replaced only once the contribution was merged. A lossless
        codec ignores it and returns None, as does every codec without `feedback`.
        """
        payload = np.empty(self.encoded_size(check_floats("snapshot", snapshot)), np.uint8)
        feedback = feedback and not self.lossless
        residual = residual if feedback else None
        new_residual = np.empty_like(snapshot) if feedback else None
        if not kernels.encode(self.kind, snapshot, payload, base=base, residual=residual, new_residual=new_residual):
            raise _not_finite(self.name)
        return payload, new_residual

    def decode(self, payload: Payload, n: int) -> F32:
        """The n values of a payload."""
        data = self.check(payload, n)
        values = np.empty(n, np.float32)
        kernels.decode(self.kind, data, values, add=False)
        return values

    def decode_add(self, payload: Payload, target: F32) -> None:
        """target += decode(payload), in place, with the same bits on every machine."""
        data = self.check(payload, check_floats("target", target, writable=True))
        kernels.decode(self.kind, data, target, add=True)

    def inspect(self, payload: Payload, n: int, slice_blocks: I64) -> tuple[bool, F64]:
        """Are all values finite, and their L2 norm per slice. Slices are block offsets, from 0 to ceil(n / 256)."""
        data = self.check(payload, n)
        finite, squares = kernels.inspect(self.kind, data, n, cut_segments(slice_blocks, -(-n // BLOCK)))
        return finite, np.sqrt(squares)

    def check(self, payload: Payload, n: int) -> U8:
        """The payload as a flat, aligned uint8 array (a view where possible), if its size is right for n elements."""
        if isinstance(payload, np.ndarray):
            if payload.dtype != np.uint8 or payload.ndim != 1:
                raise PayloadError(f"a payload must be a flat uint8 array or bytes, got {payload.dtype}{payload.shape}")
            data = np.ascontiguousarray(payload)
        else:
            data = np.frombuffer(payload, np.uint8)
        expected = self.encoded_size(n)
        if data.size != expected:
            raise PayloadError(
                f"{self.name} payload of {data.size} bytes, expected {expected} for {n} elements: truncated, oversized "
                "or made with another codec or layout; send it again with the run's codec"
            )
        # Network buffers start anywhere; float32 scales want a multiple of 4.
        return data if data.ctypes.data % 4 == 0 else data.copy()


_CODECS = {name: Codec(name, kind) for name, kind in _KINDS.items()}


def get_codec(name: str) -> Codec:
    """The codec called `name`; ConfigError naming the choices if there is none."""
    return _CODECS[one_of("codec", name, CODECS)]


def _not_finite(name: str) -> PayloadError:
    return PayloadError(
        f"cannot encode as {name}: a value is not finite (NaN or infinite); look at the loss and the learning rate of "
        "this learner, its contribution is dropped"
    )
