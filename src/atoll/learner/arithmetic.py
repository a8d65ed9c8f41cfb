"""Where a learner's own copies of a fragment live, and how they are computed with.

The vault keeps published parameters, bases, residuals and snapshots, and says what is to be computed from them. It does
not look into them. `HostArithmetic` keeps them as flat fp32 arrays in host memory and uses the compiled loops. A
framework may keep them where its parameters are (`torch_arithmetic`): then only encoded bytes travel. Whatever computes
them, the bits are the same, so learners of either kind are in one run.

Arrays are never changed once they were made, so that any thread may read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll import kernels
from atoll.codec import Codec, get_codec
from atoll.core import SyncConfig
from atoll.learner.parameters import F32, Parameters

U8 = NDArray[np.uint8]
ArrayT = TypeVar("ArrayT")
"""A fragment's values: flat, fp32, in whatever form they are kept."""


class Arithmetic(Protocol[ArrayT]):
    """Background threads call these, except `rebased`, which the training thread may need as well."""

    def loaded(self, payload: U8) -> ArrayT:
        """The values of a fragment that came whole."""

    def updated(self, theta: ArrayT, codec: str | Codec, payload: U8) -> ArrayT:
        """theta + decode(payload). PayloadError if the payload is none."""

    def checksum(self, theta: ArrayT, version: int, expected: int) -> int:
        """The checksum (xxh3-64) of theta's bytes. Where reading them is costly, that of most versions may be taken for
        `expected`, if that is not 0: they follow from checked bytes."""

    def kept(self, fragment: int, theta: ArrayT) -> ArrayT:
        """`Parameters.as_kept`."""

    def moved(self, origin: ArrayT, after: ArrayT, before: ArrayT) -> ArrayT:
        """origin + (after - before)."""

    def rebased(
        self, new: ArrayT, old: ArrayT, moves: Sequence[tuple[ArrayT, ArrayT]], out: ArrayT | None = None
    ) -> ArrayT:
        """new - old - each of (after - before), in this order; in `out`, if it is given."""

    def encoded(
        self, codec: str | Codec, values: ArrayT, origin: ArrayT, residual: ArrayT | None, *, feedback: bool
    ) -> tuple[U8, ArrayT | None]:
        """`Codec.encode_delta`."""

    def on_host(self, array: ArrayT) -> F32:
        """The values in host memory: themselves, or a copy."""


class HostArithmetic:
    """Numpy arrays and the compiled loops."""

    def __init__(self, as_kept: Callable[[int, F32], F32] | None = None) -> None:
        """`as_kept` None: the parameters are fp32, so they keep what they are given."""
        self._as_kept = as_kept

    def loaded(self, payload: U8) -> F32:
        return np.frombuffer(payload, np.float32)

    def updated(self, theta: F32, codec: str | Codec, payload: U8) -> F32:
        target = theta.copy()
        get_codec(codec).decode_add(payload, target)
        return target

    def checksum(self, theta: F32, version: int, expected: int) -> int:
        return xxhash.xxh3_64_intdigest(theta.data)

    def kept(self, fragment: int, theta: F32) -> F32:
        return theta if self._as_kept is None else self._as_kept(fragment, theta)

    def moved(self, origin: F32, after: F32, before: F32) -> F32:
        return origin + (after - before)

    def rebased(self, new: F32, old: F32, moves: Sequence[tuple[F32, F32]], out: F32 | None = None) -> F32:
        increment = np.empty_like(new) if out is None else out
        kernels.rebase(new, old, moves, increment)
        return increment

    def encoded(
        self, codec: str | Codec, values: F32, origin: F32, residual: F32 | None, *, feedback: bool
    ) -> tuple[U8, F32 | None]:
        return get_codec(codec).encode_delta(values, origin, residual, feedback=feedback)

    def on_host(self, array: F32) -> F32:
        return array


def arithmetic_of(parameters: Parameters[Any], config: SyncConfig) -> Arithmetic[Any]:
    """What these parameters bring along for a run of these settings, or the host's."""
    own = getattr(parameters, "arithmetic", None)
    return own(config) if own is not None else HostArithmetic(parameters.as_kept)
