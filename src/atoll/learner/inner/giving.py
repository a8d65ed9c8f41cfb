"""From the JSON tree back to the state that it describes."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from atoll.learner.inner import limits
from atoll.learner.inner.captured import DTYPES, NUMPY_DTYPES, RAW_DTYPES, Captured, damaged, typed
from atoll.learner.inner.random_state import GENERATORS

DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_DICT_MAKERS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda items: Counter(dict(items)),
}


class StateGiver:
    """Turns the JSON tree back into state. With `copy`, tensors are the receiver's own."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, copy: bool) -> None:
        self._tensors = tensors
        self._copy = copy
        self._given: dict[str, torch.Tensor] = {}
        self._typed: dict[tuple[str, str, tuple[int, ...]], torch.Tensor] = {}
        self._copies_left = limits.COPIES_MAX * sum(tensor.nbytes for tensor in tensors.values())
        self._nodes = 0

    @property
    def used(self) -> set[str]:
        return set(self._given)

    def value(self, node: Any, depth: int = 0) -> Any:
        self._nodes += 1
        if depth > limits.DEPTH_MAX or self._nodes > limits.NODES_MAX:
            raise damaged("a tree that is too deep or too large")
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
            if len(content) > 2 * limits.INLINE_BYTES_MAX + 3:
                raise damaged(f"an inline value of {len(content)} characters")
            if tag == "int":
                return int(content, 16)
            raw = bytes.fromhex(content)
            if tag == "float":
                return struct.unpack(">d", raw)[0]
            return raw if tag == "bytes" else np.frombuffer(raw, NUMPY_DTYPES[node["as"]], count=1)[0]
        if tag == "dtype":
            return DTYPES[content]
        if tag == "array":
            dtype, shape = node["as"]
            flat = self._tensor(content)
            self._count_copy(flat)
            return flat.numpy().view(NUMPY_DTYPES[dtype]).reshape(shape).copy()
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
            raise damaged("a tree that names the same data again and again")

    def _shape(self, name: str, node: dict[str, Any]) -> torch.Tensor:
        tensor = self._tensor(name)
        if "as" in node:
            dtype, shape = node["as"]
            key = (name, dtype, tuple(shape))
            if key not in self._typed:
                self._count_copy(tensor)
                self._typed[key] = typed(tensor, RAW_DTYPES[dtype], shape)
            tensor = self._typed[key]
        if "order" in node:
            order = node["order"]
            if len(order) != tensor.dim():
                raise ValueError("an order of other dimensions")
            tensor = tensor.permute([order.index(dim) for dim in range(len(order))])
        return tensor


def check_structure(captured: Captured) -> None:
    tree = captured.structure
    if set(tree) != {"optimizer", "extras", "rng"} or not isinstance(tree["extras"], dict):
        raise ValueError("the tree has other branches")
    giver = StateGiver(captured.tensors, copy=False)
    saved, seeds, *_ = [giver.value(node) for node in (tree["optimizer"], tree["rng"], *tree["extras"].values())]
    if saved is not None and (type(saved) is not dict or set(saved) != {"kind", "parameters", "state"}):
        raise ValueError("the optimizer's part has other fields")
    if seeds is not None and (set(seeds) != GENERATORS or any(type(device) is not int for device in {**seeds["cuda"]})):
        raise ValueError("the random numbers' part has other fields")
    if giver.used != set(captured.tensors):
        raise ValueError("it holds tensors that nothing in its tree refers to")
