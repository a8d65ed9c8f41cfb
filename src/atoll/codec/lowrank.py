"""lowrank: matrices as the product of two thin ones, everything else as int4.

    lowrank         as lowrank:4
    lowrank:8       of rank 8: (rows + columns) * 8 numbers of 8 bits for each matrix

    each matrix     an int8 payload: the columns of `left`, then the rows of `right`
    the rest        an int4 payload of all values that are in no matrix, in their order

A matrix is a slice of a fragment that is whole rows of a tensor; tensors of more dimensions are matrices of their first
dimension by the rest. One for which int4 has as few bits is left to int4, as are vectors. Without shapes (`shaped` says
which) all of it is: that is int4 under another name.

value[i, j] = sum over k of left[i, k] * right[k, j], in fp32, one multiplication and one addition after the other, k
going up: every holder of Theta gets the same bits.

The encoder multiplies the matrix with fixed random signs, makes the columns orthonormal, and multiplies twice more
(PowerSGD's iteration, arXiv 1905.13727): that finds from 94% to all of what the best matrices of that rank have
(docs/results/sparse.md). `warmed` begins with the right factors of an earlier payload instead, as PowerSGD does: a
learner gives its last contribution that was merged. That is state of the encoder alone: whoever decodes knows nothing
of it. Updates begin anew each time, so that replays need nothing but what is recorded. What does not fit into the rank
goes into the residual, all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from atoll import kernels
from atoll.codec.fragments import Matrix
from atoll.codec.int4 import INT4
from atoll.codec.int8 import INT8
from atoll.codec.plain_codec import PlainCodec
from atoll.codec.protocol import F32, U8, Payload, flat_bytes, not_finite
from atoll.errors import ConfigError, PayloadError

RANK_DEFAULT = 4
RANK_MAX = 64
FACTOR_MAX = 1e36
"""A sum of RANK_MAX products of a factor with one of length 1 stays within fp32."""
TINY = 1e-30
SIGNS_SEED = 20
ITERATIONS = 2
FACTOR_BITS, REST_BITS = 8, 4


@dataclass(frozen=True)
class LowRank(PlainCodec):
    """A codec (`protocol.Codec`) for fragments with just these matrices."""

    name: str  # type: ignore[misc]
    rank: int
    matrices: tuple[Matrix, ...] = ()
    inside: int = field(init=False, default=0)
    """Values in matrices."""
    start: tuple[F32, ...] = field(default=(), compare=False, repr=False)
    """Of each matrix, the right factors to begin with; none: the signs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "inside", sum(m.rows * m.columns for m in self.matrices))

    def shaped(self, matrices: tuple[Matrix, ...]) -> LowRank:
        return _shaped(self.name, self.rank, matrices)

    def warmed(self, payload: U8) -> LowRank:
        """The same codec, which begins with the factors of this payload of its own; where they are zero, as before."""
        return replace(self, start=tuple(self._row_start(m, right) for m, _, right in self._of_payload(payload)))

    def _row_start(self, m: Matrix, right: F32) -> F32:
        rows = right.reshape(self.rank, m.columns)
        return np.where(rows.any(axis=1, keepdims=True), rows, _signs(self.rank, m.columns))

    def size_max(self, n: int) -> int:
        """Bytes of a payload of n values, exactly."""
        if n < self.inside:
            raise PayloadError(f"{n} values cannot hold the {self.inside} of this fragment's matrices; send it again")
        factors = sum(INT8.size_max((m.rows + m.columns) * self.rank) for m in self.matrices)
        return factors + INT4.size_max(n - self.inside)

    def encode(self, values: F32) -> U8:  # type: ignore[override]
        if not np.isfinite(values).all():
            raise not_finite(self.name)
        starts = self.start or tuple(_signs(self.rank, m.columns) for m in self.matrices)
        pairs = zip(self.matrices, starts, strict=True)
        factors = [INT8.encode(self._factors(_of(values, m), start)) for m, start in pairs]
        return np.concatenate([*factors, INT4.encode(values[self._rest(values.size)])])

    def decode(self, payload: Payload, n: int) -> F32:
        data, expected = flat_bytes(payload), self.size_max(n)
        if data.size != expected:
            raise PayloadError(f"{self.name} payload of {data.size} bytes, expected {expected} for {n} elements")
        values = np.empty(n, np.float32)
        for m, left, right in self._of_payload(data):
            kernels.expand(_of(values, m), left, right, self.rank)
        values[self._rest(n)] = INT4.decode(data[-INT4.size_max(n - self.inside) or data.size :], n - self.inside)
        return values

    def _of_payload(self, data: U8) -> Iterator[tuple[Matrix, F32, F32]]:
        """Each matrix with its factors, left and right, flat."""
        at = 0
        for m in self.matrices:
            count = (m.rows + m.columns) * self.rank
            size = INT8.size_max(count)
            left, right = np.split(INT8.decode(data[at : at + size], count), [m.rows * self.rank])
            yield m, left, right
            at += size

    def _rest(self, n: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        rest = np.ones(n, bool)
        for m in self.matrices:
            rest[m.offset : m.offset + m.rows * m.columns] = False
        return rest

    def _factors(self, matrix: F32, right: F32) -> F32:
        """left, column by column, then right, row by row; each column as long as its row, for they share scales."""
        top = np.float32(np.abs(matrix).max())
        if top < TINY:
            return np.zeros(sum(matrix.shape) * self.rank, np.float32)
        unit = matrix / top  # no product overflows or vanishes
        for _ in range(ITERATIONS):
            left = _orthonormal(kernels.times_rows(unit, right))
            right = kernels.times_columns(unit, left)
        scaled = np.clip(right.astype(np.float64) * float(top), -FACTOR_MAX, FACTOR_MAX)
        lengths = np.sqrt(np.sqrt(np.square(scaled).sum(axis=1, keepdims=True)))
        thin = np.concatenate([(left * lengths).ravel(), (scaled / np.where(lengths > 0.0, lengths, 1.0)).ravel()])
        return thin.astype(np.float32)


def _of(values: F32, m: Matrix) -> F32:
    """A view of one matrix."""
    return values[m.offset : m.offset + m.rows * m.columns].reshape(m.rows, m.columns)


@lru_cache(maxsize=256)
def _signs(rank: int, columns: int) -> F32:
    dice = np.random.default_rng([SIGNS_SEED, rank, columns])
    return (2.0 * dice.integers(0, 2, (rank, columns)) - 1.0).astype(np.float32)


def _orthonormal(rows: F32) -> F32:
    """The rows, each less what the ones before have of it, of length 1 or zero. Twice: once leaves rounding errors."""
    made = rows.astype(np.float64)
    for k in range(len(made)):
        before = float(np.sqrt(np.square(made[k]).sum()))
        for _ in range(2):
            for other in made[:k]:
                made[k] -= (made[k] * other).sum() * other
        length = float(np.sqrt(np.square(made[k]).sum()))
        made[k] = made[k] / length if length > 1e-6 * before and length > TINY else 0.0
    return made.astype(np.float32)


@lru_cache(maxsize=4096)
def _shaped(name: str, rank: int, matrices: tuple[Matrix, ...]) -> LowRank:
    thin = [m for m in matrices if (m.rows + m.columns) * rank * FACTOR_BITS < m.rows * m.columns * REST_BITS]
    return LowRank(name, rank, tuple(thin))


@lru_cache(maxsize=64)
def lowrank(parameters: str) -> LowRank:
    """The codec of `lowrank:PARAMETERS`. Equal parameters give the same object."""
    name = f"lowrank:{parameters}" if parameters else "lowrank"
    rank = int(parameters) if parameters.isascii() and parameters.isdigit() and len(parameters) < 4 else 0
    if parameters and not 1 <= rank <= RANK_MAX:
        raise ConfigError(f"{name!r} is no low-rank codec: use lowrank:RANK with a rank from 1 to {RANK_MAX}")
    return LowRank(name, rank or RANK_DEFAULT)
