"""From named tensors to balanced fragments (design section 5).

A fragment is a set of tensor slices that sync together. Its parameters live in one flat fp32 array in which every slice
starts on a multiple of BLOCK, so that no quantisation block ever spans two tensors; the padding is always zero.

Packing is greedy, largest first, and deterministic: ties go by tensor name, then by start, then to the lowest bin.
That is at most one piece above the mean, so pieces are cut smaller until the largest fragment is within
BALANCE_MAX of the mean. Tensors stay whole where that is possible: merges work per slice, and whole tensors merge best.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from atoll.core.config import FRAGMENTS_MAX, TENSOR_MERGES, one_of
from atoll.core.messages import TensorSpec
from atoll.errors import LayoutError

BLOCK = 256
"""Elements per quantisation block; every slice is padded to a multiple of it."""
BALANCE_MAX = 1.1
"""Largest fragment over the mean that packing aims for (the paper's "balanced tensor" fragments)."""
PARAMETERS_MAX = 2**50
"""A thousand times the largest models. Shapes come from other machines, and a product of 64 sides has any size."""
ROW_CUT_SHARE_MIN = 16 * BLOCK
"""Below this share, cuts between rows would waste too much padding, so they are made between blocks."""
CUTS_MAX = 12
"""How often the piece size is halved in search of balance; 2**12 pieces per fair share is far past any need."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Elements [start, stop) of the flattened tensor number `tensor`, at `offset` in the fragment's flat array."""

    tensor: int
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Fragment:
    index: int
    slices: tuple[TensorSlice, ...]

    @cached_property
    def parameters(self) -> int:
        """Real elements, without padding."""
        return sum(piece.size for piece in self.slices)

    @cached_property
    def size(self) -> int:
        """Elements of the flat array, padding included: a multiple of BLOCK."""
        return sum(padded(piece.size) for piece in self.slices)


@dataclass(frozen=True)
class Layout:
    tensors: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]

    @cached_property
    def parameters(self) -> int:
        return sum(fragment.parameters for fragment in self.fragments)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names, shapes, dtypes, merge modes and slices: equal layouts, equal fingerprints."""
        document = {
            "block": BLOCK,
            "tensors": [[t.name, list(t.shape), t.dtype, t.merge] for t in self.tensors],
            "fragments": [[[s.tensor, s.start, s.stop, s.offset] for s in f.slices] for f in self.fragments],
        }
        return hashlib.sha256(json.dumps(document, separators=(",", ":")).encode()).hexdigest()

    @cached_property
    def tensors_fingerprint(self) -> str:
        return tensors_fingerprint(self.tensors)


def tensors_fingerprint(tensors: Sequence[TensorSpec]) -> str:
    """SHA-256 over names, shapes, dtypes and merge modes: equal models, equal fingerprints, however they are cut."""
    document = [[t.name, t.shape, t.dtype, t.merge] for t in tensors]
    return hashlib.sha256(json.dumps(document, separators=(",", ":")).encode()).hexdigest()


def padded(elements: int) -> int:
    """The next multiple of BLOCK."""
    return -(-elements // BLOCK) * BLOCK


def elements_of(spec: TensorSpec) -> int:
    return math.prod(spec.shape)


def build_layout(tensors: Sequence[TensorSpec], fragments_count: int) -> Layout:
    """Pack `tensors` into `fragments_count` balanced fragments."""
    specs = tuple(tensors)
    _check(specs)
    if not 1 <= fragments_count <= FRAGMENTS_MAX:
        raise LayoutError(f"a model has from 1 to {FRAGMENTS_MAX} fragments; not {fragments_count}; use --fragments")
    total = sum(padded(elements_of(spec)) for spec in specs)
    best: list[list[_Piece]] = []
    best_load = math.inf
    share = max(BLOCK, total // fragments_count)
    for _ in range(CUTS_MAX):
        bins = _pack(_cut(specs, share), fragments_count)
        load = max(sum(padded(p.stop - p.start) for p in b) for b in bins)
        if all(bins) and load < best_load:
            best, best_load = bins, load
        mean = sum(padded(p.stop - p.start) for b in bins for p in b) / fragments_count
        if (all(bins) and load <= BALANCE_MAX * mean) or share <= BLOCK:
            break
        share = max(BLOCK, share // 2)
    if not best:
        raise LayoutError(
            f"the model's {len(specs)} trainable tensors ({sum(map(elements_of, specs))} parameters) cannot fill "
            f"{fragments_count} fragments of at least one block of {BLOCK}; "
            f"use --fragments {max(1, total // BLOCK)} or fewer"
        )
    return Layout(specs, tuple(Fragment(i, _place(pieces)) for i, pieces in enumerate(best)))


@dataclass(frozen=True, slots=True)
class _Piece:
    tensor: int
    name: str
    start: int
    stop: int


def _check(specs: tuple[TensorSpec, ...]) -> None:
    if not specs:
        raise LayoutError("the model has no trainable parameters; pass one whose parameters require gradients")
    names = sorted(spec.name for spec in specs)
    twice = [name for name, other in itertools.pairwise(names) if name == other]
    if twice:
        raise LayoutError(f"two tensors are called {twice[0]!r}; names must be unique")
    if sum(map(elements_of, specs)) > PARAMETERS_MAX:
        raise LayoutError(f"the model has more than {PARAMETERS_MAX} parameters; check the shapes of its tensors")
    for spec in specs:
        one_of(f"merge mode of tensor {spec.name!r}", spec.merge, TENSOR_MERGES)
        if any(dim <= 0 for dim in spec.shape):
            raise LayoutError(f"tensor {spec.name!r} has the empty shape {spec.shape}; freeze or remove it")


def _cut(specs: tuple[TensorSpec, ...], share: int) -> list[_Piece]:
    """Whole tensors up to `share` elements; larger ones in even runs of leading-dimension rows (or, where one row
    is already larger than the share, in even runs of whole blocks)."""
    pieces: list[_Piece] = []
    for index, spec in enumerate(specs):
        total = elements_of(spec)
        if padded(total) <= share:
            pieces.append(_Piece(index, spec.name, 0, total))
            continue
        row = total // spec.shape[0] if spec.shape else total
        unit = row if row <= share and share >= ROW_CUT_SHARE_MIN else BLOCK
        units = -(-total // unit)
        parts = -(-units // max(1, share // unit))
        edges = [min(total, units * k // parts * unit) for k in range(parts + 1)]
        pieces.extend(_Piece(index, spec.name, a, b) for a, b in itertools.pairwise(edges) if b > a)
    return pieces


def _pack(pieces: list[_Piece], count: int) -> list[list[_Piece]]:
    bins: list[list[_Piece]] = [[] for _ in range(count)]
    heap = [(0, index) for index in range(count)]
    for piece in sorted(pieces, key=lambda p: (p.start - p.stop, p.name, p.start)):
        load, index = heapq.heappop(heap)
        bins[index].append(piece)
        heapq.heappush(heap, (load + padded(piece.stop - piece.start), index))
    return bins


def _place(pieces: list[_Piece]) -> tuple[TensorSlice, ...]:
    slices: list[TensorSlice] = []
    offset = 0
    for piece in sorted(pieces, key=lambda p: (p.tensor, p.start)):
        slices.append(TensorSlice(piece.tensor, piece.start, piece.stop, offset))
        offset += padded(piece.stop - piece.start)
    return tuple(slices)
