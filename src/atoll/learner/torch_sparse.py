"""int2 and topk in torch operations: fits by least squares, whose sums are added in the order of `atoll.kernels`.

All fitting is on x * power, whose largest magnitude is from 2 up to 4. A sum over lanes (int2) or over chosen values
(topk) is a loop here, one operation for all blocks at a time, because its order decides the last bit.
"""

from __future__ import annotations

import torch

from atoll.codec import Codec
from atoll.kernels import TOPK4
from atoll.learner.torch_codec import BLOCK, DEVICE_CODECS, MAGIC, DeviceCodec, Encoded, Tensor

LANES = 32
QUARTER = BLOCK // 4
EXPONENT_MIN = 16
NOT_FINITE = 0xFF000000
SCALE_MAX = torch.finfo(torch.float32).max / 4.0
FITS = 2
KEPT_ERROR = 0.95


class Powers:
    """Of each block: its value of largest magnitude, and a power of two that brings it near 1."""

    def __init__(self, blocks: Tensor) -> None:
        bits = blocks.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        self.largest = (((bits << 1) & 0xFFFFFFFF) | (bits >> 31)).amax(dim=1)
        """As rotated bits: magnitude above, sign in the lowest bit."""
        self.finite = (self.largest < NOT_FINITE).all()
        exponent = self.largest >> 24
        self.filled = exponent >= EXPONENT_MIN
        """Blocks that do not count as zero."""
        exponent = torch.where(self.filled & (exponent < 255), exponent, 127)
        self.power = _float_of((255 - exponent) << 23)
        self.inverse = _float_of((exponent - 1) << 23)
        self.peak = _float_of((self.largest >> 1) | ((self.largest & 1) << 31)) * self.power


