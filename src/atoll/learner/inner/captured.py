"""A captured state: its tensors, the tree that names them, and whose it is; with what a checkpoint can hold of each."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.errors import PayloadError
from atoll.learner.inner_state import Stateful

Blob: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]

STORED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""What every safetensors reader knows. Other types are stored as raw bytes."""
STORED_NAMES = {dtype: name for name, dtype in STORED.items()}
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
RAW_DTYPES = {name: dtype for name, dtype in DTYPES.items() if not name.startswith(("q", "bits"))}
NUMPY_DTYPES = {np.dtype(code).str: np.dtype(code) for code in "?bBhHiIlLqQefdFD"}
WRONG = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError, struct.error)
"""What Python, numpy and torch raise when data is not of the form that it should have."""


class OptimizerLike(Stateful, Protocol):
    """A torch optimizer, or what looks like one (the zoo's CombinedOptimizer, a library's wrapper)."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class InnerAbout:
    """Whose state this is and where in the run it was taken."""

    learner: str
    run: str
    generation: int
    step: int
    bases: tuple[int, ...]
    """The version of each fragment that the learner had adopted."""
    tokens: int


@dataclass(slots=True)
class Captured:
    """One consistent state in host memory. `structure` is the JSON tree whose leaves name the tensors."""

    tensors: dict[str, torch.Tensor]
    structure: dict[str, Any]
    about: InnerAbout
    places: Any = None
    """The manifest: which part of which parameter of the whole model the optimizer's state is of (`places.Places`).
    None where nobody said so."""


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, row-major; a view if they are that already."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)  # numpy's empty arrays have strides that torch does not view
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def typed(raw: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """Raw bytes as what they are: a view, where their place in memory allows it."""
    if not raw.numel():
        return torch.empty(0, dtype=dtype).reshape(shape)
    if raw.storage_offset() % dtype.itemsize or raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).reshape(shape)


@contextmanager
def reading() -> Iterator[None]:
    """What was expected in a place is not there: wrong JSON, a wrong type, a missing key, too deep a nesting."""
    try:
        yield
    except WRONG as error:
        raise damaged(f"{type(error).__name__}: {error}") from error


def damaged(why: str) -> PayloadError:
    return PayloadError(
        f"this is no inner state that can be loaded: {why[:500]}; use an older one, or start without it"
    )
