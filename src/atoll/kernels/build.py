"""Kernels from numba: compiled for the processor of this machine, and taken out of numba as object code."""

from __future__ import annotations

from typing import Any, cast

import numba
from numba.core import types as numba_types

from atoll.kernels import loops
from atoll.kernels.intrinsics import OPTIONS
from atoll.kernels.signatures import words
from atoll.kernels.stored import UNCALLED, Kernel, can_load

types: Any = numba_types
_TYPES = {
    "i": types.int64,
    "d": types.float64,
    "I": types.Array(types.int64, 1, "C"),
    "D": types.Array(types.float64, 1, "C"),
    "M": types.Array(types.float64, 2, "C"),
}


def by_numba(name: str) -> Kernel:
    """As numba itself compiles and calls it."""
    return cast(Kernel, getattr(loops, name))


def build(name: str) -> tuple[str, bytes] | None:
    """The names of its entry and of what it needs, and its object code. None where numba has changed inside, or where
    the code would need something of numba's when it runs."""
    bare = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(getattr(loops, name).py_func)
    arguments = [types.UniTuple(_TYPES[kind], count) if count else _TYPES[kind] for count, kind in words(name)]
    try:
        made = bare._compiler.compile(tuple(arguments), types.boolean)
        code = made.library.serialize_using_object_code()[2][0]
        functions = made.library._final_module.functions
        needed = {one.name for one in functions if one.is_declaration and not one.name.startswith("llvm.")}
        names = " ".join([made.fndesc.llvm_func_name, *sorted(needed - {UNCALLED})])
    except AttributeError:
        return None
    return (names, bytes(code)) if can_load(names) else None
