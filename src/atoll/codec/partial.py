"""Contributions on their way to a merged gradient: `reduce` some of them, `combine` what was reduced, `finish`.

What a merge needs of contributions are sums over them (`merges` says which), and sums can be taken in parts. A Partial
is such a part. It has one member per contribution, with the bytes as they came: nothing is decoded until the gradient
is made, in one pass over all of them. `added_up` makes one member of all, with the sums D and S as two fp32 arrays.
`condensed` makes one member with one encoded column, of each slice the sum that its method needs: a relay sends that.

What has the same bits, and what is equal up to rounding:

- Parts that were not added up, combined in the order of the learners' ids, finish with the same bits whatever the
  grouping: combining only puts the members in a row, and every sum is taken over that row, element by element in fp32
  and number by number in float64.
- A part that was added up has been rounded to fp32 (D and S have been divided by the sum of its weights, so that both
  are as large as one contribution's). What finishes from it is equal up to that rounding: for each level of the tree
  about 1e-7 of N, the contributions' mean norm, divided by |D| for methods that go by direction (contributions that
  nearly cancel have no certain direction). For the same grouping it has the same bits again, on every machine and for
  any number of threads: segments are cut by the layout, not by the work.
- A part that was condensed in fp32 is equal up to the same rounding. In a codec it has that codec's error besides. A
  slice that goes by direction, and whose contributions cancel, has no S: N * D stands for it.
- Contributions in a codec that the loops do not know are added up by that codec's own `accumulate`. Where codecs are
  mixed, the loops take each contribution as it came; one that they do not know is decoded first.

A correction turns single contributions towards the momentum, which only the syncer has: a part that was added up cannot
be corrected any more, and finishing it so is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll import kernels
from atoll.codec.fp32 import FP32
from atoll.codec.heloco import correct
from atoll.codec.kernel_codec import KernelCodec
from atoll.codec.merges import SliceSums, get_merge
from atoll.codec.protocol import BLOCK, F32, F64, I64, NORM_ZERO, U8, Codec, Payload, flat_bytes, get_codec, quotient
from atoll.errors import PayloadError
from atoll.kernels import Segments, cut_segments

DIRECTION_MIN = 1e-6
"""A mean direction shorter than this is degenerate (the contributions cancel): fp32 rounding of the sum of unit vectors
is of the order of 1e-7, so its direction would be noise. The slice falls back to the plain mean."""
NORM_MAX = 1e30
"""A merged norm above this counts as not finite. Below it, no sum, momentum or step can overflow fp32."""


@dataclass(frozen=True, slots=True)
class Turned:
    """A correction: column i of a slice counts as own[slice, i] * v_i + pull[slice, i] * momentum."""

    own: F64
    pull: F64
    momentum: F32


@dataclass(frozen=True, slots=True)
class Partial:
    """Weighted contributions to one fragment, single ones and groups that were added up. Changes nothing it holds."""

    codecs: tuple[Codec, ...]
    """Of each column. They are all known to the loops, or all one that is not."""
    columns: tuple[U8, ...]
    """The vectors, encoded: one of a single contribution (its delta), two of a group (D and S of its deltas)."""
    slice_blocks: I64
    segments: Segments
    """The cut by them."""
    weights: F64
    """[member] A, the sum of its weights."""
    radii: F64
    """[slice, member] N / A: of a single contribution its norm."""
    directed: F64
    """[slice, member] W / A: of a single contribution 1, or 0 if it is zero."""
    member: I64
    """[column]"""
    divisors: F64
    """[slice, column] What makes a direction of the column; infinite if D has no part of it."""
    in_mean: F64
    """[slice, column] How much of it is a part of S: 1, or less if it is shortened; 0 if it is none."""
    turned: Turned | None = None

    @property
    def kinds(self) -> tuple[int, ...] | None:
        """Of the columns, for the loops; None if those do not know them."""
        kinds = tuple(codec.kind for codec in self.codecs if isinstance(codec, KernelCodec))
        return kinds if len(kinds) == len(self.codecs) else None

    def shares(self) -> F64:
        """Weights that add up to 1, by member."""
        relative: F64 = self.weights / self.weights.max()
        shares: F64 = relative / relative.sum()
        return shares

    def mean_of(self, values: F64, shares: F64) -> F64:
        """The weighted mean over the members, per slice; a BLAS product might add in another order."""
        total = np.zeros(len(values), np.float64)
        for share, value in zip(shares, values.T, strict=True):
            total += share * value
        return total

    def share_directed(self, shares: F64) -> F64:
        """W: exactly 1 if nobody's is zero."""
        if (self.directed == 1.0).all():
            return np.ones(len(self.directed))
        return np.where((self.directed == 1.0).all(axis=1), 1.0, self.mean_of(self.directed, shares))

    def factors(self, relative: F64) -> F64:
        """Factors of the corrected contributions -> factors of the deltas as they came in, and of the momentum."""
        if self.turned is None:
            return relative
        towards = np.zeros(len(relative), np.float64)
        for factor, pull in zip(relative.T, self.turned.pull.T, strict=True):
            towards += factor * pull
        # Deltas are -v, and so everything here has the opposite sign.
        return np.concatenate([relative * self.turned.own, -towards[:, None]], axis=1)

    def sum(self, factors: F64) -> F32:
        """Sum of the columns, and of the momentum if there is a correction, times these factors [slice, column]."""
        own, kinds = factors[:, : len(self.columns)], self.kinds
        if kinds is not None:
            total = kernels.accumulate(kinds, self.columns, own, self.segments)
        else:
            total = self.codecs[0].accumulate(self.columns, own, self.slice_blocks)
        if self.turned is None:
            return total
        both = np.stack([np.ones(len(factors)), factors[:, -1]], axis=1)
        return kernels.accumulate([FP32.kind], [total.view(np.uint8)], both, self.segments, self.turned.momentum)

    def length(self, relative: F64) -> F64:
        """|sum of the contributions times these factors| per slice."""
        factors, kinds = self.factors(relative), self.kinds
        if kinds is not None:
            pull = self.turned.momentum if self.turned is not None else None
            return np.sqrt(kernels.direction(kinds, self.columns, factors, self.segments, pull))
        total = self.sum(factors)
        return np.sqrt(kernels.inspect(FP32.kind, total.view(np.uint8), total.size, self.segments)[1])

    def added_up(self) -> Partial:
        """One member with the sums of all, in fp32."""
        shares = self.shares()
        of_column, slices = shares[self.member], len(self.divisors)
        mean = of_column * self.in_mean
        sums = (self.sum(quotient(of_column, self.divisors)), self.sum(mean))
        return Partial(
            codecs=(FP32, FP32),
            columns=tuple(values.view(np.uint8) for values in sums),
            slice_blocks=self.slice_blocks,
            segments=self.segments,
            weights=np.array([self.weights.sum()]),
            radii=self.mean_of(self.radii, shares)[:, None],
            directed=self.share_directed(shares)[:, None],
            member=np.zeros(2, np.int64),
            divisors=np.tile([1.0, np.inf], (slices, 1)),
            in_mean=np.tile([0.0, 1.0], (slices, 1)),
        )

    def condensed(
        self, merges: Sequence[str], codec: Codec, residual: F32 | None, *, feedback: bool = True
    ) -> tuple[Partial, F32 | None]:
        """One member with one column, as a single contribution has: of each slice N * D / A where its method goes by
        direction, else S / A. Also gives what encoding it has lost, for the next one of this fragment."""
        shares = self.shares()
        radii, of_column = self.mean_of(self.radii, shares), shares[self.member]
        directions = quotient(of_column, self.divisors) * radii[:, None]
        by_direction = np.array([get_merge(name).by_direction for name in merges], bool)
        values = self.sum(np.where(by_direction[:, None], directions, of_column * self.in_mean))
        payload, left = codec.encode_delta(values, None, residual, feedback=feedback)
        one = reduce([payload], [codec], [float(self.weights.sum())], [radii], self.slice_blocks)
        return replace(one, directed=self.share_directed(shares)[:, None]), left


