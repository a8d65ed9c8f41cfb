"""Every hot loop of Atoll, compiled by numba. Nothing here checks its arguments: `atoll.kernels.run` does.

How the file works. An array is cut into blocks of 256 elements; the last may be short. A range kernel (bottom of the
file) walks over some blocks and calls block helpers (top) that work on scratch arrays of one block, which stay in the
L1 cache: each big array is read and written once. Several threads run the same range kernel on different ranges. What
a kernel computes for a block never depends on the other blocks, and sums over blocks leave one partial per segment (a
fixed cut of the array), so results have the same bits for any number of threads.

All compiled code is in this one file, but for what `intrinsics` and `sums` build in LLVM's language.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray

from atoll.kernels.constants import BF16, BLOCK, FP32, INT2, INT4, INT8, TOPK2, TOPK4
from atoll.kernels.intrinsics import (
    bits_of,
    float32_at,
    float64_at,
    float_of,
    fma,
    helper,
    int8_at,
    kernel,
    uint8_at,
    uint16_at,
    uint32_at,
    wide_vectors,
)
from atoll.kernels.sums import sum_int2, sum_int4

HALF = BLOCK // 2
QUARTER = BLOCK // 4
LANES = 32
ROW = 4 * BLOCK
"""Scratch memory is given out in rows of one block of float32. It comes from the caller, zeroed, by address: arrays
that numba allocates itself are reference-counted, and those atomic counts cost more than a block's arithmetic."""
# Adding 1.5 * 2**23 rounds a small float32 to the nearest whole number, ties to even, and leaves that number in the low
# bits of the sum, in two's complement: a rounding and a conversion for one addition.
MAGIC = np.float32(12582912.0)
NORMAL_MIN = np.float32(1.1754943508222875e-38)
NOT_FINITE = 0xFF000000  # Rotated bits of infinity; everything from here on is infinite or NaN.
BF16_MAX = 0x7F7FFFFF
INT2_FITS = 2
"""Times that the scale of an int2 block is fitted to its codes: docs/results/int2_grid.md says what each is worth."""
INT2_EXPONENT_MIN = 16
"""Biased exponent of 2**-111. An int2 block whose largest value is smaller becomes zero: its scale, at least 1/128 of
that value, might be subnormal."""
INT2_SCALE_MAX = np.float32(np.finfo(np.float32).max / np.float32(4.0))
"""The largest level is 4 scales: nothing decodes to infinity."""
MIXED = -1
"""In place of a kind: the contributions of one sum differ in theirs."""
SPARSE_FITS = 2
SPARSE_KEPT_ERROR = np.float32(0.95)
"""What error feedback keeps of an error from one round to the next where most values are not sent: `codec.topk`."""


# ---- one block: payload -> floats ------------------------------------------------------------------------------------


@helper
def _floats(address: int, count: int) -> Any:
    return carray(float32_at(address), count)


@helper
def _doubles(address: int, count: int) -> Any:
    return carray(float64_at(address), count)


@helper
def _copy(source: Any, target: Any) -> None:
    wide_vectors()
    for j in range(len(target)):
        target[j] = source[j]


@helper
def _fill(target: Any, value: Any) -> None:
    for j in range(len(target)):
        target[j] = value


@helper
def _add(target: Any, values: Any) -> None:
    wide_vectors()
    for j in range(len(target)):
        target[j] += values[j]


@helper
def _subtract(a: Any, b: Any, out: Any) -> None:
    wide_vectors()
    for j in range(len(out)):
        out[j] = a[j] - b[j]


@helper
def _shrink(target: Any) -> None:
    wide_vectors()
    for j in range(len(target)):
        target[j] *= SPARSE_KEPT_ERROR


@helper
def _take_difference(target: Any, a: Any, b: Any) -> None:
    wide_vectors()
    for j in range(len(target)):
        target[j] -= a[j] - b[j]


@helper
def _codes(kind: int, address: int, blocks: int, block: int) -> Any:
    """The integer codes of one block; they follow the scales of all blocks."""
    size = HALF if kind == INT4 else QUARTER if kind == INT2 else BLOCK
    return carray(int8_at(address + 4 * blocks + size * block), size)


@helper
def _decode_int4(codes: Any, scale: Any, out: Any) -> None:
    wide_vectors()
    low, high = out[:HALF], out[HALF:]
    for j in range(HALF):
        code = np.int32(codes[j])
        low[j] = np.float32(np.int32(np.int32(code << 28) >> 28)) * scale
        high[j] = np.float32(np.int32(code >> 4)) * scale


@helper
def _decode_int2(codes: Any, scale: Any, out: Any) -> None:
    """level * scale, with level = 2 * code + the lowest bit of the scale."""
    wide_vectors()
    odd = np.int32(bits_of(scale) & 1)
    first, second, third, fourth = out[:QUARTER], out[QUARTER:HALF], out[HALF : HALF + QUARTER], out[HALF + QUARTER :]
    for j in range(QUARTER):
        code = np.int32(codes[j])  # shifted up to the sign and back down by one bit less: twice the code
        first[j] = np.float32(np.int32(np.int32(np.int32(code << 30) >> 29) | odd)) * scale
        second[j] = np.float32(np.int32(np.int32(np.int32(code << 28) >> 30 << 1) | odd)) * scale
        third[j] = np.float32(np.int32(np.int32(np.int32(code << 26) >> 30 << 1) | odd)) * scale
        fourth[j] = np.float32(np.int32(np.int32(code >> 6 << 1) | odd)) * scale


