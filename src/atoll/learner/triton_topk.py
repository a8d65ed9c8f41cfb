"""topk in one pass over a GPU's memory: the same bits as `atoll.kernels` and `torch_sparse`.

The places of a block's largest values are told by the smallest key among them. Sums over chosen values are taken one
entry after the other, in the order of their places: a row's sum of one value and zeros is that value. As in
`triton_codec` nothing may be fused, and divisions are rounded as IEEE says.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atoll.learner.torch_codec import BLOCK, Encoded, Tensor

ROWS = 4
"""Blocks of one program."""


@triton.jit
def _float_of(bits):
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _bits_of(value):
    return value.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _entry(values, place, chosen, entry):
    """Of each row, the value at this place among the chosen."""
    return tl.sum(tl.where(chosen & (place == entry), values, 0.0), axis=1)


@triton.jit
def _fitted(magnitude, place, chosen, KEPT: tl.constexpr, ROWS: tl.constexpr):
    total = tl.zeros([ROWS], tl.float32)
    for entry in range(KEPT):
        total = total + _entry(magnitude, place, chosen, entry)
    step = tl.div_rn(total, tl.full([ROWS], 2.5 * KEPT, tl.float32))
    for _ in range(2):
        middle = 2.5 * step
        products = tl.zeros([ROWS], tl.float32)
        squares = tl.zeros([ROWS], tl.float32)
        for entry in range(KEPT):
            value = _entry(magnitude, place, chosen, entry)
            level = tl.where(value > middle, 3.0, 2.0)
            products = products + value * level
            squares = squares + level * level
        step = tl.div_rn(products, squares)
    return step


@triton.jit
def _encode_kernel(
    values,
    origin,
    residual,
    scales,
    entries,
    new_residual,
    bad,
    blocks,
    KEPT: tl.constexpr,
    BITS: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    FEEDBACK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 256)
    here = row[:, None] < blocks
    at = row[:, None].to(tl.int64) * 256 + column[None, :]
    x = tl.load(values + at, mask=here, other=0.0) - tl.load(origin + at, mask=here, other=0.0)
    if HAS_RESIDUAL:
        x = x + tl.load(residual + at, mask=here, other=0.0)
    bits = _bits_of(x)
    largest = tl.max(((bits << 1) & 0xFFFFFFFF) | (bits >> 31), axis=1)
    tl.atomic_or(bad + row * 0, (largest >= 0xFF000000).to(tl.int32), mask=largest >= 0xFF000000)
    exponent = largest >> 24
    filled = (exponent >= 16) & (exponent < 255)
    exponent = tl.where(filled, exponent, 127)
    power = _float_of((255 - exponent) << 23)
    peak = _float_of((largest >> 1) | ((largest & 1) << 31)) * power
    key = ((bits << 1) & 0xFFFFFF00) | (255 - column[None, :]).to(tl.int64)
    left = key
    smallest = tl.max(left, axis=1)
    for _ in range(KEPT):
        smallest = tl.max(left, axis=1)
        left = tl.where(left == smallest[:, None], -1, left)
    chosen = key >= smallest[:, None]
    place = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    scaled = x * power[:, None]
    top = power * 8.507058665963221e37
    if BITS == 4:
        step = _float_of(_bits_of(tl.div_rn(-peak, tl.full([ROWS], 8.0, tl.float32))) & 0xFFFF0000)
    else:
        whole = -peak * 0.5
        whole = tl.minimum(tl.maximum(whole, -top), top)
        whole = _float_of(_bits_of(whole) & 0xFFFE0000)
        fitted = _fitted(tl.abs(x) * power[:, None], place, chosen, KEPT, ROWS)
        fitted = tl.minimum(tl.maximum(fitted, -top), top)
        fitted = _float_of((_bits_of(fitted) & 0xFFFE0000) | 0x10000)
        count = tl.sum((chosen & (x != 0.0)).to(tl.int32), axis=1)
        step = tl.where(count < KEPT, whole, fitted)
    scale = tl.where(filled, step * _float_of((exponent - 1) << 23), 0.0)
    step = tl.where(filled, step, 1.0)
    value = scaled * tl.div_rn(tl.full([ROWS], 1.0, tl.float32), step)[:, None]
    stored = _bits_of(scale) >> 16
    if BITS == 4:
        near = tl.minimum(tl.maximum(value, -8.0), 7.0)
        code = ((near + 12582912.0) - 12582912.0).to(tl.int32)
        level = code
    else:
        near = tl.minimum(tl.maximum(value, -2.0), 1.0)
        even = ((near + 12582912.0) - 12582912.0).to(tl.int32)
        large = (tl.abs(value) > 2.5).to(tl.int32)
        odd = tl.where(value >= 0.0, large, -1 - large)
        is_odd = (stored & 1)[:, None] == 1
        code = tl.where(is_odd, odd, even)
        level = tl.where(is_odd, tl.where(code >= 0, code + 2, code - 1), code)
    code = tl.where(chosen & filled[:, None], code, 0)
    tl.store(scales + row, stored.to(tl.int16), mask=row < blocks)
    begin = row[:, None].to(tl.int64) * (KEPT + CODE_BYTES)
    tl.store(entries + begin + place, (column[None, :] + place * 0).to(tl.uint8), mask=here & chosen)
    each = 8 // BITS
    shifted = (code & ((1 << BITS) - 1)) << (BITS * (place % each))
    for byte in range(CODE_BYTES):
        packed = tl.sum(tl.where(chosen & (place // each == byte), shifted, 0), axis=1)
        tl.store(entries + row.to(tl.int64) * (KEPT + CODE_BYTES) + KEPT + byte, packed.to(tl.uint8), mask=row < blocks)
    if FEEDBACK:
        decoded = tl.where(chosen & filled[:, None], level.to(tl.float32) * scale[:, None], 0.0)
        tl.store(new_residual + at, (x - decoded) * 0.95, mask=here)


@triton.jit
def _update_kernel(
    theta,
    scales,
    entries,
    out,
    blocks,
    KEPT: tl.constexpr,
    BITS: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 256)
    here = row[:, None] < blocks
    at = row[:, None].to(tl.int64) * 256 + column[None, :]
    stored = tl.load(scales + row, mask=row < blocks, other=0).to(tl.int64) & 0xFFFF
    scale = _float_of(stored << 16)
    begin = row.to(tl.int64) * (KEPT + CODE_BYTES)
    decoded = tl.zeros([ROWS, 256], tl.float32)
    for entry in range(KEPT):
        index = tl.load(entries + begin + entry, mask=row < blocks, other=0).to(tl.int32)
        byte = tl.load(entries + begin + KEPT + entry * BITS // 8, mask=row < blocks, other=0).to(tl.int32)
        code = (byte << (32 - BITS - (entry * BITS) % 8)) >> (32 - BITS)
        if BITS == 2:
            code = tl.where(stored & 1 == 1, tl.where(code >= 0, code + 2, code - 1), code)
        value = code.to(tl.float32) * scale
        decoded = tl.where(column[None, :] == index[:, None], value[:, None], decoded)
    tl.store(out + at, tl.load(theta + at, mask=here, other=0.0) + decoded, mask=here)


def encode_difference(
    values: Tensor, origin: Tensor, residual: Tensor | None, kept: int, bits: int, feedback: bool
) -> Encoded:
    """enc(values - origin + residual), as of `triton_codec`."""
    blocks, code_bytes = values.numel() // BLOCK, -(-kept * bits // 8)
    payload = torch.empty(blocks * (2 + kept + code_bytes), dtype=torch.uint8, device=values.device)
    bad = torch.zeros(1, dtype=torch.int32, device=values.device)
    new_residual = torch.empty_like(values) if feedback else values
    _encode_kernel[(triton.cdiv(blocks, ROWS),)](
        values,
        origin,
        residual if residual is not None else values,
        payload[: 2 * blocks].view(torch.int16),
        payload[2 * blocks :],
        new_residual,
        bad,
        blocks,
        KEPT=kept,
        BITS=bits,
        CODE_BYTES=code_bytes,
        HAS_RESIDUAL=residual is not None,
        FEEDBACK=feedback,
        ROWS=ROWS,
        enable_fp_fusion=False,
    )
    return Encoded(payload, new_residual, bad == 0)


def add_update(theta: Tensor, payload: Tensor, kept: int, bits: int) -> Tensor:
    """theta + decode(payload), as a new tensor."""
    blocks, out = theta.numel() // BLOCK, torch.empty_like(theta)
    _update_kernel[(triton.cdiv(blocks, ROWS),)](
        theta,
        payload[: 2 * blocks].view(torch.int16),
        payload[2 * blocks :],
        out,
        blocks,
        KEPT=kept,
        BITS=bits,
        CODE_BYTES=-(-kept * bits // 8),
        ROWS=ROWS,
        enable_fp_fusion=False,
    )
    return out
