"""What a learner computes with its copies, in one pass over a GPU's memory: int4 and int8 both ways, and rebase.

Each program takes some blocks of 256 values. Multiplications and additions must not be fused (launched with
`enable_fp_fusion=False`) and the one division must be rounded as IEEE says, or the bits would not be those of
`atoll.kernels`. The module can only be imported where there is Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atoll.learner.torch_codec import BLOCK, HALF, Encoded, Tensor

BLOCKS_PER_PROGRAM = 8
"""2048 values: enough loads in flight for each program, and few enough for its registers."""


@triton.jit
def _row_peak(low, high):
    """The value of largest magnitude of each row, as bits rotated left by one: of two that tie, the negative one."""
    low_bits = low.to(tl.uint32, bitcast=True)
    high_bits = high.to(tl.uint32, bitcast=True)
    low_rotated = ((low_bits << 1) | (low_bits >> 31)).to(tl.int64)
    high_rotated = ((high_bits << 1) | (high_bits >> 31)).to(tl.int64)
    return tl.maximum(tl.max(low_rotated, axis=1), tl.max(high_rotated, axis=1))


@triton.jit
def _difference(values, origin, residual, at, mask, HAS_RESIDUAL: tl.constexpr):
    x = tl.load(values + at, mask=mask, other=0.0) - tl.load(origin + at, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        x = x + tl.load(residual + at, mask=mask, other=0.0)
    return x


@triton.jit
def _encode_kernel(
    values,
    origin,
    residual,
    scales,
    codes,
    new_residual,
    bad,
    blocks,
    STEPS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    FEEDBACK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, 128)
    here = row[:, None] < blocks
    at = row[:, None].to(tl.int64) * 256 + half[None, :]
    low = _difference(values, origin, residual, at, here, HAS_RESIDUAL)
    high = _difference(values, origin, residual, at + 128, here, HAS_RESIDUAL)
    rotated = _row_peak(low, high)
    tl.atomic_or(bad + row * 0, (rotated >= 0xFF000000).to(tl.int32), mask=rotated >= 0xFF000000)
    peak = ((rotated >> 1) | ((rotated & 1) << 31)).to(tl.uint32).to(tl.float32, bitcast=True)
    scale = tl.div_rn(-peak, tl.full([ROWS], STEPS, tl.float32))
    tiny = tl.abs(scale) < 1.1754943508222875e-38
    inverse = tl.where(tiny, 0.0, tl.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.where(tiny, 1.0, scale)))
    scale = tl.where(tiny, 0.0, scale)
    tl.store(scales + row, scale, mask=row < blocks)
    top = STEPS - 1.0
    low_scaled = low * inverse[:, None]
    high_scaled = high * inverse[:, None]
    low_shifted = tl.where(low_scaled < top, low_scaled, top) + 12582912.0
    high_shifted = tl.where(high_scaled < top, high_scaled, top) + 12582912.0
    low_bits = low_shifted.to(tl.int32, bitcast=True)
    high_bits = high_shifted.to(tl.int32, bitcast=True)
    if STEPS == 8:
        packed = (low_bits & 15) | ((high_bits & 15) << 4)
        tl.store(codes + row[:, None].to(tl.int64) * 128 + half[None, :], packed.to(tl.uint8), mask=here)
    else:
        tl.store(codes + at, (low_bits & 255).to(tl.uint8), mask=here)
        tl.store(codes + at + 128, (high_bits & 255).to(tl.uint8), mask=here)
    if FEEDBACK:
        tl.store(new_residual + at, low - (low_shifted - 12582912.0) * scale[:, None], mask=here)
        tl.store(new_residual + at + 128, high - (high_shifted - 12582912.0) * scale[:, None], mask=here)


@triton.jit
def _update_kernel(theta, scales, codes, out, blocks, STEPS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, 128)
    here = row[:, None] < blocks
    at = row[:, None].to(tl.int64) * 256 + half[None, :]
    scale = tl.load(scales + row, mask=row < blocks, other=0.0)[:, None]
    if STEPS == 8:
        byte = tl.load(codes + row[:, None].to(tl.int64) * 128 + half[None, :], mask=here, other=0).to(tl.int32)
        low = (byte << 28) >> 28
        high = byte >> 4
    else:
        low = tl.load(codes + at, mask=here, other=0).to(tl.int32)
        high = tl.load(codes + at + 128, mask=here, other=0).to(tl.int32)
    low_theta = tl.load(theta + at, mask=here, other=0.0)
    high_theta = tl.load(theta + at + 128, mask=here, other=0.0)
    tl.store(out + at, low_theta + low.to(tl.float32) * scale, mask=here)
    tl.store(out + at + 128, high_theta + high.to(tl.float32) * scale, mask=here)


@triton.jit
def _rebase_kernel(new, old, after, before, out, n, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    here = at < n
    moved = tl.load(after + at, mask=here) - tl.load(before + at, mask=here)
    tl.store(out + at, (tl.load(new + at, mask=here) - tl.load(old + at, mask=here)) - moved, mask=here)


def encode_difference(values: Tensor, origin: Tensor, residual: Tensor | None, steps: int, feedback: bool) -> Encoded:
    """enc(values - origin + residual) with `steps` (8: int4, 128: int8) levels below zero. Without `feedback` the
    residual that comes back means nothing."""
    blocks = values.numel() // BLOCK
    code_bytes = HALF if steps == 8 else BLOCK
    payload = torch.empty(blocks * (4 + code_bytes), dtype=torch.uint8, device=values.device)
    bad = torch.zeros(1, dtype=torch.int32, device=values.device)
    new_residual = torch.empty_like(values) if feedback else values
    _encode_kernel[(triton.cdiv(blocks, BLOCKS_PER_PROGRAM),)](
        values,
        origin,
        residual if residual is not None else values,
        payload[: 4 * blocks].view(torch.float32),
        payload[4 * blocks :],
        new_residual,
        bad,
        blocks,
        STEPS=steps,
        HAS_RESIDUAL=residual is not None,
        FEEDBACK=feedback,
        ROWS=BLOCKS_PER_PROGRAM,
        enable_fp_fusion=False,
    )
    return Encoded(payload, new_residual, bad == 0)


def rebase(new: Tensor, old: Tensor, after: Tensor, before: Tensor) -> Tensor:
    """new - old - (after - before)."""
    out, size = torch.empty_like(new), BLOCKS_PER_PROGRAM * BLOCK
    _rebase_kernel[(triton.cdiv(new.numel(), size),)](
        new, old, after, before, out, new.numel(), SIZE=size, enable_fp_fusion=False
    )
    return out


def add_update(theta: Tensor, payload: Tensor, steps: int) -> Tensor:
    """theta + decode(payload), as a new tensor."""
    blocks = theta.numel() // BLOCK
    out = torch.empty_like(theta)
    _update_kernel[(triton.cdiv(blocks, BLOCKS_PER_PROGRAM),)](
        theta,
        payload[: 4 * blocks].view(torch.float32),
        payload[4 * blocks :].view(torch.int8),
        out,
        blocks,
        STEPS=steps,
        ROWS=BLOCKS_PER_PROGRAM,
        enable_fp_fusion=False,
    )
    return out