@helper
def _decode_int8(codes: Any, scale: Any, out: Any) -> None:
    wide_vectors()
    for j in range(BLOCK):
        out[j] = np.float32(codes[j]) * scale


@helper
def _decode_bf16(codes: Any, out: Any) -> None:
    wide_vectors()
    for j in range(len(codes)):
        out[j] = float_of(np.uint32(np.uint32(codes[j]) << 16))


@helper
def _is_sparse(kind: int) -> bool:
    return kind & 255 == TOPK2 or kind & 255 == TOPK4


@helper
def _sparse_entries(kind: int, address: int, blocks: int, block: int) -> tuple[Any, Any]:
    """Indices and packed codes of one block; they follow the scales of all blocks."""
    kept = kind >> 8
    codes = (kept * (2 if kind & 255 == TOPK2 else 4) + 7) // 8
    at = address + 2 * blocks + (kept + codes) * block
    return carray(uint8_at(at), kept), carray(uint8_at(at + kept), codes)


@helper
def _sparse_scale(address: int, block: int) -> Any:
    return float_of(np.uint32(np.uint32(carray(uint16_at(address + 2 * block), 1)[0]) << 16))


@helper
def _sparse_level(kind: int, codes: Any, entry: int, odd: Any) -> Any:
    """What one code stands for, in scales."""
    if kind & 255 == TOPK4:
        nibble = np.int32(np.int32(codes[entry >> 1]) >> np.int32(4 * (entry & 1)))
        return np.int32(np.int32(nibble << 28) >> 28)
    pair = np.int32(np.int32(codes[entry >> 2]) >> np.int32(2 * (entry & 3)))
    code = np.int32(np.int32(pair << 30) >> 30)
    if odd == 0:
        return code
    return np.int32(code + 2) if code >= 0 else np.int32(code - 1)


@helper
def _decode_sparse(kind: int, address: int, blocks: int, block: int, out: Any) -> None:
    indices, codes = _sparse_entries(kind, address, blocks, block)
    scale = _sparse_scale(address, block)
    odd = np.uint32(bits_of(scale) >> 16) & 1
    _fill(out, np.float32(0.0))
    for entry in range(kind >> 8):
        out[indices[entry]] = np.float32(_sparse_level(kind, codes, entry, odd)) * scale


@helper
def _decode_block(kind: int, address: int, blocks: int, block: int, count: int, out: Any) -> None:
    """out[:count] = the decoded values of one block."""
    if kind == INT4:
        _decode_int4(_codes(kind, address, blocks, block), _floats(address + 4 * block, 1)[0], out)
    elif kind == INT8:
        _decode_int8(_codes(kind, address, blocks, block), _floats(address + 4 * block, 1)[0], out)
    elif kind == INT2:
        _decode_int2(_codes(kind, address, blocks, block), _floats(address + 4 * block, 1)[0], out)
    elif kind == BF16:
        _decode_bf16(carray(uint16_at(address + 2 * BLOCK * block), count), out)
    elif _is_sparse(kind):
        _decode_sparse(kind, address, blocks, block, out)
    else:
        _copy(_floats(address + 4 * BLOCK * block, count), out[:count])


# ---- one block: floats -> payload ------------------------------------------------------------------------------------


@helper
def _largest(x: Any) -> Any:
    """The value of largest magnitude as rotated bits: magnitude above, sign in the lowest bit.

    An integer maximum vectorises, a float maximum (with its NaN rules) does not, and it finds NaN and infinity too.
    """
    wide_vectors()
    largest = np.uint32(0)
    for j in range(BLOCK):
        bits = bits_of(x[j])
        rotated = np.uint32(np.uint32(bits << 1) | np.uint32(bits >> 31))
        largest = max(largest, rotated)
    return largest


@helper
def _encode_int4(x: Any, inverse: Any, scale: Any, codes: Any, decoded: Any) -> None:
    wide_vectors()
    x_low, x_high = x[:HALF], x[HALF:]
    decoded_low, decoded_high = decoded[:HALF], decoded[HALF:]
    top = np.float32(7.0)  # The bottom needs no clamp: the value of largest magnitude sits there exactly.
    for j in range(HALF):
        low, high = x_low[j] * inverse, x_high[j] * inverse
        low = (low if low < top else top) + MAGIC
        high = (high if high < top else top) + MAGIC
        codes[j] = np.int8(np.uint32(bits_of(low) & 15) | np.uint32(bits_of(high) << 4))
        decoded_low[j] = (low - MAGIC) * scale
        decoded_high[j] = (high - MAGIC) * scale


@helper
def _encode_int8(x: Any, inverse: Any, scale: Any, codes: Any, decoded: Any) -> None:
    wide_vectors()
    top = np.float32(127.0)
    for j in range(BLOCK):
        value = x[j] * inverse
        value = (value if value < top else top) + MAGIC
        codes[j] = np.int8(bits_of(value))
        decoded[j] = (value - MAGIC) * scale


