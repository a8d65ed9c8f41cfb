"""The model out of the syncer's state: a safetensors file by parameter name, as torch expects it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core import Layout, TensorSpec, build_layout, elements_of
from atoll.errors import ConfigError, StoreError
from atoll.store.files import Replacement
from atoll.store.loaded import LoadedFragment
from atoll.store.tensorfile import DTYPE_CODES, encode_header

EXPORT_DTYPES = ("float32", "bfloat16", "float16", "own")
"""What parameters may be written as; "own" is each parameter's type in the training script."""
_FLOATS = ("float32", "float64", "bfloat16", "float16")


def export_model(
    rows: Mapping[str, Any],
    fragments: Mapping[int, LoadedFragment],
    to: Path,
    *,
    dtype: str = "float32",
    buffers: Mapping[str, NDArray[Any]] | None = None,
) -> None:
    """Write the published parameters of a loaded state or snapshot, then the buffers, which keep their own types. One
    tensor at a time is held besides the state."""
    if dtype not in EXPORT_DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(EXPORT_DTYPES)}; use one of these")
    layout = _layout(rows)
    thetas = {fragment.index: _theta(layout, fragment.index, fragments) for fragment in layout.fragments}
    kinds = [_kind(spec, dtype) for spec in layout.tensors]
    versions = ",".join(str(fragments[index].version) for index in sorted(thetas))
    buffers = buffers or {}
    for name, buffer in buffers.items():
        if str(buffer.dtype) not in DTYPE_CODES:
            raise StoreError(f"buffer {name!r} is {buffer.dtype}, which cannot be written; export without buffers")
    header = encode_header(
        [
            *((spec.name, kind, spec.shape) for spec, kind in zip(layout.tensors, kinds, strict=True)),
            *((name, str(buffer.dtype), buffer.shape) for name, buffer in buffers.items()),
        ],
        {"format": "pt", "atoll_versions": versions},
    )
    pieces = _pieces(layout)
    with Replacement(to, "export") as file:
        file.write(header)
        for index, (spec, kind) in enumerate(zip(layout.tensors, kinds, strict=True)):
            flat = np.empty(elements_of(spec), np.float32)
            for fragment, start, stop, offset in pieces[index]:
                flat[start:stop] = thetas[fragment][offset : offset + stop - start]
            file.write(_cast(flat, kind).view(np.uint8).data)
        for buffer in buffers.values():
            file.write(np.ascontiguousarray(buffer).reshape(-1).view(np.uint8).data)


def _layout(rows: Mapping[str, Any]) -> Layout:
    run = rows.get("run")
    if not isinstance(run, Mapping) or "tensors" not in run or "fragments" not in run:
        raise StoreError(
            "the state does not say which parameters the model has; the run ended before a learner had joined it, or "
            "its tape is lost. Export a snapshot instead"
        )
    try:
        specs = [TensorSpec(str(n), tuple(map(int, s)), str(d), str(merge)) for n, s, d, merge in run["tensors"]]
        fragments = int(run["fragments"])
    except (TypeError, ValueError, OverflowError) as error:
        raise StoreError(
            f"the state's list of parameters makes no sense ({error}); export a snapshot instead"
        ) from error
    return build_layout(specs, fragments)


def _theta(layout: Layout, index: int, fragments: Mapping[int, LoadedFragment]) -> NDArray[np.float32]:
    fragment = fragments.get(index)
    theta = fragment.arrays.get("theta") if fragment is not None else None
    if theta is None:
        raise StoreError(
            f"fragment {index} of {len(layout.fragments)} is missing, so the model is not complete; "
            "export a snapshot instead"
        )
    if theta.dtype != np.float32 or theta.size != layout.fragments[index].size:
        raise StoreError(
            f"fragment {index} has {theta.size} elements of {theta.dtype} and the layout asks for "
            f"{layout.fragments[index].size} of float32; the state belongs to another model. Export a snapshot instead"
        )
    return theta


def _pieces(layout: Layout) -> list[list[tuple[int, int, int, int]]]:
    """By tensor: (fragment, start, stop, offset in the fragment)."""
    pieces: list[list[tuple[int, int, int, int]]] = [[] for _ in layout.tensors]
    for fragment in layout.fragments:
        for piece in fragment.slices:
            pieces[piece.tensor].append((fragment.index, piece.start, piece.stop, piece.offset))
    return pieces


def _kind(spec: TensorSpec, dtype: str) -> str:
    kind = spec.dtype if dtype == "own" else dtype
    if kind not in _FLOATS:
        raise ConfigError(f"parameter {spec.name!r} is {kind}, which cannot be written; use --dtype float32")
    return kind


def _cast(flat: NDArray[np.float32], kind: str) -> NDArray[Any]:
    if kind == "bfloat16":
        import ml_dtypes

        return flat.astype(ml_dtypes.bfloat16)
    return flat.astype(kind, copy=False)
