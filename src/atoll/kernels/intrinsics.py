"""The few machine operations that numba does not spell: memory by address, bit casts, vector width, and the decorators.

Kernels take the addresses of the big arrays instead of the arrays. A contribution set is then one int64 array whatever
the number of contributions, read-only and writable arrays share one compiled signature, and a call costs microseconds.
The typed layer in `atoll.kernels.run` checks shapes and keeps the arrays alive while a kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types as numba_types
from numba.extending import intrinsic

types: Any = numba_types  # mypy takes the names of this module for the standard library's
Function = TypeVar("Function", bound=Callable[..., Any])

# No fastmath: Theta must come out with the same bits on the syncer and on every learner, so a multiplication and an
# addition must never be contracted into one rounding on one of them only.
OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}


def helper(function: Function) -> Function:
    """Compile a function that only other compiled functions call.

    It is always inlined: numba counts references on every array that it passes to a function, and only in one piece of
    code can it see that the counts cancel. Left in place, those calls took a sixth of the merge.
    """
    return cast(Function, numba.njit(forceinline=True, **OPTIONS)(function))


def kernel(function: Function) -> Function:
    """An entry point: `build` takes its compiled code, `stored` keeps it."""
    return cast(Function, numba.njit(**OPTIONS)(function))


def _pointer_to(element: Any, llvm_type: Any) -> Any:
    def build(_typing: Any, _address: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], llvm_type.as_pointer())

        return types.CPointer(element)(types.int64), generate

    return build


def _bitcast(source: Any, target: Any, llvm_type: Any) -> Any:
    def build(_typing: Any, _value: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], llvm_type)

        return target(source), generate

    return build


def _fma(_typing: Any, _a: Any, _b: Any, _c: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


def _wide_vectors(_typing: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        # LLVM prefers 256-bit vectors on Xeons for the sake of clock speed on mixed code. These loops are nothing but
        # vector work and run 1.9x faster at 512. llvmlite only knows plain attributes, hence the call to set.add.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), generate


int8_at: Any = intrinsic(_pointer_to(types.int8, ir.IntType(8)))
uint8_at: Any = intrinsic(_pointer_to(types.uint8, ir.IntType(8)))
uint32_at: Any = intrinsic(_pointer_to(types.uint32, ir.IntType(32)))
uint16_at: Any = intrinsic(_pointer_to(types.uint16, ir.IntType(16)))
float32_at: Any = intrinsic(_pointer_to(types.float32, ir.FloatType()))
float64_at: Any = intrinsic(_pointer_to(types.float64, ir.DoubleType()))
bits_of: Any = intrinsic(_bitcast(types.float32, types.uint32, ir.IntType(32)))
float_of: Any = intrinsic(_bitcast(types.uint32, types.float32, ir.FloatType()))
fma: Any = intrinsic(_fma)
wide_vectors: Any = intrinsic(_wide_vectors)
