"""What the goodput simulator costs: the large cell to half a point; growth with chips, failures and learners.

    python benchmarks/goodput.py [--seeds 12] [--figures FOLDER]

Times are CPU seconds of one core. "Events" are inputs that the real SyncerMachine and LearnerMachines handled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.instruments.fleet import YEAR_S, Aim, Cell, simulate_cell

FIXED_S = 4800.0


@dataclass(frozen=True)
class Timed:
    cell: Cell
    cpu_s: float
    wall_s: float


def timed(chips: int, learners: int, method: str = "decoupled", *, mtbi_s: float = YEAR_S, aim: Aim) -> Timed:
    began_s, began_wall_s = time.process_time(), time.perf_counter()
    cell = simulate_cell(chips, learners, method, mtbi_s=mtbi_s, aim=aim)
    return Timed(cell, time.process_time() - began_s, time.perf_counter() - began_wall_s)


def large_cell() -> None:
    print("## 2.4 million chips, M=8, to half a point\n")
    run = timed(2_400_000, 8, aim=Aim(precision=0.5))
    cell = run.cell
    print(
        f"goodput {cell.goodput:.2f}% ± {cell.half_width:.2f}, uptime {cell.uptime:.2f}%: {cell.windows} windows of "
        f"{cell.window_seconds:.0f} s of one run, {cell.failures:,} failures, {cell.events:,} events, "
        f"{run.cpu_s:.1f} s of CPU\n"
    )


def by_chips() -> list[dict[str, Any]]:
    print(f"## Chips: M=8, {FIXED_S:.0f} simulated seconds\n")
    print("| chips | MTBI, years | failures | events | CPU s | µs per event |\n|---|---|---|---|---|---|")
    rows = [(chips, 1.0) for chips in (150_000, 600_000, 2_400_000)]
    rows += [(chips, chips / 2_400_000) for chips in (240_000, 24_000_000, 240_000_000)]
    points = []
    for chips, years in rows:
        run = timed(chips, 8, mtbi_s=years * YEAR_S, aim=Aim(seconds=FIXED_S))
        print(row(f"{chips:,}", f"{years:g}", run), flush=True)
        if years == 1.0:
            points.append(point(run, "M = 8, an interruption per chip and year"))
        if years == chips / 2_400_000:
            points.append(point(run, "M = 8, equally many interruptions"))
    print()
    return points


def by_learners() -> list[dict[str, Any]]:
    print(f"## Learners: 150,000 chips each, {FIXED_S:.0f} simulated seconds\n")
    print("| learners | chips | failures | events | CPU s | µs per event |\n|---|---|---|---|---|---|")
    points = []
    for learners in (2, 8, 32, 128):
        chips = 150_000 * learners
        run = timed(chips, learners, aim=Aim(seconds=FIXED_S))
        print(row(str(learners), f"{chips:,}", run), flush=True)
        points.append(point(run, "M = 2 to 128"))
    print()
    return points


def baselines() -> None:
    print("## Data-parallel baselines: no syncer, cost per stall\n")
    print("| method | chips | failures | stalls | CPU s | µs per stall |\n|---|---|---|---|---|---|")
    for method in ("elastic", "inelastic"):
        for chips in (150_000, 2_400_000):
            run = timed(chips, 1, method, aim=Aim(seconds=20_000 * YEAR_S / chips))
            print(row(method, f"{chips:,}", run), flush=True)
    print()


def point(run: Timed, label: str) -> dict[str, Any]:
    return {"chips": run.cell.chips, "events": run.cell.events, "wall_s": run.wall_s, "label": label}


def row(first: str, second: str, run: Timed) -> str:
    cell = run.cell
    each_us = 1e6 * run.cpu_s / cell.events
    return f"| {first} | {second} | {cell.failures:,} | {cell.events:,} | {run.cpu_s:.2f} | {each_us:.0f} |"


def coverage(seeds: int) -> None:
    print(f"## Do the intervals hold? {seeds} seeds\n")
    print("| cell | mean | spread (2 standard deviations) | mean half interval | truth inside |\n|---|---|---|---|---|")
    for chips, learners, method in ((2_400_000, 1, "elastic"), (300_000, 1, "elastic"), (2_400_000, 8, "decoupled")):
        cells = [simulate_cell(chips, learners, method, aim=Aim(precision=1.0, seed=s)) for s in range(1, seeds + 1)]
        means = [cell.goodput for cell in cells]
        centre = statistics.mean(means)
        inside = sum(abs(cell.goodput - centre) <= cell.half_width for cell in cells)
        half = statistics.mean(cell.half_width for cell in cells)
        print(
            f"| {method} M={learners}, {chips:,} | {centre:.2f} | {2 * statistics.stdev(means):.2f} | {half:.2f} | "
            f"{inside} of {seeds} |",
            flush=True,
        )
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=12, help="Seeds per cell in the check of the intervals.")
    parser.add_argument("--figures", type=Path, help="Folder for goodput-growth.png.")
    arguments = parser.parse_args()
    large_cell()
    points = by_chips() + by_learners()
    if arguments.figures is not None:
        from atoll.instruments.figures import growth_figure

        arguments.figures.mkdir(parents=True, exist_ok=True)
        growth_figure(points, wide=True).save(arguments.figures / "goodput-growth")
    baselines()
    coverage(arguments.seeds)


if __name__ == "__main__":
    main()
