"""A learner's inner state: optimizer, extras such as schedules and data position, and random number generators.

    training thread   capture: a consistent host copy, at a step boundary
    background        pack: one safetensors blob; unpack: back again, with every length, name and type checked
    a new process     restore: into a fresh optimizer and extras, so that training continues bit for bit

Tensors are kept as tensors; what holds them becomes a JSON tree, so that nothing is ever pickled. In the tree, None,
bools, strings, lists and finite numbers are themselves. Everything else is an object whose first key says what it is:

    {"dict" | "ordered" | "counter": [[key, value], ...]}     {"tuple": [...]}       {"int": hex}   {"float": hex}
    {"tensor": name, "order": dims?, "as": [dtype, shape]?}    {"array": name, "as": [dtype, shape]}
    {"scalar": hex, "as": dtype}                               {"bytes": hex}         {"dtype": name}

`order` is the order of dimensions in memory of a tensor that is not row-major; `as` tells the type of raw bytes.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.errors import ConfigError, PayloadError
from atoll.learner.inner_state import Stateful
from atoll.learner.warmup import torch_optimizers

Blob: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]

FORMAT = "atoll.inner"
FORMAT_VERSION = 1
FORMAT_VERSION_OLDEST = 1
"""The oldest version that this build reads: at least one back, once there is a second."""
BLOB_BYTES_MAX = 256 * 2**30
"""AdamW's moments of 32 billion parameters in fp32: more than one process holds."""
HEADER_BYTES_MAX = 100_000_000
"""The safetensors library's own limit on a header."""
TENSORS_MAX = 262_144
"""At about 300 bytes each, in the header and in the tree, this many fit the header."""
NODES_MAX = 2_000_000
"""Values in the tree: a few per tensor. A million-entry list belongs into a tensor."""
DEPTH_MAX = 32
"""Containers inside each other. An optimizer's state is 4 deep; a cycle would have no end."""
DIMENSIONS_MAX = 64
"""PyTorch's own limit."""
COPIES_MAX = 4
"""How often, on average, the data of a state may be copied while its tree is read. A tensor is copied at most once."""
INLINE_BYTES_MAX = 2**20
"""`bytes` values and very long integers, which are written into the tree."""
NAME_CHARS_MAX = 200
"""Tensor names are the paths to them; a longer one is cut and numbered."""
TEXT_CHARS_MAX = 4096
"""Learner and run ids."""
COUNT_MAX = 2**62
"""Steps, tokens and versions, as on the wire."""

