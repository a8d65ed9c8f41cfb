"""The published compute-utilisation tables, and this package's model of the same cells.

Both tables give the bandwidth, in Gbit/s, at which a method reaches a compute utilisation. Their values lie on a grid
of 50 points from 0.1 to 1000, evenly spaced in the logarithm: a cell is the first point of the grid that suffices. Our
cell is found in the same way, so that cells can be compared exactly. A published value is taken for the nearest point.

Known of each model: parameters and step time (published), layers (see MODELS). One number per table is ours: the bits
that an exchange moves per parameter. It was chosen once for all cells of its table, by the number of cells that agree.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from atoll.instruments.plan.utilisation import MethodTraffic, compute_utilisation, data_parallel, diloco, streaming

UTILISATIONS = (0.50, 0.80, 0.90, 0.95, 0.99)
GRID_GBIT_S = tuple(0.1 * 10.0 ** (4.0 * k / 49.0) for k in range(50))
OVER = math.inf
"""Published as 1000+: not reached on the grid."""
LAYERS_EACH = 3
"""Streaming DiLoCo's fragments have three layers."""
FP4_OF_16_BIT = 0.25
OVERLAP = 1
"""tau of Streaming DiLoCo's main runs."""
EPSILON = 1e-12

STREAMING_TABLE = "Streaming DiLoCo, Table 4"
SCALING_TABLE = "Scaling laws for DiLoCo, Table 6"
BITS_PER_PARAMETER = {STREAMING_TABLE: 13.5, SCALING_TABLE: 11.5}
"""Ours (see above). Neither paper, as far as we could read them, says how many bits an all-reduce moves: 16 bits sent
once would be 16, a ring of many learners 32."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A row group of a table."""

    table: str
    name: str
    parameters_1e9: float
    step_s: float
    layers: int


@dataclass(frozen=True, slots=True)
class Row:
    """One method's published bandwidths, by utilisation."""

    model: PublishedModel
    method: str
    gbit_s: tuple[float, ...]


_1B = PublishedModel(STREAMING_TABLE, "1B", 1.0, 0.1, 24)
_10B = PublishedModel(STREAMING_TABLE, "10B", 10.0, 0.8, 48)
_100B = PublishedModel(STREAMING_TABLE, "100B", 100.0, 4.9, 108)
_10B_SCALING = PublishedModel(SCALING_TABLE, "10B", 10.0, 0.8, 48)
_LLAMA3 = PublishedModel(SCALING_TABLE, "Llama3-405B", 405.0, 26.0, 126)
_DEEPSEEK = PublishedModel(SCALING_TABLE, "DeepSeek-V3 671B", 671.0, 20.0, 61)
MODELS = (_1B, _10B, _100B, _10B_SCALING, _LLAMA3, _DEEPSEEK)
"""Layers: 126 and 61 are those of the released models. 24, 48 and 108 are ours: usual depths for these sizes that are
multiples of three. Depths beside them agree with fewer cells (docs/results/plan.md)."""

ROWS = (
    Row(_1B, "Data-Parallel", (86.8, 152.6, 184.2, 222.3, 569.0)),
    Row(_1B, "DiLoCo H=100", (1.4, 6.2, 13.3, 23.3, 86.8)),
    Row(_1B, "Streaming", (1.4, 5.2, 9.1, 16.0, 28.1)),
    Row(_1B, "+ overlap", (1.4, 4.3, 6.2, 9.1, 11.0)),
    Row(_1B, "+ overlap + FP4", (0.4, 0.9, 1.7, 2.0, 3.0)),
    Row(_10B, "Data-Parallel", (104.8, 222.3, 222.3, 268.3, 471.5)),
    Row(_10B, "DiLoCo H=100", (1.7, 7.5, 16.0, 33.9, 104.8)),
    Row(_10B, "Streaming", (1.7, 5.2, 9.1, 13.3, 19.3)),
    Row(_10B, "+ overlap", (1.7, 3.6, 5.2, 6.2, 7.5)),
    Row(_10B, "+ overlap + FP4", (0.4, 0.9, 1.4, 1.4, 1.7)),
    Row(_100B, "Data-Parallel", (184.2, 323.8, 390.7, 390.7, 471.5)),
    Row(_100B, "DiLoCo H=100", (3.0, 11.0, 23.3, 49.4, 184.2)),
    Row(_100B, "Streaming", (2.4, 6.2, 9.1, 11.0, 19.3)),
    Row(_100B, "+ overlap", (1.7, 3.6, 4.3, 5.2, 5.2)),
    Row(_100B, "+ overlap + FP4", (0.5, 0.9, 1.1, 1.1, 1.4)),
    Row(_10B_SCALING, "Data-Parallel", (104.8, 184.2, 222.3, 222.3, 390.7)),
    Row(_10B_SCALING, "DiLoCo H=10", (16.0, 49.4, 86.8, 152.6, 222.3)),
    Row(_10B_SCALING, "DiLoCo H=50", (3.0, 11.0, 23.3, 41.0, 126.5)),
    Row(_10B_SCALING, "DiLoCo H=100", (1.4, 6.2, 13.3, 23.3, 86.8)),
    Row(_10B_SCALING, "DiLoCo H=300", (0.5, 2.0, 4.3, 9.1, 41.0)),
    Row(_LLAMA3, "Data-Parallel", (126.5, 222.3, 268.3, 323.8, 323.8)),
    Row(_LLAMA3, "DiLoCo H=100", (2.0, 7.5, 16.0, 33.9, 126.5)),
    Row(_DEEPSEEK, "Data-Parallel", (323.8, 569.0, 686.6, 686.6, OVER)),
    Row(_DEEPSEEK, "DiLoCo H=100", (4.3, 16.0, 41.0, 72.0, 268.3)),
)
"""As printed in the papers."""