def _float_of(bits: Tensor) -> Tensor:
    """fp32 numbers of these bits, given as whole numbers of 64."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def _bits_of(value: Tensor) -> Tensor:
    return value.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _within(value: Tensor, top: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(value, -top), top)


# ---------------------------------------------------------------- int2


def _lanes(values: Tensor) -> Tensor:
    """Sum of the last two dimensions (rows, lanes): rows first, one after the other; then halves of the lanes."""
    total = values[:, 0].clone()
    for row in range(1, values.shape[1]):
        total += values[:, row]
    for width in (16, 8, 4, 2):
        total = total[:, :width] + total[:, width : 2 * width]
    return total[:, 0] + total[:, 1]


def _codes_of(scaled: Tensor, step_inverse: Tensor, offset: Tensor) -> Tensor:
    return (scaled * step_inverse[:, None] - offset[:, None]).clamp(-2.0, 1.0) + MAGIC


def _encode_int2(x: Tensor) -> Encoded:
    blocks = x.view(-1, BLOCK)
    of = Powers(blocks)
    scaled = torch.where(of.filled[:, None], blocks, torch.ones_like(blocks)) * of.power[:, None]
    rows = scaled.view(-1, BLOCK // LANES, LANES)
    count = (scaled != 0.0).sum(dim=1)
    step = torch.sqrt(_lanes(rows * rows) / count.to(torch.float32))
    whole = count < BLOCK
    step = torch.where(whole & (of.largest & 1 == 0), -step, step)
    offset = torch.where(whole, 0.0, 0.5)
    for _ in range(FITS):
        code = _codes_of(scaled, 1.0 / step, offset) - MAGIC
        level = code + offset[:, None]
        quarters = (4.0 * level * level).sum(dim=1)  # whole numbers below 2**24: exact in any order
        step = _lanes((scaled * level).view_as(rows)) / (0.25 * quarters)
    half = _within(0.5 * step, SCALE_MAX * of.power)
    odd = (offset + offset).to(torch.int64)
    half = _float_of((_bits_of(half) & 0xFFFFFFFE) | odd)
    scale = torch.where(of.filled, half * of.inverse, torch.zeros_like(half))
    written = _codes_of(scaled, 0.5 / half, 0.5 * odd.to(torch.float32))
    code = torch.where(of.filled[:, None], written.view(torch.int32) & 3, 0)
    parts = code.view(-1, 4, QUARTER)
    packed = parts[:, 0] | (parts[:, 1] << 2) | (parts[:, 2] << 4) | (parts[:, 3] << 6)
    payload = torch.cat((scale.view(torch.uint8), packed.to(torch.uint8).view(-1)))
    return Encoded(payload, x - _decode_int2(payload, x.numel()), of.finite)


def _decode_int2(payload: Tensor, n: int) -> Tensor:
    blocks = n // BLOCK
    scale = payload[: 4 * blocks].view(torch.float32)
    packed = payload[4 * blocks :].view(blocks, 1, QUARTER).to(torch.int32)
    shifts = torch.tensor([30, 28, 26, 24], dtype=torch.int32, device=payload.device).view(1, 4, 1)
    code = (packed << shifts) >> 30
    level = 2 * code + (scale.view(torch.int32) & 1).view(-1, 1, 1)
    return (level.to(torch.float32) * scale.view(-1, 1, 1)).view(-1)


# ---------------------------------------------------------------- topk


def _fitted(magnitudes: Tensor) -> Tensor:
    """The scale of the levels 2 and 3 that fits these (blocks, kept), by least squares."""
    kept = magnitudes.shape[1]
    total = torch.zeros_like(magnitudes[:, 0])
    for entry in range(kept):
        total += magnitudes[:, entry]
    step = total / torch.tensor(2.5 * kept, dtype=torch.float32, device=total.device)
    for _ in range(FITS):
        level = torch.where(magnitudes > (2.5 * step)[:, None], 3.0, 2.0)
        products, squares = torch.zeros_like(total), torch.zeros_like(total)
        for entry in range(kept):
            products += magnitudes[:, entry] * level[:, entry]
            squares += level[:, entry] * level[:, entry]
        step = products / squares
    return step


def _encode_topk(x: Tensor, kept: int, bits: int) -> Encoded:
    blocks = x.view(-1, BLOCK)
    of = Powers(blocks)
    places = torch.arange(BLOCK, device=x.device)
    keys = ((_bits_of(blocks) << 1) & 0xFFFFFF00) | (BLOCK - 1 - places)
    indices = (BLOCK - 1 - (keys.topk(kept, dim=1, sorted=False).values & 255)).sort(dim=1).values
    chosen = blocks.gather(1, indices)
    top = SCALE_MAX * of.power
    if bits == 4:
        step = _float_of(_bits_of(-of.peak / 8.0) & 0xFFFF0000)
    else:
        whole = _float_of(_bits_of(_within(-of.peak / 2.0, top)) & 0xFFFE0000)
        fitted = _within(_fitted(chosen.abs() * of.power[:, None]), top)
        fitted = _float_of((_bits_of(fitted) & 0xFFFE0000) | 0x10000)
        step = torch.where((chosen != 0.0).sum(dim=1) < kept, whole, fitted)
    scale = torch.where(of.filled, step * of.inverse, torch.zeros_like(step))
    value = chosen * of.power[:, None] * (1.0 / step)[:, None]
    if bits == 4:
        code = value.clamp(-8.0, 7.0).round().to(torch.int32)
    else:
        large = (value.abs() > 2.5).to(torch.int32)
        odd, even = torch.where(value >= 0.0, large, -1 - large), value.clamp(-2.0, 1.0).round().to(torch.int32)
        code = torch.where(((_bits_of(scale) >> 16) & 1 == 0)[:, None], even, odd)
    code = torch.where(of.filled[:, None], code, 0)
    packed = _packed(code, bits)
    high = (_bits_of(scale) >> 16).to(torch.int32)
    scales = torch.stack((high & 255, high >> 8), dim=1).to(torch.uint8)
    payload = torch.cat((scales.view(-1), torch.cat((indices.to(torch.uint8), packed), dim=1).view(-1)))
    rest = (x - _decode_topk(payload, x.numel(), kept, bits)) * KEPT_ERROR
    return Encoded(payload, rest, of.finite)


def _packed(code: Tensor, bits: int) -> Tensor:
    """Codes of so many bits (blocks, kept) as bytes, from the lowest bits up."""
    each = 8 // bits
    pad = -code.shape[1] % each
    padded = torch.nn.functional.pad(code & ((1 << bits) - 1), (0, pad)).view(len(code), -1, each)
    shifts = bits * torch.arange(each, dtype=torch.int32, device=code.device)
    return (padded << shifts).sum(dim=2).to(torch.uint8)


def _decode_topk(payload: Tensor, n: int, kept: int, bits: int) -> Tensor:
    blocks, each = n // BLOCK, 8 // bits
    pairs = payload[: 2 * blocks].view(-1, 2).to(torch.int64)
    stored = pairs[:, 0] | (pairs[:, 1] << 8)
    scale = _float_of(stored << 16)
    entries = payload[2 * blocks :].view(blocks, -1)
    shifts = 32 - bits - bits * torch.arange(each, dtype=torch.int32, device=payload.device)
    code = ((entries[:, kept:, None].to(torch.int32) << shifts) >> (32 - bits)).reshape(blocks, -1)[:, :kept]
    if bits == 2:
        outer = torch.where(code >= 0, code + 2, code - 1)
        code = torch.where((stored & 1 == 0)[:, None], code, outer)
    out = torch.zeros((blocks, BLOCK), dtype=torch.float32, device=payload.device)
    out.scatter_(1, entries[:, :kept].to(torch.int64), code.to(torch.float32) * scale[:, None])
    return out.view(-1)


# ---------------------------------------------------------------- by name


INT2 = DeviceCodec(lambda n: n // BLOCK * (4 + QUARTER), _encode_int2, _decode_int2)


def kept_and_bits(codec: Codec) -> tuple[int, int]:
    """Of topk: how many values of a block it keeps, and the bits of each; (0, 0) of another codec."""
    kept = int(getattr(codec, "kept", 0))
    return kept, (4 if getattr(codec, "kind", 0) & 255 == TOPK4 else 2) if kept else 0


def device_codec(codec: Codec) -> DeviceCodec | None:
    """None of a codec that no device computes."""
    kept, bits = kept_and_bits(codec)
    if not kept:
        return INT2 if codec.name == "int2" else DEVICE_CODECS.get(codec.name)
    size = codec.size_max(BLOCK)
    return DeviceCodec(
        lambda n: n // BLOCK * size,
        lambda x: _encode_topk(x, kept, bits),
        lambda payload, n: _decode_topk(payload, n, kept, bits),
    )
