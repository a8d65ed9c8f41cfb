"""Outer optimizers: what becomes of a merged gradient. One module for each.

An optimizer keeps arrays of a fragment's size, by name, which the syncer commits with the fragment and gives back after
a restart; an array that the disk does not hold begins as `init` says. What `update` returns is encoded with the
downlink's codec (and error feedback), and Theta advances by what was decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from atoll.codec.protocol import F32
from atoll.core import OUTERS


@dataclass(frozen=True, slots=True)
class OuterRates:
    """What settings say to every outer optimizer."""

    lr: float
    """`outer_lr`."""
    momentum: float
    """`outer_momentum`."""
    updates: int = 0
    """Updates since the state began, or began anew (`momentum_restart`)."""


class OuterOptimizer(Protocol):
    """Holds no state itself, and gives the same bits on every machine, so that a replay comes to the same model."""

    def init(self, size: int) -> dict[str, F32]:
        """The arrays of a fragment of this size, before its first update. theta and residual are taken names."""

    def update(self, gradient: F32, state: Mapping[str, F32], rates: OuterRates) -> F32:
        """What is to be added to Theta. Changes the arrays of the state in place; the gradient stays as it is."""


def get_outer(name: str) -> OuterOptimizer:
    """The outer optimizer called `name`; ConfigError naming the choices if there is none."""
    optimizer: OuterOptimizer = OUTERS.get(name)
    return optimizer
