"""Relative losses against a baseline, or other percentages, as bars, with error bars and what others published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.errors import ConfigError
from atoll.instruments.figures.labels import LABEL_POINTS, LINE_INCHES, finish, legend, text_inches, wrap
from atoll.instruments.figures.picture import PageTable, Picture, unique_ids
from atoll.instruments.figures.style import AXIS, BAND, INK, SOFT, colour, new_figure, styled, width_of
from atoll.instruments.figures.ticks import signed
from atoll.instruments.figures.values import Tally, as_number, name, number, optional_name, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BARS_MAX = 60
"""Bars of one figure: what fits on a page at 0.16 inch each."""

BAR_INCHES = 0.105
LANE_INCHES = 0.175
"""Thickness of a bar, and of its lane, which the published band fills."""

BOLD_WIDTH = 1.15
"""Bold DejaVu Sans against the plain one, per letter."""

NAMES_SHARE_MAX = 0.34
"""How much of the figure's width the names at the left may take."""

REMEDY = (
    'Give groups such as {"label": "M = 8", "percent": 1.9, "half_width": 0.2, "published": 3.9, "group": "AdamW"}; '
    '"published" is a number or [low, high], and only label and percent are needed.'
)

Write = Callable[[float, int], str]
"""How a value is written, with so many digits."""


@dataclass(frozen=True)
class Bar:
    label: str
    percent: float
    half_width: float
    published: tuple[float, float] | None
    group: str


def bars_figure(
    groups: Sequence[Mapping[str, Any]],
    *,
    x_label: str = "loss against the baseline (%)",
    differences: bool = True,
    wide: bool = False,
    caption: str = "",
) -> Picture:
    """One horizontal bar per entry in the order given, with its value; names may be long.

    `published`: a number p shades the lane from 0 to p, a pair [low, high] from low to high. Entries with a "group"
    stand together under its name, in a colour of their own. Differences have a sign; other percentages have none.
    """
    tally = Tally("bars")
    bars = _read(groups, tally)
    write: Write = signed if differences else _plain
    with styled():
        width = width_of(wide)
        figure, axes, places = _canvas(bars, width)
        order = list(dict.fromkeys(bar.group for bar in bars))
        ids = unique_ids("bar", [f"{bar.group} {bar.label}" for bar in bars])
        for bar, y, gid in zip(bars, places, ids, strict=True):
            _draw(axes, bar, y, colour(order.index(bar.group)), gid)
        axes.axvline(0, color=AXIS, linewidth=0.8, zorder=4)
        axes.set_xlabel(x_label)
        _values(figure, axes, bars, places, write)
        if any(bar.published for bar in bars):
            _key(figure)
        finish(figure)
    better = "; lower is better" if differences else ""
    text = caption or f"{x_label[0].upper()}{x_label[1:]}{better}."
    halves = ["Error bars are the given half widths."] if any(bar.half_width for bar in bars) else []
    tips = {
        gid: f"{bar.group} {bar.label}: {_words(bar, write)} percent".strip()
        for bar, gid in zip(bars, ids, strict=True)
    }
    names = ("Difference to the baseline", "difference, %") if differences else (x_label, "value, %")
    return Picture(figure, x_label, text, _table(bars, write, names), [*halves, *tally.notes()], tips)


def _read(groups: Sequence[Mapping[str, Any]], tally: Tally) -> list[Bar]:
    bars = []
    for i, row in enumerate(rows_of(groups, "groups", REMEDY)):
        where = f"groups[{i}]"
        label, group = name(row, "label", where), optional_name(row, "group", where)
        percent, half = number(row, "percent", where), number(row, "half_width", where, low=0)
        published = _published(row.get("published"), where)
        if tally.keep(percent) and percent is not None:
            bars.append(Bar(label, percent, half or 0.0, published, group))
    tally.require_some(REMEDY)
    if len(bars) > BARS_MAX:
        raise ConfigError(f"{len(bars)} bars in one figure; at most {BARS_MAX} fit on a page. Draw several figures.")
    order = list(dict.fromkeys(bar.group for bar in bars))
    return sorted(bars, key=lambda bar: order.index(bar.group))


def _published(value: object, where: str) -> tuple[float, float] | None:
    if isinstance(value, (list, tuple)):
        if len(value) != 2:
            raise ConfigError(f"{where}: 'published' has {len(value)} values. Give a number or [low, high].")
        ends = [as_number(one, f"{where}: 'published'") for one in value]
        return None if ends[0] is None or ends[1] is None else (min(ends[0], ends[1]), max(ends[0], ends[1]))
    one = as_number(value, f"{where}: 'published'")
    return None if one is None else (min(0.0, one), max(0.0, one))


# ---------------------------------------------------------------- drawing


