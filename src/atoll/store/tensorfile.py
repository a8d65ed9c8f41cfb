"""The safetensors format, written and read in place: no copy of the arrays is made on either way.

    length of the header (8 bytes) | header: JSON, padded with spaces | the arrays, one after the other

The safetensors package can only write whole files from memory and to local paths; we stream to buckets as well. Files
are the same, and the tests read them with the package.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.errors import PayloadError
from atoll.store.documents import whole

DTYPE_CODES = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "int16": "I16",
    "int8": "I8",
    "bool": "BOOL",
}
_ITEM_BYTES = {"bfloat16": 2}
HEADER_BYTES_MAX = 100 << 20
"""The limit of the safetensors package itself."""
DIMENSIONS_MAX = 64
"""As numpy's own."""
ALIGNMENT = 64
"""The arrays begin on a cache line, so that views into a file that was read whole are aligned for every type."""
_LENGTH = struct.Struct("<Q")


def item_bytes(dtype: str) -> int:
    return _ITEM_BYTES.get(dtype) or np.dtype(dtype).itemsize


def encode_header(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Everything before the arrays. `tensors` are (name, dtype by numpy's name, shape), in the order they follow."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * item_bytes(dtype)
        document[name] = {
            "dtype": DTYPE_CODES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(document, separators=(",", ":")).encode()
    text = text.ljust(-(-(_LENGTH.size + len(text)) // ALIGNMENT) * ALIGNMENT - _LENGTH.size)
    return _LENGTH.pack(len(text)) + text


def decode_file(data: NDArray[np.uint8]) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The flat arrays in a file, as views of `data`, and its metadata. Raises PayloadError on anything unexpected."""
    if data.nbytes < _LENGTH.size:
        raise PayloadError("the file is shorter than its first field")
    (length,) = _LENGTH.unpack(data[: _LENGTH.size].tobytes())
    if length > min(HEADER_BYTES_MAX, data.nbytes - _LENGTH.size):
        raise PayloadError(f"its header would take {length} bytes")
    body = data[_LENGTH.size + length :]
    codes = {code: dtype for dtype, code in DTYPE_CODES.items() if dtype != "bfloat16"}
    try:
        document = json.loads(data[_LENGTH.size : _LENGTH.size + length].tobytes())
        metadata = document.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(type(text) is str for text in metadata.values()):
            raise PayloadError("its metadata is not a table of texts")
        arrays: dict[str, NDArray[Any]] = {}
        for name, entry in document.items():
            start, stop = entry["data_offsets"]
            dtype = np.dtype(codes[entry["dtype"]])
            if len(entry["shape"]) > DIMENSIONS_MAX or not whole((start, stop, *entry["shape"])):
                raise PayloadError(f"the place of {name!r} is not told in numbers")
            if not 0 <= start <= stop <= body.nbytes or stop - start != math.prod(entry["shape"]) * dtype.itemsize:
                raise PayloadError(f"the place of {name!r} does not fit the file")
            arrays[name] = body[start:stop].view(dtype)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PayloadError(f"its header cannot be understood ({type(error).__name__}: {error})") from error
    return arrays, metadata