@dataclass(frozen=True, slots=True)
class MergedGradient:
    """sum of coefficients[slice, column] * column (and of the momentum, last): not carried out yet."""

    partial: Partial
    coefficients: F64
    norm: float
    """Over the fragment; NaN or above NORM_MAX: it is not finite, and there are no values."""

    @property
    def finite(self) -> bool:
        return self.norm <= NORM_MAX

    def values(self) -> F32:
        return self.partial.sum(self.coefficients)


def reduce(
    payloads: Sequence[Payload],
    codec: str | Sequence[Codec],
    weights: Sequence[float],
    norms: Sequence[F64],
    slice_blocks: I64,
) -> Partial:
    """Encoded contributions in the order of their learners' ids, with the norms per slice of `Codec.inspect`. They have
    one codec, by name, or one each."""
    offsets = np.ascontiguousarray(slice_blocks, np.int64)
    segments = cut_segments(offsets, int(offsets[-1]) if offsets.size else 0)
    of = [get_codec(codec)] * len(payloads) if isinstance(codec, str) else codec
    codecs, columns = _columns(payloads, of, offsets)
    given, lengths = _check_contributions(len(payloads), weights, norms, segments.slice_count)
    return Partial(
        codecs=codecs,
        columns=columns,
        slice_blocks=offsets,
        segments=segments,
        weights=given,
        radii=lengths,
        directed=_has_direction(lengths),
        member=np.arange(len(payloads)),
        divisors=lengths,
        in_mean=np.ones_like(lengths),
    )


