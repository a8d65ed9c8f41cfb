"""Atoll beside the systems of its field: one command, same model, data, optimizer, machines and clock.

    scripts/bakeoff --quick                     six systems, five scenarios and loss, in about 15 minutes on 2 cores
    scripts/bakeoff --repeat 3                  everything
    scripts/bakeoff --systems atoll,torchft --scenarios clean,kill --repeat 3
    scripts/bakeoff --table                     the tables of what is in results.jsonl

Each cell is a run of its own, in turn, so that whatever else the machine does hits all alike. Results are appended to
FOLDER/results.jsonl (bakeoff/ unless told otherwise); tables go to FOLDER/tables.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

import scenarios as s
import systems as y
from cluster import Cluster, Result
from tables import write_tables

EQUAL_TOKENS = "tokens"
"""Not a scenario: every learner makes as many steps, and the model's held-out loss is compared."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--systems", default="", help=f"of {', '.join(y.SYSTEMS)}")
    parser.add_argument("--scenarios", default="", help=f"of {', '.join(s.SCENARIOS)}, {EQUAL_TOKENS}")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each cell (seeds, for loss)")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.0, help="of each window, where nothing is done to it")
    parser.add_argument("--steps", type=int, default=240, help="of each learner, for loss at equal tokens")
    parser.add_argument("--folder", type=Path, default=Path("bakeoff"))
    parser.add_argument("--table", action="store_true", help="only write the tables again")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.table:
        run_all(options)
    print(write_tables(options.folder))


def run_all(options: argparse.Namespace) -> None:
    known = {**s.SCENARIOS, EQUAL_TOKENS: s.SCENARIOS["clean"]}
    names = chosen(options.systems, y.SYSTEMS, y.QUICK if options.quick else tuple(y.SYSTEMS))
    which = chosen(options.scenarios, known, (*s.QUICK, EQUAL_TOKENS) if options.quick else tuple(known))
    for name in names:
        if not y.SYSTEMS[name].there:
            sys.exit(f"the environment of {name} is missing; run benchmarks/peers/venvs {y.SYSTEMS[name].venv}")
    cells = list(itertools.product(range(options.repeat), which, names))
    began = time.monotonic()
    for number, (seed, label, name) in enumerate(cells, 1):
        result = run_cell(options, name, label, seed)
        with (options.folder / "results.jsonl").open("a") as out:
            out.write(result.line() + "\n")
        minutes = (time.monotonic() - began) / 60
        print(
            f"[{number}/{len(cells)}, {minutes:.1f} min] {label:12} {y.SYSTEMS[name].title:20} {words(result)}",
            flush=True,
        )


def run_cell(options: argparse.Namespace, name: str, label: str, seed: int) -> Result:
    system, equal = y.SYSTEMS[name], label == EQUAL_TOKENS
    scenario = s.SCENARIOS["clean" if equal else label]
    reason = system.cannot.get(label, "")
    if reason:
        return Result(name, label, seed, why=reason)
    if options.seconds and not scenario.faults:
        scenario = s.replace(scenario, seconds=options.seconds)
    steps = options.steps if equal else 0
    return Cluster(name, system, scenario, world=options.world, seed=seed, steps=steps).run(label)


def chosen(
    text: str, known: dict[str, object] | dict[str, s.Scenario] | dict[str, y.System], default: tuple[str, ...]
) -> list[str]:
    names = text.split(",") if text else list(default)
    for name in names:
        if name not in known:
            sys.exit(f"there is no {name!r}; choose from {', '.join(known)}")
    return names


def words(result: Result) -> str:
    numbers = f"{result.steps_per_s:6.2f} steps/s, longest pause {result.pause_s:.2f} s" if result.steps_per_s else ""
    loss = f"loss {result.loss:.4f}" if result.loss else ""
    return "; ".join(part for part in (numbers, loss, result.why) if part)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
