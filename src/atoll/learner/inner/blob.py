"""Background: a captured state as one safetensors blob, and back again with every length, name and type checked."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.errors import ConfigError
from atoll.learner.inner import limits, places
from atoll.learner.inner.captured import (
    STORED,
    STORED_NAMES,
    Blob,
    Captured,
    InnerAbout,
    damaged,
    raw_bytes,
    reading,
    typed,
)
from atoll.learner.inner.giving import check_structure

FORMAT = "atoll.inner"
FORMAT_VERSION = 1
FORMAT_VERSION_OLDEST = 1
"""The oldest version that this build reads: at least one back, once there is a second."""


def parts(captured: Captured) -> Iterator[memoryview]:
    """The blob in pieces, without a copy of the tensors: the header, then each tensor's bytes."""
    order = _order(captured)
    yield memoryview(_header(captured, order))
    for name in order:
        yield raw_bytes(captured.tensors[name]).numpy().data


def size_of(captured: Captured) -> int:
    """The number of bytes that `pack` gives."""
    data = sum(tensor.nbytes for tensor in captured.tensors.values())
    return len(_header(captured, _order(captured))) + data


def pack(captured: Captured) -> NDArray[np.uint8]:
    """Background: one safetensors blob that carries everything."""
    blob = np.empty(size_of(captured), np.uint8)
    at = 0
    for part in parts(captured):
        blob[at : at + len(part)] = part
        at += len(part)
    return blob


def _order(captured: Captured) -> list[str]:
    """Wide types first, so that every tensor is aligned to its element."""
    return sorted(captured.tensors, key=lambda name: -captured.tensors[name].element_size())


def _header(captured: Captured, order: Sequence[str]) -> bytes:
    about, structure = (_json(value) for value in (asdict(captured.about), captured.structure))
    metadata = {"format": FORMAT, "version": str(FORMAT_VERSION), "about": about, "structure": structure}
    if captured.places is not None:
        metadata["places"] = _json({"places": places.to_json(captured.places)})
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name in order:
        tensor = captured.tensors[name]
        end = at + tensor.nbytes
        header[name] = {"dtype": STORED_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = _json(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > limits.HEADER_BYTES_MAX:
        raise ConfigError(f"the learner's state needs a header of {len(text)} bytes; keep long lists as tensors")
    return struct.pack("<Q", len(text)) + text


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def unpack(blob: Blob) -> Captured:
    """Check a blob and read it. The tensors are views of the blob's memory (of a copy, if that is read-only)."""
    with reading():
        return _unpack(blob)


def _unpack(blob: Blob) -> Captured:
    view = (blob.data if isinstance(blob, np.ndarray) else memoryview(blob)).cast("B")
    if not 8 < len(view) <= limits.BLOB_BYTES_MAX:
        raise damaged(f"{len(view)} bytes")
    (length,) = struct.unpack_from("<Q", view)
    if length > min(limits.HEADER_BYTES_MAX, len(view) - 8):
        raise damaged(f"a header of {length} bytes in {len(view)}")
    header = _parse(bytes(view[8 : 8 + length]))
    metadata = header.pop("__metadata__")
    about = _described(metadata)
    manifest = places.from_json(_parse(metadata["places"])["places"]) if "places" in metadata else None
    captured = Captured(_views(view[8 + length :], header), _parse(metadata["structure"]), about, manifest)
    check_structure(captured)
    return captured


def read_about(blob: Blob) -> InnerAbout:
    """Whose state this is. Only the header is looked at."""
    with reading():
        view = (blob.data if isinstance(blob, np.ndarray) else memoryview(blob)).cast("B")
        (length,) = struct.unpack_from("<Q", view)
        if length > min(limits.HEADER_BYTES_MAX, len(view) - 8):
            raise damaged(f"a header of {length} bytes in {len(view)}")
        return _described(_parse(bytes(view[8 : 8 + length]))["__metadata__"])


def _described(metadata: dict[str, Any]) -> InnerAbout:
    if metadata["format"] != FORMAT:
        raise damaged(f"its format is {metadata['format']!r}, not {FORMAT!r}")
    if not FORMAT_VERSION_OLDEST <= int(metadata["version"]) <= FORMAT_VERSION:
        raise damaged(f"format version {metadata['version']!r}, this build reads up to {FORMAT_VERSION}; upgrade atoll")
    return _read_about(_parse(metadata["about"]))


def _parse(text: str | bytes) -> Any:
    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    value = json.loads(text, parse_constant=constant)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _read_about(value: dict[str, Any]) -> InnerAbout:
    bases = value["bases"]
    if set(value) != {field.name for field in fields(InnerAbout)} or not isinstance(bases, list):
        raise ValueError("the fields of its description differ")
    counts = [value["generation"], value["step"], value["tokens"], *bases]
    if any(type(count) is not int or abs(count) > limits.COUNT_MAX for count in counts):
        raise ValueError("a counter is not a number")
    if any(type(value[name]) is not str or len(value[name]) > limits.TEXT_CHARS_MAX for name in ("learner", "run")):
        raise ValueError("an id is not a text")
    return InnerAbout(**{**value, "bases": tuple(bases)})


def _views(data: memoryview, header: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors, after a check that they fill the data exactly: no gap, no overlap, nothing beyond."""
    if len(header) > limits.TENSORS_MAX:
        raise damaged(f"{len(header)} tensors")
    spans = sorted((entry["data_offsets"], name) for name, entry in header.items())
    at = 0
    for (start, end), name in spans:
        entry = header[name]
        shape = entry["shape"]
        if len(shape) > limits.DIMENSIONS_MAX or any(type(n) is not int or n < 0 for n in (start, end, *shape)):
            raise damaged(f"sizes of {name!r}")
        if start != at or end - start != math.prod(shape) * STORED[entry["dtype"]].itemsize:
            raise damaged(f"offsets of {name!r}")
        at = end
    if at != len(data):
        raise damaged(f"{len(data)} bytes of tensors where the header counts {at}")
    array = np.frombuffer(data, np.uint8)
    buffer = torch.from_numpy(array.copy() if data.readonly else array)
    tensors = {}
    for (start, end), name in spans:
        tensors[name] = typed(buffer[start:end], STORED[header[name]["dtype"]], header[name]["shape"])
    return tensors
