"""What a codec is: a way to turn a flat float32 array into bytes, by name.

Codecs work on fragments, which are whole blocks of 256 values; the built-in ones take other lengths as well. Sizes may
depend on the data: whoever makes room for a payload asks `size_max`, and `inspect` and `decode_add` say whether it
really is one. A payload that is none, whatever its bytes, is a PayloadError and nothing else. Decoding gives the same
bits on every machine: Theta is the sum of decoded updates, and every holder must have the same.

A codec holds no state and may be called from several threads at once. One of a user's own is most easily made from
`PlainCodec`, which needs to be told how to encode and how to decode, and is registered with `atoll.register_codec` or
as an entry point of the group "atoll.codecs", in every process of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.core import CODECS
from atoll.errors import ConfigError, PayloadError

BLOCK = kernels.BLOCK
NORM_ZERO = 1e-30
"""A slice of smaller norm counts as zero: it has no direction, and 1 / norm would leave the range of fp32."""

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Payload = U8 | bytes | bytearray | memoryview


class Codec(Protocol):
    """One way to turn a flat float32 array into bytes."""

    @property
    def name(self) -> str:
        """As settings and messages call it."""

    @property
    def lossless(self) -> bool:
        """True if nothing is rounded, so that there is no residual."""

    def size_max(self, n: int) -> int:
        """The most bytes that a payload of n values can have."""

    def encode_delta(
        self, snapshot: F32, base: F32 | None, residual: F32 | None, *, feedback: bool = True
    ) -> tuple[U8, F32 | None]:
        """Encode x = snapshot - base + residual; also returns the new residual, x - decode(payload) or a part of it.

        The residual that came in is left as it is: it is replaced only once the contribution was merged. A lossless
        codec ignores it and returns None, as does every codec without `feedback`. PayloadError if x is not finite.
        """

    def decode_add(self, payload: Payload, target: F32) -> None:
        """target += decode(payload), in place, with the same bits on every machine."""

    def inspect(self, payload: Payload, n: int, slice_blocks: I64) -> tuple[bool, F64]:
        """Are all values finite, and their L2 norm per slice. Slices are block offsets, from 0 to ceil(n / 256)."""

    def accumulate(self, payloads: Sequence[Payload], coefficients: F64, slice_blocks: I64) -> F32:
        """Sum over i of coefficients[slice, i] * decode(payloads[i]), added up in this order in fp32."""


def get_codec(name: str | Codec) -> Codec:
    """The codec called `name`, or the one that was found before; ConfigError naming the choices if there is none."""
    codec: Codec = CODECS.get(name) if isinstance(name, str) else name
    return codec


def block_bytes(name: str) -> tuple[int, ...]:
    """Of a codec whose payloads are made of sections, each with so many bytes for each block of 256 values, in their
    order: the bytes of any blocks can be told apart without decoding. Learners of several processes need that, because
    each of them encodes blocks of its own."""
    sections: tuple[int, ...] = getattr(get_codec(name), "block_bytes", ())
    if not sections:
        raise ConfigError(
            f"codec {name!r} does not say how many bytes a block of {BLOCK} values takes (block_bytes), so a learner "
            "of several processes cannot use it; choose fp32, bf16, int8, int4 or int2, or run one process per learner"
        )
    return sections


def flat_bytes(payload: Payload) -> U8:
    """The payload as a flat, contiguous uint8 array: a view where possible."""
    if not isinstance(payload, np.ndarray):
        return np.frombuffer(payload, np.uint8)
    if payload.dtype != np.uint8 or payload.ndim != 1:
        raise PayloadError(f"a payload must be a flat uint8 array or bytes, got {payload.dtype}{payload.shape}")
    return np.ascontiguousarray(payload)


def quotient(numerator: F64, divisor: F64) -> F64:
    """numerator / divisor, and 0 where the divisor counts as zero."""
    small = divisor < NORM_ZERO
    return np.where(small, 0.0, numerator / np.where(small, 1.0, divisor))


def not_finite(name: str) -> PayloadError:
    return PayloadError(
        f"cannot encode as {name}: a value is not finite (NaN or infinite); look at the loss and the learning rate of "
        "this learner, its contribution is dropped"
    )
