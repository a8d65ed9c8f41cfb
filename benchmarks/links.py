"""Atoll beside DDP over gloo where links are thin: steps per second, and time to a loss. Real processes, each in a
network namespace of its own, with tc (root; Linux). The harness is that of benchmarks/peers.

    python benchmarks/links.py --scenarios 20mbit,100mbit --world 4 --out links.jsonl
    python benchmarks/links.py --list

All begin over 1 Gbit/s; when everybody has made some steps, the links become what the scenario says, and the clock
starts. (Over 5 Mbit/s the first parameters alone would take minutes, for either system.) A step takes 0.5 s, by
sleeping, as in benchmarks/peers. A loss is the mean of the last 32 training losses of all workers together.
"""

from __future__ import annotations

import argparse
import json
import queue
import signal
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import result as r
from cluster import Cluster, end_all
from net import lack_of_links
from scenarios import MBIT, Fault, Scenario
from systems import SYSTEMS

SMOOTHED = 32
LOSSES = (3.2, 3.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4)
MEDIUM: dict[str, Any] = {"shape": "medium", "step_ms": 500.0, "rate": 1000 * MBIT}


def thin(what: str, seconds: float, *rates_mbit: float) -> Scenario:
    """Links of these rates, each for as long as the others."""
    each_s = seconds / len(rates_mbit)
    faults = tuple(Fault(k * each_s, "rate", back_s=1e9, rate=rate * MBIT) for k, rate in enumerate(rates_mbit))
    return Scenario(what, seconds=seconds, faults=faults, **MEDIUM)


SCENARIOS = {
    "100mbit": thin("100 Mbit/s, 10.8M parameters", 60, 100),
    "20mbit": thin("20 Mbit/s, 10.8M parameters", 120, 20),
    "5mbit": thin("5 Mbit/s, 10.8M parameters", 240, 5),
    "minutes": thin("100, 20, 5 and 100 Mbit/s, a minute each, 10.8M parameters", 240, 100, 20, 5, 100),
}


class TimedCluster(Cluster):
    """Keeps what each worker's steps were, with their times since the links became thin."""

    curve: list[tuple[float, float]]
    exchanges_before = 0

    def _window(self, result: r.Result) -> None:
        self.exchanges_before = self._exchanges()
        super()._window(result)

    def _reduce(self, result: r.Result, begin: float, end: float, *before: Any) -> None:
        super()._reduce(result, begin, end, *before)
        lines = [line for rank in range(self._world) for line in r.worker_lines(self.folder, rank)]
        self.curve = [(line["t"] - begin, line["loss"]) for line in sorted(lines, key=lambda line: line["t"])]
        self.exchanges_inside = self._exchanges() - self.exchanges_before

    def _exchanges(self) -> int:
        workers = [r.worker_lines(self.folder, rank) for rank in range(self._world)]
        return r.exchanges(self._system.kept, self.folder, workers) or 0


def times_to(curve: list[tuple[float, float]]) -> dict[str, float]:
    """Seconds after which the smoothed loss was first this low; 0: before the links became thin."""
    last: deque[float] = deque(maxlen=SMOOTHED)
    found: dict[str, float] = {}
    for at_s, loss in curve:
        last.append(loss)
        if len(last) == SMOOTHED:
            mean = sum(last) / SMOOTHED
            for wanted in LOSSES:
                if mean <= wanted:
                    found.setdefault(f"{wanted:g}", round(max(0.0, at_s), 1))
    return found


def measure(name: str, label: str, options: argparse.Namespace, place: int) -> dict[str, Any]:
    scenario = SCENARIOS[label]
    scenario = Scenario(**{**vars_of(scenario), "batch": options.batch, "step_ms": options.step_ms})
    cluster = TimedCluster(name, SYSTEMS[name], scenario, world=options.world, seed=options.seed, place=place)
    result = cluster.run(label)
    row: dict[str, Any] = {"world": options.world, "batch": options.batch, **json.loads(result.line())}
    if hasattr(cluster, "curve"):
        inside = [loss for at_s, loss in cluster.curve if at_s >= 0]
        row |= {"exchanges_inside": cluster.exchanges_inside, "times_to": times_to(cluster.curve), "steps": len(inside)}
        tail = [loss for _, loss in cluster.curve][-SMOOTHED:]
        row["loss_train"] = round(sum(tail) / len(tail), 3)
    return row


def vars_of(scenario: Scenario) -> dict[str, Any]:
    return {name: getattr(scenario, name) for name in scenario.__dataclass_fields__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="ddp,atoll,atoll-adaptive")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1, help="rows of 64 tokens in a step")
    parser.add_argument("--step-ms", type=float, default=500.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--out", type=Path, default=Path("links.jsonl"), help="one line for each run is appended")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    wrong = [s for s in options.scenarios.split(",") if s not in SCENARIOS]
    wrong += [s for s in options.systems.split(",") if s not in SYSTEMS]
    if wrong:
        parser.error(
            f"there is no {', '.join(wrong)}; scenarios: {', '.join(SCENARIOS)}; systems: {', '.join(SYSTEMS)}"
        )
    cells = [(name, label) for label in options.scenarios.split(",") for name in options.systems.split(",")]
    cells.sort(key=lambda cell: -SCENARIOS[cell[1]].seconds)
    if options.list:
        print("\n".join(f"{label}: {scenario.what}, {scenario.seconds:g} s" for label, scenario in SCENARIOS.items()))
        return
    if lack := lack_of_links():  # asked once, before there are threads: the answer is kept
        parser.error(lack)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_all)
    waiting: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for cell in cells:
        waiting.put(cell)
    jobs = [threading.Thread(target=work, args=(place, waiting, options)) for place in range(options.jobs)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()


WRITING = threading.Lock()


def work(place: int, waiting: queue.SimpleQueue[tuple[str, str]], options: argparse.Namespace) -> None:
    while True:
        try:
            name, label = waiting.get_nowait()
        except queue.Empty:
            return
        row = measure(name, label, options, place)
        with WRITING, options.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
            said = row["why"] or f"{row['steps_per_s']:.3f} steps/s, loss {row['loss_train']}, {row['times_to']}"
            print(f"{label:8} {SYSTEMS[name].title:16} {said}", flush=True)


if __name__ == "__main__":
    main()