_STORED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""What every safetensors reader knows. Other types are stored as raw bytes."""
_STORED_NAMES = {dtype: name for name, dtype in _STORED.items()}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_RAW_DTYPES = {name: dtype for name, dtype in _DTYPES.items() if not name.startswith(("q", "bits"))}
_NUMPY_DTYPES = {np.dtype(code).str: np.dtype(code) for code in "?bBhHiIlLqQefdFD"}
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_DICT_MAKERS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda items: Counter(dict(items)),
}
_SHAPED_OTHERWISE = ("LBFGS", "Adafactor")
"""Optimizers of torch whose state is not shaped like the parameter."""
_GENERATORS = {"python", "numpy", "torch", "cuda"}
_WRONG = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError, struct.error)
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


# ---------------------------------------------------------------- taking a copy


@torch.no_grad()
def capture(
    optimizer: OptimizerLike | None,
    extras: Mapping[str, Stateful],
    about: InnerAbout,
    *,
    rng: bool = True,
    reuse: Captured | None = None,
) -> Captured:
    """Training thread, at a step boundary: copy the whole inner state to host memory.

    `reuse` is a capture that nobody needs any more: its memory is written over where it fits. On a CPU that is 3 to 15
    times faster than fresh memory, whose pages must be mapped first; on a GPU it saves pinning new memory.
    """
    taker = _Taker({} if reuse is None else reuse.tensors)
    structure: dict[str, Any] = {"optimizer": None, "extras": {}, "rng": None}
    if optimizer is not None:
        inside = {"kind": _kind(optimizer), "parameters": _parameters(optimizer), "state": optimizer.state_dict()}
        structure["optimizer"] = taker.node(inside, "optimizer")
    for name, extra in extras.items():
        structure["extras"][name] = taker.node(extra.state_dict(), f"extras.{name}")
    if rng:
        structure["rng"] = taker.node(_random_state(), "rng")
    taker.finish()
    return Captured(taker.tensors, structure, about)


class _Taker:
    """Turns state into a JSON tree, and its tensors into host copies."""

    def __init__(self, reuse: Mapping[str, torch.Tensor]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._reuse = reuse
        self._shared: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}
        self._devices: set[torch.device] = set()
        self._nodes = 0

    def finish(self) -> None:
        """Wait for the copies that are still on their way from a GPU."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def node(self, value: Any, path: str, depth: int = 0) -> Any:
        self._nodes += 1
        if depth > DEPTH_MAX or self._nodes > NODES_MAX:
            limit = f"deeper than {DEPTH_MAX} containers" if depth > DEPTH_MAX else f"more than {NODES_MAX} values"
            raise ConfigError(f"{path} of the learner's state has {limit}; keep long lists as tensors, and no cycles")
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if abs(value) < 2**63 else {"int": self._short(hex(value), path)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is list:
            return [self.node(item, f"{path}.{i}", depth + 1) for i, item in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self.node(item, f"{path}.{i}", depth + 1) for i, item in enumerate(value)]}
        if kind in _DICTS:
            pairs = [[self._key(k, path), self.node(v, f"{path}.{k}", depth + 1)] for k, v in value.items()]
            return {_DICTS[kind]: pairs}
        return self._leaf(value, path)

    def _leaf(self, value: Any, path: str) -> Any:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and _plain(value):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray) and value.dtype.str in _NUMPY_DTYPES:
            raw = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
            return {"array": self._keep(raw, path), "as": [value.dtype.str, list(value.shape)]}
        if isinstance(value, np.generic) and value.dtype.str in _NUMPY_DTYPES:
            return {"scalar": value.tobytes().hex(), "as": value.dtype.str}
        if type(value) is bytes:
            return {"bytes": self._short(value.hex(), path)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        raise ConfigError(
            f"{path} of the learner's state is a {type(value).__module__}.{type(value).__qualname__}, which a "
            "checkpoint cannot hold; let its state_dict give plain dense tensors, numbers, strings, lists, tuples and "
            "dicts with str or int keys, or leave it out of the extras"
        )

    def _key(self, key: Any, path: str) -> Any:
        if type(key) not in (str, int):
            raise ConfigError(f"{path} of the learner's state has the key {key!r}; use only str and int as keys there")
        return self.node(key, path)

    def _short(self, text: str, path: str) -> str:
        if len(text) > 2 * INLINE_BYTES_MAX:
            raise ConfigError(
                f"{path} of the learner's state is longer than {INLINE_BYTES_MAX} bytes; keep it as a tensor"
            )
        return text

    def _tensor(self, value: torch.Tensor, path: str) -> dict[str, Any]:
        if id(value) in self._shared:
            return self._shared[id(value)][1]
        node: dict[str, Any] = {"tensor": ""}
        source = value.detach().resolve_conj().resolve_neg()
        if not source.is_contiguous():
            order = sorted(range(source.dim()), key=source.stride().__getitem__, reverse=True)
            if source.permute(order).is_contiguous():  # channels last and the like keep their strides
                source, node["order"] = source.permute(order), order
        if source.dtype not in _STORED_NAMES:
            node["as"] = [str(source.dtype).removeprefix("torch."), list(source.shape)]
            source = _raw(source)
        node["tensor"] = self._keep(source, path)
        self._shared[id(value)] = (value, node)  # the tensor is held so that its id stays its own
        return node

    def _keep(self, source: torch.Tensor, path: str) -> str:
        name = path[:NAME_CHARS_MAX].encode("ascii", "backslashreplace").decode()
        if name in self.tensors:
            name = f"{name}#{len(self.tensors)}"
        if len(self.tensors) >= TENSORS_MAX:
            raise ConfigError(f"the learner's state has more than {TENSORS_MAX} tensors; leave some of the extras out")
        cuda = source.device.type == "cuda"
        host = self._reuse.get(name)
        if host is None or host.shape != source.shape or host.dtype != source.dtype or host.is_pinned() != cuda:
            host = _host_memory(source, pinned=cuda)
        host.copy_(source, non_blocking=cuda)
        if cuda:
            self._devices.add(source.device)
        self.tensors[name] = host
        return name


def _plain(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and not value.is_quantized and value.device.type != "meta"


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, row-major; a view if they are that already."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)  # numpy's empty arrays have strides that torch does not view
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _host_memory(source: torch.Tensor, *, pinned: bool) -> torch.Tensor:
    try:
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
    except RuntimeError:  # no more memory may be pinned here: copies are slower then, but right
        return torch.empty(source.shape, dtype=source.dtype)


def _kind(optimizer: object) -> str:
    """The class, and for a combination its parts: state of one kind makes no sense in another."""
    parts = [type(part).__name__ for part in torch_optimizers(optimizer) if part is not optimizer]
    return type(optimizer).__name__ + (f"({', '.join(parts)})" if parts else "")


def _parameters(optimizer: OptimizerLike) -> list[list[str]]:
    """Type and shape of every parameter, by group: 'float32[768, 3072]'."""
    return [
        [f"{str(p.dtype).removeprefix('torch.')}{list(p.shape)}" for p in group["params"]]
        for group in optimizer.param_groups
    ]


def _random_state() -> dict[str, Any]:
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
        "cuda": {device: torch.cuda.get_rng_state(device) for device in cuda},
    }


# ---------------------------------------------------------------- bytes


def parts(captured: Captured) -> Iterator[memoryview]:
    """The blob in pieces, without a copy of the tensors: the header, then each tensor's bytes."""
    order = _order(captured)
    yield memoryview(_header(captured, order))
    for name in order:
        yield _raw(captured.tensors[name]).numpy().data


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
    header: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "version": str(FORMAT_VERSION), "about": about, "structure": structure}
    }
    at = 0
    for name in order:
        tensor = captured.tensors[name]
        end = at + tensor.nbytes
        header[name] = {"dtype": _STORED_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = _json(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise ConfigError(f"the learner's state needs a header of {len(text)} bytes; keep long lists as tensors")
    return struct.pack("<Q", len(text)) + text


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def unpack(blob: Blob) -> Captured:
    """Check a blob and read it. The tensors are views of the blob's memory (of a copy, if that is read-only)."""
    with _reading():
        return _unpack(blob)


@contextmanager
def _reading() -> Iterator[None]:
    """What was expected in a place is not there: wrong JSON, a wrong type, a missing key, too deep a nesting."""
    try:
        yield
    except _WRONG as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error


def _damaged(why: str) -> PayloadError:
    return PayloadError(
        f"this is no inner state that can be loaded: {why[:500]}; use an older one, or start without it"
    )


def _unpack(blob: Blob) -> Captured:
    view = (blob.data if isinstance(blob, np.ndarray) else memoryview(blob)).cast("B")
    if not 8 < len(view) <= BLOB_BYTES_MAX:
        raise _damaged(f"{len(view)} bytes")
    (length,) = struct.unpack_from("<Q", view)
    if length > min(HEADER_BYTES_MAX, len(view) - 8):
        raise _damaged(f"a header of {length} bytes in {len(view)}")
    header = _parse(bytes(view[8 : 8 + length]))
    metadata = header.pop("__metadata__")
    if metadata["format"] != FORMAT:
        raise _damaged(f"its format is {metadata['format']!r}, not {FORMAT!r}")
    if not FORMAT_VERSION_OLDEST <= int(metadata["version"]) <= FORMAT_VERSION:
        raise _damaged(
            f"format version {metadata['version']!r}, this build reads up to {FORMAT_VERSION}; upgrade atoll"
        )
    about = _read_about(_parse(metadata["about"]))
    structure = _parse(metadata["structure"])
    captured = Captured(_views(view[8 + length :], header), structure, about)
    _check_structure(captured)
    return captured


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
    if any(type(count) is not int or abs(count) > COUNT_MAX for count in counts):
        raise ValueError("a counter is not a number")
    if any(type(value[name]) is not str or len(value[name]) > TEXT_CHARS_MAX for name in ("learner", "run")):
        raise ValueError("an id is not a text")
    return InnerAbout(**{**value, "bases": tuple(bases)})


def _views(data: memoryview, header: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors, after a check that they fill the data exactly: no gap, no overlap, nothing beyond."""
    if len(header) > TENSORS_MAX:
        raise _damaged(f"{len(header)} tensors")
    spans = sorted((entry["data_offsets"], name) for name, entry in header.items())
    at = 0
    for (start, end), name in spans:
        entry = header[name]
        shape = entry["shape"]
        if len(shape) > DIMENSIONS_MAX or any(type(n) is not int or n < 0 for n in (start, end, *shape)):
            raise _damaged(f"sizes of {name!r}")
        if start != at or end - start != math.prod(shape) * _STORED[entry["dtype"]].itemsize:
            raise _damaged(f"offsets of {name!r}")
        at = end
    if at != len(data):
        raise _damaged(f"{len(data)} bytes of tensors where the header counts {at}")
    array = np.frombuffer(data, np.uint8)
    buffer = torch.from_numpy(array.copy() if data.readonly else array)
    tensors = {}
    for (start, end), name in spans:
        tensors[name] = _typed(buffer[start:end], _STORED[header[name]["dtype"]], header[name]["shape"])
    return tensors


def _typed(raw: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """Raw bytes as what they are: a view, where their place in memory allows it."""
    if not raw.numel():
        return torch.empty(0, dtype=dtype).reshape(shape)
    if raw.storage_offset() % dtype.itemsize or raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).reshape(shape)


# ---------------------------------------------------------------- from the tree back to state


class _Giver:
    """Turns the JSON tree back into state. With `copy`, tensors are the receiver's own."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, copy: bool) -> None:
        self._tensors = tensors
        self._copy = copy
        self._given: dict[str, torch.Tensor] = {}
        self._typed: dict[tuple[str, str, tuple[int, ...]], torch.Tensor] = {}
        self._copies_left = COPIES_MAX * sum(tensor.nbytes for tensor in tensors.values())
        self._nodes = 0

    @property
    def used(self) -> set[str]:
        return set(self._given)

    def value(self, node: Any, depth: int = 0) -> Any:
        self._nodes += 1
        if depth > DEPTH_MAX or self._nodes > NODES_MAX:
            raise _damaged("a tree that is too deep or too large")
        if isinstance(node, list):
            return [self.value(item, depth + 1) for item in node]
        if not isinstance(node, dict):
            return node
        if not node:
            raise ValueError("an empty object in the tree")
        tag, content = next(iter(node.items()))
        if tag == "tuple":
            return tuple(self.value(item, depth + 1) for item in content)
        if tag in _DICT_MAKERS:
            pairs = [(self._key(key), self.value(item, depth + 1)) for key, item in content]
            if len({key for key, _ in pairs}) != len(pairs):
                raise ValueError("the same key twice")
            return _DICT_MAKERS[tag](pairs)
        return self._leaf(tag, content, node)

    def _key(self, node: Any) -> Any:
        key = self.value(node)
        if type(key) not in (str, int):
            raise ValueError("a key that is neither str nor int")
        return key

    def _leaf(self, tag: str, content: str, node: dict[str, Any]) -> Any:
        if tag in ("int", "float", "bytes", "scalar"):
            if len(content) > 2 * INLINE_BYTES_MAX + 3:
                raise _damaged(f"an inline value of {len(content)} characters")
            if tag == "int":
                return int(content, 16)
            raw = bytes.fromhex(content)
            if tag == "float":
                return struct.unpack(">d", raw)[0]
            return raw if tag == "bytes" else np.frombuffer(raw, _NUMPY_DTYPES[node["as"]], count=1)[0]
        if tag == "dtype":
            return _DTYPES[content]
        if tag == "array":
            dtype, shape = node["as"]
            flat = self._tensor(content)
            self._count_copy(flat)
            return flat.numpy().view(_NUMPY_DTYPES[dtype]).reshape(shape).copy()
        if tag == "tensor":
            return self._shape(content, node)
        raise ValueError(f"unknown kind {tag[:50]!r} in the tree")

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._given:
            self._given[name] = self._tensors[name].clone() if self._copy else self._tensors[name]
        return self._given[name]

    def _count_copy(self, tensor: torch.Tensor) -> None:
        """A tree of a few bytes may name one large tensor a million times."""
        self._copies_left -= tensor.nbytes
        if self._copies_left < 0:
            raise _damaged("a tree that names the same data again and again")

    def _shape(self, name: str, node: dict[str, Any]) -> torch.Tensor:
        tensor = self._tensor(name)
        if "as" in node:
            dtype, shape = node["as"]
            key = (name, dtype, tuple(shape))
            if key not in self._typed:
                self._count_copy(tensor)
                self._typed[key] = _typed(tensor, _RAW_DTYPES[dtype], shape)
            tensor = self._typed[key]
        if "order" in node:
            order = node["order"]
            if len(order) != tensor.dim():
                raise ValueError("an order of other dimensions")
            tensor = tensor.permute([order.index(dim) for dim in range(len(order))])
        return tensor


def _check_structure(captured: Captured) -> None:
    tree = captured.structure
    if set(tree) != {"optimizer", "extras", "rng"} or not isinstance(tree["extras"], dict):
        raise ValueError("the tree has other branches")
    giver = _Giver(captured.tensors, copy=False)
    saved, seeds, *_ = [giver.value(node) for node in (tree["optimizer"], tree["rng"], *tree["extras"].values())]
    if saved is not None and (type(saved) is not dict or set(saved) != {"kind", "parameters", "state"}):
        raise ValueError("the optimizer's part has other fields")
    if seeds is not None and (
        set(seeds) != _GENERATORS or any(type(device) is not int for device in {**seeds["cuda"]})
    ):
        raise ValueError("the random numbers' part has other fields")
    if giver.used != set(captured.tensors):
        raise ValueError("it holds tensors that nothing in its tree refers to")


# ---------------------------------------------------------------- putting it back


def restore(
    captured: Captured, optimizer: OptimizerLike | None, extras: Mapping[str, Stateful], *, rng: bool
) -> list[str]:
    """Put a state of this learner's own back. Gives a line for everything that could not be restored.

    An optimizer that the state does not fit is left as it is, with a PayloadError, and so is the rest.
    """
    tree, nodes, lost = captured.structure, captured.structure["extras"], []
    giver = _Giver(captured.tensors, copy=True)
    states = {name: giver.value(node) for name, node in nodes.items() if name in extras}
    if optimizer is not None and tree["optimizer"] is not None:
        saved = giver.value(tree["optimizer"])
        with _reading():
            _check_fit(saved, optimizer)
            _move_groups(saved["state"], optimizer)
        _load(optimizer, saved["state"])
    elif optimizer is not None:
        lost.append("optimizer: the state holds none")
    elif tree["optimizer"] is not None:
        lost.append("optimizer: none was given to put its state into")
    for name in sorted({*nodes, *extras}):
        if name not in states:
            lost.append(f"{name}: " + ("no such extra was given" if name in nodes else "the state does not hold it"))
            continue
        try:
            extras[name].load_state_dict(states[name])
        except Exception as error:  # the user's object: it may raise anything
            lost.append(f"{name}: {type(error).__name__}: {error}")
    if rng:
        lost += ["random numbers: the state holds none"] if tree["rng"] is None else _seed(giver.value(tree["rng"]))
    return lost


def restore_optimizer_only(captured: Captured, optimizer: OptimizerLike) -> None:
    """Take over a peer's moments and step counters. The learning rate and the other settings of the optimizer, the
    extras and the random numbers stay this learner's own."""
    saved = _Giver(captured.tensors, copy=True).value(captured.structure["optimizer"])
    if saved is None:
        raise PayloadError("the peer sent no optimizer state; start with a warm-up instead")
    with _reading():
        _check_fit(saved, optimizer)
    for name, tensor in captured.tensors.items():
        if name.startswith("optimizer.") and not _is_finite(tensor):
            raise PayloadError(f"the peer's {name} is not finite; start with a warm-up instead")
    state = optimizer.state_dict()
    theirs, mine = list(_torch_states(saved["state"])), list(_torch_states(state))
    if not mine or len(theirs) != len(mine):
        raise PayloadError("the peer's optimizer state is built otherwise than this learner's; start with a warm-up")
    with _reading():
        for target, source in zip(mine, theirs, strict=True):
            ids = dict(zip(_ids(source), _ids(target), strict=True))
            target["state"] = {ids.get(key, key): entry for key, entry in source["state"].items()}
    _load(optimizer, state)


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = tensor.aminmax()  # unlike isfinite this makes no tensors as large as its argument
    return bool(low.isfinite() and high.isfinite())


def _check_fit(saved: dict[str, Any], optimizer: OptimizerLike) -> None:
    """The same kind of optimizer over parameters of the same types and shapes, in the same groups."""
    remedy = "start this learner with the model and optimizer that the state was taken from, or without the state"
    kind, groups = _kind(optimizer), _parameters(optimizer)
    if saved["kind"] != kind:
        raise PayloadError(f"this is the state of a {saved['kind']}, the optimizer is a {kind}; {remedy}")
    if [len(group) for group in saved["parameters"]] != [len(group) for group in groups]:
        raise PayloadError(f"the optimizer's groups have other numbers of parameters than its saved state; {remedy}")
    for i, (old, new) in enumerate(zip(chain(*saved["parameters"]), chain(*groups), strict=True)):
        if old != new:
            raise PayloadError(f"parameter {i} of the optimizer is {new}, its saved state is for {old}; {remedy}")
    for part, param, entry in _entries(optimizer, saved["state"]):
        if type(part).__module__.startswith("torch.optim.") and type(part).__name__ not in _SHAPED_OTHERWISE:
            for key, value in entry.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != param.shape:
                    raise PayloadError(f"{key} is shaped {list(value.shape)} for {list(param.shape)}; {remedy}")


def _move_groups(state: dict[str, Any], optimizer: object) -> None:
    """A learning rate that is a tensor goes to the device of the optimizer's own: torch leaves it where it finds it."""
    for part, saved in zip(torch_optimizers(optimizer), _torch_states(state), strict=False):
        for own, group in zip(part.param_groups, saved["param_groups"], strict=True):
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and isinstance(own.get(key), torch.Tensor):
                    group[key] = value.to(own[key].device)


def _load(optimizer: OptimizerLike, state: dict[str, Any]) -> None:
    before = optimizer.state_dict()
    try:
        optimizer.load_state_dict(state)
    except Exception as error:  # a custom optimizer may raise anything
        optimizer.load_state_dict(before)
        raise PayloadError(f"the optimizer does not take the state: {error}; start without it") from error
    for part, param, entry in _entries(optimizer, state):
        loaded = part.state.get(param, {})
        for key, value in entry.items():
            cast = loaded.get(key)
            # torch casts moments to the parameter's type; fp32 moments of bf16 parameters would lose their low bits.
            if isinstance(value, torch.Tensor) and isinstance(cast, torch.Tensor) and cast.dtype != value.dtype:
                loaded[key] = value.to(cast.device)


def _torch_states(tree: Any, depth: int = DEPTH_MAX) -> Iterator[dict[str, Any]]:
    """The state dicts of torch's form inside of a state dict: itself, or those of a combination's parts."""
    if isinstance(tree, dict) and {"state", "param_groups"} <= set(tree):
        yield tree
    elif isinstance(tree, dict | list | tuple) and depth:
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _torch_states(item, depth - 1)


def _ids(state: dict[str, Any]) -> list[Any]:
    if not all(isinstance(group, dict) for group in state["param_groups"]):
        raise TypeError("a group of parameters must be a table")
    return [key for group in state["param_groups"] for key in group["params"]]


def _entries(
    optimizer: object, state: dict[str, Any]
) -> Iterator[tuple[torch.optim.Optimizer, torch.Tensor, dict[str, Any]]]:
    """(optimizer, parameter, what the state holds for it), where the optimizer is made of torch's."""
    found, saved = list(torch_optimizers(optimizer)), list(_torch_states(state))
    for part, own in zip(found, saved, strict=True) if len(found) == len(saved) else ():
        params = [param for group in part.param_groups for param in group["params"]]
        for key, param in zip(_ids(own), params, strict=True):
            if isinstance(own["state"].get(key), dict):
                yield part, param, own["state"][key]


def _seed(state: dict[str, Any]) -> list[str]:
    seeders: dict[str, Callable[[], Any]] = {
        "python": lambda: random.setstate(state["python"]),
        "numpy": lambda: np.random.set_state(state["numpy"]),
        "torch": lambda: torch.set_rng_state(state["torch"]),
    }
    lost = []
    for device, value in state["cuda"].items():
        if device < torch.cuda.device_count():
            seeders[f"cuda:{device}"] = partial(torch.cuda.set_rng_state, value, device)
        else:
            lost.append(f"random numbers of cuda:{device}: there is no such device")
    for name, seed in seeders.items():
        try:
            seed()
        except _WRONG as error:
            lost.append(f"random numbers of {name}: {type(error).__name__}: {error}")
    return lost
