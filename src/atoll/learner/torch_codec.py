"""Codecs in torch operations, for arrays that live on a device. The same bits as the compiled loops of `atoll.kernels`.

Each operation rounds by itself, as the contract of the codecs asks (`codec.blocks`). On a GPU `triton_codec` does the
same in one pass over memory; these are its reference, and what is used where there is no Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

BLOCK = 256
HALF = BLOCK // 2
MAGIC = 12582912.0
"""1.5 * 2**23: adding it rounds to a whole number, ties to even, and leaves that number in the low bits of the sum."""
NORMAL_MIN = torch.finfo(torch.float32).tiny
BF16_MAX = torch.finfo(torch.bfloat16).max

Tensor: TypeAlias = torch.Tensor


class Encoded(NamedTuple):
    payload: Tensor
    """Bytes."""
    residual: Tensor
    """What the payload leaves out."""
    finite: Tensor
    """One truth value: everything was finite. It stays on the device."""


class DeviceCodec(NamedTuple):
    """A codec of `atoll.codec` on flat fp32 tensors of whole blocks."""

    size: Callable[[int], int]
    """Bytes of a payload of so many values."""
    encode: Callable[[Tensor], Encoded]
    decode: Callable[[Tensor, int], Tensor]


def _scales(x: Tensor, steps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Per block: scale, 1 / scale (both 0 where the scale would be subnormal), and whether all is finite."""
    low, high = x.aminmax(dim=1, keepdim=True)
    peak = torch.where(-low >= high, low, high)  # of two that tie, the negative one
    scale = peak / -steps
    scale = torch.where(scale.abs() < NORMAL_MIN, torch.zeros_like(scale), scale)
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1.0 / scale)
    return scale, inverse, torch.isfinite(low).all() & torch.isfinite(high).all()


def _encode_whole_numbers(x: Tensor, steps: int) -> Encoded:
    blocks = x.view(-1, BLOCK)
    scale, inverse, finite = _scales(blocks, steps)
    shifted = (blocks * inverse).clamp_max(steps - 1) + MAGIC
    bits = shifted.view(torch.int32)
    codes = (bits[:, :HALF] & 15) | ((bits[:, HALF:] & 15) << 4) if steps == 8 else bits & 255
    residual = blocks - (shifted - MAGIC) * scale
    payload = torch.cat((scale.view(-1).view(torch.uint8), codes.to(torch.uint8).view(-1)))
    return Encoded(payload, residual.view(-1), finite)


def _decode_whole_numbers(payload: Tensor, n: int, steps: int) -> Tensor:
    blocks = n // BLOCK
    scale = payload[: 4 * blocks].view(torch.float32).view(-1, 1)
    codes = payload[4 * blocks :].view(torch.int8).view(blocks, -1).to(torch.int32)
    if steps == 8:
        codes = torch.cat(((codes << 28) >> 28, codes >> 4), dim=1)
    return (codes.to(torch.float32) * scale).view(-1)


def _encode_bf16(x: Tensor) -> Encoded:
    rounded = x.clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16)
    return Encoded(rounded.view(torch.uint8), x - rounded.to(torch.float32), torch.isfinite(x).all())


DEVICE_CODECS = {
    "int4": DeviceCodec(
        lambda n: n // BLOCK * (4 + HALF),
        lambda x: _encode_whole_numbers(x, 8),
        lambda payload, n: _decode_whole_numbers(payload, n, 8),
    ),
    "int8": DeviceCodec(
        lambda n: n // BLOCK * (4 + BLOCK),
        lambda x: _encode_whole_numbers(x, 128),
        lambda payload, n: _decode_whole_numbers(payload, n, 128),
    ),
    "bf16": DeviceCodec(
        lambda n: 2 * n,
        _encode_bf16,
        lambda payload, n: payload.view(torch.bfloat16).to(torch.float32),
    ),
    "fp32": DeviceCodec(
        lambda n: 4 * n,
        lambda x: Encoded(x.view(torch.uint8), torch.zeros_like(x), torch.isfinite(x).all()),
        lambda payload, n: payload.view(torch.float32),
    ),
}
"""Those that a device can compute. A run with another codec keeps its learners' copies on the host."""
