"""The syncer's arithmetic for one round: merge encoded contributions, take the outer step, encode the update.

Follows sections 4.4 to 4.8 of the design. With contributions delta_i = theta_i - base_i, v_i = -delta_i and weights w_i
that add up to 1, per slice:

    mean       g = sum w_i v_i
    RDA        g = r * unit(d)              r = sum w_i |v_i|, d = sum w_i v_i / |v_i|
    half RDA   g = r * sqrt(|d| / W) * unit(d)     W = sum of those w_i whose v_i is not zero

times the share of the step that the round takes. What contributions disagree about cancels in the mean, so it is
shorter than they are, by |d| where they are equally long. RDA gives all of that length back, half RDA the square root:
where they are equally long, its length is the geometric mean of the other two. With one learner the three are the same.
A contribution of zero has no direction to disagree with, hence W.

All are sums with one coefficient per contribution and slice, so one kernel serves all. The norms |v_i| are known from
inspection at arrival; what RDA needs besides is |d|. That takes one pass over the contributions
(about 4 bytes per parameter for 8 of them in int4), less than storing the sum for the second pass would (8 bytes).

Then Nesterov and the downlink with error feedback, per element in fp32:

    buf = mu * buf + g;  x = -lr * (g + mu * buf) + residual;  U = enc(x);  theta += dec(U);  residual = x - dec(U)

With `correction` each v_i is first turned towards the momentum (heloco.py says how). A corrected v_i is a sum of v_i
and the momentum, so the merged gradient still is one sum, with the momentum as one more summand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.codec.codecs import BLOCK, F32, F64, I64, U8, Codec, Payload, get_codec
from atoll.codec.heloco import correct
from atoll.core.config import CORRECTIONS, one_of
from atoll.errors import PayloadError
from atoll.kernels.run import Segments, check_floats, cut_segments

MODE_RDA, MODE_MEAN, MODE_HALF_RDA = 0, 1, 2
MODES: Mapping[str, int] = {"rda": MODE_RDA, "mean": MODE_MEAN, "half-rda": MODE_HALF_RDA}
"""How a slice is merged, by the name of the setting."""

DIRECTION_MIN = 1e-6
"""A mean direction shorter than this is degenerate (the contributions cancel): fp32 rounding of the sum of unit vectors
is of the order of 1e-7, so its direction would be noise. The slice falls back to the plain mean."""
NORM_ZERO = 1e-30
"""A slice of smaller norm counts as zero: it has no direction, and 1 / norm would leave the range of fp32."""
NORM_MAX = 1e30
"""A merged norm above this counts as not finite. Below it, no sum, momentum or step can overflow fp32."""
SAMPLE_ALL_MAX = 1 << 20
"""Fragments up to this many elements keep the whole last gradient for rho."""
SAMPLE_EVERY = 16
"""Larger fragments keep one block in this many: 0.25 bytes per parameter, and rho to about 1 / sqrt(n / 16)."""


@dataclass(frozen=True, slots=True)
class GradientSample:
    """A fixed sample of blocks of a fragment's merged gradient, to compare with the next one."""

    values: F32
    norm: float


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What came of a merge. If not `finite`, nothing was changed and the rest is empty."""

    update: U8
    gradient_norm: float
    rho: float
    """Cosine between this merged gradient and the previous one; NaN for the first or when one is zero."""
    sample: GradientSample
    finite: bool


def merge_fragment(
    *,
    payloads: Sequence[Payload],
    codec_up: str,
    weights: Sequence[float],
    norms: Sequence[F64],
    theta: F32,
    momentum: F32,
    residual: F32 | None,
    codec_down: str,
    slice_blocks: I64,
    slice_modes: NDArray[np.uint8],
    outer_lr: float,
    outer_momentum: float,
    previous: GradientSample | None,
    feedback: bool = True,
    correction: str = "none",
    restart: bool = False,
    share: float = 1.0,
) -> MergeResult:
    """Merge contributions (in learner-id order) into theta, momentum and residual, in place.

    `norms` are those of `Codec.inspect`. `residual` is None exactly when codec_down is lossless or there is no
    `feedback`. `restart` sets the momentum to zero first. The merged gradient is multiplied by `share`. If it is not
    finite, no state is touched and the result says so.
    """
    up, down = get_codec(codec_up), get_codec(codec_down)
    n = _check_state(theta, momentum, residual, down, feedback)
    data = [up.check(payload, n) for payload in payloads]
    segments = cut_segments(slice_blocks, n // BLOCK)
    shares, lengths = _check_contributions(len(data), weights, norms, segments.slice_count)
    modes = np.asarray(slice_modes)
    if modes.shape != (segments.slice_count,):
        raise PayloadError(f"slice_modes has shape {modes.shape}, expected ({segments.slice_count},)")

    parts = _Parts(up, data, shares, lengths, modes, segments)
    if one_of("correction", correction, CORRECTIONS) == "heloco" and not restart:
        parts = _corrected(parts, momentum)
    coefficients, gradient_norm = _coefficients(parts)
    if share != 1.0:
        coefficients, gradient_norm = coefficients * share, gradient_norm * share
    every = 1 if n <= SAMPLE_ALL_MAX else SAMPLE_EVERY
    sample = np.empty(-(-(n // BLOCK) // every) * BLOCK, np.float32)
    if not gradient_norm <= NORM_MAX:
        empty = GradientSample(np.empty(0, np.float32), 0.0)
        return MergeResult(np.empty(0, np.uint8), math.nan, math.nan, empty, finite=False)
    if previous is not None and previous.values.size != sample.size:
        raise PayloadError(f"previous gradient sample has {previous.values.size} elements, expected {sample.size}")

    if restart:
        momentum[:] = 0.0
    update = np.empty(down.encoded_size(n), np.uint8)
    step = kernels.OuterStep(
        kind_up=up.kind,
        kind_down=down.kind,
        theta=theta,
        momentum=momentum,
        residual=residual,
        update=update,
        sample=sample,
        previous=None if previous is None else previous.values,
        sample_every=every,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        pull=parts.momentum is not None,
    )
    finite, (cross, own) = kernels.outer_step(step, data, coefficients, segments)
    if not finite:
        raise PayloadError(
            "the outer state of a fragment is not finite: momentum or residual was damaged before this merge; restart "
            "the syncer from its last good state"
        )
    kept = GradientSample(sample, math.sqrt(own))
    scale = kept.norm * (math.nan if previous is None else previous.norm)
    return MergeResult(update, gradient_norm, cross / scale if scale > 0.0 else math.nan, kept, finite=True)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a merged gradient is made of."""

    up: Codec
    data: list[U8]
    shares: F64
    lengths: F64
    """Norms as [slice, contribution]; of the corrected contributions, where there is a correction."""
    modes: NDArray[np.uint8]
    segments: Segments
    momentum: F32 | None = None
    """Only with a correction: contribution i of a slice is own[slice, i] * v_i + pull[slice, i] * momentum."""
    own: F64 | None = None
    pull: F64 | None = None

    def columns(self, relative: F64) -> F64:
        """Factors of the corrected contributions -> factors of the deltas as they came in, and of the momentum."""
        if self.own is None or self.pull is None:
            return relative
        towards = np.zeros(len(relative), np.float64)
        for factor, pull in zip(relative.T, self.pull.T, strict=True):
            towards += factor * pull
        # Deltas are -v, and so everything here has the opposite sign.
        return np.concatenate([relative * self.own, -towards[:, None]], axis=1)

    def length(self, relative: F64) -> F64:
        """|sum of the contributions times these factors| per slice."""
        columns = self.columns(relative)
        return np.sqrt(kernels.direction(self.up.kind, self.data, columns, self.segments, self.momentum))


