"""Training thread: a consistent copy of the whole inner state on the host, as tensors and a tree."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from atoll.errors import ConfigError
from atoll.learner.inner import limits
from atoll.learner.inner.captured import NUMPY_DTYPES, STORED_NAMES, Captured, InnerAbout, OptimizerLike, raw_bytes
from atoll.learner.inner.giving import DICTS
from atoll.learner.inner.places import Places
from atoll.learner.inner.random_state import random_state
from atoll.learner.inner_state import Stateful
from atoll.learner.local_part import is_dtensor, local_part
from atoll.learner.warmup import torch_optimizers


@torch.no_grad()
def capture(
    optimizer: OptimizerLike | None,
    extras: Mapping[str, Stateful],
    about: InnerAbout,
    *,
    rng: bool = True,
    reuse: Captured | None = None,
    places: Places | None = None,
) -> Captured:
    """Training thread, at a step boundary: copy the whole inner state to host memory.

    `reuse` is a capture that nobody needs any more: its memory is written over where it fits. On a CPU that is 3 to 15
    times faster than fresh memory, whose pages must be mapped first; on a GPU it saves pinning new memory.
    """
    taker = StateTaker({} if reuse is None else reuse.tensors)
    structure: dict[str, Any] = {"optimizer": None, "extras": {}, "rng": None}
    if optimizer is not None:
        inside = {"kind": kind_of(optimizer), "parameters": parameters_of(optimizer), "state": optimizer.state_dict()}
        structure["optimizer"] = taker.node(inside, "optimizer")
    for name, extra in extras.items():
        structure["extras"][name] = taker.node(extra.state_dict(), f"extras.{name}")
    if rng:
        structure["rng"] = taker.node(random_state(), "rng")
    taker.finish()
    return Captured(taker.tensors, structure, about, places)


def keep_extras(extras: Mapping[str, Any], about: InnerAbout) -> Captured:
    """A state of nothing but these values of extras, copied."""
    taker = StateTaker({})
    nodes = {name: taker.node(value, f"extras.{name}") for name, value in extras.items()}
    return Captured(taker.tensors, {"optimizer": None, "extras": nodes, "rng": None}, about)


class StateTaker:
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
        if depth > limits.DEPTH_MAX or self._nodes > limits.NODES_MAX:
            limit = (
                f"deeper than {limits.DEPTH_MAX} containers"
                if depth > limits.DEPTH_MAX
                else f"more than {limits.NODES_MAX} values"
            )
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
        if kind in DICTS:
            pairs = [[self._key(k, path), self.node(v, f"{path}.{k}", depth + 1)] for k, v in value.items()]
            return {DICTS[kind]: pairs}
        return self._leaf(value, path)

    def _leaf(self, value: Any, path: str) -> Any:
        if is_dtensor(value):
            return self._tensor(local_part(value), path)  # each rank keeps its own part
        if type(value) in (torch.Tensor, torch.nn.Parameter) and _plain(value):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray) and value.dtype.str in NUMPY_DTYPES:
            raw = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
            return {"array": self._keep(raw, path), "as": [value.dtype.str, list(value.shape)]}
        if isinstance(value, np.generic) and value.dtype.str in NUMPY_DTYPES:
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
        if len(text) > 2 * limits.INLINE_BYTES_MAX:
            raise ConfigError(
                f"{path} of the learner's state is longer than {limits.INLINE_BYTES_MAX} bytes; keep it as a tensor"
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
        if source.dtype not in STORED_NAMES:
            node["as"] = [str(source.dtype).removeprefix("torch."), list(source.shape)]
            source = raw_bytes(source)
        node["tensor"] = self._keep(source, path)
        self._shared[id(value)] = (value, node)  # the tensor is held so that its id stays its own
        return node

    def _keep(self, source: torch.Tensor, path: str) -> str:
        name = path[: limits.NAME_CHARS_MAX].encode("ascii", "backslashreplace").decode()
        if name in self.tensors:
            name = f"{name}#{len(self.tensors)}"
        if len(self.tensors) >= limits.TENSORS_MAX:
            raise ConfigError(
                f"the learner's state has more than {limits.TENSORS_MAX} tensors; leave some of the extras out"
            )
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


def _host_memory(source: torch.Tensor, *, pinned: bool) -> torch.Tensor:
    try:
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
    except RuntimeError:  # no more memory may be pinned here: copies are slower then, but right
        return torch.empty(source.shape, dtype=source.dtype)


def kind_of(optimizer: object) -> str:
    """The class, and for a combination its parts: state of one kind makes no sense in another."""
    parts = [type(part).__name__ for part in torch_optimizers(optimizer) if part is not optimizer]
    return type(optimizer).__name__ + (f"({', '.join(parts)})" if parts else "")


PART = ", the part at "
"""Where the description of a parameter says which part of it this is."""


def parameters_of(optimizer: OptimizerLike) -> list[list[str]]:
    """Type and shape of every parameter, by group: 'float32[768, 3072]'. Of a sharded one what is here, and which part
    of the whole that is: rows of one mesh and columns of another may have the same shape."""
    return [[_described(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _described(parameter: torch.Tensor) -> str:
    own = f"{str(parameter.dtype).removeprefix('torch.')}{list(local_part(parameter).shape)}"
    if not is_dtensor(parameter):
        return own
    whole: Any = parameter
    mesh = whole.device_mesh
    where = f"{list(mesh.get_coordinate() or ())} of the mesh {list(mesh.shape)}"
    return f"{own}{PART}{where} of {list(whole.shape)} by {', '.join(map(str, whole.placements))}"
