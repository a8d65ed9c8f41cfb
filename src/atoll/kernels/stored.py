"""Kernels as machine code on disk. A process that finds them there needs no numba, which takes more than half a second
and 85 MB to load; without them the first process compiles, and the others wait for what it stores.

numba's own cache would not do: reading it takes all of numba. Here a file is one kernel's object code with its name in
it. What it was made for is part of the file's name: the sources, numba and LLVM, and the processor. So a file is never
wrong, only unused.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import threading
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding as llvm  # type: ignore[import-untyped]

from atoll.kernels.disk import alone, stored, write
from atoll.kernels.signatures import words

SOURCES = ("constants.py", "intrinsics.py", "loops.py", "signatures.py", "sums.py")
"""Whatever the compiled code depends on."""
UNCALLED = "NRT_MemInfo_call_dtor"
"""numba puts a function that calls it into every object. No kernel calls that one: none owns memory."""
Kernel = Callable[..., bool]

_lock = threading.RLock()
_kernels: dict[str, Kernel] = {}


def kernel(name: str) -> Kernel:
    """A compiled loop of `loops`: from this process, from disk, or compiled now."""
    found = _kernels.get(name)
    if found is None:
        with _lock:
            found = _kernels[name] = _kernels.get(name) or _find(name)
    return found


def _find(name: str) -> Kernel:
    whole_name = f"{name}-{_made_for()}"
    found = stored(whole_name)
    if found is not None and can_load(found[0]):
        return _loaded(name, *found)
    with alone(whole_name):
        found = stored(whole_name)
        return _loaded(name, *found) if found is not None and can_load(found[0]) else _compiled(name, whole_name)


def _compiled(name: str, whole_name: str) -> Kernel:
    """With numba, and stored for the next process."""
    from atoll.kernels.build import build, by_numba

    made = build(name)
    if made is None:
        return by_numba(name)
    write(whole_name, *made)
    return _loaded(name, *made)


def _matters(variable: str) -> bool:
    """Whether an environment variable may change what numba compiles."""
    return variable.startswith("NUMBA_") and variable != "NUMBA_CACHE_DIR"


@lru_cache(maxsize=1)
def _made_for() -> str:
    """A name for all that compiled code depends on."""
    sources = [(Path(__file__).parent / source).read_bytes() for source in SOURCES]
    settings = sorted(f"{key}={value}" for key, value in os.environ.items() if _matters(key))
    processor = (llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), llvm.get_process_triple())
    made_by = (version("numba"), version("llvmlite"), *settings, *processor)
    return hashlib.sha256(b"\0".join([*sources, *(part.encode() for part in made_by)])).hexdigest()[:20]


# ---- in memory -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _engine() -> Any:
    with contextlib.suppress(RuntimeError):  # newer ones do it by themselves, and say so
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if llvm.address_of_symbol(UNCALLED) is None:  # numba's own, where it is loaded, stays
        llvm.add_symbol(UNCALLED, ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value)
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def can_load(names: str) -> bool:
    """Whether this process has what a kernel needs (sqrtf of the C library, say): LLVM would end it otherwise."""
    return all(hasattr(ctypes.CDLL(None), needed) for needed in names.split()[1:])


def _loaded(name: str, names: str, code: bytes) -> Kernel:
    """numba's calling convention: where the result goes, where an exception would go, the arguments; 0 for success."""
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    entry, given = engine.get_function_address(names.split()[0]), words(name)
    plain = [kind for count, letter in given for kind in _C_TYPES[letter] * (count or 1)]
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *plain)(entry)
    if all(letter == "i" and not count for count, letter in given):
        return lambda *arguments: _result(name, call, arguments)
    return lambda *arguments: _result(name, call, _flat(given, arguments))


_LONG, _DOUBLE = ctypes.c_int64, ctypes.c_double
_C_TYPES: dict[str, list[Any]] = {"i": [_LONG], "d": [_DOUBLE], "I": [_LONG] * 7, "D": [_LONG] * 7, "M": [_LONG] * 9}
_DTYPES = {"I": np.dtype(np.int64), "D": np.dtype(np.float64), "M": np.dtype(np.float64)}


def _flat(given: list[tuple[int, str]], arguments: tuple[Any, ...]) -> list[Any]:
    """As compiled code takes them: an array is owner, object, size, item size, address, shape and strides."""
    flat: list[Any] = []
    for (count, letter), value in zip(given, arguments, strict=True):
        if count:
            flat += value
        elif letter in _DTYPES:
            assert value.dtype == _DTYPES[letter] and value.flags.c_contiguous, f"{value.dtype} is no {letter}"
            flat += (0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides)
        else:
            flat.append(value)
    return flat


def _result(name: str, call: Any, arguments: Any) -> bool:
    result, error = ctypes.c_bool(), ctypes.c_void_p()
    if call(ctypes.byref(result), ctypes.byref(error), *arguments):
        raise RuntimeError(f"the compiled loop {name} has failed; that is a defect of Atoll: please report it")
    return result.value
