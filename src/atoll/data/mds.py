"""MosaicML's shards (MDS) as a map-style data set: `atoll.data.loader(learner, atoll.data.shards("/data/mds"))`.

Only the public layout is read; the library that writes it is not needed. A folder has `index.json`, which lists the
shards; a shard is one file:

    u32 samples | u32 offsets, one more than samples | settings as JSON | the samples

A sample has one u32 for the size of each column whose size is not fixed, then the columns, in order. Shards that are
compressed, or whose columns are pickles, are refused.
"""

from __future__ import annotations

import itertools
import json
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from atoll.errors import CorpusError

SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
VALUE_TYPES = {8 * np.dtype(name).itemsize + "uif".index(np.dtype(name).kind): name for name in SCALARS}
"""The byte in front of an ndarray whose type is not fixed."""
SHAPE_TYPES = ("uint8", "uint16", "uint32", "uint64")
"""Of the sizes of an ndarray's sides, by the lowest two bits of the byte in front of them."""
SHARDS_OPEN_MAX = 64
"""Files that are mapped at a time."""
Decode = Callable[[bytes], Any]


def shards(folder: str | Path) -> Shards:
    """A folder of MDS shards, read by index. CorpusError if it cannot be read."""
    return Shards(folder)


class Shards:
    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._shards = _index(self._folder)
        self._ends = list(itertools.accumulate(shard["samples"] for shard in self._shards))
        self._columns = [_columns(shard, self._folder) for shard in self._shards]
        self._maps: dict[int, mmap.mmap] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getstate__(self) -> dict[str, Any]:
        """A worker process maps the files itself."""
        kept = {name: value for name, value in self.__dict__.items() if name not in ("_maps", "_columns")}
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._columns = [_columns(shard, self._folder) for shard in self._shards]
        self._maps = {}

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        within = index - (self._ends[number - 1] if number else 0)
        data = self._map(number)
        begin, end = np.frombuffer(data, "<u4", 2, 4 * (1 + within)).tolist()
        return dict(self._values(number, data[begin:end]))

    def _values(self, number: int, sample: bytes) -> Iterator[tuple[str, Any]]:
        columns = self._columns[number]
        position = 4 * sum(size is None for _, size, _ in columns)
        told = iter(np.frombuffer(sample, "<u4", position // 4).tolist())
        for name, fixed, decode in columns:
            size = fixed if fixed is not None else next(told)
            yield name, decode(sample[position : position + size])
            position += size

    def _map(self, number: int) -> mmap.mmap:
        if number not in self._maps:
            while len(self._maps) >= SHARDS_OPEN_MAX:
                self._maps.pop(next(iter(self._maps))).close()
            path = self._folder / self._shards[number]["raw_data"]["basename"]
            try:
                with path.open("rb") as file:
                    self._maps[number] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CorpusError(f"cannot read the shard {path}: {error}; copy the folder again") from None
        return self._maps[number]


def _index(folder: Path) -> list[dict[str, Any]]:
    path = folder / "index.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        shards_found: list[dict[str, Any]] = document["shards"]
        kinds = {(shard["format"], bool(shard.get("zip_data"))) for shard in shards_found}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{path} is no index of MDS shards ({error!r}); give the folder that it is in") from None
    if kinds - {("mds", False)}:
        raise CorpusError(f"{folder} has shards of {sorted(kinds)}; atoll.data reads MDS without compression")
    return shards_found


def _columns(shard: dict[str, Any], folder: Path) -> list[tuple[str, int | None, Decode]]:
    rows = zip(shard["column_names"], shard["column_sizes"], shard["column_encodings"], strict=True)
    return [(name, size, _decoder(encoding, f"column {name!r} in {folder}")) for name, size, encoding in rows]


def _decoder(encoding: str, where: str) -> Decode:
    plain: dict[str, Decode] = {
        "bytes": bytes,
        "str": lambda data: bytes(data).decode("utf-8"),
        "int": lambda data: int(np.frombuffer(data, "<i8")[0]),
        "json": lambda data: json.loads(bytes(data)),
        "str_int": lambda data: int(bytes(data)),
        "str_float": lambda data: float(bytes(data)),
    }
    if encoding in plain:
        return plain[encoding]
    if encoding in SCALARS:
        return lambda data: np.frombuffer(data, encoding)[0]
    kind, _, rest = encoding.partition(":")
    if kind == "ndarray":
        dtype, _, shape = rest.partition(":")
        return _array_decoder(dtype, tuple(map(int, shape.split(","))) if shape else None)
    raise CorpusError(
        f"{where} is encoded as {encoding!r}, which atoll.data does not read (it unpickles nothing); write it as "
        "bytes, str, json, a number or an ndarray"
    )


def _array_decoder(dtype: str, shape: tuple[int, ...] | None) -> Decode:
    def decode(data: bytes) -> Any:
        kind, sides, position = dtype, shape, 0
        if not kind:
            kind, position = VALUE_TYPES.get(data[0], ""), 1
        if sides is None:
            packed = data[position]
            count, side = packed >> 2, np.dtype(SHAPE_TYPES[packed & 3])
            sides = tuple(np.frombuffer(data, side, count, position + 1).tolist())
            position += 1 + count * side.itemsize
        return np.frombuffer(data, kind, offset=position).reshape(sides).copy()

    return decode
