"""Goodput against the number of chips, and the rule that makes all its curves one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atoll.errors import ConfigError
from atoll.instruments.figures.labels import LineEnd, end_labels, finish, legend
from atoll.instruments.figures.picture import PageTable, Picture, unique_ids
from atoll.instruments.figures.style import AXIS, PALETTE, SOFT, new_figure, ramp, styled, width_of
from atoll.instruments.figures.ticks import log_axis, percent_y_axis, short, signed
from atoll.instruments.figures.values import Tally, limit_lines, name, number, positive, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

METHODS = ("inelastic", "elastic", "decoupled")
REMEDY = (
    'Give cells such as {"chips": 1200000, "method": "decoupled", "learners": 8, "goodput": 88.1, "half_width": 0.4, '
    '"uptime": 100.0, "published": 88}; methods are inelastic, elastic and decoupled.'
)


@dataclass(frozen=True)
class GoodputCell:
    chips: float
    method: str
    learners: int
    goodput: float
    half_width: float | None
    uptime: float | None
    published: float | None


@dataclass
class GoodputLine:
    """One method with one number of learners."""

    label: str
    colour: str
    cells: list[GoodputCell] = field(default_factory=list)
    group: str = ""

    def tip(self) -> str:
        points = ", ".join(f"{short(c.chips)} chips {_value(c)}" for c in self.cells)
        return f"{self.label}: {points}"


def goodput_figure(cells: Sequence[Mapping[str, Any]], *, wide: bool = False, caption: str = "") -> Picture:
    """Goodput against chips on a logarithmic axis, one line per method and number of learners.

    Published values, where a cell has one, are hollow markers. A line's name stands at its end.
    """
    tally = Tally("cells")
    found = _cells(cells, tally)
    with styled():
        lines = _lines(found)
        width = width_of(wide)
        figure, (axes,) = new_figure(width, 3.0 if wide else 2.55)
        drawn = [_draw(axes, line, [c.chips for c in line.cells]) for line in lines]
        log_axis(axes, [c.chips for c in found], width - 1.3)
        percent_y_axis(axes)
        axes.set(xlabel="chips", ylabel="goodput (%)")
        has_published = _published_key(found)
        if has_published:
            legend(figure, has_published)
        endings = [
            LineEnd(line.label, line.colour, line.cells[-1].chips, line.cells[-1].goodput, handle)
            for line, handle in zip(lines, drawn, strict=True)
        ]
        end_labels(figure, axes, endings)
        finish(figure)
    text = caption or "Goodput against the number of chips, for data-parallel training and for M decoupled learners."
    return Picture(
        figure, "Goodput against chips", text, _table(lines), [*_interval_note(found), *tally.notes()],
        {line.group: line.tip() for line in lines},
    )  # fmt: skip


def collapse_figure(cells: Sequence[Mapping[str, Any]], *, wide: bool = False, caption: str = "") -> Picture:
    """Goodput against chips per learner: M learners on N chips are like one elastic learner on N/M.

    Inelastic cells are left out, because the rule does not speak of them.
    """
    tally = Tally("cells")
    found = [cell for cell in _cells(cells, tally) if cell.method != "inelastic"]
    if not found:
        raise ConfigError(f"Nothing to draw: no elastic or decoupled cell is among the cells. {REMEDY}")
    with styled():
        lines = _lines(found)
        width = width_of(wide)
        figure, (axes,) = new_figure(width, 2.6 if wide else 2.35)
        drawn = [_draw(axes, line, [c.chips / c.learners for c in line.cells], published=False) for line in lines]
        for line, handle in zip(lines, drawn, strict=True):
            if line.cells[0].method == "elastic":  # the reference lies under the others: broad, so that it is seen
                handle.set(linewidth=4, alpha=0.45, zorder=1, solid_capstyle="butt")
        log_axis(axes, [c.chips / c.learners for c in found], width - 0.6, at_values=False)
        percent_y_axis(axes)
        axes.set(xlabel="chips per learner", ylabel="goodput (%)")
        legend(figure, [(handle, line.label) for line, handle in zip(lines, drawn, strict=True)])
        finish(figure)
    text = caption or "Goodput against chips per learner: M learners on N chips are like one elastic learner on N/M."
    notes = [*_rule_note(found), *_interval_note(found), *tally.notes()]
    return Picture(
        figure,
        "Goodput against chips per learner",
        text,
        _table(lines),
        notes,
        {line.group: line.tip() for line in lines},
    )


# ---------------------------------------------------------------- reading


def _cells(cells: Sequence[Mapping[str, Any]], tally: Tally) -> list[GoodputCell]:
    found: dict[tuple[str, int, float], GoodputCell] = {}
    for i, row in enumerate(rows_of(cells, "cells", REMEDY)):
        where = f"cells[{i}]"
        method = name(row, "method", where)
        if method not in METHODS:
            raise ConfigError(f"{where}: unknown method {method!r}. {REMEDY}")
        chips, learners = positive(row, "chips", where), positive(row, "learners", where)
        goodput = number(row, "goodput", where, low=0, high=100)
        if not tally.keep(chips, learners, goodput):
            continue
        assert chips is not None and learners is not None and goodput is not None
        if learners != int(learners) or learners > chips:
            raise ConfigError(
                f"{where}: {learners:g} learners on {chips:g} chips. Give a whole number, at most the chips."
            )
        key = (method, int(learners), chips)
        if key in found:
            raise ConfigError(f"{where}: a second cell for {method}, {key[1]} learners, {chips:g} chips. Keep one.")
        found[key] = GoodputCell(
            chips, method, int(learners), goodput, number(row, "half_width", where, low=0, high=100),
            number(row, "uptime", where, low=0, high=100), number(row, "published", where, low=0, high=100),
        )  # fmt: skip
    tally.require_some(REMEDY)
    return list(found.values())


def _lines(cells: Sequence[GoodputCell]) -> list[GoodputLine]:
    """Inelastic, elastic, then decoupled from few to many learners, light to dark."""
    keys = sorted({(METHODS.index(c.method), c.learners) for c in cells})
    limit_lines(len(keys), "methods and numbers of learners")
    many = [learners for method, learners in keys if method == 2]
    shades = dict(zip(many, ramp(len(many)), strict=True)) if many else {}
    lines = []
    for method, learners in keys:
        label = f"M = {learners}" if method == 2 else f"M = {learners}, {METHODS[method]}"
        line_colour = shades[learners] if method == 2 else (AXIS, PALETTE[1])[method]
        mine = [c for c in cells if (METHODS.index(c.method), c.learners) == (method, learners)]
        line = GoodputLine(label, line_colour, sorted(mine, key=lambda c: c.chips))
        lines.append(line)
    for line, group in zip(lines, unique_ids("goodput", [line.label for line in lines]), strict=True):
        line.group = group
    return lines


# ---------------------------------------------------------------- drawing


def _draw(axes: Axes, line: GoodputLine, xs: Sequence[float], *, published: bool = True) -> Line2D:
    ys = [cell.goodput for cell in line.cells]
    (drawn,) = axes.plot(xs, ys, color=line.colour, marker="o", gid=line.group, zorder=3, clip_on=False)
    wide_enough = [(x, c.goodput, c.half_width) for x, c in zip(xs, line.cells, strict=True) if c.half_width]
    if wide_enough:
        at, middle, half = zip(*wide_enough, strict=True)
        axes.errorbar(at, middle, yerr=half, fmt="none", ecolor=line.colour, elinewidth=0.8, capsize=1.6, capthick=0.8)
    if published:
        theirs = [(x, c.published) for x, c in zip(xs, line.cells, strict=True) if c.published is not None]
        if theirs:
            axes.plot(
                *zip(*theirs, strict=True), linestyle="none", marker="o", markersize=6.2, markerfacecolor="none",
                markeredgecolor=line.colour, markeredgewidth=0.8, zorder=4, clip_on=False,
                gid=f"{line.group}-published",
            )  # fmt: skip
    return drawn


def _published_key(cells: Sequence[GoodputCell]) -> list[tuple[Line2D, str]]:
    """Two signs that say which markers are ours and which are published."""
    from matplotlib.lines import Line2D

    if all(cell.published is None for cell in cells):
        return []
    ours = Line2D([], [], color=SOFT, marker="o")
    theirs = Line2D([], [], color=SOFT, marker="o", markersize=6.2, markerfacecolor="none", linestyle="none")
    return [(ours, "simulated"), (theirs, "published")]


# ---------------------------------------------------------------- words


def _value(cell: GoodputCell) -> str:
    half = f" ± {cell.half_width:.1f}" if cell.half_width else ""
    return f"{cell.goodput:.1f}{half}"


def _interval_note(cells: Sequence[GoodputCell]) -> list[str]:
    widths = [cell.half_width for cell in cells if cell.half_width]
    return [f"Bars are 95% intervals, at most {max(widths):.1f} points either way."] if widths else []


def _rule_note(cells: Sequence[GoodputCell]) -> list[str]:
    """How well the rule holds where a decoupled cell has an elastic twin at exactly N/M chips."""
    single = {cell.chips: cell.goodput for cell in cells if cell.method == "elastic" and cell.learners == 1}
    gaps = [
        cell.goodput - single[cell.chips / cell.learners]
        for cell in cells
        if cell.method == "decoupled" and cell.chips / cell.learners in single
    ]
    if not gaps:
        return []
    return [
        f"{len(gaps)} decoupled cells have an elastic twin at N/M chips; "
        f"they differ from it by {signed(min(gaps))} to {signed(max(gaps))} points."
    ]


def _table(lines: Sequence[GoodputLine]) -> PageTable:
    rows = []
    for line in lines:
        for cell in line.cells:
            uptime = "–" if cell.uptime is None else f"{cell.uptime:.1f}"
            theirs = "–" if cell.published is None else f"{cell.published:g}"
            gap = "–" if cell.published is None else signed(cell.goodput - cell.published)
            rows.append((line.label, short(cell.chips), _value(cell), theirs, gap, uptime))
    head = ("method", "chips", "goodput, %", "published, %", "difference, points", "uptime, %")
    return PageTable("Goodput by method and chips", head, rows)
