"""Tables of what was measured: median and range of each cell."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scenarios import SCENARIOS
from systems import SYSTEMS

Row = dict[str, Any]
MEASURES: dict[str, tuple[str, Callable[[Row], float], str]] = {
    "steps_per_s": ("Useful steps per second, all learners", lambda row: row["steps_per_s"], "{:.1f}"),
    "pause_s": ("Longest pause of a learner to whom nothing was done, s", lambda row: row["pause_s"], "{:.2f}"),
    "rejoin_s": ("From a process's start to its first step, s (faults)", lambda row: row["rejoin_s"], "{:.1f}"),
    "start_s": ("From the first process to the last learner's third step, s", lambda row: row["start_s"], "{:.1f}"),
    "megabytes_per_step": ("Megabytes on the links per step", lambda row: row["megabytes_per_step"], "{:.3f}"),
    "cpu_s_per_step": ("CPU seconds of all processes per step", lambda row: row["cpu_s_per_step"], "{:.4f}"),
    "memory_mb": ("Memory per learner, coordinator included, MB", lambda row: row["memory_mb"], "{:.0f}"),
    "loss": ("Training loss at equal time (last row: held out, at equal tokens)", lambda row: row["loss"], "{:.3f}"),
}


def write_tables(folder: Path) -> str:
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    cells: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        cells[row["scenario"], row["system"]].append(row)
    names = [name for name in SYSTEMS if any(system == name for _, system in cells)]
    labels = [name for name in (*SCENARIOS, "tokens") if any(label == name for label, _ in cells)]
    parts = [
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    ]
    for title, value, form in MEASURES.values():
        body = [_line(label, names, cells, value, form) for label in labels]
        if any(any(c.strip() for c in cell[1:]) for cell in body):
            parts += [f"\n## {title}\n", _table(["", *(SYSTEMS[name].title for name in names)], body)]
    whys = sorted(
        {(SYSTEMS[n].title, label, row["why"]) for (label, n), found in cells.items() for row in found if row["why"]}
    )
    parts.append("\n## What did not work\n")
    parts += [f"- {title}, {label}: {why}" for title, label, why in whys]
    lines = [[SYSTEMS[name].title, str(SYSTEMS[name].code_lines)] for name in names]
    parts += ["\n## Lines of the user's script that the system asks for\n", _table(["system", "lines"], lines)]
    parts += ["\n## Scenarios\n"] + [f"- {name}: {SCENARIOS[name].what}" for name in labels if name in SCENARIOS]
    text = "\n".join(parts) + "\n"
    (folder / "tables.md").write_text(text)
    return text


def _line(
    label: str, names: list[str], cells: dict[tuple[str, str], list[Row]], value: Callable[[Row], float], form: str
) -> list[str]:
    return [label, *(_cell([value(row) for row in cells.get((label, name), [])], form) for name in names)]


def _cell(values: list[float], form: str) -> str:
    found = sorted(value for value in values if value)
    if not found:
        return "-" if values else ""
    middle = form.format(statistics.median(found))
    low, high = form.format(found[0]), form.format(found[-1])
    return middle if low == high else f"{middle} ({low} to {high})"


def _table(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
