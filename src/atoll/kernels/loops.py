"""Every hot loop of Atoll, compiled by numba. Nothing here checks its arguments: `atoll.kernels.run` does.

How the file works. An array is cut into blocks of 256 elements; the last may be short. A range kernel (bottom of the
file) walks over some blocks and calls block helpers (top) that work on scratch arrays of one block, which stay in the
L1 cache: each big array is read and written once. Several threads run the same range kernel on different ranges. What
a kernel computes for a block never depends on the other blocks, and sums over blocks leave one partial per segment (a
fixed cut of the array), so results have the same bits for any number of threads.

All compiled code is in this one file because numba's disk cache only notices changes in the file of the entry point.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray
from numba.core import cgutils
from numba.extending import intrinsic

from atoll.kernels.constants import BF16, BLOCK, FP32, INT4, INT8
from atoll.kernels.intrinsics import (
    bits_of,
    float32_at,
    float64_at,
    float_of,
    fma,
    helper,
    int8_at,
    kernel,
    types,
    uint16_at,
    wide_vectors,
)

HALF = BLOCK // 2
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
def _codes(kind: int, address: int, blocks: int, block: int) -> Any:
    """The integer codes of one block; they follow the scales of all blocks."""
    size = HALF if kind == INT4 else BLOCK
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
def _decode_block(kind: int, address: int, blocks: int, block: int, count: int, out: Any) -> None:
    """out[:count] = the decoded values of one block."""
    if kind == INT4:
        _decode_int4(_codes(kind, address, blocks, block), _floats(address + 4 * block, 1)[0], out)
    elif kind == INT8:
        _decode_int8(_codes(kind, address, blocks, block), _floats(address + 4 * block, 1)[0], out)
    elif kind == BF16:
        _decode_bf16(carray(uint16_at(address + 2 * BLOCK * block), count), out)
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


def _sum_int4(_typing: Any, _total: Any, _addresses: Any, _factors: Any, _count: Any, _blocks: Any, _block: Any) -> Any:
    """sum_int4(total, addresses, factors, count, blocks, block): total = sum_i factors[i] * block `block` of payload i.

    All arguments are int64; the first three are addresses of a block of float32, of int64s and of float64s; count >= 1.
    The loop is over contributions, with the sums of the whole block in registers: 16 vectors of 16 floats, which numba
    cannot be led to from a plain loop. The vectors are LLVM's own, so machines with narrower ones get the same bits.
    Nibbles stay where the fewest operations leave them, low ones times 2**28 and high ones times 16, and the factors
    make up for it: exactly, for products of a factor and a scale from 2**-98 on.
    """
    lanes = 16
    i32, i64, f32, f64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
    codes16, ints, floats = (ir.VectorType(element, lanes) for element in (ir.IntType(8), i32, f32))

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        total, addresses, factors, count, blocks, block = arguments
        fma_type, fma_name = ir.FunctionType(floats, [floats] * 3), f"llvm.fma.v{lanes}f32"
        vector_fma = cgutils.get_or_insert_function(builder.module, fma_type, fma_name)

        def pointer(kind: Any, address: Any, offset: Any) -> Any:
            return builder.inttoptr(builder.add(address, offset), kind.as_pointer())

        def load(kind: Any, address: Any, offset: Any, align: int) -> Any:
            return builder.load(pointer(kind, address, offset), align=align)

        def every_lane(value: int) -> Any:
            return ir.Constant(ints, [value] * lanes)

        def broadcast(value: Any) -> Any:
            nothing = ir.Constant(floats, ir.Undefined)
            first = builder.insert_element(nothing, value, i32(0))
            return builder.shuffle_vector(first, nothing, every_lane(0))

        scale_offset = builder.mul(block, i64(4))
        codes_offset = builder.add(builder.mul(blocks, i64(4)), builder.mul(block, i64(HALF)))
        before = builder.block
        body, after = builder.append_basic_block("contribution"), builder.append_basic_block("summed")
        builder.branch(body)

        builder.position_at_end(body)
        i = builder.phi(i64)
        sums = [builder.phi(floats) for _ in range(BLOCK // lanes)]
        at = builder.mul(i, i64(8))
        payload = load(i64, addresses, at, 8)
        scale = builder.fpext(load(f32, payload, scale_offset, 4), f64)
        factor = builder.fptrunc(builder.fmul(load(f64, factors, at, 8), scale), f32)
        low_factor = broadcast(builder.fmul(factor, f32(2.0**-28)))
        high_factor = broadcast(builder.fmul(factor, f32(2.0**-4)))
        codes_address = builder.add(payload, codes_offset)
        low_sums, high_sums = [], []
        for k in range(HALF // lanes):
            codes = builder.sext(load(codes16, codes_address, i64(lanes * k), 1), ints)
            low = builder.sitofp(builder.shl(codes, every_lane(28)), floats)
            high = builder.sitofp(builder.and_(codes, every_lane(-16)), floats)
            low_sums.append(builder.call(vector_fma, [low_factor, low, sums[k]]))
            high_sums.append(builder.call(vector_fma, [high_factor, high, sums[HALF // lanes + k]]))
        following = builder.add(i, i64(1))
        builder.cbranch(builder.icmp_signed("<", following, count), body, after)

        new_sums = low_sums + high_sums
        zeros = ir.Constant(floats, [0.0] * lanes)
        for phi, start, new in zip([i, *sums], [i64(0)] + [zeros] * len(sums), [following, *new_sums], strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(new, body)
        builder.position_at_end(after)
        for k, new in enumerate(new_sums):
            builder.store(new, pointer(floats, total, i64(4 * lanes * k)), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


sum_int4: Any = intrinsic(_sum_int4)


@helper
def _add_scaled(total: Any, values: Any, f: Any) -> None:
    wide_vectors()
    for j in range(BLOCK):
        total[j] = fma(f, values[j], total[j])


@helper
def _weighted_sum(kind: int, addresses: Any, blocks: int, block: int, factors: Any, values: Any, total: Any) -> None:
    """total = sum over contributions of factor * decoded block, in fp32 and in the order given.

    The fused multiply-add is asked for by name, so it has the same bits on every machine.
    """
    contributions = len(addresses)
    if kind == INT4 and contributions > 0:
        sum_int4(total.ctypes.data, addresses.ctypes.data, factors.ctypes.data, contributions, blocks, block)
        return
    _fill(total, np.float32(0.0))
    for i in range(contributions):
        if kind == INT8:
            _decode_int8(_codes(kind, addresses[i], blocks, block), np.float32(1.0), values)
            _add_scaled(total, values, np.float32(factors[i] * _floats(addresses[i] + 4 * block, 1)[0]))
        else:
            _decode_block(kind, addresses[i], blocks, block, BLOCK, values)
            _add_scaled(total, values, np.float32(factors[i]))


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
def _sum_and_clear(lanes: Any) -> float:
    total = 0.0
    for j in range(len(lanes)):
        total += lanes[j]
        lanes[j] = 0.0
    return total


@helper
def _code_squares(codes: Any, kind: int) -> Any:
    """The exact sum of the squared codes of one full block."""
    wide_vectors()
    total = np.int32(0)
    if kind == INT4:
        for j in range(HALF):
            code = np.int32(codes[j])
            low, high = np.int32(np.int32(code << 28) >> 28), np.int32(code >> 4)
            total = np.int32(total + low * low + high * high)
    else:
        for j in range(BLOCK):
            code = np.int32(codes[j])
            total = np.int32(total + code * code)
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
            _subtract(values, decoded, _floats(new_residual + at, count))
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
def inspect(kind: int, n: int, lo: int, hi: int, payload: int, starts: Any, squares: Any, scratch: int) -> bool:
    """squares[s] = sum of squares of the decoded values of segment s, for lo <= s < hi. False if one is not finite."""
    wide_vectors()
    blocks = (n + BLOCK - 1) // BLOCK
    values, lanes = _floats(scratch, BLOCK), _doubles(scratch + ROW, BLOCK)
    # A scale above this is finite itself but would decode its largest code to infinity.
    scale_max = np.finfo(np.float32).max / (np.float32(8.0) if kind == INT4 else np.float32(128.0))
    finite = True
    for segment in range(lo, hi):
        exact = 0.0
        for block in range(starts[segment], starts[segment + 1]):
            count = min(BLOCK, n - BLOCK * block)
            if kind in (INT4, INT8):
                scale = _floats(payload + 4 * block, 1)[0]
                finite &= abs(scale) <= scale_max
                if count == BLOCK:
                    exact += (
                        np.float64(scale)
                        * np.float64(scale)
                        * _code_squares(_codes(kind, payload, blocks, block), kind)
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
    kind: int,
    blocks: int,
    lo: int,
    hi: int,
    addresses: Any,
    coefficients: Any,
    starts: Any,
    slices: Any,
    squares: Any,
    scratch: int,
) -> bool:
    """squares[s] = sum of squares of sum_i coefficients[slice, i] * delta_i over segment s, for lo <= s < hi."""
    wide_vectors()
    total, values = _floats(scratch, BLOCK), _floats(scratch + ROW, BLOCK)
    lanes = _doubles(scratch + 2 * ROW, LANES)
    for segment in range(lo, hi):
        factors = coefficients[slices[segment]]
        for block in range(starts[segment], starts[segment + 1]):
            _weighted_sum(kind, addresses, blocks, block, factors, values, total)
            _add_squares(total, lanes)
        squares[segment] = _sum_and_clear(lanes)
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

    kinds: codec up, codec down; state: addresses of theta, momentum, residual, update, sample, previous sample (0 if
    absent); products[s] = (sample . previous, sample . sample) over the segment.
    """
    wide_vectors()
    up, down = kinds
    theta, momentum, residual, update, sample, previous = state
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
            _weighted_sum(up, addresses, blocks, block, factors, values, gradient)
            if block % sample_every == 0:
                sampled = 4 * BLOCK * (block // sample_every)
                _copy(gradient, _floats(sample + sampled, BLOCK))
                _add_products(gradient, gradient, own_lanes)
                if previous != 0:
                    _add_products(gradient, _floats(previous + sampled, BLOCK), cross_lanes)
            # A lossless downlink has no residual; its differences, all zero, go to one block of scratch.
            rest = _floats(nothing if residual == 0 else residual + at, BLOCK)
            largest = _nesterov(gradient, _floats(momentum + at, BLOCK), rest, lr, mu, x)
            finite &= _encode_block(down, x, update, blocks, block, BLOCK, largest, decoded)
            _apply(x, decoded, _floats(theta + at, BLOCK), rest)
        products[segment, 0], products[segment, 1] = _sum_and_clear(cross_lanes), _sum_and_clear(own_lanes)
    return finite