@dataclass(frozen=True, slots=True)
class ComparedCell:
    """One cell of a table: theirs, ours, and how many points of the grid lie between them (ours above: positive)."""

    table: str
    model: str
    method: str
    utilisation: float
    published_gbit_s: float
    ours_gbit_s: float
    steps_off: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many cells of a table agree."""

    table: str
    cells: int
    exact: int
    one_off: int
    more_off: int


def compare() -> tuple[ComparedCell, ...]:
    """Every published cell beside ours."""
    cells: list[ComparedCell] = []
    for row in ROWS:
        exchange = exchange_of(row.model, row.method)
        for utilisation, theirs in zip(UTILISATIONS, row.gbit_s, strict=True):
            ours = first_on_grid(exchange, utilisation)
            off = ours - grid_index(theirs)
            cells.append(
                ComparedCell(row.model.table, row.model.name, row.method, utilisation, theirs, grid_value(ours), off)
            )
    return tuple(cells)


def agreement(cells: tuple[ComparedCell, ...]) -> tuple[Agreement, ...]:
    """Totals by table."""
    totals = []
    for table in (STREAMING_TABLE, SCALING_TABLE):
        off = [abs(cell.steps_off) for cell in cells if cell.table == table]
        totals.append(Agreement(table, len(off), off.count(0), off.count(1), sum(steps > 1 for steps in off)))
    return tuple(totals)


def exchange_of(model: PublishedModel, method: str) -> MethodTraffic:
    """The method on this model, as this package models it."""
    gbit = BITS_PER_PARAMETER[model.table] * model.parameters_1e9
    if method.startswith("DiLoCo H="):
        return diloco(gbit, model.layers, model.step_s, sync_every=int(method.removeprefix("DiLoCo H=")))
    return _METHODS[method](gbit, model)


def _streaming(overlap: int, share: float) -> Callable[[float, PublishedModel], MethodTraffic]:
    def made(gbit: float, model: PublishedModel) -> MethodTraffic:
        return streaming(
            share * gbit, model.layers, model.step_s, sync_every=100, layers_each=LAYERS_EACH, overlap=overlap
        )

    return made


_METHODS: dict[str, Callable[[float, PublishedModel], MethodTraffic]] = {
    "Data-Parallel": lambda gbit, model: data_parallel(gbit, model.layers, model.step_s),
    "Streaming": _streaming(0, 1.0),
    "+ overlap": _streaming(OVERLAP, 1.0),
    "+ overlap + FP4": _streaming(OVERLAP, FP4_OF_16_BIT),
}


def first_on_grid(exchange: MethodTraffic, utilisation: float) -> int:
    """The first point of the grid that reaches this utilisation; the length of the grid if none does. More bandwidth
    never hurts, so that it can be bisected."""
    return bisect_left(GRID_GBIT_S, utilisation - EPSILON, key=lambda gbit_s: compute_utilisation(exchange, gbit_s))


def grid_index(gbit_s: float) -> int:
    """The point of the grid that a printed value stands for: the nearest in the logarithm."""
    if math.isinf(gbit_s):
        return len(GRID_GBIT_S)
    return min(range(len(GRID_GBIT_S)), key=lambda k: abs(math.log(GRID_GBIT_S[k] / gbit_s)))


def grid_value(index: int) -> float:
    """The bandwidth of a point of the grid."""
    return GRID_GBIT_S[index] if index < len(GRID_GBIT_S) else OVER
