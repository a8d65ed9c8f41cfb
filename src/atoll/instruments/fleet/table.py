"""Many cells, on several cores, and how far they are from the published table."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, field
from typing import Any

from atoll.errors import ConfigError
from atoll.instruments.fleet.cell import Aim, Cell, simulate_cell
from atoll.instruments.fleet.mechanics import MTBI_YEARS, YEAR_S, Mechanics, check_fleet
from atoll.instruments.fleet.parts import Parts
from atoll.instruments.fleet.published import CHIPS, GOODPUT
from atoll.instruments.sim import whole, workers

CELLS_MAX = 10_000
JOBS_MAX = 1024


@dataclass(frozen=True, slots=True)
class CellTask:
    """What to simulate for one cell."""

    chips: int
    learners: int
    method: str
    mechanics: Mechanics = field(default_factory=Mechanics)
    mtbi_s: float = MTBI_YEARS * YEAR_S
    aim: Aim = field(default_factory=Aim)
    parts: Parts | None = None

    def __post_init__(self) -> None:
        check_fleet(self.chips, self.learners, self.method, self.mtbi_s, self.mechanics)
        if self.parts is not None:
            self.parts.check(self.learners)

    def run(self) -> Cell:
        return simulate_cell(
            self.chips,
            self.learners,
            self.method,
            mechanics=self.mechanics,
            mtbi_s=self.mtbi_s,
            aim=self.aim,
            parts=self.parts,
        )


@dataclass(frozen=True, slots=True)
class Table:
    cells: tuple[Cell, ...]
    mechanics: Mechanics
    mtbi_s: float
    wall_seconds: float
    parts: Parts | None = None

    @property
    def errors(self) -> list[float]:
        """Absolute differences from the published figures, in points."""
        return [abs(cell.difference) for cell in self.cells if cell.difference is not None]

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints, less the tables of other sections."""
        errors = self.errors
        return {
            "cells": [cell.to_dict() for cell in self.cells],
            "mechanics": asdict(self.mechanics),
            "mtbi_seconds": self.mtbi_s,
            "parts": self.parts.to_dict() if self.parts is not None else None,
            "published_cells": len(errors),
            "error_mean": sum(errors) / len(errors) if errors else None,
            "error_max": max(errors) if errors else None,
            "wall_seconds": self.wall_seconds,
        }


def published_grid() -> list[tuple[int, int, str]]:
    """The 30 cells of the published table as (chips, learners, method)."""
    return [(chips, learners, method) for method, learners in GOODPUT for chips in CHIPS]


def simulate_table(
    grid: Sequence[tuple[int, int, str]] | None = None,
    *,
    mechanics: Mechanics | None = None,
    mtbi_s: float = MTBI_YEARS * YEAR_S,
    aim: Aim | None = None,
    jobs: int = 1,
    progress: Callable[[Cell], None] = lambda cell: None,
    parts: Parts | None = None,
) -> Table:
    """Simulate these cells (the published table's if none are given) on `jobs` processes (0: one per core). The numbers
    do not depend on `jobs`: every cell draws from its own stream."""
    wanted = published_grid() if grid is None else list(grid)
    whole("jobs", jobs, 0, JOBS_MAX)
    if not 1 <= len(wanted) <= CELLS_MAX:
        raise ConfigError(f"a table has 1 to {CELLS_MAX:,} cells, not {len(wanted):,}; give fewer sizes or learners")
    mechanics, aim = mechanics or Mechanics(), aim or Aim()
    of = {"inelastic": None, "elastic": None}  # they have no syncer
    tasks = [
        CellTask(c, learners, method, mechanics, mtbi_s, aim, of.get(method, parts)) for c, learners, method in wanted
    ]
    began_s = time.perf_counter()
    cells: dict[int, Cell] = {}
    for number, cell in _results(tasks, min(jobs or os.cpu_count() or 1, len(tasks))):
        cells[number] = cell
        progress(cell)
    ordered = tuple(cells[number] for number in range(len(tasks)))
    return Table(ordered, mechanics, mtbi_s, time.perf_counter() - began_s, parts)


def _results(tasks: list[CellTask], jobs: int) -> Iterator[tuple[int, Cell]]:
    if jobs == 1:
        yield from ((number, task.run()) for number, task in enumerate(tasks))
        return
    with workers(jobs) as pool:
        # The longest first, so that no core is left with one at the end.
        order = sorted(range(len(tasks)), key=lambda number: -tasks[number].learners)
        futures = {pool.submit(tasks[number].run): number for number in order}
        for future in as_completed(futures):
            yield futures[future], future.result()