def _canvas(bars: Sequence[Bar], width: float) -> tuple[Figure, Axes, list[float]]:
    """The figure, as high as its bars need, and each bar's place. One inch of height is one unit of y."""
    figure, (axes,) = new_figure(width, 1.0)
    labels = [wrap(figure, bar.label, NAMES_SHARE_MAX * width) for bar in bars]
    y, places, heads, before = 0.0, [], [], None
    for bar, label in zip(bars, labels, strict=True):
        if bar.group != before and bar.group:
            text = wrap(figure, bar.group, NAMES_SHARE_MAX * width / BOLD_WIDTH)
            height = LINE_INCHES * (text.count("\n") + 1) + 0.04
            y += 0.06 * (before is not None)
            heads.append((y + height / 2, text))
            y += height
        before = bar.group
        lane = max(LANE_INCHES, LINE_INCHES * (label.count("\n") + 1) + 0.03)
        places.append(y + lane / 2)
        y += lane
    figure.set_size_inches(width, round(y + 0.55, 2))
    axes.set_ylim(y + 0.04, -0.04)
    axes.set_yticks([*places, *(at for at, _ in heads)], [*labels, *(text for _, text in heads)])
    for tick, is_head in zip(axes.get_yticklabels(), [False] * len(places) + [True] * len(heads), strict=True):
        tick.set(color=INK, linespacing=1.1, fontweight="bold" if is_head else "normal")
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    return figure, axes, places


def _draw(axes: Axes, bar: Bar, y: float, fill: str, gid: str) -> None:
    if bar.published is not None:
        low, high = bar.published
        axes.barh(y, high - low, left=low, height=LANE_INCHES - 0.015, color=BAND, zorder=2, gid=f"{gid}-published")
        edges = [end for end in (low, high) if end != 0]
        axes.vlines(
            edges, y - LANE_INCHES / 2 + 0.008, y + LANE_INCHES / 2 - 0.008, color=SOFT, linewidth=0.8, zorder=2.5
        )
    axes.barh(y, bar.percent, height=BAR_INCHES, color=fill, zorder=3, gid=gid)
    if bar.half_width:
        axes.errorbar(
            bar.percent, y, xerr=bar.half_width, fmt="none", ecolor=INK, elinewidth=0.8, capsize=1.6, zorder=5
        )


def _values(figure: Figure, axes: Axes, bars: Sequence[Bar], places: Sequence[float], write: Write) -> None:
    """What the bars say, in a column right of them; what was published, in grey beside it."""
    every = [0.0, *(bar.percent + side * bar.half_width for bar in bars for side in (-1, 1))]
    every += [end for bar in bars for end in bar.published or ()]
    span = max(every) - min(every) or 1.0
    axes.set_xlim(min(every) - 0.04 * span, max(every) + 0.04 * span)
    digits = 1 if max(abs(value) for value in every) >= 1 else 2
    ours = [_words(bar, write, digits) for bar in bars]
    theirs = [f"({_published_words(bar.published, write, digits)})" if bar.published else "" for bar in bars]
    right = 0.06
    for texts, ink in ((ours, INK), (theirs, SOFT)):
        wide = max(text_inches(figure, text) for text in texts)
        right += wide + 0.06 if wide else 0.0
        for text, y in zip(texts, places, strict=True):
            axes.annotate(
                text, (1, y), xycoords=("axes fraction", "data"), xytext=(72 * right, 0), textcoords="offset points",
                ha="right", va="center_baseline", size=LABEL_POINTS, color=ink, annotation_clip=False,
            )  # fmt: skip


def _key(figure: Figure) -> None:
    from matplotlib.patches import Patch

    legend(figure, [(Patch(facecolor=BAND, edgecolor=SOFT, linewidth=0.6), "published (in parentheses)")])


# ---------------------------------------------------------------- words


def _plain(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"


def _words(bar: Bar, write: Write, digits: int = 2) -> str:
    return write(bar.percent, digits) + (f" ± {bar.half_width:.{digits}f}" if bar.half_width else "")


def _published_words(published: tuple[float, float], write: Write, digits: int = 1) -> str:
    low, high = published
    return write(high or low, digits) if 0 in published else f"{write(low, digits)} to {write(high, digits)}"


def _table(bars: Sequence[Bar], write: Write, names: tuple[str, str]) -> PageTable:
    title, column = names
    rows = []
    for bar in bars:
        theirs = _published_words(bar.published, write) if bar.published else "–"
        half = f"{bar.half_width:.2f}" if bar.half_width else "–"
        rows.append((bar.group or "–", bar.label, write(bar.percent, 2), half, theirs))
    head = ("group", "label", column, "±", "published, %")
    if not any(bar.group for bar in bars):
        return PageTable(title, head[1:], [row[1:] for row in rows])
    return PageTable(title, head, rows)