def _corrected(parts: _Parts, momentum: F32) -> _Parts:
    products, squares = kernels.alignment(parts.up.kind, parts.data, momentum, parts.segments)
    corrected = correct(parts.lengths, -products, np.sqrt(squares), zero=NORM_ZERO)
    return replace(parts, lengths=corrected.norms, momentum=momentum, own=corrected.own, pull=corrected.pull)


def _coefficients(parts: _Parts) -> tuple[F64, float]:
    """coefficients[slice, i] with g = sum_i coefficients * delta_i, and |g| over the fragment. Touches no state."""
    shares, lengths = parts.shares, parts.lengths
    by_direction, half = parts.modes != MODE_MEAN, parts.modes == MODE_HALF_RDA
    radius = np.zeros(len(lengths), np.float64)
    for share, length_of_one in zip(shares, lengths.T, strict=True):
        radius += share * length_of_one  # sum w_i |v_i| per slice; a BLAS product might add in another order
    if not np.all(radius <= NORM_MAX):
        return np.zeros_like(lengths), math.nan
    # Divided by |v_i| (RDA) or by the radius (mean), sums have norm 1 or less, whatever the size of the deltas.
    divisor = np.where(by_direction[:, None], lengths, np.broadcast_to(radius[:, None], lengths.shape))
    relative = _over(np.broadcast_to(shares, lengths.shape), divisor)
    length = parts.length(relative)
    degenerate = by_direction & (length < DIRECTION_MIN) & (radius >= NORM_ZERO)
    if degenerate.any():
        mean = _over(np.broadcast_to(shares, lengths.shape), np.broadcast_to(radius[:, None], lengths.shape))
        relative = np.where(degenerate[:, None], mean, relative)
        length = parts.length(relative)
    # A square root is correctly rounded on every machine; other powers are not.
    taken = np.where(half, np.sqrt(length * _with_direction(shares, lengths)), length)
    stretch = np.where(by_direction & ~degenerate, _over(radius, taken), radius)
    slice_norms = stretch * length  # NaN if a payload is not what its norms said
    return np.ascontiguousarray(-stretch[:, None] * parts.columns(relative)), math.hypot(*slice_norms.tolist())