def _columns(
    payloads: Sequence[Payload], codecs: Sequence[Codec], slice_blocks: I64
) -> tuple[tuple[Codec, ...], tuple[U8, ...]]:
    """The payloads as the loops take them. One in a codec that they do not know is decoded, unless all are in it."""
    if len(set(map(id, codecs))) == 1 and not isinstance(codecs[0], KernelCodec):
        return tuple(codecs), tuple(flat_bytes(payload) for payload in payloads)
    columns, of, ones = [], [], np.ones((slice_blocks.size - 1, 1))
    for payload, codec in zip(payloads, codecs, strict=True):
        known = isinstance(codec, KernelCodec)
        columns.append(
            codec.check(payload, int(slice_blocks[-1]) * BLOCK)
            if isinstance(codec, KernelCodec)
            else codec.accumulate([payload], ones, slice_blocks).view(np.uint8)
        )
        of.append(codec if known else FP32)
    return tuple(of), tuple(columns)


def combine(partials: Sequence[Partial]) -> Partial:
    """All members of several parts, in the order given, which is that of their learners' ids. Parts in a codec that the
    loops do not know are added up first, unless all are in it."""
    first = partials[0]
    if any(not np.array_equal(part.slice_blocks, first.slice_blocks) for part in partials):
        raise PayloadError("parts of different fragments or layouts cannot be combined; combine those of one fragment")
    different = any(part.codecs[0] is not first.codecs[0] for part in partials)
    if different and any(part.kinds is None for part in partials):
        partials = [part if part.kinds is not None else part.added_up() for part in partials]
    starts = np.cumsum([0, *(part.weights.size for part in partials)])
    return Partial(
        codecs=tuple(codec for part in partials for codec in part.codecs),
        columns=tuple(column for part in partials for column in part.columns),
        slice_blocks=first.slice_blocks,
        segments=first.segments,
        weights=np.concatenate([part.weights for part in partials]),
        radii=np.concatenate([part.radii for part in partials], axis=1),
        directed=np.concatenate([part.directed for part in partials], axis=1),
        member=np.concatenate([start + part.member for start, part in zip(starts, partials, strict=False)]),
        divisors=np.concatenate([part.divisors for part in partials], axis=1),
        in_mean=np.concatenate([part.in_mean for part in partials], axis=1),
    )


