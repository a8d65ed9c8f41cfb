"""Two trees side by side: is the code of today slower than an older one? Both in turn, in one run.

    git archive --format=tar.gz -o /tmp/before.tgz 2c0ad86 src benchmarks pyproject.toml
    python benchmarks/house.py /tmp/before.tgz [--only sim fleet merge rounds overhead] [--repeats 5]

The older tree comes as a folder or as a tarball, so that a machine without the history can do this. Each repetition is
a process of its own, once for each tree, first one and then the other. Simulator and fleet are measured in CPU time of
that process, which others on the machine disturb less; the rest is wall clock and wants a quiet machine. Both trees run
their own benchmarks/merge.py, rounds.py and overhead.py: what they measure is the same, what they import is not.

The table says the best and the median of each, and the ratio of the bests: above 1 the tree of today is faster.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent.parent
WARM_UP_NS = 10_000_000_000
SHAPES = ((4, 4), (16, 4), (16, 24))
CELLS = ((2_400_000, 8, "decoupled"), (600_000, 4, "diloco"))
Values = dict[str, float]


@dataclass(frozen=True)
class Measure:
    """One command of a tree, and how its numbers are read from what it prints."""

    arguments: tuple[str, ...]
    read: Callable[[str], Values]
    less_is_better: bool = False


# ------------------------------------------------------------ what runs inside a tree


def room(name: str, *modules: str) -> dict[str, Any]:
    """What a room of instruments offers: through its front door, or (before 0.5.0) these modules of it."""
    try:
        door = importlib.import_module(f"atoll.instruments.{name}")
        return {offered: getattr(door, offered) for offered in dir(door)}
    except ModuleNotFoundError:
        parts = [importlib.import_module(f"atoll.{name}.{module}") for module in modules]
        return {offered: value for part in parts for offered, value in vars(part).items()}


def probe_sim(events: int) -> Values:
    """Machine events per second of CPU time."""
    sim, config_of = (
        SimpleNamespace(**room("sim", "scenario", "world")),
        importlib.import_module("atoll.core.config").SyncConfig,
    )
    rates = {}
    for learners, fragments in SHAPES:
        config = config_of(sync_every=24, fragments=fragments, learners_expected=learners, quorum="50%")
        specs = tuple(sim.LearnerSpec(step_ns=200_000_000 + i * 1_000_003, jitter=0.1) for i in range(learners))
        world = sim.World(sim.Scenario(seed=1, config=config, learners=specs, arrays=False, inline=True))
        world.begin()
        world.clock.run(WARM_UP_NS)
        before, began_s = world.events, time.process_time()
        while world.events - before < events:
            world.clock.run(world.now_ns + 1_000_000_000)
        rates[f"sim {learners} x {fragments}, events/s"] = (world.events - before) / (time.process_time() - began_s)
    return rates


def probe_fleet(seconds: int) -> Values:
    """Machine events per second of CPU time; the goodput beside it must not change at all."""
    fleet, rates = SimpleNamespace(**room("fleet", "cell")), {}
    for chips, learners, method in CELLS:
        began_s = time.process_time()
        cell = fleet.simulate_cell(chips, learners, method, aim=fleet.Aim(seconds=float(seconds)))
        took_s = time.process_time() - began_s
        name = f"fleet {method} {chips / 1e6:g}M chips, M={learners}"
        rates[f"{name}, events/s"], rates[f"{name}, goodput"] = cell.events / took_s, cell.goodput
    return rates


PROBES = {"sim": probe_sim, "fleet": probe_fleet}

# ------------------------------------------------------------ reading what the trees' own benchmarks print


def rows_of(text: str) -> Iterator[list[str]]:
    """Of Markdown tables."""
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def read_merge(text: str) -> Values:
    cells = [row for row in rows_of(text) if row[0].isdigit()]
    return {
        f"{stage}, ms" + (f", {threads} threads" if threads != "1" else ""): float(ms)
        for threads, stage, ms, *_ in cells
    }


def read_rounds(text: str) -> Values:
    found = re.findall(r"^(none|commit) +([\d.]+) +[\d.]+ +[\d.]+ +[\d,]+$", text, re.MULTILINE)
    names = {"none": "rounds/s without a disk", "commit": "rounds/s with commits"}
    return {names[level]: float(rate) for level, rate in found}


def read_overhead(text: str) -> Values:
    found = re.search(r"^ratio +([\d.]+)", text, re.MULTILINE)
    assert found is not None, text
    return {"steps/s with Atoll over without": float(found[1])}


def read_json(text: str) -> Values:
    values: Values = json.loads(text.splitlines()[-1])
    return values


def measures(arguments: argparse.Namespace) -> dict[str, Measure]:
    me = str(Path(__file__).resolve())
    params, seconds = str(arguments.merge_params), str(arguments.round_seconds)
    rounds = ("benchmarks/rounds.py", "--parameters", "10", "--seconds", seconds, "--repeat", "1")
    overhead = ("benchmarks/overhead.py", "--device", arguments.device, "--model", arguments.model)
    return {
        "sim": Measure((me, "--probe", "sim", str(arguments.events)), read_json),
        "fleet": Measure((me, "--probe", "fleet", str(arguments.fleet_seconds)), read_json),
        "merge": Measure(
            ("benchmarks/merge.py", "--params", params, "--threads", "1"), read_merge, less_is_better=True
        ),
        "rounds": Measure(rounds, read_rounds),
        "overhead": Measure((*overhead, "--segments", str(arguments.segments)), read_overhead),
    }


# ------------------------------------------------------------ both in turn


def unpacked(tree: Path, into: Path) -> Path:
    if tree.is_dir():
        return tree.resolve()
    with tarfile.open(tree) as archive:
        archive.extractall(into, filter="data")
    return into


def run(tree: Path, measure: Measure) -> Values:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, *measure.arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} in {tree} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return measure.read(done.stdout)


def compare(before: Path, measure: Measure, repeats: int) -> None:
    seen: dict[str, tuple[list[float], list[float]]] = {}
    for number in range(repeats):
        trees = (before, HERE) if number % 2 == 0 else (HERE, before)
        for tree in trees:
            for name, value in run(tree, measure).items():
                seen.setdefault(name, ([], []))[tree is HERE].append(value)
    best = min if measure.less_is_better else max
    for name, (old, new) in seen.items():
        if old and new:  # the rest is new: nothing to compare
            ratio = best(old) / best(new) if measure.less_is_better else best(new) / best(old)
            spread = f"{statistics.median(old):,.4g} | {statistics.median(new):,.4g}"
            print(f"| {name} | {best(old):,.6g} | {best(new):,.6g} | {spread} | {ratio:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="the older tree: a folder, or a tarball of one")
    parser.add_argument("--only", nargs="+", default=["sim", "fleet", "merge", "rounds", "overhead"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--events", type=int, default=30_000, help="machine events per row of the simulator")
    parser.add_argument("--fleet-seconds", type=int, default=2400, help="simulated")
    parser.add_argument("--merge-params", type=int, default=16, help="millions (2^20) of parameters")
    parser.add_argument("--round-seconds", type=float, default=6.0)
    parser.add_argument("--device", default="cpu", help="of the overhead")
    parser.add_argument("--model", default="tiny", help="of the overhead")
    parser.add_argument("--segments", type=int, default=20, help="of the overhead")
    parser.add_argument("--probe", nargs=2, metavar=("NAME", "N"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.probe:
        print(json.dumps(PROBES[arguments.probe[0]](int(arguments.probe[1]))))
        return
    if arguments.before is None:
        parser.error("name the older tree: a folder or a tarball (git archive)")
    with tempfile.TemporaryDirectory() as folder:
        before = unpacked(arguments.before, Path(folder))
        print("| what | before, best | now, best | before, median | now, median | now is faster by |")
        print("|---|---|---|---|---|---|")
        for name in arguments.only:
            compare(before, measures(arguments)[name], arguments.repeats)


if __name__ == "__main__":
    main()
