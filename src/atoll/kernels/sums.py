"""Weighted sums of packed integer codes, built in LLVM's language."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils
from numba.extending import intrinsic

from atoll.kernels.constants import BLOCK
from atoll.kernels.intrinsics import types


class Vectors:
    """Vectors of 16 lanes, as LLVM's builder makes them. They are LLVM's own, so machines with narrower ones get the
    same bits."""

    lanes = 16
    i32, i64, f32, f64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
    bytes_, ints, floats = (ir.VectorType(element, 16) for element in (ir.IntType(8), ir.IntType(32), ir.FloatType()))

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        fma_type = ir.FunctionType(self.floats, [self.floats] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{self.lanes}f32")

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self._fma, [a, b, c])

    def pointer(self, kind: Any, address: Any, offset: Any) -> Any:
        return self.builder.inttoptr(self.builder.add(address, offset), kind.as_pointer())

    def load(self, kind: Any, address: Any, offset: Any, align: int) -> Any:
        return self.builder.load(self.pointer(kind, address, offset), align=align)

    def every_lane(self, value: int) -> Any:
        return ir.Constant(self.ints, [value] * self.lanes)

    def broadcast(self, value: Any, kind: Any) -> Any:
        nothing = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(nothing, value, self.i32(0))
        return self.builder.shuffle_vector(first, nothing, self.every_lane(0))

    def scaled(self, factor: Any, power: float) -> Any:
        return self.broadcast(self.builder.fmul(factor, self.f32(power)), self.floats)


def _split_int4(v: Vectors, factor: Any, _scale: Any) -> Callable[[Any], list[tuple[Any, Any]]]:
    """Nibbles stay where the fewest operations leave them, low ones times 2**28 and high ones times 16, and the factors
    make up for it: exactly, for products of a factor and a scale from 2**-98 on."""
    low_factor, high_factor = v.scaled(factor, 2.0**-28), v.scaled(factor, 2.0**-4)

    def split(codes: Any) -> list[tuple[Any, Any]]:
        low = v.builder.sitofp(v.builder.shl(codes, v.every_lane(28)), v.floats)
        high = v.builder.sitofp(v.builder.and_(codes, v.every_lane(-16)), v.floats)
        return [(low_factor, low), (high_factor, high)]

    return split


def _split_int2(v: Vectors, factor: Any, scale: Any) -> Callable[[Any], list[tuple[Any, Any]]]:
    """Each code goes to the top two bits of its lane and the lowest bit of the scale behind it: the level times 2**29.
    Exact for products of a factor and a scale from 2**-97 on."""
    level_factor = v.scaled(factor, 2.0**-29)
    odd = v.builder.and_(v.builder.bitcast(scale, v.i32), v.i32(1))
    odd_lanes = v.broadcast(v.builder.shl(odd, v.i32(29)), v.ints)

    def split(codes: Any) -> list[tuple[Any, Any]]:
        levels = []
        for part in range(4):
            top = v.builder.and_(v.builder.shl(codes, v.every_lane(30 - 2 * part)), v.every_lane(-(1 << 30)))
            levels.append(v.builder.sitofp(v.builder.or_(top, odd_lanes), v.floats))
        return [(level_factor, level) for level in levels]

    return split


def _sum_codes(parts: int, splitter: Callable[..., Callable[[Any], list[tuple[Any, Any]]]]) -> Any:
    """An intrinsic sum(total, addresses, factors, count, blocks, block) for codes of which a byte holds `parts`:

        total = sum_i factors[i] * block `block` of payload i

    All arguments are int64; the first three are addresses of a block of float32, of int64s and of float64s; count >= 1.
    The loop is over contributions, with the sums of the whole block in registers: 16 vectors of 16 floats, which numba
    cannot be led to from a plain loop.
    """
    size = BLOCK // parts

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        total, addresses, factors, count, blocks, block = arguments
        v = Vectors(builder)
        i64 = v.i64
        scale_offset = builder.mul(block, i64(4))
        codes_offset = builder.add(builder.mul(blocks, i64(4)), builder.mul(block, i64(size)))
        before = builder.block
        body, after = builder.append_basic_block("contribution"), builder.append_basic_block("summed")
        builder.branch(body)

        builder.position_at_end(body)
        i = builder.phi(i64)
        sums = [builder.phi(v.floats) for _ in range(BLOCK // v.lanes)]
        at = builder.mul(i, i64(8))
        payload = v.load(i64, addresses, at, 8)
        scale = v.load(v.f32, payload, scale_offset, 4)
        factor = builder.fptrunc(builder.fmul(v.load(v.f64, factors, at, 8), builder.fpext(scale, v.f64)), v.f32)
        split = splitter(v, factor, scale)
        codes_address = builder.add(payload, codes_offset)
        new_sums: list[Any] = [None] * len(sums)
        for k in range(size // v.lanes):
            codes = builder.sext(v.load(v.bytes_, codes_address, i64(v.lanes * k), 1), v.ints)
            for part, (scaled_factor, values) in enumerate(split(codes)):
                at_sum = part * (size // v.lanes) + k
                new_sums[at_sum] = v.fma(scaled_factor, values, sums[at_sum])
        following = builder.add(i, i64(1))
        builder.cbranch(builder.icmp_signed("<", following, count), body, after)

        zeros = ir.Constant(v.floats, [0.0] * v.lanes)
        for phi, start, new in zip([i, *sums], [i64(0)] + [zeros] * len(sums), [following, *new_sums], strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(new, body)
        builder.position_at_end(after)
        for k, new in enumerate(new_sums):
            builder.store(new, v.pointer(v.floats, total, i64(4 * v.lanes * k)), align=4)
        return context.get_dummy_value()

    def build(_typing: Any, _total: Any, _addresses: Any, _factors: Any, _count: Any, _blocks: Any, _block: Any) -> Any:
        return types.void(*[types.int64] * 6), generate

    return intrinsic(build)


sum_int4: Any = _sum_codes(2, _split_int4)
sum_int2: Any = _sum_codes(4, _split_int2)