def corrected(partial: Partial, momentum: F32) -> Partial:
    """Every contribution turned towards the momentum (`heloco`)."""
    if partial.weights.size != len(partial.columns):
        raise PayloadError("a correction takes single contributions, and some were added up; use correction=none")
    products, squares = alignment(partial, momentum)
    turned = correct(partial.radii, -products * partial.in_mean, np.sqrt(squares), zero=NORM_ZERO)
    return replace(
        partial,
        radii=turned.norms,
        divisors=turned.norms,
        directed=_has_direction(turned.norms),
        in_mean=np.ones_like(partial.in_mean),
        turned=Turned(turned.own * partial.in_mean, turned.pull, momentum),
    )


def alignment(partial: Partial, momentum: F32) -> tuple[F64, F64]:
    """delta_i . momentum per slice and contribution, and momentum . momentum per slice."""
    segments, kinds = partial.segments, partial.kinds
    if kinds is not None:
        return kernels.alignment(kinds, partial.columns, momentum, segments)
    products, ones = [], np.ones((len(partial.divisors), 1))
    for column in partial.columns:  # one decoded fragment at a time
        values = partial.codecs[0].accumulate([column], ones, partial.slice_blocks).view(np.uint8)
        of_one, squares = kernels.alignment([FP32.kind], [values], momentum, segments)
        products.append(of_one[:, 0])
    return np.stack(products, axis=1), squares


def finish(partial: Partial, merges: Sequence[str], share: float = 1.0) -> MergedGradient:
    """The merged gradient, slice by slice by the method of that name, times the share of the step that it takes."""
    shares, slices = partial.shares(), len(partial.radii)
    if len(merges) != slices:
        raise PayloadError(f"{len(merges)} merge methods for {slices} slices: one each is needed")
    names = np.asarray(merges, object)
    methods = {name: get_merge(name) for name in dict.fromkeys(merges)}
    by_direction = np.array([methods[name].by_direction for name in merges], bool)
    radius = partial.mean_of(partial.radii, shares)
    if not np.all(radius <= NORM_MAX):
        return MergedGradient(partial, np.zeros_like(partial.divisors), math.nan)
    # Divided by |v_i| (D) or by the radius (S / N), sums have norm 1 or less, whatever the size of the deltas.
    of_column = shares[partial.member]
    mean = quotient(of_column * partial.in_mean, radius[:, None])
    relative = np.where(by_direction[:, None], quotient(of_column, partial.divisors), mean)
    length = partial.length(relative)
    degenerate = by_direction & (length < DIRECTION_MIN) & (radius >= NORM_ZERO)
    if degenerate.any():
        relative = np.where(degenerate[:, None], mean, relative)
        length = partial.length(relative)
    stretch, directed = radius.copy(), partial.share_directed(shares)
    for name, method in methods.items():
        at = (names == name) & ~degenerate
        stretch[at] = method.stretch(SliceSums(radius[at], length[at], directed[at]))
    slice_norms = stretch * length  # NaN if a payload is not what its norms said
    coefficients = np.ascontiguousarray(-stretch[:, None] * partial.factors(relative))
    norm = math.hypot(*slice_norms.tolist())
    return MergedGradient(partial, *((coefficients * share, norm * share) if share != 1.0 else (coefficients, norm)))


def _has_direction(norms: F64) -> F64:
    return np.where(norms < NORM_ZERO, 0.0, 1.0)


def _check_contributions(
    count: int, weights: Sequence[float], norms: Sequence[F64], slice_count: int
) -> tuple[F64, F64]:
    """Weights, and norms as [slice, contribution]."""
    shares = np.asarray(weights, np.float64)
    if count == 0 or shares.shape != (count,) or len(norms) != count:
        raise PayloadError(f"{count} payloads with {shares.size} weights and {len(norms)} norms: one each is needed")
    if not np.all(np.isfinite(shares)) or np.any(shares < 0.0) or not shares.sum() > 0.0:
        raise PayloadError(f"weights must be finite, not negative and not all zero; got {list(weights)}")
    lengths = np.stack([np.asarray(norm, np.float64) for norm in norms], axis=1)
    if lengths.shape != (slice_count, count):
        raise PayloadError(f"norms have shape {lengths.shape[::-1]}, expected ({count}, {slice_count})")
    return shares, lengths
