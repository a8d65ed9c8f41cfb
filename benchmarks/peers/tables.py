"""Tables of what was measured: median and range of each cell."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from scenarios import EQUAL_TOKENS, SCENARIOS, SEARCH
from systems import SYSTEMS

Row = dict[str, Any]
TIMES = re.compile(
    r"\d{4}-\d\d-\d\d[T ][\d:.,]+ (- )?|[A-Z][a-z]{2} \d\d [\d:.]+ |\x1b\[\d*m|\[identity=[^\]]*(\]( -)?|$)"
)
"""Of logs: the same words at another time, in another run, are the same words."""
ONE_RUN = "¹"
Cells = dict[tuple[str, str], list[Row]]
MEASURES = {
    "steps_per_s": ("Useful steps per second, all learners", "{:.1f}"),
    "pause_s": ("Longest pause of a learner to whom nothing was done, s", "{:.2f}"),
    "lost_steps": ("Steps made and thrown away", "{:.0f}"),
    "rejoin_s": ("From the start of a process that comes in, or comes back, to its first step, s", "{:.1f}"),
    "start_s": ("From the first process to the last learner's third step, s", "{:.1f}"),
    "megabytes_per_step": ("Megabytes on the links per step", "{:.3f}"),
    "learner_cpu_s_per_step": ("CPU seconds of the learners per step", "{:.4f}"),
    "coordinator_cpu_s_per_step": ("CPU seconds of the coordinator per step", "{:.4f}"),
    "busy": ("Share of its cores that a run used (near 1 the cores were measured, not the system)", "{:.2f}"),
    "learner_memory_mb": ("Memory of a learner's processes, MB", "{:.0f}"),
    "coordinator_memory_mb": ("Memory of the coordinator's processes, MB", "{:.0f}"),
    "loss": ("Held-out loss at equal time (rows search and tokens: at equal tokens)", "{:.3f}"),
}


def write_tables(folder: Path) -> str:
    cells = read_cells(folder / "results.jsonl")
    text = "\n".join([*head(cells), *tables(cells), *the_rest(cells)]) + "\n"
    (folder / "tables.md").write_text(text)
    return text


def read_cells(results: Path) -> Cells:
    cells: Cells = defaultdict(list)
    for line in results.read_text().splitlines():
        row = json.loads(line)
        cells[row["scenario"], row["system"]].append(row)
    return cells


def head(cells: Cells) -> list[str]:
    """As the runs themselves say it: the page may be written elsewhere."""
    rows = [row for found in cells.values() for row in found if row["cores"]]
    runs = [len(found) for found in cells.values()]
    places = sorted({f"{row.get('date', '')}, {row.get('machine', '')}".strip(", ") for row in rows} - {""})
    cores = ", ".join(map(str, sorted({row["cores"] for row in rows})))
    return [
        f"{'; '.join(places) or 'On an unknown day and machine'}; {cores} cores for each run. "
        f"{_runs_in_words(min(runs), max(runs))}"
    ]


def _runs_in_words(least: int, most: int) -> str:
    if most == 1:
        return "One run of each cell."
    runs = str(most) if least == most else f"{least} to {most}"
    return f"{runs} runs of each cell: the median, and the range{f'; {ONE_RUN}: one run' if least == 1 else ''}."


def tables(cells: Cells) -> list[str]:
    names = [name for name in SYSTEMS if any(system == name for _, system in cells)]
    labels = [name for name in (*SCENARIOS, SEARCH, EQUAL_TOKENS) if any(label == name for label, _ in cells)]
    parts = []
    for measure, (title, form) in MEASURES.items():
        shown = [label for label in labels if any(row[measure] is not None for row in _rows(cells, label, names))]
        if shown:
            body = [[label, *(_cell_of(cells, label, n, measure, form) for n in names)] for label in shown]
            parts += [f"\n## {title}\n", table(["", *(SYSTEMS[name].title for name in names)], body)]
    return parts


def the_rest(cells: Cells) -> list[str]:
    names = [name for name in SYSTEMS if any(system == name for _, system in cells)]
    parts = ["\n## What a person had to do, besides starting again what was killed\n"]
    parts += _said(cells, "person") or ["- nothing, anywhere"]
    parts += ["\n## What did not work\n", *_said(cells, "why"), *_impossible(cells, names)]
    lines = [
        [SYSTEMS[name].title, versions_of(cells, name), str(SYSTEMS[name].code_lines), SYSTEMS[name].source]
        for name in names
    ]
    parts += ["\n## Versions, lines of code that the system adds to the bare script, and settings\n"]
    parts += [table(["system", "versions", "lines", "its authors' settings"], lines), "\n## Scenarios\n"]
    return parts + [f"- {name}: {one.what}" for name, one in SCENARIOS.items() if any(name == x for x, _ in cells)]


def _impossible(cells: Cells, names: list[str]) -> list[str]:
    """Of scenarios that others ran."""
    labels = [label for label in SCENARIOS if any(label == one for one, _ in cells)]
    return [
        f"- {SYSTEMS[name].title}, {label}: {SYSTEMS[name].cannot[label]}"
        for name in names
        for label in labels
        if label in SYSTEMS[name].cannot and (label, name) not in cells
    ]


def versions_of(cells: Cells, name: str) -> str:
    found = {row.get("versions", "") for (_, system), rows in cells.items() if system == name for row in rows}
    return "; ".join(sorted(found - {""})) or "-"


def _said(cells: Cells, what: str) -> list[str]:
    """Each thing once, with how many runs said it."""
    counts: dict[tuple[str, str, str], int] = defaultdict(int)
    for (label, name), found in cells.items():
        for row in found:
            if row[what] and row[what] != "nothing":
                counts[SYSTEMS[name].title, label, TIMES.sub("", row[what])] += 1
    return [f"- {title}, {label}: {text} ({count}x)" for (title, label, text), count in sorted(counts.items())]


def _rows(cells: Cells, label: str, names: list[str]) -> list[Row]:
    return [row for name in names for row in cells.get((label, name), [])]


def _cell_of(cells: Cells, label: str, name: str, measure: str, form: str) -> str:
    """What is known to be impossible is said without a run."""
    reason = SYSTEMS[name].cannot.get(label, "").split(":")[0]
    mark = ONE_RUN if any(len(rows) > 1 for rows in cells.values()) else ""
    return _cell(cells.get((label, name), []), measure, form, mark) or reason


def _cell(rows: list[Row], measure: str, form: str, mark: str) -> str:
    """The median and the range; a measured zero is one, and what is not there says why. `mark`: of a single run."""
    found = sorted(row[measure] for row in rows if row[measure] is not None)
    back = [row["returned"] for row in rows if row["returned"]] if measure == "rejoin_s" else []
    absent = sum(not text.startswith(text.split(" of ")[1]) for text in back)
    if not found:
        return "did not return" if absent else _why(rows)
    middle, low, high = (form.format(value) for value in (statistics.median(found), found[0], found[-1]))
    shown = f"{middle}{mark}" if len(found) == 1 else middle if low == high else f"{middle} ({low} to {high})"
    return f"{shown}; {absent} of {len(rows)} did not return" if absent else shown


def _why(rows: list[Row]) -> str:
    whys = {row["why"].split(":")[0] for row in rows if row["why"]}
    return ", ".join(sorted(whys)) if whys else "-" if rows else ""


def table(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