@helper
def _fold(lanes: Any, width: int) -> None:
    wide_vectors()
    for j in range(width):
        lanes[j] += lanes[j + width]


@helper
def _fold_all(lanes: Any) -> Any:
    """The sum of LANES float32 values, halves added until one is left: an order that vectors keep."""
    _fold(lanes, 16)
    _fold(lanes, 8)
    _fold(lanes, 4)
    _fold(lanes, 2)
    return lanes[0] + lanes[1]


@helper
def _spread(x: Any, power: Any, lanes: Any) -> tuple[Any, Any]:
    """Sum of squares of x * power, and how many values are not zero."""
    wide_vectors()
    count = np.int32(0)
    for j in range(LANES):
        value = x[j] * power
        total = value * value
        count = np.int32(count + np.int32(value != np.float32(0.0)))
        for row in range(1, BLOCK // LANES):
            value = x[row * LANES + j] * power
            total += value * value
            count = np.int32(count + np.int32(value != np.float32(0.0)))
        lanes[j] = total
    return _fold_all(lanes), count


@helper
def _code_of(value: Any, inverse: Any, offset: Any) -> Any:
    """MAGIC + the int2 code of a value, -2 .. 1; the levels are code + offset steps."""
    low, high = np.float32(-2.0), np.float32(1.0)
    code = value * inverse - offset
    code = code if code < high else high
    return (code if code > low else low) + MAGIC


@helper
def _fitted_step(x: Any, power: Any, step: Any, offset: Any, lanes: Any) -> Any:
    """The step of least squared error for the codes that `step` gives: sum(x * level) / sum(level * level)."""
    wide_vectors()
    inverse = np.float32(1.0) / step
    quarters = np.int32(0)  # of the squared levels: exact
    twice_offset = np.int32(offset + offset)
    for j in range(LANES):
        total = np.float32(0.0)
        for row in range(BLOCK // LANES):
            value = x[row * LANES + j] * power
            code = _code_of(value, inverse, offset) - MAGIC
            level = np.int32(np.int32(code) * 2 + twice_offset)
            total += value * (code + offset)
            quarters = np.int32(quarters + level * level)
        lanes[j] = total
    return _fold_all(lanes) / (np.float32(0.25) * np.float32(quarters))


@helper
def _write_int2(x: Any, power: Any, half: Any, scale: Any, codes: Any, decoded: Any) -> None:
    wide_vectors()
    inverse = np.float32(0.5) / half
    odd = np.float32(bits_of(scale) & 1)
    offset = np.float32(0.5) * odd
    for j in range(QUARTER):
        bits = np.uint32(0)
        for part in range(4):
            code = _code_of(x[part * QUARTER + j] * power, inverse, offset)
            bits = np.uint32(bits | np.uint32(np.uint32(bits_of(code) & 3) << np.uint32(2 * part)))
            code -= MAGIC
            decoded[part * QUARTER + j] = (code + code + odd) * scale
        codes[j] = np.int8(bits)


@helper
def _encode_int2(x: Any, largest: Any, codes: Any, decoded: Any) -> Any:
    """Write the codes of one block and what they decode to; returns its scale, which is half a step.

    A block without zeros takes the levels +-1/2 and +-3/2 steps; one with zeros -2, -1, 0 and 1 steps, so that a zero
    (padding, rows of an embedding that were not used) stays one. The lowest bit of the scale tells which. The first
    step is the root mean square of what is not zero; then it is fitted. All of it on x * power, whose largest magnitude
    is from 2 up to 4, so that no sum overflows or vanishes.
    """
    exponent = np.uint32(largest >> 24)
    if exponent < INT2_EXPONENT_MIN:
        _fill(codes, np.int8(0))
        _fill(decoded, np.float32(0.0))
        return np.float32(0.0)
    power = float_of(np.uint32(np.uint32(255 - exponent) << 23))
    squares, count = _spread(x, power, decoded)
    step = np.float32(math.sqrt(squares / np.float32(count)))
    offset = np.float32(0.5)
    if count < BLOCK:
        offset = np.float32(0.0)
        step = step if largest & 1 else -step  # as in int4, the largest value is on the side that has a level more
    for _ in range(INT2_FITS):
        step = _fitted_step(x, power, step, offset, decoded)
    half = np.float32(0.5) * step
    top = INT2_SCALE_MAX * power
    half = half if half < top else top
    half = half if half > -top else -top
    half = float_of(np.uint32(np.uint32(bits_of(half) & 0xFFFFFFFE) | np.uint32(offset + offset)))
    scale = half * float_of(np.uint32(np.uint32(exponent - 1) << 23))
    _write_int2(x, power, half, scale, codes, decoded)
    return scale


@helper
def _encode_bf16(x: Any, codes: Any, decoded: Any) -> None:
    wide_vectors()
    for j in range(len(codes)):
        bits = bits_of(x[j])
        magnitude = np.uint32(bits & 0x7FFFFFFF)
        # Round to nearest even; what would round to infinity stays the largest bf16.
        nearest = np.uint32(min(np.uint32(magnitude + 0x7FFF + ((magnitude >> 16) & 1)), np.uint32(BF16_MAX)) >> 16)
        code = np.uint32(nearest | np.uint32(np.uint32(bits >> 31) << 15))
        codes[j] = np.uint16(code)
        decoded[j] = float_of(np.uint32(code << 16))


@helper
def _order(x: Any, keys: Any) -> None:
    """Keys by magnitude, to 16 bits of it, and of equal ones by place: the first is the largest."""
    wide_vectors()
    for j in range(BLOCK):
        keys[j] = np.uint32(np.uint32(np.uint32(bits_of(x[j]) << 1) & 0xFFFFFF00) | np.uint32(BLOCK - 1 - j))


@helper
def _largest_key(keys: Any) -> Any:
    wide_vectors()
    largest = np.uint32(0)
    for j in range(BLOCK):
        largest = max(largest, keys[j])
    return largest


@helper
def _choose(x: Any, keys: Any, indices: Any) -> int:
    """The places of the values of largest magnitude, in ascending order. Returns how many of these are not zero."""
    _order(x, keys)
    filled = 0
    for entry in range(len(indices)):
        j = BLOCK - 1 - int(_largest_key(keys) & 255)
        keys[j] = np.uint32(0)
        filled += 1 if x[j] != np.float32(0.0) else 0
        at = entry
        while at > 0 and indices[at - 1] > j:
            indices[at] = indices[at - 1]
            at -= 1
        indices[at] = np.uint8(j)
    return filled


@helper
def _sparse_step(x: Any, indices: Any, power: Any) -> Any:
    """The scale of the levels 2 and 3 that fits these magnitudes (times power), by least squares."""
    total = np.float32(0.0)
    for entry in range(len(indices)):
        total += abs(x[indices[entry]]) * power
    step = total / np.float32(2.5 * len(indices))
    for _ in range(SPARSE_FITS):
        middle = np.float32(2.5) * step
        products, squares = np.float32(0.0), np.float32(0.0)
        for entry in range(len(indices)):
            value = abs(x[indices[entry]]) * power
            level = np.float32(3.0) if value > middle else np.float32(2.0)
            products += value * level
            squares += level * level
        step = products / squares
    return step


@helper
def _within(value: Any, top: Any) -> Any:
    return min(max(value, -top), top)


@helper
def _truncated(value: Any, odd: int) -> Any:
    """A bf16 near a value: below it in magnitude or, with `odd` 0 or 1, with that lowest bit."""
    bits = bits_of(value)
    if odd < 0:
        return float_of(np.uint32(bits & np.uint32(0xFFFF0000)))
    return float_of(np.uint32(np.uint32(bits & np.uint32(0xFFFE0000)) | np.uint32(odd << 16)))


@helper
def _encode_sparse(kind: int, x: Any, address: int, blocks: int, block: int, largest: Any, decoded: Any) -> None:
    """Write one block and what it decodes to. All fitting is on x * power, as in int2."""
    indices, codes = _sparse_entries(kind, address, blocks, block)
    filled = _choose(x, carray(uint32_at(decoded.ctypes.data), BLOCK), indices)
    _fill(codes, np.uint8(0))
    exponent = np.uint32(largest >> 24)
    stored = carray(uint16_at(address + 2 * block), 1)
    stored[0] = np.uint16(0)
    if exponent >= INT2_EXPONENT_MIN:
        power = float_of(np.uint32(np.uint32(255 - exponent) << 23))
        peak = float_of(np.uint32(np.uint32(largest >> 1) | np.uint32(largest << 31))) * power
        # The largest value is on the side that has a level more, as in int4.
        if kind & 255 == TOPK4:
            step = _truncated(-peak / np.float32(8.0), -1)
        elif filled < len(indices):
            step = _truncated(_within(-peak / np.float32(2.0), INT2_SCALE_MAX * power), 0)
        else:
            step = _truncated(_within(_sparse_step(x, indices, power), INT2_SCALE_MAX * power), 1)
        scale = step * float_of(np.uint32(np.uint32(exponent - 1) << 23))  # over power, exactly
        stored[0] = np.uint16(bits_of(scale) >> 16)
        _write_sparse(kind, x, power, np.float32(1.0) / step, indices, codes, np.uint32(bits_of(scale) >> 16) & 1)
    _decode_sparse(kind, address, blocks, block, decoded)


@helper
def _write_sparse(kind: int, x: Any, power: Any, inverse: Any, indices: Any, codes: Any, odd: Any) -> None:
    for entry in range(len(indices)):
        value = x[indices[entry]] * power * inverse
        if kind & 255 == TOPK4:
            code = np.int32(np.rint(min(max(value, np.float32(-8.0)), np.float32(7.0))))
            codes[entry >> 1] |= np.uint8((code & 15) << (4 * (entry & 1)))
            continue
        if odd == 0:
            code = np.int32(np.rint(min(max(value, np.float32(-2.0)), np.float32(1.0))))
        else:
            large = np.int32(1) if abs(value) > np.float32(2.5) else np.int32(0)
            code = np.int32(large if value >= np.float32(0.0) else -1 - large)
        codes[entry >> 2] |= np.uint8((code & 3) << (2 * (entry & 3)))


@helper
def _encode_block(
    kind: int, x: Any, address: int, blocks: int, block: int, count: int, largest: Any, decoded: Any
) -> bool:
    """Write the codes of x (one block, zero past count) and what they decode to. False if x is not finite.

    largest: as of `_largest`.
    """
    if largest >= NOT_FINITE:
        return False
    if kind == FP32:
        _copy(x, _floats(address + 4 * BLOCK * block, count))
        _copy(x, decoded)
    elif kind == BF16:
        _encode_bf16(x, carray(uint16_at(address + 2 * BLOCK * block), count), decoded)
    elif _is_sparse(kind):
        _encode_sparse(kind, x, address, blocks, block, largest, decoded)
    elif kind == INT2:
        codes = _codes(kind, address, blocks, block)
        _floats(address + 4 * block, 1)[0] = _encode_int2(x, largest, codes, decoded)
    else:
        # The value of largest magnitude gets the code -8 (-128), so the scale carries its sign, dividing it is exact
        # and nothing decodes to more than it: no overflow, and one level more than a symmetric grid has.
        steps = np.float32(8.0) if kind == INT4 else np.float32(128.0)
        peak = float_of(np.uint32(np.uint32(largest >> 1) | np.uint32(largest << 31)))
        scale = -peak / steps
        inverse = np.float32(0.0)
        if abs(scale) < NORMAL_MIN:
            scale = np.float32(0.0)
        else:
            inverse = np.float32(1.0) / scale
        _floats(address + 4 * block, 1)[0] = scale
        if kind == INT4:
            _encode_int4(x, inverse, scale, _codes(kind, address, blocks, block), decoded)
        else:
            _encode_int8(x, inverse, scale, _codes(kind, address, blocks, block), decoded)
    return True


# ---- one block: sums -------------------------------------------------------------------------------------------------


@helper
def _add_scaled(total: Any, values: Any, f: Any) -> None:
    wide_vectors()
    for j in range(BLOCK):
        total[j] = fma(f, values[j], total[j])


@helper
def _common(kinds: Any) -> int:
    """The kind of all contributions, or MIXED."""
    if len(kinds) == 0:
        return FP32
    for i in range(1, len(kinds)):
        if kinds[i] != kinds[0]:
            return MIXED
    return int(kinds[0])


@helper
def _add_sparse(kind: int, address: int, blocks: int, block: int, factor: float, total: Any) -> None:
    indices, codes = _sparse_entries(kind, address, blocks, block)
    scale = _sparse_scale(address, block)
    odd = np.uint32(bits_of(scale) >> 16) & 1
    f = np.float32(factor * scale)
    for entry in range(kind >> 8):
        j = indices[entry]
        total[j] = fma(f, np.float32(_sparse_level(kind, codes, entry, odd)), total[j])


@helper
def _weighted_sum(
    common: int, kinds: Any, addresses: Any, blocks: int, block: int, factors: Any, values: Any, total: Any
) -> None:
    """total = sum over contributions of factor * decoded block, in fp32 and in the order given.

    The fused multiply-add is asked for by name, so it has the same bits on every machine.
    """
    contributions = len(addresses)
    if common == INT4 and contributions > 0:
        sum_int4(total.ctypes.data, addresses.ctypes.data, factors.ctypes.data, contributions, blocks, block)
        return
    if common == INT2 and contributions > 0:
        sum_int2(total.ctypes.data, addresses.ctypes.data, factors.ctypes.data, contributions, blocks, block)
        return
    _fill(total, np.float32(0.0))
    for i in range(contributions):
        kind = kinds[i]
        if _is_sparse(kind):
            _add_sparse(kind, addresses[i], blocks, block, factors[i], total)
        elif kind == INT8:
            _decode_int8(_codes(kind, addresses[i], blocks, block), np.float32(1.0), values)
            _add_scaled(total, values, np.float32(factors[i] * _floats(addresses[i] + 4 * block, 1)[0]))
        else:
            _decode_block(kind, addresses[i], blocks, block, BLOCK, values)
            _add_scaled(total, values, np.float32(factors[i]))


@helper
def _add_pull(contributions: int, factors: Any, pull: int, block: int, total: Any) -> None:
    """total += the factor after those of the contributions, times this block of the array at `pull`; 0: nothing."""
    if pull != 0:
        _add_scaled(total, _floats(pull + 4 * BLOCK * block, BLOCK), np.float32(factors[contributions]))


@helper
def _add_squares(x: Any, lanes: Any) -> None:
    """lanes += squares of x, eight at a time in fp32. For |x| <= 1: squares that underflow there cannot matter."""
    wide_vectors()
    for j in range(LANES):
        s = x[j] * x[j]
        for row in range(1, BLOCK // LANES):
            value = x[row * LANES + j]
            s += value * value
        lanes[j] += np.float64(s)


@helper
def _add_products(a: Any, b: Any, lanes: Any) -> None:
    """lanes += a * b in float64, whatever the magnitudes."""
    wide_vectors()
    for j in range(len(a)):
        lanes[j] += np.float64(a[j]) * np.float64(b[j])


@helper
def _add_dot(a: Any, b: Any, lanes: Any) -> None:
    """lanes += a * b in float64, eight at a time."""
    wide_vectors()
    for j in range(LANES):
        total = np.float64(a[j]) * np.float64(b[j])
        for row in range(1, BLOCK // LANES):
            total += np.float64(a[row * LANES + j]) * np.float64(b[row * LANES + j])
        lanes[j] += total


@helper
def _sum_and_clear(lanes: Any) -> float:
    total = 0.0
    for j in range(len(lanes)):
        total += lanes[j]
        lanes[j] = 0.0
    return total


@helper
def _code_squares(codes: Any, kind: int, scale: Any) -> Any:
    """The exact sum of the squared codes (of int2: levels) of one full block."""
    wide_vectors()
    total = np.int32(0)
    if kind == INT4:
        for j in range(HALF):
            code = np.int32(codes[j])
            low, high = np.int32(np.int32(code << 28) >> 28), np.int32(code >> 4)
            total = np.int32(total + low * low + high * high)
    elif kind == INT2:
        odd = np.int32(bits_of(scale) & 1)
        for j in range(QUARTER):
            code = np.int32(codes[j])
            for part in range(4):
                level = np.int32(np.int32(np.int32(np.int32(code << (30 - 2 * part)) >> 30) * 2) + odd)
                total = np.int32(total + level * level)
    else:
        for j in range(BLOCK):
            code = np.int32(codes[j])
            total = np.int32(total + code * code)
    return total


@helper
def _sparse_squares(kind: int, address: int, blocks: int, block: int, scale: Any) -> Any:
    """The exact sum of the squared levels of one block."""
    _, codes = _sparse_entries(kind, address, blocks, block)
    odd = np.uint32(bits_of(scale) >> 16) & 1
    total = np.int32(0)
    for entry in range(kind >> 8):
        level = _sparse_level(kind, codes, entry, odd)
        total = np.int32(total + level * level)
    return total


# ---- range kernels ---------------------------------------------------------------------------------------------------


@kernel
def encode(
    kind: int,
    n: int,
    lo: int,
    hi: int,
    snapshot: int,
    base: int,
    residual: int,
    payload: int,
    new_residual: int,
    scratch: int,
) -> bool:
    """payload = enc(x), new_residual = x - dec(payload), with x = snapshot - base + residual; 0 for what is absent."""
    wide_vectors()
    blocks = (n + BLOCK - 1) // BLOCK
    x, decoded = _floats(scratch, BLOCK), _floats(scratch + ROW, BLOCK)
    for block in range(lo, hi):
        at, count = 4 * BLOCK * block, min(BLOCK, n - BLOCK * block)
        _fill(x[count:], np.float32(0.0))
        values = x[:count]
        if base != 0:
            _subtract(_floats(snapshot + at, count), _floats(base + at, count), values)
        else:
            _copy(_floats(snapshot + at, count), values)
        if residual != 0:
            _add(values, _floats(residual + at, count))
        if not _encode_block(kind, x, payload, blocks, block, count, _largest(x), decoded):
            return False
        if new_residual != 0:
            rest = _floats(new_residual + at, count)
            _subtract(values, decoded, rest)
            if _is_sparse(kind):
                _shrink(rest)
    return True


@kernel
def decode(kind: int, n: int, lo: int, hi: int, payload: int, target: int, add: int, scratch: int) -> bool:
    """target = dec(payload), or target += dec(payload)."""
    wide_vectors()
    blocks = (n + BLOCK - 1) // BLOCK
    values = _floats(scratch, BLOCK)
    for block in range(lo, hi):
        count = min(BLOCK, n - BLOCK * block)
        _decode_block(kind, payload, blocks, block, count, values)
        out = _floats(target + 4 * BLOCK * block, count)
        if add != 0:
            _add(out, values)
        else:
            _copy(values, out)
    return True


@kernel
def rebase(n: int, lo: int, hi: int, new: int, old: int, moves: Any, target: int) -> bool:
    """target = new - old - sum_i (after_i - before_i); `moves` holds the addresses after_0, before_0, after_1, ..."""
    wide_vectors()
    for block in range(lo, hi):
        at, count = 4 * BLOCK * block, min(BLOCK, n - BLOCK * block)
        out = _floats(target + at, count)
        _subtract(_floats(new + at, count), _floats(old + at, count), out)
        for i in range(0, len(moves), 2):
            _take_difference(out, _floats(moves[i] + at, count), _floats(moves[i + 1] + at, count))
    return True


@kernel
def inspect(kind: int, n: int, lo: int, hi: int, payload: int, starts: Any, squares: Any, scratch: int) -> bool:
    """squares[s] = sum of squares of the decoded values of segment s, for lo <= s < hi. False if one is not finite."""
    wide_vectors()
    blocks = (n + BLOCK - 1) // BLOCK
    values, lanes = _floats(scratch, BLOCK), _doubles(scratch + ROW, BLOCK)
    # A scale above this is finite itself but would decode its largest code to infinity.
    scale_max = np.finfo(np.float32).max / (np.float32(8.0) if kind == INT4 else np.float32(128.0))
    if kind == INT2 or kind & 255 == TOPK2:
        scale_max = INT2_SCALE_MAX
    elif kind & 255 == TOPK4:
        scale_max = np.finfo(np.float32).max / np.float32(8.0)
    finite = True
    for segment in range(lo, hi):
        exact = 0.0
        for block in range(starts[segment], starts[segment + 1]):
            count = min(BLOCK, n - BLOCK * block)
            if kind in (INT2, INT4, INT8):
                scale = _floats(payload + 4 * block, 1)[0]
                finite &= abs(scale) <= scale_max
                if count == BLOCK:
                    exact += (
                        np.float64(scale)
                        * np.float64(scale)
                        * _code_squares(_codes(kind, payload, blocks, block), kind, scale)
                    )
                    continue
            if _is_sparse(kind):
                scale = _sparse_scale(payload, block)
                finite &= abs(scale) <= scale_max
                if count == BLOCK:
                    exact += (
                        np.float64(scale) * np.float64(scale) * _sparse_squares(kind, payload, blocks, block, scale)
                    )
                    continue
            _decode_block(kind, payload, blocks, block, count, values)
            _fill(values[count:], np.float32(0.0))
            finite &= _largest(values) < NOT_FINITE
            _add_products(values, values, lanes)
        squares[segment] = exact + _sum_and_clear(lanes)
    return finite


@kernel
def direction(
    kinds: Any,
    blocks: int,
    lo: int,
    hi: int,
    addresses: Any,
    pull: int,
    coefficients: Any,
    starts: Any,
    slices: Any,
    squares: Any,
    scratch: int,
) -> bool:
    """squares[s] = sum of squares of sum_i coefficients[slice, i] * delta_i over segment s, for lo <= s < hi.

    pull: address of an array that counts as one more delta, or 0.
    """
    wide_vectors()
    total, values = _floats(scratch, BLOCK), _floats(scratch + ROW, BLOCK)
    lanes = _doubles(scratch + 2 * ROW, LANES)
    common = _common(kinds)
    for segment in range(lo, hi):
        factors = coefficients[slices[segment]]
        for block in range(starts[segment], starts[segment + 1]):
            _weighted_sum(common, kinds, addresses, blocks, block, factors, values, total)
            _add_pull(len(addresses), factors, pull, block, total)
            _add_squares(total, lanes)
        squares[segment] = _sum_and_clear(lanes)
    return True


@kernel
def accumulate(
    kinds: Any,
    blocks: int,
    lo: int,
    hi: int,
    addresses: Any,
    pull: int,
    coefficients: Any,
    starts: Any,
    slices: Any,
    target: int,
    scratch: int,
) -> bool:
    """target = sum_i coefficients[slice, i] * delta_i over the segments lo..hi; with `pull` as in `direction`."""
    wide_vectors()
    values = _floats(scratch, BLOCK)
    common = _common(kinds)
    for segment in range(lo, hi):
        factors = coefficients[slices[segment]]
        for block in range(starts[segment], starts[segment + 1]):
            total = _floats(target + 4 * BLOCK * block, BLOCK)
            _weighted_sum(common, kinds, addresses, blocks, block, factors, values, total)
            _add_pull(len(addresses), factors, pull, block, total)
    return True


@kernel
def alignment(
    kinds: Any, blocks: int, lo: int, hi: int, addresses: Any, momentum: int, starts: Any, products: Any, scratch: int
) -> bool:
    """products[s, i] = delta_i . momentum over segment s, for lo <= s < hi; the last column is momentum . momentum.

    Contribution by contribution, so that a segment's momentum (1 MiB at most) comes from memory once.
    """
    wide_vectors()
    values, lanes = _floats(scratch, BLOCK), _doubles(scratch + ROW, LANES)
    count = len(addresses)
    for segment in range(lo, hi):
        for i in range(count + 1):
            for block in range(starts[segment], starts[segment + 1]):
                own = _floats(momentum + 4 * BLOCK * block, BLOCK)
                if i < count:
                    _decode_block(kinds[i], addresses[i], blocks, block, BLOCK, values)
                    _add_dot(values, own, lanes)
                else:
                    _add_dot(own, own, lanes)
            products[segment, i] = _sum_and_clear(lanes)
    return True


@helper
def _nesterov(gradient: Any, momentum: Any, residual: Any, lr: Any, mu: Any, x: Any) -> Any:
    """momentum = mu * momentum + g; x = -lr * (g + mu * momentum) + residual. Returns what `_largest` would."""
    wide_vectors()
    largest = np.uint32(0)
    for j in range(BLOCK):
        velocity = mu * momentum[j] + gradient[j]
        momentum[j] = velocity
        value = -lr * (gradient[j] + mu * velocity) + residual[j]
        x[j] = value
        bits = bits_of(value)
        largest = max(largest, np.uint32(np.uint32(bits << 1) | np.uint32(bits >> 31)))
    return largest


@helper
def _apply(x: Any, decoded: Any, theta: Any, residual: Any) -> None:
    wide_vectors()
    for j in range(BLOCK):
        theta[j] += decoded[j]
        residual[j] = x[j] - decoded[j]


@kernel
def outer_step(
    kinds: Any,
    down: int,
    state: Any,
    rates: Any,
    lo: int,
    hi: int,
    addresses: Any,
    coefficients: Any,
    starts: Any,
    slices: Any,
    sample_every: int,
    products: Any,
    scratch: int,
) -> bool:
    """The whole outer step of the segments lo..hi: merge, Nesterov, downlink encode, Theta, residual, gradient sample.

    kinds: of each contribution; down: of the update; state: addresses of theta, momentum, residual, update, sample,
    previous sample (0 if absent), and of what counts as one more delta (the momentum, or 0); products[s] = (sample .
    previous, sample . sample) over the segment.
    """
    wide_vectors()
    common = _common(kinds)
    theta, momentum, residual, update, sample, previous, pull = state
    lr, mu = np.float32(rates[0]), np.float32(rates[1])
    blocks = starts[len(starts) - 1]
    gradient, values = _floats(scratch, BLOCK), _floats(scratch + ROW, BLOCK)
    x, decoded = _floats(scratch + 2 * ROW, BLOCK), _floats(scratch + 3 * ROW, BLOCK)
    own_lanes, cross_lanes = _doubles(scratch + 4 * ROW, BLOCK), _doubles(scratch + 6 * ROW, BLOCK)
    nothing = scratch + 8 * ROW
    finite = True
    for segment in range(lo, hi):
        factors = coefficients[slices[segment]]
        for block in range(starts[segment], starts[segment + 1]):
            at = 4 * BLOCK * block
            _weighted_sum(common, kinds, addresses, blocks, block, factors, values, gradient)
            _add_pull(len(addresses), factors, pull, block, gradient)
            if block % sample_every == 0:
                sampled = 4 * BLOCK * (block // sample_every)
                _copy(gradient, _floats(sample + sampled, BLOCK))
                _add_products(gradient, gradient, own_lanes)
                if previous != 0:
                    _add_products(gradient, _floats(previous + sampled, BLOCK), cross_lanes)
            # A downlink without feedback has no residual: what would be one goes to a block of scratch and is cleared.
            rest = _floats(nothing if residual == 0 else residual + at, BLOCK)
            largest = _nesterov(gradient, _floats(momentum + at, BLOCK), rest, lr, mu, x)
            finite &= _encode_block(down, x, update, blocks, block, BLOCK, largest, decoded)
            _apply(x, decoded, _floats(theta + at, BLOCK), rest)
            if residual == 0:
                _fill(rest, np.float32(0.0))
            elif _is_sparse(down):
                _shrink(rest)
        products[segment, 0], products[segment, 1] = _sum_and_clear(cross_lanes), _sum_and_clear(own_lanes)
    return finite


@helper
def _add_product(total: Any, factor: Any, values: Any) -> None:
    """One rounding for the product, one for the sum: never a fused one."""
    wide_vectors()
    for j in range(len(total)):
        total[j] += factor * values[j]


@kernel
def expand(
    lo: int, hi: int, columns: int, rank: int, rows: int, left: int, right: int, target: int, scratch: int
) -> bool:
    """target[i, j] = sum over k of left[k, i] * right[k, j], k going up, for the rows lo..hi."""
    wide_vectors()
    total = _floats(scratch, BLOCK)
    of_left = _floats(left, rank * rows)
    for i in range(lo, hi):
        for start in range(0, columns, BLOCK):
            count = min(BLOCK, columns - start)
            part = total[:count]
            _fill(part, np.float32(0.0))
            for k in range(rank):
                _add_product(part, of_left[k * rows + i], _floats(right + 4 * (k * columns + start), count))
            _copy(part, _floats(target + 4 * (i * columns + start), count))
    return True


@kernel
def times_columns(
    lo: int, hi: int, columns: int, rank: int, rows: int, matrix: int, left: int, target: int, scratch: int
) -> bool:
    """target[k, j] = sum over i of left[k, i] * matrix[i, j], i going up, for the blocks of columns lo..hi."""
    wide_vectors()
    of_left = _floats(left, rank * rows)
    for block in range(lo, hi):
        start = block * BLOCK
        count = min(BLOCK, columns - start)
        for k in range(rank):
            total = _floats(target + 4 * (k * columns + start), count)
            _fill(total, np.float32(0.0))
            for i in range(rows):
                _add_product(total, of_left[k * rows + i], _floats(matrix + 4 * (i * columns + start), count))
    return True


@kernel
def times_rows(
    lo: int, hi: int, columns: int, rank: int, rows: int, matrix: int, right: int, target: int, scratch: int
) -> bool:
    """target[k, i] = sum over j of matrix[i, j] * right[k, j], in float64 lanes, for the rows lo..hi."""
    wide_vectors()
    out, lanes = _floats(target, rank * rows), _doubles(scratch, BLOCK)
    for i in range(lo, hi):
        for k in range(rank):
            for start in range(0, columns, BLOCK):
                count = min(BLOCK, columns - start)
                own = _floats(matrix + 4 * (i * columns + start), count)
                _add_products(own, _floats(right + 4 * (k * columns + start), count), lanes)
            out[k * rows + i] = np.float32(_sum_and_clear(lanes))
    return True
