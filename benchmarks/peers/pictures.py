"""Figures of what was measured: useful steps of each system as a share of the ideal."""

from __future__ import annotations

from pathlib import Path

from systems import SYSTEMS
from tables import Cells

FIGURES = {
    "pace": ("clean", "jitter", "slow", "generations", "delay"),
    "faults": ("kill", "kills", "coordinator", "partition", "join", "all"),
    "links": ("1gbit-small", "100mbit-small", "20mbit-small", "5mbit-small", "thin"),
}
"""What fits on a page each."""
TITLES = {"pace": "what machines and distance cost", "faults": "what faults cost", "links": "what thin links cost"}


def write_figures(cells: Cells, folder: Path, prefix: str = "") -> list[tuple[str, Path]]:
    """Title and file of each; none of scenarios without numbers."""
    from atoll.instruments.figures import bars_figure

    found = []
    for name, labels in FIGURES.items():
        if bars := [bar for label in labels for bar in _bars(cells, label)]:
            picture = bars_figure(
                bars, x_label="useful steps, % of the ideal", differences=False, wide=True,
                caption="Useful steps, % of the ideal: the middle of the range of all runs, which the lines show.",
            )  # fmt: skip
            folder.mkdir(parents=True, exist_ok=True)
            picture.save(folder / f"{prefix}{name}")
            found.append((TITLES[name], folder / f"{prefix}{name}.png"))
    return found


def _bars(cells: Cells, label: str) -> list[dict[str, object]]:
    """In the same order in every group."""
    bars = []
    for name in (name for name in SYSTEMS if name != "bare"):
        rows = [row for row in cells.get((label, name), []) if row["ideal_steps_per_s"]]
        shares = [100 * row["steps_per_s"] / row["ideal_steps_per_s"] for row in rows if row["steps_per_s"] is not None]
        if shares:
            middle, half = (max(shares) + min(shares)) / 2, (max(shares) - min(shares)) / 2
            bars.append({"label": SYSTEMS[name].title, "percent": middle, "half_width": half, "group": label})
    return bars
