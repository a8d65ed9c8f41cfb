"""The syncer's arithmetic for one round: merge contributions, take the outer step, encode the update.

    gradient    of contributions delta_i = theta_i - base_i: `partial` and `merges`
    outer step  x = what the outer optimizer makes of it, + residual: `outer`
    downlink    U = enc(x);  theta += dec(U);  residual = x - dec(U)

A merged gradient is a sum with one coefficient per contribution and slice. The norms |v_i| are known from inspection at
arrival; what the coefficients need besides is the length of one sum. That takes one pass over the contributions (about
4 bytes per parameter for 8 of them in int4), less than storing the sum for the second pass would (8 bytes). The second
pass is one compiled loop over everything else, gradient, Nesterov and downlink: `_fused`. What is not built in, be it a
codec or an outer optimizer, goes the plain way, step by step through whole arrays; where both ways are possible, both
give the same bits (but for the last digits of rho).

With `correction` each contribution is first turned towards the momentum (heloco.py says how). It is then a sum of what
came in and the momentum, so the merged gradient still is one sum, with the momentum as one more summand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atoll import kernels
from atoll.codec.fp32 import FP32
from atoll.codec.kernel_codec import KernelCodec
from atoll.codec.outer import OuterRates, get_outer
from atoll.codec.outer.nesterov import Nesterov
from atoll.codec.partial import MergedGradient, Partial, corrected, finish
from atoll.codec.protocol import BLOCK, F32, F64, U8, Codec, get_codec
from atoll.core import CORRECTIONS, one_of
from atoll.errors import PayloadError
from atoll.kernels import check_floats, cut_segments

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


@dataclass(frozen=True, slots=True)
class OuterTarget:
    """A fragment as a merge changes it, in place."""

    theta: F32
    state: Mapping[str, F32]
    """The outer optimizer's."""
    residual: F32 | None
    """None exactly when the downlink is lossless or has no feedback."""


def merge_fragment(
    partial: Partial,
    merges: Sequence[str],
    target: OuterTarget,
    *,
    codec_down: str | Codec,
    outer: str = "nesterov",
    rates: OuterRates,
    previous: GradientSample | None,
    feedback: bool = True,
    correction: str = "none",
    restart: bool = False,
    share: float = 1.0,
) -> MergeResult:
    """Merge contributions, slice by slice by the method of that name, into the target.

    `restart` lets the outer optimizer begin anew first. The merged gradient is multiplied by `share`. If it is not
    finite, no state is touched and the result says so.
    """
    optimizer, down = get_outer(outer), get_codec(codec_down)
    n = _check_target(target, down, feedback)
    if int(partial.slice_blocks[-1]) * BLOCK != n:
        raise PayloadError(f"the contributions have {partial.slice_blocks[-1] * BLOCK} elements each, theta has {n}")
    if one_of("correction", correction, CORRECTIONS) == "heloco" and not restart:
        partial = corrected(partial, target.state["momentum"])
    gradient = finish(partial, merges, share)
    if not gradient.finite:
        nothing = GradientSample(np.empty(0, np.float32), 0.0)
        return MergeResult(np.empty(0, np.uint8), math.nan, math.nan, nothing, finite=False)
    every = 1 if n <= SAMPLE_ALL_MAX else SAMPLE_EVERY
    sample = np.empty(-(-(n // BLOCK) // every) * BLOCK, np.float32)
    if previous is not None and previous.values.size != sample.size:
        raise PayloadError(f"previous gradient sample has {previous.values.size} elements, expected {sample.size}")

    if restart:
        for name, array in optimizer.init(n).items():
            target.state[name][:] = array
    before = None if previous is None else previous.values
    kinds = partial.kinds
    if kinds is not None and isinstance(down, KernelCodec) and isinstance(optimizer, Nesterov):
        update, (cross, own) = _fused(gradient, kinds, target, down, rates, sample, before, every)
    else:
        values = gradient.values()
        sample[:] = values.reshape(-1, BLOCK)[::every].ravel()
        update = _plain(optimizer.update(values, target.state, rates), target, down)
        cross, own = _products(sample, before)
    kept = GradientSample(sample, math.sqrt(own))
    scale = kept.norm * (math.nan if previous is None else previous.norm)
    return MergeResult(update, gradient.norm, cross / scale if scale > 0.0 else math.nan, kept, finite=True)


def _fused(
    gradient: MergedGradient,
    kinds_up: Sequence[int],
    target: OuterTarget,
    down: KernelCodec,
    rates: OuterRates,
    sample: F32,
    previous: F32 | None,
    every: int,
) -> tuple[U8, F64]:
    """Gradient, outer step and downlink in one pass; the update, and (sample . previous, sample . sample)."""
    partial = gradient.partial
    update = np.empty(down.size_max(target.theta.size), np.uint8)
    step = kernels.OuterStep(
        kinds_up=kinds_up,
        kind_down=down.kind,
        theta=target.theta,
        momentum=target.state["momentum"],
        residual=target.residual,
        update=update,
        sample=sample,
        previous=previous,
        sample_every=every,
        outer_lr=rates.lr,
        outer_momentum=rates.momentum,
        pull=partial.turned is not None,
    )
    finite, products = kernels.outer_step(step, partial.columns, gradient.coefficients, partial.segments)
    if not finite:
        raise PayloadError(
            "the outer state of a fragment is not finite: momentum or residual was damaged before this merge; restart "
            "the syncer from its last good state"
        )
    return update, products


def _plain(step: F32, target: OuterTarget, down: Codec) -> U8:
    """Encode a step, and advance Theta by what it decodes to."""
    # A downlink without residual adds a zero as well, which makes +0 of -0: the loops do.
    x = step + np.float32(0.0) if target.residual is None else step
    update, rest = down.encode_delta(x, None, target.residual, feedback=target.residual is not None)
    down.decode_add(update, target.theta)
    if target.residual is not None and rest is not None:
        target.residual[:] = rest
    return update


def _products(sample: F32, previous: F32 | None) -> tuple[float, float]:
    """(sample . previous, sample . sample)."""
    blocks = sample.size // BLOCK
    segments = cut_segments(np.array([0, blocks], np.int64), blocks)
    other = (sample if previous is None else previous).view(np.uint8)
    cross, own = kernels.alignment([FP32.kind], [other], sample, segments)
    return float(cross[0, 0]), float(own[0])


def _check_target(target: OuterTarget, down: Codec, feedback: bool) -> int:
    n = check_floats("theta", target.theta, writable=True)
    if n % BLOCK:
        raise PayloadError(f"a fragment has a multiple of {BLOCK} elements, got {n}; pad every slice with zeros")
    for name, array in target.state.items():
        check_floats(name, array, n, writable=True)
    needed = feedback and not down.lossless
    if needed != (target.residual is not None):
        without = "" if feedback else " without feedback"
        raise PayloadError(f"codec {down.name}{without} {'needs a' if needed else 'keeps no'} residual")
    if target.residual is not None:
        check_floats("residual", target.residual, n, writable=True)
    return n
