"""What was measured of one run, and how it is worked out of what its processes left."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

Line = dict[str, Any]
FAILED = "failed: "
"""How `why` begins where nothing was measured though it should have been: such a cell is tried again."""
STILL_S = 8.0
"""Who has made no step for so long (or for three of its own) stands still."""


@dataclass
class Result:
    """None: not measured, or there is none."""

    system: str
    scenario: str
    seed: int
    outer: str = ""
    steps_per_s: float | None = None
    """Useful ones: made, and not known to be thrown away."""
    ideal_steps_per_s: float | None = None
    """Of workers that never wait and are never away."""
    exchanges: int | None = None
    """Since it began: commits of Atoll and torchft, hivemind's averagings, Flower's merged rounds, DDP's steps."""
    lost_steps: float | None = None
    pause_s: float | None = None
    """The longest gap between two steps of a worker to whom nothing was done."""
    rejoin_s: float | None = None
    """From the start of a process that comes back to its first step; the mean."""
    returned: str = ""
    """How many of those that were started again made a step before the window ended: "1 of 1"."""
    standing: int = 0
    """Workers that made no step at the end of the window, though they should."""
    start_s: float | None = None
    """From the start of the first process to the third step of the last."""
    megabytes_per_step: float | None = None
    learner_cpu_s_per_step: float | None = None
    coordinator_cpu_s_per_step: float | None = None
    busy: float | None = None
    """Of the cores that the run had, the share that its processes used: near 1, the cores were measured."""
    learner_memory_mb: float | None = None
    coordinator_memory_mb: float | None = None
    loss: float | None = None
    """Held out: at equal time of worker 0's own model, at equal tokens of what the system hands to its user."""
    person: str = ""
    """What somebody had to do besides starting again what was killed."""
    why: str = ""
    """Not possible, not measured, or how it ended early."""
    window_s: float = 0.0
    cores: int = 0
    load: float = 0.0
    """Of the whole machine, when it ended."""
    date: str = ""
    machine: str = ""
    versions: str = ""
    """Of the system and what it stands on."""

    def void(self, why: str) -> None:
        """An error, and no numbers."""
        for one in fields(self):
            if one.default is None:
                setattr(self, one.name, None)
        self.why = f"{FAILED}{why}"

    def line(self) -> str:
        return json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()})


def read_lines(path: Path) -> list[Line]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def worker_lines(folder: Path, rank: int) -> list[Line]:
    return read_lines(folder / f"worker-{rank}.jsonl")


def longest_pause(workers: list[list[Line]], begin: float, end: float) -> float:
    """Of workers to whom nothing was done."""
    times = ([begin, *(x["t"] for x in lines if begin <= x["t"] < end), end] for lines in workers)
    return max((after - before for found in times for before, after in itertools.pairwise(found)), default=0.0)


def lost_by_count(workers: list[list[Line]], alive: set[int], begin: float, end: float) -> float:
    """Steps that processes say were thrown away, and those of the dead that had not come into the model."""
    lost = 0.0
    for lines in workers:
        for pid, found in itertools.groupby(lines, key=lambda line: line["pid"]):
            mine = [line for line in found if line["t"] < end]
            if mine and "kept" in mine[-1] and mine[-1]["t"] >= begin:
                before = max((line["lost"] for line in mine if line["t"] < begin), default=0)
                lost += (mine[-1]["lost"] if pid in alive else len(mine) - mine[-1]["kept"]) - before
    return lost


def lost_by_round(folder: Path, workers: list[list[Line]], alive: set[int], begin: float, end: float) -> float:
    """Steps of rounds that the server has not merged, but for the newest of those that live."""
    merged = set((folder / "merged.txt").read_text().split()) if (folder / "merged.txt").exists() else set()
    inside = [[line for line in lines if begin <= line["t"] < end] for lines in workers]
    good = merged | {lines[-1]["round"] for lines in inside if lines and lines[-1]["pid"] in alive}
    return sum(line["round"] not in good for lines in inside for line in lines)


def lost_by_ledger(folder: Path, workers: list[list[Line]], begin: float, end: float, tokens: int) -> float | None:
    """Atoll: made, less merged, less pending. Its events have the wall clock's time."""
    offset = time.time() - time.monotonic()
    stats = [
        (line["t_ns"] / 1e9 - offset, (line["tokens_merged"] + line["tokens_pending"]) / tokens)
        for path in sorted((folder / "run" / "events").glob("syncer*.jsonl"))
        for line in read_lines(path)
        if line["kind"] == "syncer_stats"
    ]
    inside = sorted((at, steps) for at, steps in stats if begin <= at <= end)
    if not inside:
        return None

    def gap(at: float, steps: float) -> float:
        return sum(line["t"] <= at for lines in workers for line in lines) - steps

    return gap(*inside[-1]) - gap(*inside[0])


def exchanges(kept: str, folder: Path, workers: list[list[Line]]) -> int:
    """How often something of a worker came into the model since the run began. Steps alone show nothing: a system whose
    workers never find each other makes them undisturbed."""
    if kept == "ledger":
        files = (folder / "run" / "events").glob("syncer*.jsonl")
        return sum(max((x["commits"] for x in read_lines(f) if x["kind"] == "syncer_stats"), default=0) for f in files)
    if kept == "rounds":
        merged = folder / "merged.txt"
        return len(merged.read_text().split()) if merged.exists() else 0
    lines = [line for found in workers for line in found]
    count = next((name for name in ("averaged", "kept") if lines and name in lines[0]), "")
    return len({(x["pid"], x[count]) for x in lines if x[count]}) if count else len(lines)


def standing_still(workers: list[list[Line]], end: float) -> list[int]:
    """Ranks that make no step, though they should."""
    found = []
    for rank, lines in enumerate(workers):
        times = [line["t"] for line in lines]
        usual = sorted(b - a for a, b in itertools.pairwise(times))[len(times) // 2 - 1] if len(times) > 2 else 0.0
        if not times or end - times[-1] > max(STILL_S, 3 * usual):
            found.append(rank)
    return found