def _with_direction(shares: F64, lengths: F64) -> F64:
    """Sum of the shares of those contributions to a slice that are not zero: exactly 1 if all are."""
    total = np.zeros(len(lengths), np.float64)
    for share, length_of_one in zip(shares, lengths.T, strict=True):
        total += np.where(length_of_one < NORM_ZERO, 0.0, share)
    return np.where((lengths < NORM_ZERO).any(axis=1), total, 1.0)


def _over(numerator: F64, divisor: F64) -> F64:
    """numerator / divisor, and 0 where the divisor counts as zero."""
    small = divisor < NORM_ZERO
    return np.where(small, 0.0, numerator / np.where(small, 1.0, divisor))


def _check_state(theta: F32, momentum: F32, residual: F32 | None, down: Codec, feedback: bool) -> int:
    n = check_floats("theta", theta, writable=True)
    check_floats("momentum", momentum, n, writable=True)
    if n % BLOCK:
        raise PayloadError(f"a fragment has a multiple of {BLOCK} elements, got {n}; pad every slice with zeros")
    needed = feedback and not down.lossless
    if needed != (residual is not None):
        without = "" if feedback else " without feedback"
        raise PayloadError(f"codec {down.name}{without} {'needs a' if needed else 'keeps no'} residual")
    if residual is not None:
        check_floats("residual", residual, n, writable=True)
    return n


def _check_contributions(
    count: int, weights: Sequence[float], norms: Sequence[F64], slice_count: int
) -> tuple[F64, F64]:
    """Weights normalised to add up to 1, and norms as [slice, contribution]."""
    shares = np.asarray(weights, np.float64)
    if count == 0 or shares.shape != (count,) or len(norms) != count:
        raise PayloadError(f"{count} payloads with {shares.size} weights and {len(norms)} norms: one each is needed")
    if not np.all(np.isfinite(shares)) or np.any(shares < 0.0) or not shares.sum() > 0.0:
        raise PayloadError(f"weights must be finite, not negative and not all zero; got {list(weights)}")
    lengths = np.stack([np.asarray(norm, np.float64) for norm in norms], axis=1)
    if lengths.shape != (slice_count, count):
        raise PayloadError(f"norms have shape {lengths.shape[::-1]}, expected ({count}, {slice_count})")
    return shares / shares.max() / (shares / shares.max()).sum(), lengths
