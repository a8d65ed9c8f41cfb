"""Inner states as bytes and files, and the checkpoints that all processes of a learner have left together.

    RUN/learners/NAME/inner-jax.safetensors               of a learner of one process
    RUN/learners/NAME/rank-R-of-N/inner-jax.safetensors   of one of N

A state is a pytree, such as optax makes. Its leaves are kept as bytes, with their paths, shapes and types, and with
what part of each is here. So processes of another number or mesh take their parts out of the files of all. Nothing is
pickled. The file before the last one stays: processes that die while they write may have left different last ones.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from atoll.errors import PayloadError
from atoll.jax.parameters import Tree, path_name
from atoll.jax.spread import Cut, Shape, cut_again, cut_of, is_spread

FILE, BEFORE = "inner-jax.safetensors", "inner-jax.before.safetensors"
ABOUT = "about"
"""The entry that holds a JSON text: the run, the step, the leaves and the extras."""
RANKS_MAX = 65_536
_RANK = re.compile(r"rank-(\d{1,6})-of-(\d{1,6})")


def rows_of(state: Tree) -> list[list[Any]]:
    """Path, shape and type of each leaf; of one that is cut over processes also which part of it is here."""
    rows: list[list[Any]] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = path_name(path)
        row = [name, list(jnp.shape(leaf)), str(jnp.result_type(leaf))]
        cut = cut_of(name, leaf) if is_spread(leaf) else None
        rows.append([*row, {"spec": cut.spec, "ranges": cut.ranges}] if cut is not None else row)
    return rows


def pack(state: Tree, about: dict[str, Any]) -> bytes:
    """A state as bytes. Blocks for the device. `leaves` in `about` are the rows of what it is a part of."""
    arrays = [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(state)]
    text = json.dumps({"leaves": rows_of(state), **about}).encode()
    entries = {f"{i:06d}": np.frombuffer(array.tobytes(), np.uint8) for i, array in enumerate(arrays)}
    return bytes(save({**entries, ABOUT: np.frombuffer(text, np.uint8)}))


class PackedPart:
    """What one process has packed. PayloadError if it cannot be read."""

    def __init__(self, read: Callable[[str], NDArray[np.uint8]]) -> None:
        self._read = read
        try:
            about = json.loads(read(ABOUT).tobytes())
        except (SafetensorError, KeyError, ValueError, RecursionError) as error:
            raise PayloadError(f"it cannot be read: {error}") from None
        if not isinstance(about, dict) or not isinstance(about.get("leaves"), list):
            raise PayloadError("it does not say what it is")
        self.about: dict[str, Any] = about
        self.rows: list[Any] = about["leaves"]

    @classmethod
    def of_bytes(cls, blob: bytes) -> PackedPart:
        try:
            return cls(load(blob).__getitem__)
        except (SafetensorError, ValueError) as error:
            raise PayloadError(f"it cannot be read: {error}") from None

    @classmethod
    def of_file(cls, file: Path) -> PackedPart:
        """Its leaves are read when they are wanted, one by one."""
        try:
            return cls(safe_open(file, "np").get_tensor)
        except (SafetensorError, OSError) as error:
            raise PayloadError(f"it cannot be read: {error}") from None

    @property
    def key(self) -> tuple[int, int]:
        """Generation and step."""
        generation, step = self.about.get("generation", 0), self.about.get("step", 0)
        return (generation, step) if isinstance(generation, int) and isinstance(step, int) else (0, 0)

    def indices(self, leaf: int, shape: Shape) -> list[NDArray[np.int64]]:
        """Along each dimension: what of a leaf is here."""
        row = self.rows[leaf]
        if len(row) < 4:
            return [np.arange(size) for size in shape]
        return [np.concatenate([np.arange(*run) for run in runs]) for runs in row[3]["ranges"]]

    def values(self, leaf: int, dtype: Any) -> NDArray[Any]:
        try:
            return np.frombuffer(self._read(f"{leaf:06d}").tobytes(), dtype)
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise PayloadError(f"its leaf {leaf} cannot be read: {error}") from None


def unpack(parts: Sequence[PackedPart], like: Tree, mesh: Mesh | None = None) -> Tree:
    """The state, with the structure of `like`. PayloadError if it does not fit. `mesh` is of all processes: leaves that
    were cut over processes are cut over them as they were, where that can be; a fresh state may begin otherwise."""
    found, structure = jax.tree_util.tree_flatten_with_path(like)
    own = [row[:3] for row in rows_of(like)]
    if any(not all(isinstance(row, list) for row in part.rows) for part in parts):
        raise PayloadError("it does not say what it is")
    if any([row[:3] for row in part.rows] != own for part in parts):
        raise PayloadError("it is of another optimizer, or of another model")
    leaves = [_leaf(parts, i, path_name(path), leaf, mesh) for i, (path, leaf) in enumerate(found)]
    return jax.tree_util.tree_unflatten(structure, leaves)


def _leaf(parts: Sequence[PackedPart], number: int, path: str, leaf: Any, mesh: Mesh | None) -> Any:
    shape, row = jnp.shape(leaf), parts[0].rows[number]
    cut: Cut | None = cut_of(path, leaf) if is_spread(leaf) else None
    if mesh is not None and len(row) > 3:
        with suppress(PayloadError):
            cut = cut_again(path, shape, mesh, row[3])
    wanted = cut.indices if cut is not None else tuple(np.arange(size) for size in shape)
    try:
        values = _gathered(parts, number, wanted, np.dtype(jnp.result_type(leaf)), shape)
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise PayloadError(f"what it says of its leaf {path!r} makes no sense: {error}") from None
    if cut is not None:
        return cut.whole(jax.device_put(values, cut.sharding))
    if isinstance(leaf, jax.Array):  # what is bound to no device goes where the others of a computation are
        return jax.device_put(values, leaf.sharding) if leaf.committed else jnp.asarray(values)
    return values


def _gathered(
    parts: Sequence[PackedPart], number: int, wanted: Sequence[NDArray[np.int64]], dtype: Any, shape: Shape
) -> NDArray[Any]:
    """A box of a leaf, from the boxes that the parts have of it."""
    values = np.empty([index.size for index in wanted], dtype)
    missing = np.ones(values.shape, bool)
    for part in parts:
        here = part.indices(number, shape)
        both = [np.intersect1d(mine, its, return_indices=True)[1:] for mine, its in zip(wanted, here, strict=True)]
        mine, its = np.ix_(*(pair[0] for pair in both)), np.ix_(*(pair[1] for pair in both))
        if not missing[mine].any():
            continue
        data = part.values(number, dtype)
        if data.size != int(np.prod([index.size for index in here])):
            raise PayloadError(f"its leaf {number} has a wrong size")
        values[mine] = data.reshape([index.size for index in here])[its]
        missing[mine] = False
    if missing.any():
        raise PayloadError("it is of another mesh of processes, and not all of their files are here")
    return values


# ------------------------------------------------------------ files


@dataclass(frozen=True)
class PartSet:
    """Files of one generation and step: one of each process."""

    parts: tuple[PackedPart, ...]

    @property
    def key(self) -> tuple[int, int, int]:
        return (*self.parts[0].key, len(self.parts))


def find_sets(home: Path, run: str) -> list[PartSet]:
    """Those in a learner's folder that are complete and of this run, newest first."""
    places: dict[int, dict[int, Path]] = defaultdict(dict)
    places[1][0] = home
    with suppress(OSError):
        for entry in home.iterdir():
            match = _RANK.fullmatch(entry.name)
            if match and int(match[1]) < int(match[2]) <= RANKS_MAX:
                places[int(match[2])][int(match[1])] = entry
    sets = []
    for size, folders in places.items():
        if len(folders) == size:
            found = [parts_in(folders[rank], run) for rank in range(size)]
            common = set(found[0]).intersection(*found[1:])
            sets += [PartSet(tuple(of_rank[key] for of_rank in found)) for key in common]
    return sorted(sets, key=lambda one: one.key, reverse=True)


def parts_in(folder: Path, run: str) -> dict[tuple[int, int], PackedPart]:
    """What one process has left, by generation and step."""
    found = {}
    for name in (BEFORE, FILE):
        with suppress(PayloadError):
            part = PackedPart.of_file(folder / name)
            if part.about.get("run") == run:
                found[part.key] = part
    return found


def write(path: Path, blob: bytes) -> None:
    """OSError if it cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(blob)
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileNotFoundError):
        path.replace(path.with_name(BEFORE))
    temporary.replace(path)
