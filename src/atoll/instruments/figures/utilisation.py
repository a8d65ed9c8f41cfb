"""Compute utilisation against bandwidth, computed and published."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import ConfigError
from atoll.instruments.figures.labels import finish, legend
from atoll.instruments.figures.picture import PageTable, Picture, unique_ids
from atoll.instruments.figures.style import SOFT, look, new_figure, styled, width_of
from atoll.instruments.figures.ticks import log_axis, percent_y_axis, short, signed
from atoll.instruments.figures.values import Tally, limit_lines, name, number, optional_name, positive, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

TABLE_POINTS_MAX = 12
"""Rows per method in the table, where nothing is published to compare with."""

PANELS_MAX = 4
"""Side by side on a page; a fifth would be narrower than its labels."""

REMEDY = (
    'Give rows such as {"method": "Streaming", "gbit_s": 9.1, "utilisation": 88.0, "published": 90.0}; either value '
    'may be None, and "panel" names a panel of its own, such as "10B, 0.8 s per step".'
)


@dataclass
class UtilisationCurve:
    computed: list[tuple[float, float]] = field(default_factory=list)
    published: list[tuple[float, float]] = field(default_factory=list)


Panels = dict[str, dict[str, UtilisationCurve]]
"""panel -> method -> its points (Gbit/s, percent)."""


def utilisation_figure(rows: Sequence[Mapping[str, Any]], *, wide: bool = False, caption: str = "") -> Picture:
    """Utilisation against bandwidth on a logarithmic axis, one line per method, published points as hollow markers.

    Rows with different "panel" values go into panels side by side; with more than one, the figure is page-wide.
    """
    tally = Tally("rows")
    panels = _read(rows, tally)
    methods = list(dict.fromkeys(method for curves in panels.values() for method in curves))
    limit_lines(len(methods), "methods")
    with styled():
        width = width_of(wide or len(panels) > 1)
        figure, axes_list = new_figure(width, 2.4, panels=len(panels))
        handles: dict[str, Any] = {}
        tips: dict[str, str] = {}
        for axes, (panel, curves) in zip(axes_list, panels.items(), strict=True):
            groups = unique_ids(f"utilisation-{axes_list.index(axes)}", methods)
            for i, method in enumerate(methods):
                if method in curves:
                    made = _draw(axes, curves[method], i, groups[i])
                    handles[method] = max(made, handles.get(method, ()), key=len)
                    tips[made[0].get_gid()] = _tip(panel, method, curves[method])
            log_axis(
                axes,
                [x for curve in curves.values() for x, _ in curve.computed + curve.published],
                width / len(panels) - 0.5,
            )
            percent_y_axis(axes)
            axes.set(xlabel="bandwidth (Gbit/s)")
            axes.set_title(panel)
        axes_list[0].set_ylabel("compute utilisation (%)")
        legend(figure, [*((handle, method) for method, handle in handles.items()), *_published_key(panels)])
        finish(figure)
    text = caption or "Compute utilisation against the bandwidth between learners."
    return Picture(figure, "Compute utilisation against bandwidth", text, _table(panels), tally.notes(), tips)


def _read(rows: Sequence[Mapping[str, Any]], tally: Tally) -> Panels:
    panels: Panels = {}
    for i, row in enumerate(rows_of(rows, "rows", REMEDY)):
        where = f"rows[{i}]"
        method, panel = name(row, "method", where), optional_name(row, "panel", where)
        gbit_s = positive(row, "gbit_s", where)
        ours, theirs = (number(row, key, where, low=0, high=100) for key in ("utilisation", "published"))
        if not tally.keep(gbit_s, ours if ours is not None else theirs):
            continue
        assert gbit_s is not None
        curve = panels.setdefault(panel, {}).setdefault(method, UtilisationCurve())
        curve.computed += [(gbit_s, ours)] if ours is not None else []
        curve.published += [(gbit_s, theirs)] if theirs is not None else []
    tally.require_some(REMEDY)
    if len(panels) > PANELS_MAX:
        raise ConfigError(f"{len(panels)} panels in one figure; at most {PANELS_MAX} fit. Draw several figures.")
    return panels


def _draw(axes: Axes, curve: UtilisationCurve, index: int, group: str) -> Any:
    """What the legend shows: the line, with the sign of the published points on it."""
    style = look(index)
    marker = style.pop("marker")
    made = []
    if curve.computed:
        points = sorted(curve.computed)
        lone = {"marker": marker} if len(points) == 1 else {}
        made += axes.plot([x for x, _ in points], [y for _, y in points], gid=group, zorder=3, **style, **lone)
    if curve.published:
        theirs = sorted(curve.published)
        made += axes.plot(
            [x for x, _ in theirs], [y for _, y in theirs], linestyle="none", marker=marker, markersize=4.6,
            markerfacecolor="white", markeredgecolor=style["color"], markeredgewidth=1.0, zorder=4, clip_on=False,
            gid=f"{group}-published",
        )  # fmt: skip
    return tuple(made)


def _published_key(panels: Panels) -> list[tuple[Line2D, str]]:
    from matplotlib.lines import Line2D

    if not any(curve.published for curves in panels.values() for curve in curves.values()):
        return []
    sign = Line2D([], [], color=SOFT, marker="o", markersize=4.6, markerfacecolor="white", linestyle="none")
    return [(sign, "published")]


def _tip(panel: str, method: str, curve: UtilisationCurve) -> str:
    of = f"{panel}, {method}" if panel else method
    points = sorted(curve.computed or curve.published)
    return f"{of}: " + ", ".join(f"{short(x)} Gbit/s {y:.1f}%" for x, y in points)


def _table(panels: Panels) -> PageTable:
    """Computed against published where something is published, else the computed points, thinned."""
    rows = []
    for panel, curves in panels.items():
        for method, curve in curves.items():
            every = math.ceil(len(curve.computed) / TABLE_POINTS_MAX)
            places: list[tuple[float, float | None]] = [*sorted(curve.published)]
            places = places or [(x, None) for x, _ in sorted(curve.computed)[::every]]
            for x, theirs in places:
                ours = _computed_at(curve, x)
                gap = signed(ours - theirs) if ours is not None and theirs is not None else "–"
                mine = "–" if ours is None else f"{ours:.1f}"
                rows.append((panel or "–", method, short(x), mine, "–" if theirs is None else f"{theirs:g}", gap))
    head = ("setting", "method", "bandwidth, Gbit/s", "utilisation, %", "published, %", "difference, points")
    if list(panels) == [""]:
        return PageTable("Compute utilisation by bandwidth", head[1:], [row[1:] for row in rows])
    return PageTable("Compute utilisation by bandwidth", head, rows)


def _computed_at(curve: UtilisationCurve, gbit_s: float) -> float | None:
    """Between its two neighbours on the logarithmic axis; None outside the computed range."""
    points = sorted(curve.computed)
    if not points or not points[0][0] <= gbit_s <= points[-1][0]:
        return None
    return float(np.interp(math.log(gbit_s), [math.log(x) for x, _ in points], [y for _, y in points]))
