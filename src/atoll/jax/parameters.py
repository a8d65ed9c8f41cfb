"""A pytree of JAX arrays as `Parameters`.

Arrays cannot be changed, and a training step may be given their memory (`donate_argnums`). So a snapshot is a copy of
the fragment that one compiled gather makes on the device; it comes to the host when a background thread asks for it. An
adopt is a compiled scatter that makes new arrays. Neither waits for the device.

Every floating-point leaf is synced. Its name is its path in the tree, "layers.0.kernel". Learners of other frameworks
can be in the same run: `names` maps paths to their names, and a leaf that is the transpose of theirs is `Transposed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from atoll.core import Layout, TensorSlice, TensorSpec
from atoll.errors import ConfigError, LayoutError
from atoll.learner import F32, MakeValues, Snapshot, merge_mode

Tree: TypeAlias = Any
"""A pytree of arrays."""


@dataclass(frozen=True, slots=True)
class Transposed:
    """The name of a matrix that this side keeps transposed: a flax kernel is (in, out), a torch weight (out, in)."""

    name: str


Names: TypeAlias = Mapping[str, "str | Transposed"] | Callable[[str], "str | Transposed"]
"""Each path's name in the run. A mapping also says the order of the tensors, which learners must agree on."""


def path_name(path: tuple[Any, ...]) -> str:
    """A leaf's place in its tree: ("layers", 0, "kernel") becomes "layers.0.kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


class JaxSnapshot:
    def __init__(self, flat: Any) -> None:
        self._flat = flat

    def values(self) -> F32:
        """Blocks until the device has made the copy and sent it: background threads only."""
        values: F32 = np.asarray(self._flat)
        return values


class JaxParameters:
    """The leaves of a pytree (`atoll.learner.Parameters`). `tree` is what the training loop has now."""

    def __init__(self, tree: Tree, *, names: Names | None = None, merge_modes: Mapping[str, str] | None = None) -> None:
        found, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        paths = [path_name(path) for path, _ in found]
        self._leaves: list[Any] = [leaf for _, leaf in found]
        self._check(paths)
        self._order, run_names = _ordered(paths, names)
        self._transposed = [isinstance(name, Transposed) for name in run_names]
        plain = [name.name if isinstance(name, Transposed) else name for name in run_names]
        modes = dict(merge_modes or {})
        if unknown := [name for name in modes if name not in plain]:
            raise ConfigError(
                f"merge_modes names {unknown[0]!r}, which is not in the tree; its names are like {plain[0]!r}"
            )
        self.specs = tuple(
            TensorSpec(name, self._shape(i), str(self._leaf(i).dtype), modes.get(name, merge_mode(name)))
            for i, name in enumerate(plain)
        )
        self._gather = lru_cache(maxsize=None)(self._make_gather)
        self._change = lru_cache(maxsize=None)(self._make_change)

    def _check(self, paths: list[str]) -> None:
        if not paths:
            raise LayoutError("the tree has no leaves; pass the parameters that are trained")
        for path, leaf in zip(paths, self._leaves, strict=True):
            if not isinstance(leaf, jax.Array):
                raise LayoutError(f"leaf {path!r} is {type(leaf).__name__}, no JAX array; pass the parameters alone")
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise LayoutError(f"leaf {path!r} is {leaf.dtype}, which cannot be averaged; keep it out of the tree")
        self._check_places(paths)

    def _check_places(self, paths: list[str]) -> None:
        for path, leaf in zip(paths, self._leaves, strict=True):
            if not leaf.is_fully_addressable:
                raise LayoutError(
                    f"leaf {path!r} is spread over several processes; make it an atoll.jax.Learner of all of them"
                )

    # ------------------------------------------------------------ leaves, in the run's order

    def _leaf(self, index: int) -> Any:
        return self._leaves[self._order[index]]

    def _here(self, index: int) -> Any:
        """What this process has of it."""
        return self._leaf(index)

    def _put(self, index: int, here: Any) -> None:
        self._leaves[self._order[index]] = here

    def _shape(self, index: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._leaf(index).shape or (1,)
        if not self._transposed[index]:
            return shape
        if len(shape) != 2:
            raise ConfigError(f"a leaf of shape {shape} cannot be Transposed: only matrices can")
        return shape[::-1]

    @property
    def tree(self) -> Tree:
        return jax.tree_util.tree_unflatten(self._structure, self._leaves)

    @tree.setter
    def tree(self, tree: Tree) -> None:
        structure: Any
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if structure != self._structure:
            raise LayoutError("these parameters have another structure than those that the learner was made with")
        for path, (old, new) in enumerate(zip(self._leaves, leaves, strict=True)):
            self._check_cut(path, old, new)
            if old.shape != new.shape or old.dtype != new.dtype:
                raise LayoutError(
                    f"leaf {path} was {old.dtype}{list(old.shape)} and is {new.dtype}{list(new.shape)} now; a run's "
                    "tensors keep their shapes"
                )
        self._leaves = leaves

    def _check_cut(self, path: int, old: Any, new: Any) -> None:
        """One process may cut its arrays as it likes."""

    def lay_out(self, layout: Layout) -> None:
        self.layout = layout

    def _pieces(self, fragment: int) -> tuple[TensorSlice, ...]:
        return tuple(self.layout.fragments[fragment].slices)

    # ------------------------------------------------------------ to the host

    def read(self, fragment: int) -> JaxSnapshot:
        sources = tuple(self._here(piece.tensor) for piece in self._pieces(fragment))
        return JaxSnapshot(self._gather(fragment)(sources))

    def _make_gather(self, fragment: int) -> Callable[[tuple[Any, ...]], Any]:
        pieces, size = self._pieces(fragment), self.layout.fragments[fragment].size

        def gather(sources: tuple[Any, ...]) -> Any:
            flat = jnp.zeros(size, jnp.float32)
            for piece, source in zip(pieces, sources, strict=True):
                values = self._flat(piece.tensor, source)[piece.start : piece.stop].astype(jnp.float32)
                flat = flat.at[piece.offset : piece.offset + piece.size].set(values)
            return flat

        return jax.jit(gather)

    def _flat(self, index: int, leaf: Any) -> Any:
        return (leaf.T if self._transposed[index] else leaf).reshape(-1)

    def release(self, snapshot: Snapshot) -> None: ...

    # ------------------------------------------------------------ from the host

    def stage(self, fragment: int, make: MakeValues) -> Any:
        """On the default device and not bound to it: it goes where each leaf is."""
        return jnp.asarray(make(None))

    def write(self, fragment: int, staged: Any) -> None:
        self._apply("write", fragment, staged, 0.0)

    def add(self, fragment: int, staged: Any) -> None:
        self._apply("add", fragment, staged, 0.0)

    def mix(self, fragment: int, staged: Any, alpha: float) -> None:
        self._apply("mix", fragment, staged, alpha)

    def _apply(self, rule: str, fragment: int, staged: Any, alpha: float) -> None:
        touched = tuple(dict.fromkeys(piece.tensor for piece in self._pieces(fragment)))
        leaves = tuple(self._here(tensor) for tensor in touched)
        changed = self._change(rule, fragment, tuple(leaf.sharding for leaf in leaves))(leaves, staged, alpha)
        for tensor, leaf in zip(touched, changed, strict=True):
            self._put(tensor, leaf)

    def _make_change(self, rule: str, fragment: int, shardings: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]]:
        pieces = self._pieces(fragment)
        touched = tuple(dict.fromkeys(piece.tensor for piece in pieces))

        def change(leaves: tuple[Any, ...], staged: Any, alpha: Any) -> tuple[Any, ...]:
            flats = {tensor: self._flat(tensor, leaf) for tensor, leaf in zip(touched, leaves, strict=True)}
            for piece in pieces:
                flat = flats[piece.tensor]
                values = staged[piece.offset : piece.offset + piece.size]
                if rule != "write":
                    own = flat[piece.start : piece.stop].astype(jnp.float32)
                    values = own + values if rule == "add" else alpha * own + (1.0 - alpha) * values
                flats[piece.tensor] = flat.at[piece.start : piece.stop].set(values.astype(flat.dtype))
            return tuple(
                self._shaped(tensor, flats[tensor], leaf) for tensor, leaf in zip(touched, leaves, strict=True)
            )

        return jax.jit(change, out_shardings=shardings)

    def _shaped(self, index: int, flat: Any, like: Any) -> Any:
        return flat.reshape(like.shape[::-1]).T if self._transposed[index] else flat.reshape(like.shape)

    # ------------------------------------------------------------ as they are

    def as_kept(self, fragment: int, theta: F32) -> F32:
        return self.rounded(theta, self._pieces(fragment))

    def rounded(self, theta: F32, pieces: Sequence[TensorSlice]) -> F32:
        """`as_kept` of an array in which these pieces lie."""
        typed = [(piece, self._leaf(piece.tensor).dtype) for piece in pieces]
        rounded = [(piece, dtype) for piece, dtype in typed if dtype != np.float32]
        if not rounded:
            return theta
        kept = theta.copy()
        for piece, dtype in rounded:
            part = kept[piece.offset : piece.offset + piece.size]
            part[:] = part.astype(ml_dtypes.bfloat16 if dtype == jnp.bfloat16 else dtype)
        return kept

    def save(self) -> list[Any]:
        return list(self._leaves)  # arrays do not change

    def restore(self, saved: list[Any]) -> None:
        self._leaves = list(saved)


def _ordered(paths: list[str], names: Names | None) -> tuple[list[int], list[str | Transposed]]:
    """Which leaf is the run's tensor number i, and its name."""
    if names is None:
        return list(range(len(paths))), list(paths)
    if callable(names):
        found: dict[str, str | Transposed] = {path: names(path) for path in paths}
    else:
        found = dict(names)
    if missing := [path for path in paths if path not in found]:
        raise ConfigError(f"names has nothing for {missing[0]!r}; every leaf of the tree needs a name")
    if extra := [path for path in found if path not in paths]:
        raise ConfigError(f"names maps {extra[0]!r}, which is no leaf of the tree; its leaves are like {paths[0]!r}")
    return [paths.index(path) for path in found], list(found.values())
