"""How a merged gradient follows from sums over the contributions: one module for each method.

Per tensor slice, with weights w_i that add up to 1 and v_i = -delta_i:

    N = sum w_i |v_i|     W = sum of those w_i whose v_i is not zero     D = sum w_i unit(v_i)     S = sum w_i v_i

A method takes a multiple of D or of S / N. Both have norm 1 or less, whatever the size of the deltas. All of these are
sums, so parts of them can be added up anywhere (`partial.combine`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from atoll.codec.protocol import F64
from atoll.core import MERGES


@dataclass(frozen=True, slots=True)
class SliceSums:
    """What a method may go by: one number per slice of each."""

    radius: F64
    """N."""
    length: F64
    """|D|, or |S| / N for a method that goes by vectors. Never so small that its direction would be noise."""
    directed: F64
    """W. A contribution of zero has no direction to disagree with."""


class MergeMethod(Protocol):
    """A way to merge. Where D is degenerate (the contributions cancel), the plain mean is taken instead."""

    @property
    def by_direction(self) -> bool:
        """True: the gradient is a multiple of D. False: of S / N."""

    def stretch(self, sums: SliceSums) -> F64:
        """The multiple, per slice."""


def get_merge(name: str) -> MergeMethod:
    """The merge method called `name`; ConfigError naming the choices if there is none."""
    method: MergeMethod = MERGES.get(name)
    return method
