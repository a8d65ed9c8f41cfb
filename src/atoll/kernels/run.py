"""The typed layer over the compiled loops: checks arrays, takes their addresses, cuts work for the threads.

Payloads are aligned, contiguous uint8 arrays of the right size here; `atoll.codec` sees to that for bytes from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from atoll.errors import PayloadError
from atoll.kernels.constants import BLOCK, FP32, SEGMENT_BLOCKS
from atoll.kernels.pool import RangeFunction, run_ranges
from atoll.kernels.stored import kernel

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

CUTS_KEPT = 4096
"""Fragments whose cut is remembered: the most that a run can have. Making one takes longer than a small merge."""


def _address(array: F32 | U8 | None) -> int:
    return 0 if array is None else array.ctypes.data


def check_floats(name: str, array: F32, n: int | None = None, *, writable: bool = False) -> int:
    """Check a flat float32 array and return its length."""
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.ndim != 1:
        what = f"{array.dtype} array of {array.ndim} dimensions" if isinstance(array, np.ndarray) else str(type(array))
        raise PayloadError(f"{name} must be a flat float32 array, got a {what}; use array.astype(np.float32).ravel()")
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise PayloadError(f"{name} must be contiguous and aligned; use np.ascontiguousarray")
    if n is not None and array.size != n:
        raise PayloadError(f"{name} has {array.size} elements, expected {n}; pass arrays of one fragment")
    if writable and not array.flags.writeable:
        raise PayloadError(f"{name} is read-only but is updated in place; pass a copy")
    return int(array.size)


def encode(
    kind: int,
    snapshot: F32,
    payload: U8,
    *,
    base: F32 | None = None,
    residual: F32 | None = None,
    new_residual: F32 | None = None,
) -> bool:
    """payload = enc(x), new_residual = x - dec(payload); x = snapshot - base + residual. False: x is not finite."""
    n = check_floats("snapshot", snapshot)
    for name, array in (("base", base), ("residual", residual), ("new residual", new_residual)):
        if array is not None:
            check_floats(name, array, n, writable=name == "new residual")
    compiled = kernel("encode")
    addresses = [_address(array) for array in (snapshot, base, residual, payload, new_residual)]
    return run_ranges(
        -(-n // BLOCK), SEGMENT_BLOCKS, lambda lo, hi, scratch: compiled(kind, n, lo, hi, *addresses, scratch)
    )


def decode(kind: int, payload: U8, target: F32, *, add: bool) -> None:
    """target = dec(payload), or target += dec(payload)."""
    n = check_floats("target", target, writable=True)
    compiled = kernel("decode")
    source, destination = _address(payload), _address(target)
    run_ranges(
        -(-n // BLOCK),
        SEGMENT_BLOCKS,
        lambda lo, hi, scratch: compiled(kind, n, lo, hi, source, destination, int(add), scratch),
    )


def rebase(new: F32, old: F32, moves: Sequence[tuple[F32, F32]], target: F32) -> None:
    """target = new - old - what happened between the two of each pair (after, before)."""
    n = check_floats("target", target, writable=True)
    for name, array in (("new", new), ("old", old), *(("a move", array) for pair in moves for array in pair)):
        check_floats(name, array, n)
    addresses = np.array([_address(array) for pair in moves for array in pair], dtype=np.int64)
    compiled, (after, before, out) = kernel("rebase"), (_address(array) for array in (new, old, target))
    run_ranges(-(-n // BLOCK), SEGMENT_BLOCKS, lambda lo, hi, _: compiled(n, lo, hi, after, before, addresses, out))


@dataclass(frozen=True, slots=True)
class Segments:
    """The fixed cut of a fragment behind every sum: at slice boundaries and every SEGMENT_BLOCKS blocks in a slice."""

    starts: I64  # blocks, one more than there are segments
    slices: I64  # slice of each segment
    slice_count: int

    def per_slice(self, partials: F64) -> F64:
        """Add up one number per segment into one per slice, always in the order of the segments."""
        return np.bincount(self.slices, weights=partials, minlength=self.slice_count).astype(np.float64)

    def run(self, function: RangeFunction) -> bool:
        """Call function(lo, hi, scratch) over the segments on several threads."""
        count = len(self.slices)
        # Models with many tiny tensors have many tiny segments: hand them out by the dozen.
        per_task = max(1, -(-count * SEGMENT_BLOCKS // max(int(self.starts[-1]), 1)))
        return run_ranges(count, per_task, function)


def cut_segments(slice_blocks: I64, blocks: int) -> Segments:
    """Cut `blocks` blocks by the slices (block offsets from 0 to `blocks`)."""
    return _cut(np.ascontiguousarray(slice_blocks, dtype=np.int64).tobytes(), blocks)


@lru_cache(maxsize=CUTS_KEPT)
def _cut(slice_blocks: bytes, blocks: int) -> Segments:
    offsets = np.frombuffer(slice_blocks, np.int64)
    if offsets.size < 1 or offsets[0] != 0 or offsets[-1] != blocks or np.any(np.diff(offsets) < 0):
        raise PayloadError(
            f"slice_blocks must rise from 0 to {blocks}, the blocks of this fragment; got {offsets.tolist()[:8]}..."
        )
    counts = -(-np.diff(offsets) // SEGMENT_BLOCKS)  # segments per slice
    slices = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)  # index of the first segment of the same slice
    starts = offsets[slices] + (np.arange(len(slices), dtype=np.int64) - first) * SEGMENT_BLOCKS
    return Segments(np.append(starts, np.int64(blocks)), slices, len(counts))


def inspect(kind: int, payload: U8, n: int, segments: Segments) -> tuple[bool, F64]:
    """Are all decoded values finite, and the sum of their squares per slice."""
    squares = np.zeros(len(segments.slices), np.float64)
    compiled, source = kernel("inspect"), _address(payload)
    finite = segments.run(lambda lo, hi, scratch: compiled(kind, n, lo, hi, source, segments.starts, squares, scratch))
    return finite, segments.per_slice(squares)


def alignment(kinds: Sequence[int], payloads: Sequence[U8], momentum: F32, segments: Segments) -> tuple[F64, F64]:
    """delta_i . momentum per slice and contribution, and momentum . momentum per slice, in float64."""
    blocks, compiled = int(segments.starts[-1]), kernel("alignment")
    check_floats("momentum", momentum, blocks * BLOCK)
    products = np.zeros((len(segments.slices), len(payloads) + 1), np.float64)
    addresses = np.array([_address(payload) for payload in payloads], dtype=np.int64)
    own, of = _address(momentum), np.array(kinds, np.int64)
    segments.run(
        lambda lo, hi, scratch: compiled(of, blocks, lo, hi, addresses, own, segments.starts, products, scratch)
    )
    per_slice = np.stack([segments.per_slice(column) for column in products.T], axis=1)
    return np.ascontiguousarray(per_slice[:, :-1]), per_slice[:, -1]


def direction(
    kinds: Sequence[int], payloads: Sequence[U8], coefficients: F64, segments: Segments, pull: F32 | None = None
) -> F64:
    """Squared norm per slice of sum_i coefficients[slice, i] * delta_i. Meant for sums of norm 1 or less.

    `pull`, if there is one, counts as one more delta and has the last column of the coefficients.
    """
    squares = np.zeros(len(segments.slices), np.float64)
    coefficients = np.ascontiguousarray(coefficients)  # the loops take its rows by address
    addresses = np.array([_address(payload) for payload in payloads], dtype=np.int64)
    blocks, compiled, pulling = int(segments.starts[-1]), kernel("direction"), _address(pull)
    of = np.array(kinds, np.int64)
    segments.run(
        lambda lo, hi, scratch: compiled(
            of, blocks, lo, hi, addresses, pulling, coefficients, segments.starts, segments.slices, squares, scratch
        )
    )
    return segments.per_slice(squares)


def accumulate(
    kinds: Sequence[int], payloads: Sequence[U8], coefficients: F64, segments: Segments, pull: F32 | None = None
) -> F32:
    """sum_i coefficients[slice, i] * delta_i, as `outer_step` adds it up; `pull` as of `direction`."""
    blocks, compiled, pulling = int(segments.starts[-1]), kernel("accumulate"), _address(pull)
    of = np.array(kinds, np.int64)
    coefficients = np.ascontiguousarray(coefficients)
    addresses = np.array([_address(payload) for payload in payloads], dtype=np.int64)
    total = np.empty(blocks * BLOCK, np.float32)
    out = _address(total)
    segments.run(
        lambda lo, hi, scratch: compiled(
            of, blocks, lo, hi, addresses, pulling, coefficients, segments.starts, segments.slices, out, scratch
        )
    )
    return total


@dataclass(frozen=True, slots=True)
class OuterStep:
    """What one outer step reads and writes. theta, momentum and residual are updated in place."""

    kinds_up: Sequence[int]
    """Of each contribution."""
    kind_down: int
    theta: F32
    momentum: F32
    residual: F32 | None
    update: U8
    sample: F32
    previous: F32 | None
    sample_every: int
    outer_lr: float
    outer_momentum: float
    pull: bool = False
    """The momentum, as it was before, counts as one more delta and has the last column of the coefficients."""


def outer_step(step: OuterStep, payloads: Sequence[U8], coefficients: F64, segments: Segments) -> tuple[bool, F64]:
    """g = sum_i coefficients[slice, i] * delta_i, then Nesterov and the downlink, in one pass over the memory.

    Returns whether the update is finite, and (sample . previous sample, sample . sample) of the gradient.
    """
    products = np.zeros((len(segments.slices), 2), np.float64)
    coefficients = np.ascontiguousarray(coefficients)
    addresses = np.array([_address(payload) for payload in payloads], dtype=np.int64)
    pull = step.momentum if step.pull else None
    state = (step.theta, step.momentum, step.residual, step.update, step.sample, step.previous, pull)
    state_addresses = tuple(_address(array) for array in state)
    kinds, rates = np.array(step.kinds_up, np.int64), (step.outer_lr, step.outer_momentum)
    compiled = kernel("outer_step")
    finite = segments.run(
        lambda lo, hi, scratch: compiled(
            kinds,
            step.kind_down,
            state_addresses,
            rates,
            lo,
            hi,
            addresses,
            coefficients,
            segments.starts,
            segments.slices,
            step.sample_every,
            products,
            scratch,
        )
    )
    return finite, np.add.reduce(products, axis=0)


def expand(target: F32, left: F32, right: F32, rank: int) -> None:
    """target[i, j] = sum over k of left[k, i] * right[k, j]; target is a contiguous matrix, the factors are flat."""
    rows, columns = target.shape
    compiled, addresses = kernel("expand"), [_address(array) for array in (left, right, target)]
    per_task = max(1, SEGMENT_BLOCKS * BLOCK // columns)
    run_ranges(rows, per_task, lambda lo, hi, scratch: compiled(lo, hi, columns, rank, rows, *addresses, scratch))


def times_rows(matrix: F32, right: F32) -> F32:
    """right @ matrix.T, in one order on every machine."""
    (rows, columns), rank = matrix.shape, len(right)
    made = np.empty((rank, rows), np.float32)
    compiled, addresses = kernel("times_rows"), [_address(array) for array in (matrix, right, made)]
    per_task = max(1, SEGMENT_BLOCKS * BLOCK // columns)
    run_ranges(rows, per_task, lambda lo, hi, scratch: compiled(lo, hi, columns, rank, rows, *addresses, scratch))
    return made


def times_columns(matrix: F32, left: F32) -> F32:
    """left @ matrix, in one order on every machine."""
    (rows, columns), rank = matrix.shape, len(left)
    made = np.empty((rank, columns), np.float32)
    compiled, addresses = kernel("times_columns"), [_address(array) for array in (matrix, left, made)]
    run_ranges(
        -(-columns // BLOCK), 1, lambda lo, hi, scratch: compiled(lo, hi, columns, rank, rows, *addresses, scratch)
    )
    return made


def warm_up(*, merge: bool = True) -> None:
    """Compile the kernels, or load them from the cache, so that the first real call does not wait for it.

    merge=False leaves out what only a syncer needs: more than half of the compile time.
    """
    values, payload = np.zeros(BLOCK, np.float32), np.zeros(4 * BLOCK, np.uint8)
    encode(FP32, values, payload)
    decode(FP32, payload, values, add=True)
    rebase(values, values, [], np.zeros(BLOCK, np.float32))
    if not merge:
        return
    segments = cut_segments(np.array([0, 1], np.int64), 1)
    inspect(FP32, payload, BLOCK, segments)
    direction([FP32], [payload], np.zeros((1, 1)), segments)
    accumulate([FP32], [payload], np.zeros((1, 1)), segments)
    alignment([FP32], [payload], values, segments)
    scratch = [np.zeros(BLOCK, np.float32) for _ in range(2)]
    step = OuterStep([FP32], FP32, values, scratch[0], None, payload, scratch[1], None, 1, 0.0, 0.0)
    outer_step(step, [np.zeros(4 * BLOCK, np.uint8)], np.zeros((1, 1)), segments)
