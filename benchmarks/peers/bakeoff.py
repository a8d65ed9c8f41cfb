"""Atoll beside the systems of its field: one command, same model, data, optimizer, machines and clock.

    scripts/bakeoff --quick                     five systems, five scenarios and loss, in about 15 minutes on 2 cores
    scripts/bakeoff --repeat 3                  everything
    scripts/bakeoff --systems atoll,torchft --scenarios clean,kill --repeat 3
    scripts/bakeoff --short --repeat 3 --jobs 8 what fits into a quarter of an hour of 16 cores
    scripts/bakeoff --scenarios search,tokens   outer settings of each system by the same search, then loss with them
    scripts/bakeoff --plan FILE --jobs 8        lines of runs, scenarios and systems, most worth first
    scripts/bakeoff --table                     the tables of what is in results.jsonl

Each cell is a run of its own, in turn, so that whatever else the machine does hits all alike: one pass over all cells,
then the next. With `--jobs` so many run side by side, each on cores of its own. Results are appended to
FOLDER/results.jsonl (bakeoff/ unless told otherwise) as they come; tables go to FOLDER/tables.md, figures to
FOLDER/figures.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import scenarios as s
import systems as y
from cluster import WARM_STEPS, Cluster, end_all, too_busy
from net import lack_of_delays, lack_of_links
from pictures import write_figures
from result import FAILED, Result, read_lines
from tables import read_cells, write_tables

OUTER_TRIED = ("0.7,0.0", "0.7,0.3", "0.7,0.6", "0.7,0.9", "1.0,0.0", "1.0,0.3")
"""The same for every system that has outer settings."""
SEARCH_SEED = 100
START_S, AFTER_S = 11.0, 4.0
"""What a cell takes before and after its steps where each has two cores, to tell how long a plan will take."""
QUICK_SECONDS, QUICK_SECONDS_MAX, QUICK_STEP_MS, QUICK_STEPS = 10.0, 12.0, 100.0, 96
"""Five processes on two cores: their steps together must fit into a step's time."""
Cell = tuple[int, str, str, str]
"""Seed, scenario, system, outer settings (empty: its own)."""
Part = tuple[int, list[str], list[str]]
"""Runs of each cell, scenarios, systems."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--systems", default="", help=f"of {', '.join(y.SYSTEMS)}; of a plan only these")
    parser.add_argument("--scenarios", default="", help=f"of {', '.join((*s.SCENARIOS, s.SEARCH, s.EQUAL_TOKENS))}")
    parser.add_argument("--plan", type=Path, help="a file of cells: in each line RUNS SCENARIOS SYSTEMS, # for notes")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each cell (seeds, for loss)")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1, help="cells side by side, each on its share of the cores")
    parser.add_argument("--cores", default="", help="FIRST-LAST: use these alone")
    parser.add_argument("--seconds", type=float, default=0.0, help="of a window, where the scenario has the usual 20")
    parser.add_argument("--step-ms", type=float, default=0.0, help="of a step, where the scenario has the usual 50")
    parser.add_argument("--batch", type=int, default=0, help="rows of a step, where the scenario has the usual 8")
    parser.add_argument("--steps", type=int, default=240, help="of each learner, for loss at equal tokens")
    parser.add_argument("--until-s", type=float, default=1e9, help="start no cell later than this")
    parser.add_argument("--resume", type=Path, help="leave out cells that are in this file of results")
    parser.add_argument("--folder", type=Path, default=Path("bakeoff"))
    parser.add_argument("--table", action="store_true", help="only write the tables again")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.cores:
        os.sched_setaffinity(0, cores_of(options.cores))
    if options.quick:
        options.seconds, options.step_ms = options.seconds or QUICK_SECONDS, options.step_ms or QUICK_STEP_MS
        options.steps = min(options.steps, QUICK_STEPS)
    if not options.table:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end_all)
        Bakeoff(options).run()
    print(write_tables(options.folder))
    draw(options.folder)


def draw(folder: Path) -> None:
    try:
        found = write_figures(read_cells(folder / "results.jsonl"), folder / "figures")
    except ImportError as error:  # a machine that only measures
        print(f"no figures here: {error}. Where Atoll is installed, `--table --folder {folder}` draws them.")
        return
    print("\n".join([f"tables: {folder / 'tables.md'}", *(f"{title}: {path}" for title, path in found)]))


class Bakeoff:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._results = options.folder / "results.jsonl"
        self._cells = list(self._planned(self._parts()))
        # Asked once, before there are threads: the answers are kept.
        for lack, label in ((lack_of_links(), "limited links"), (lack_of_delays(), "delays")):
            if lack:
                print(f"no {label} here: {lack}", flush=True)
        self._began = time.monotonic()
        self._count = itertools.count(1)
        self._writing = threading.Lock()

    def _parts(self) -> list[Part]:
        """Wrong words are told before an environment that is missing."""
        options = self._options
        if options.plan:
            lines = (line.partition("#")[0].strip() for line in options.plan.read_text().splitlines())
            parts = [self._part(line) for line in lines if line]
        else:
            names = y.QUICK if options.quick else y.DEVICE if options.short else None
            which = (*s.QUICK, s.EQUAL_TOKENS) if options.quick else s.DEVICE if options.short else None
            parts = [(options.repeat, self._which(options.scenarios, which), self._names(options.systems, names))]
        for name in dict.fromkeys(name for _, _, names in parts for name in names):
            if not y.SYSTEMS[name].there:
                sys.exit(f"the environment of {name} is missing; run benchmarks/peers/venvs {y.SYSTEMS[name].venv}")
        return parts

    def _part(self, line: str) -> Part:
        words = line.split()
        if len(words) != 3 or not words[0].isdigit():
            sys.exit(f"{self._options.plan}: {line!r} is not RUNS SCENARIOS SYSTEMS, as in: 3 clean,kill atoll,ddp")
        names, wanted = self._names(words[2], None), self._names(self._options.systems, None)
        return int(words[0]), self._which(words[1], None), [name for name in names if name in wanted]

    def _names(self, text: str, default: Iterable[str] | None) -> list[str]:
        return chosen(text, y.SYSTEMS, default)

    def _which(self, text: str, default: Iterable[str] | None) -> list[str]:
        which = chosen(text, (*s.SCENARIOS, s.SEARCH, s.EQUAL_TOKENS), default)
        for label in which:
            least = s.SCENARIOS[label].workers_min if label in s.SCENARIOS else 2
            if self._options.world < least:
                sys.exit(f"{label} needs {least} learners; say --world {least}, or leave it out of --scenarios")
        return which

    def _planned(self, parts: list[Part]) -> Iterable[Cell]:
        lines = read_lines(self._options.resume) if self._options.resume else []
        done: list[Cell] = [_cell(line) for line in lines if not str(line["why"]).startswith(FAILED)]
        for cell in dict.fromkeys(itertools.chain.from_iterable(map(_cells, parts))):
            if cell[1] != s.SEARCH and (*cell[:3], "") in done:
                done.remove((*cell[:3], ""))
            elif cell not in done:
                yield cell

    def expected_s(self) -> float:
        """Of all cells, by what they took elsewhere."""
        return sum(self._cell_s(cell) for cell in self._cells) / self._options.jobs

    def _cell_s(self, cell: Cell) -> float:
        scenario, equal = self._scenario(cell[1]), cell[1] in (s.SEARCH, s.EQUAL_TOKENS)
        step_s = scenario.step_ms / 1e3
        if cell[1] in y.SYSTEMS[cell[2]].cannot:
            return 0.0
        if equal:
            return START_S + self._options.steps * step_s
        slowest = max([1.0, *scenario.factors.values()])
        return START_S + WARM_STEPS * step_s * slowest + scenario.seconds + AFTER_S

    def _scenario(self, label: str) -> s.Scenario:
        options, equal = self._options, label in (s.SEARCH, s.EQUAL_TOKENS)
        one = s.scaled(s.SCENARIOS["clean" if equal else label], options.seconds, options.step_ms, options.batch)
        shorter = options.quick and not one.faults and one.seconds > QUICK_SECONDS_MAX
        return s.replace(one, seconds=QUICK_SECONDS_MAX) if shorter else one

    def run(self) -> None:
        """A search ends before what depends on it begins."""
        print(f"{len(self._cells)} cells, {self._options.jobs} at a time: about {self.expected_s():.0f} s", flush=True)
        if busy := too_busy():
            print(f"what comes is not to be believed{busy}; run it again when nothing else does", flush=True)
        for searching in (True, False):
            waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
            for cell in self._cells:
                if (cell[1] == s.SEARCH) == searching:
                    waiting.put(cell)
            jobs = [threading.Thread(target=self._work, args=(place, waiting)) for place in range(self._options.jobs)]
            for job in jobs:
                job.start()
            for job in jobs:
                job.join()

    def _work(self, place: int, waiting: queue.SimpleQueue[Cell]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        each = max(1, len(cores) // self._options.jobs)
        os.sched_setaffinity(0, cores[place * each : (place + 1) * each] or cores)  # of this thread, and what it starts
        while time.monotonic() - self._began < self._options.until_s:
            try:
                cell = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self._write(self._measure(cell, place))
            except Exception as error:  # one cell's trouble is not that of those that wait behind it
                self._write(Result(cell[2], cell[1], cell[0], outer=cell[3], why=f"{FAILED}{error}"))

    def _measure(self, cell: Cell, place: int) -> Result:
        seed, label, name, outer = cell
        options, system, equal = self._options, y.SYSTEMS[name], label in (s.SEARCH, s.EQUAL_TOKENS)
        if reason := system.cannot.get(label, ""):
            return Result(name, label, seed, why=reason, person="start all of it again from a checkpoint")
        scenario = self._scenario(label)
        steps = options.steps if equal else 0
        outer = outer or (self._best_outer(name) if equal else "")
        return Cluster(
            name, system, scenario, world=options.world, seed=seed, steps=steps, outer=outer, place=place
        ).run(label)

    def _best_outer(self, name: str) -> str:
        """What the search found for this system; empty where there was none."""
        lines = [line for line in read_lines(self._results) if line["scenario"] == s.SEARCH and line["system"] == name]
        if self._options.resume:
            lines += [x for x in read_lines(self._options.resume) if x["scenario"] == s.SEARCH and x["system"] == name]
        return min(((line["loss"], line["outer"]) for line in lines if line["loss"]), default=(0.0, ""))[1]

    def _write(self, result: Result) -> None:
        with self._writing, self._results.open("a") as out:
            out.write(result.line() + "\n")
            minutes = (time.monotonic() - self._began) / 60
            head = f"[{next(self._count)}/{len(self._cells)}, {minutes:.1f} min] {result.scenario:12}"
            print(f"{head} {y.SYSTEMS[result.system].title:20} {words(result)}", flush=True)


def cores_of(text: str) -> set[int]:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit()):
        sys.exit(f"--cores {text!r}: say FIRST-LAST, as in 0-3")
    cores = os.sched_getaffinity(0) & set(range(int(first), int(last) + 1))
    return cores or os.sched_getaffinity(0)


def _cells(part: Part) -> list[Cell]:
    """One pass over all, then the next; before them the search, whose seed is its own."""
    repeat, which, names = part
    tried = [(SEARCH_SEED, s.SEARCH, name, outer) for outer in OUTER_TRIED for name in names]
    searches = [cell for cell in tried if s.SEARCH in which and y.SYSTEMS[cell[2]].outer]
    passes = itertools.product(range(repeat), [label for label in which if label != s.SEARCH], names)
    return [*searches, *((seed, label, name, "") for seed, label, name in passes)]


def _cell(line: dict[str, object]) -> Cell:
    outer = line["outer"] if line["scenario"] == s.SEARCH else ""
    return (int(str(line["seed"])), str(line["scenario"]), str(line["system"]), str(outer))


def chosen(text: str, known: Iterable[str], default: Iterable[str] | None) -> list[str]:
    known = list(known)
    names = text.split(",") if text else list(default or known)
    for name in names:
        if name not in known:
            sys.exit(f"there is no {name!r}; choose from {', '.join(known)}")
    return names


def words(result: Result) -> str:
    parts = [result.why]
    if result.steps_per_s is not None:
        parts.insert(0, f"{result.steps_per_s:6.2f} steps/s, longest pause {result.pause_s:.2f} s")
    if result.loss is not None:
        parts.insert(-1, f"loss {result.loss:.4f} {result.outer}")
    return "; ".join(part for part in parts if part)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
