"""How much of its time a synchronous method computes, on a link of a given speed.

The model is a small graph of one learner's work and its link, as in the simulations behind the published
compute-utilisation tables (docs/PLAN.md):

    compute   a step is a forward pass of a third of its time and a backward pass of two thirds, over equal layers
    ready     in the last step before an exchange, a layer may be sent as soon as its backward pass is over
    link      one layer after the other, in the order in which they became ready, each at the full speed of the link
    needed    the layer's next forward pass, `overlap` steps later, waits until its exchange is complete

Data-parallel exchanges every layer in every step; DiLoCo every layer in every H-th step; Streaming DiLoCo a few layers
at a time, each group in every H-th step. Utilisation is compute time over all time, in the steady state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

TICKS_FORWARD, TICKS_BACKWARD = 1, 2
"""A layer's backward pass costs twice its forward pass: two matrix products per weight instead of one. Counting compute
time in whole ticks keeps the order of moments exact."""
PERIODS = 3
"""The first periods fill the link; the last one is measured. In all cases here the second already equals the third."""
GBIT_S_MIN, GBIT_S_MAX = 1e-9, 1e9
"""Bounds of the search for a bandwidth: a bit per second, and a million times the fastest network card."""
SEARCH_STEPS = 80
"""Halvings of the bounds' ratio (60 doublings): the answer is exact to a float's last digits."""


@dataclass(frozen=True, slots=True)
class MethodTraffic:
    """What a method sends, and when. `groups` are the layers that are exchanged together, counted from the input."""

    gbit: float
    """Bits that cross one learner's link in each direction for one exchange of the whole model, in Gbit."""
    layers: int
    step_s: float
    period_steps: int
    """Steps between two exchanges of the same layer (H)."""
    groups: tuple[tuple[int, ...], ...]
    spacing_steps: int = 0
    """Steps between the exchanges of two groups."""
    overlap: int = 0
    """Steps that an exchange may take while training goes on (tau)."""
    latency_s: float = 0.0
    """Time from a layer's last bit on the link to its result."""


def data_parallel(gbit: float, layers: int, step_s: float, *, latency_s: float = 0.0) -> MethodTraffic:
    """All layers in every step, each as soon as its gradient is there."""
    return MethodTraffic(gbit, layers, step_s, 1, (tuple(range(layers)),), latency_s=latency_s)


def diloco(gbit: float, layers: int, step_s: float, *, sync_every: int, latency_s: float = 0.0) -> MethodTraffic:
    """All layers in every H-th step, and training waits for them."""
    return MethodTraffic(gbit, layers, step_s, sync_every, (tuple(range(layers)),), latency_s=latency_s)


def streaming(
    gbit: float, layers: int, step_s: float, *, sync_every: int, layers_each: int, overlap: int
) -> MethodTraffic:
    """Strided groups of `layers_each` layers, evenly over the period and a whole number of steps apart."""
    count = -(-layers // layers_each)
    groups = tuple(tuple(range(first, layers, count)) for first in range(count))
    spacing = max(1, round(sync_every / count))
    return MethodTraffic(gbit, layers, step_s, spacing * count, groups, spacing, overlap)


def compute_utilisation(exchange: MethodTraffic, gbit_s: float) -> float:
    """Share of the time in which the learner computes, on a link of `gbit_s` in each direction."""
    layer_s = exchange.gbit / exchange.layers / gbit_s
    tick_s = exchange.step_s / _step_ticks(exchange)
    late_s = free_s = 0.0
    ended: dict[tuple[int, int, int], float] = {}
    late_after: dict[int, float] = {}
    for ticks, needed, key in _events(exchange):
        now_s = ticks * tick_s + late_s
        if not needed:
            free_s = max(free_s, now_s) + layer_s
            ended[key] = free_s + exchange.latency_s
        else:
            late_s += max(0.0, ended[key] - now_s)
            late_after[key[0]] = late_s
    stall_s = late_after[PERIODS - 1] - late_after[PERIODS - 2]
    busy_s = exchange.period_steps * exchange.step_s
    return busy_s / (busy_s + stall_s)


def bandwidth_for(exchange: MethodTraffic, utilisation: float) -> float:
    """The smallest link, in Gbit/s, on which the method reaches this utilisation; infinite if latency forbids it."""
    if compute_utilisation(exchange, GBIT_S_MAX) < utilisation:
        return float("inf")
    low, high = GBIT_S_MIN, GBIT_S_MAX
    for _ in range(SEARCH_STEPS):
        middle = (low * high) ** 0.5
        if compute_utilisation(exchange, middle) >= utilisation:
            high = middle
        else:
            low = middle
    return high


def _step_ticks(exchange: MethodTraffic) -> int:
    return (TICKS_FORWARD + TICKS_BACKWARD) * exchange.layers


@lru_cache(maxsize=16)
def _events(exchange: MethodTraffic) -> list[tuple[int, bool, tuple[int, int, int]]]:
    """Moments of compute time, in order: (ticks, whether it is a need or else a readiness, (period, group, layer))."""
    step_ticks = _step_ticks(exchange)
    events: list[tuple[int, bool, tuple[int, int, int]]] = []
    for period in range(PERIODS):
        for number, group in enumerate(exchange.groups):
            step = period * exchange.period_steps + number * exchange.spacing_steps
            backward = step * step_ticks + TICKS_FORWARD * exchange.layers
            forward = (step + 1 + exchange.overlap) * step_ticks
            for layer in group:
                key = (period, number, layer)
                events.append((backward + (exchange.layers - layer) * TICKS_BACKWARD, False, key))
                events.append((forward + layer * TICKS_FORWARD, True, key))
    return sorted(events)
