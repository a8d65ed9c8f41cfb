"""A result against a numeric setting, one line per arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atoll.errors import ConfigError
from atoll.instruments.figures.labels import LineEnd, end_labels, finish
from atoll.instruments.figures.picture import PageTable, Picture, unique_ids
from atoll.instruments.figures.style import AXIS, look, new_figure, styled, width_of
from atoll.instruments.figures.ticks import linear_axis, log_axis, plain_y_axis, short
from atoll.instruments.figures.values import Tally, as_number, limit_lines, name, pairs, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

REMEDY = (
    'Give series such as {"label": "rebase", "points": [[1, 0.4, 0.1], [8, 0.9, 0.1]]}: setting, result, half width.'
)

DENSE_POINTS = 12
"""Lines with more points get smaller markers."""

Point = tuple[float, float, float]
"""Setting, result, half width of its error bar (0 if none)."""


def sweep_figure(
    series: Sequence[Mapping[str, Any]],
    *,
    x_label: str = "setting",
    y_label: str = "loss",
    log_x: bool = False,
    zero_line: bool = False,
    wide: bool = False,
    caption: str = "",
) -> Picture:
    """One line per arm with error bars; its name stands at its right end. `zero_line` for differences in percent."""
    tally = Tally("points")
    arms = _read(series, tally, log_x)
    with styled():
        width = width_of(wide)
        figure, (axes,) = new_figure(width, 2.6 if wide else 2.4)
        groups = unique_ids("sweep", arms)
        handles = [_draw(axes, points, i, groups[i]) for i, points in enumerate(arms.values())]
        every = [point[0] for points in arms.values() for point in points]
        (log_axis if log_x else linear_axis)(axes, every, width - 1.5)
        if zero_line:
            axes.axhline(0, color=AXIS, linewidth=0.8, zorder=1)
        axes.margins(y=0.08)
        plain_y_axis(axes, [point[1] for points in arms.values() for point in points])
        axes.set(xlabel=x_label, ylabel=y_label)
        endings = [
            LineEnd(label, str(handle.get_color()), points[-1][0], points[-1][1], handle)
            for (label, points), handle in zip(arms.items(), handles, strict=True)
        ]
        end_labels(figure, axes, endings)
        finish(figure)
    text = caption or f"{y_label} against {x_label}."
    tips = {group: _tip(label, points) for group, (label, points) in zip(groups, arms.items(), strict=True)}
    return Picture(
        figure,
        f"{y_label} against {x_label}",
        text[0].upper() + text[1:],
        _table(arms, x_label, y_label),
        tally.notes(),
        tips,
    )


def _read(series: Sequence[Mapping[str, Any]], tally: Tally, log_x: bool) -> dict[str, list[Point]]:
    arms: dict[str, list[Point]] = {}
    for i, row in enumerate(rows_of(series, "series", REMEDY)):
        where = f"series[{i}]"
        label = name(row, "label", where)
        if label in arms:
            raise ConfigError(f"{where}: a second series named {label!r}. Join their points or choose another name.")
        points = arms.setdefault(label, [])
        for raw in pairs(row, "points", where, columns=(2, 3)):
            x, y = as_number(raw[0], f"{where}: setting"), as_number(raw[1], f"{where}: result")
            half = as_number(raw[2], f"{where}: half width", low=0) if len(raw) == 3 else None
            if not tally.keep(x, y) or x is None or y is None:
                continue
            if log_x and x <= 0:
                raise ConfigError(f"{where}: the setting {x:g} has no place on a logarithmic axis. Use log_x=False.")
            points.append((x, y, half or 0.0))
        points.sort()
    if not any(arms.values()):
        raise ConfigError(f"Nothing to draw: no series has a point with finite values. {REMEDY}")
    limit_lines(len(arms), "series")
    return {label: points for label, points in arms.items() if points}


def _draw(axes: Axes, points: Sequence[Point], index: int, group: str) -> Line2D:
    style = look(index) | ({"markersize": 2.4} if len(points) > DENSE_POINTS else {})
    xs, ys, halves = (list(column) for column in zip(*points, strict=True))
    (line,) = axes.plot(xs, ys, gid=group, zorder=3, **style)
    if any(halves):
        axes.errorbar(xs, ys, yerr=halves, fmt="none", ecolor=style["color"], elinewidth=0.8, capsize=1.8, capthick=0.8)
    return line


def _tip(label: str, points: Sequence[Point]) -> str:
    return f"{label}: " + ", ".join(
        f"{short(x)}: {y:.4g}" + (f" ± {half:.2g}" if half else "") for x, y, half in points
    )


def _table(arms: Mapping[str, Sequence[Point]], x_label: str, y_label: str) -> PageTable:
    rows = [
        (label, short(x), f"{y:.4g}".replace("-", "\u2212"), f"{half:.2g}" if half else "–")
        for label, points in arms.items()
        for x, y, half in points
    ]
    return PageTable(f"{y_label} by {x_label}", ("series", x_label, y_label, "±"), rows)
