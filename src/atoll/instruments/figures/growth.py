"""How the simulator's own cost grows: events and wall seconds against chips."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atoll.instruments.figures.labels import finish, legend
from atoll.instruments.figures.picture import PageTable, Picture, unique_ids
from atoll.instruments.figures.style import AXIS, look, new_figure, styled, width_of
from atoll.instruments.figures.ticks import log_axis, log_y_axis, short
from atoll.instruments.figures.values import Tally, limit_lines, optional_name, positive, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

REMEDY = (
    'Give points such as {"chips": 1200000, "events": 380000, "wall_s": 9.5}, with "label" if there are several lines.'
)

Points = dict[str, list[tuple[float, float, float]]]
"""label -> (chips, events, wall seconds), by chips."""


def growth_figure(points: Sequence[Mapping[str, Any]], *, wide: bool = True, caption: str = "") -> Picture:
    """Two panels on logarithmic axes, events and wall seconds against chips, with a guide proportional to the chips."""
    tally = Tally("points")
    series = _read(points, tally)
    with styled():
        width = width_of(wide)
        figure, panels = new_figure(width, 2.4 if wide else 2.0, panels=2)
        handles: list[tuple[Line2D, str]] = []
        groups = unique_ids("growth", series)
        for axes, column, title in zip(panels, (1, 2), ("events", "wall seconds"), strict=True):
            drawn = _panel(axes, series, column, groups)
            _axes(axes, series, column, width)
            guide = _guide(axes, series, column)
            axes.set(xlabel="chips")
            axes.set_title(title)
            handles = [*zip(drawn, series, strict=True), (guide, "in proportion to the chips")]
        legend(figure, [(handle, label or "simulation") for handle, label in handles])
        finish(figure)
    text = caption or "Events and wall seconds of a simulation against the chips that it has."
    tips = {
        group: f"{label or 'simulation'}: "
        + ", ".join(f"{short(c)} chips {short(e)} events {w:.3g} s" for c, e, w in rows)
        for group, (label, rows) in zip(groups, series.items(), strict=True)
    }
    return Picture(
        figure, "Growth of the simulation's cost", text, _table(series), [*_slopes(series), *tally.notes()], tips
    )


def _read(points: Sequence[Mapping[str, Any]], tally: Tally) -> Points:
    series: Points = {}
    for i, row in enumerate(rows_of(points, "points", REMEDY)):
        where = f"points[{i}]"
        values = [positive(row, key, where) for key in ("chips", "events", "wall_s")]
        label = optional_name(row, "label", where)
        if tally.keep(*values):
            chips, events, wall_s = (value for value in values if value is not None)
            series.setdefault(label, []).append((chips, events, wall_s))
    tally.require_some(REMEDY)
    limit_lines(len(series), "lines")
    return {label: sorted(rows) for label, rows in series.items()}


def _panel(axes: Axes, series: Points, column: int, groups: Sequence[str]) -> list[Line2D]:
    drawn = []
    for i, rows in enumerate(series.values()):
        xs, ys = [row[0] for row in rows], [row[column] for row in rows]
        drawn += axes.plot(xs, ys, gid=groups[i] if column == 1 else f"{groups[i]}-wall", zorder=3, **look(i))
    return drawn


def _axes(axes: Axes, series: Points, column: int, width: float) -> None:
    every = [row for rows in series.values() for row in rows]
    log_axis(axes, [row[0] for row in every], width / 2 - 0.5)
    log_y_axis(axes, [row[column] for row in every], 1.6)


def _guide(axes: Axes, series: Points, column: int) -> Line2D:
    """Through the first point of the first line, in proportion to the chips, as far as the panel reaches."""
    chips, value = next(iter(series.values()))[0][0], next(iter(series.values()))[0][column]
    low, high = axes.get_xlim()
    limits = axes.get_ylim()
    (line,) = axes.plot(
        [low, high],
        [value * low / chips, value * high / chips],
        color=AXIS,
        linewidth=0.8,
        linestyle=(0, (3, 2)),
        zorder=1,
    )
    axes.set_ylim(limits)
    axes.set_xlim(low, high)
    return line


def _slopes(series: Points) -> list[str]:
    """Exponents between the first and the last point of a line."""
    notes = []
    for label, rows in series.items():
        first, last = rows[0], rows[-1]
        if last[0] > first[0]:
            events, wall = (math.log(last[c] / first[c]) / math.log(last[0] / first[0]) for c in (1, 2))
            of = f"{label}: " if label else ""
            notes.append(
                f"{of}from {short(first[0])} to {short(last[0])} chips, events grow with exponent {events:.2f} "
                f"and wall time with {wall:.2f}."
            )
    return [note[0].upper() + note[1:] for note in notes]


def _table(series: Points) -> PageTable:
    rows = [
        (label or "simulation", short(chips), f"{events:,.0f}", f"{wall_s:.3g}", f"{1e6 * wall_s / events:.3g}")
        for label, points in series.items()
        for chips, events, wall_s in points
    ]
    return PageTable("Cost of a simulation", ("run", "chips", "events", "wall, s", "microseconds per event"), rows)
