"""Names of lines that never overlap: at the lines' right ends where there is room, else in a legend above the plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.instruments.figures.style import DPI, text_colour

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")

LABEL_POINTS = 6.5
LINE_INCHES = 1.25 * LABEL_POINTS / 72
"""Height of one line of a label: its size with 25% leading."""

GAP_INCHES = 0.02
"""Between two labels, one above the other."""

LEAD_INCHES = 0.14
"""Between the axes and the labels: room for the hair lines that lead to them."""

COLUMN_INCHES_MAX = 1.3
"""Width of the labels at the right, a third of a column, so that the plot keeps most of it; longer names are broken."""


@dataclass(frozen=True)
class LineEnd:
    """The right end of a line, in data coordinates, and what to write there."""

    text: str
    colour: str
    x: float
    y: float
    handle: Artist


# ---------------------------------------------------------------- measuring


def text_inches(figure: Figure, text: str, points: float = LABEL_POINTS) -> float:
    from matplotlib.font_manager import FontProperties

    font = FontProperties(family=["DejaVu Sans"], size=points)
    canvas: Any = figure.canvas  # Agg's, see new_figure
    return float(canvas.get_renderer().get_text_width_height_descent(text, font, False)[0]) / DPI


def wrap(figure: Figure, text: str, inches: float, points: float = LABEL_POINTS) -> str:
    """The text in lines of at most so many inches; a word that is longer than a line is cut."""
    lines = [""]
    for word in text.split():
        candidate = f"{lines[-1]} {word}".strip()
        if text_inches(figure, candidate, points) <= inches:
            lines[-1] = candidate
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and text_inches(figure, lines[-1] + letter, points) > inches:
                lines.append("")
            lines[-1] += letter
    return "\n".join(lines)


def spread(wanted: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """Centres as near to the wanted ones as can be (least squares), in their order, without overlap, inside low..high.

    Label i must lie at least (h[i-1] + h[i]) / 2 above label i-1. With c[i] the sum of those distances, p[i] - c[i] may
    not decrease, so this is isotonic regression of wanted[i] - c[i]: neighbours that are out of order are pooled.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    offsets, total = [], 0.0
    for place, i in enumerate(order):
        total += (heights[order[place - 1]] + heights[i]) / 2 if place else 0.0
        offsets.append(total)
    pools: list[tuple[float, int]] = []  # mean, members
    for i, offset in zip(order, offsets, strict=True):
        pools.append((wanted[i] - offset, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools.pop(-2), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m))
    level = [mean for mean, members in pools for _ in range(members)]
    floor, ceiling = low + heights[order[0]] / 2, high - heights[order[-1]] / 2 - offsets[-1]
    centres = [0.0] * len(wanted)
    for i, offset, value in zip(order, offsets, level, strict=True):
        centres[i] = min(max(value, floor), max(ceiling, floor)) + offset
    return centres


# ---------------------------------------------------------------- labels at the ends


def end_labels(figure: Figure, axes: Axes, endings: Sequence[LineEnd]) -> None:
    """Names right of the axes, each in the colour of its line; a legend instead if they are too many or too long."""
    width, height = figure.get_size_inches()
    texts = [wrap(figure, ending.text, COLUMN_INCHES_MAX) for ending in endings]
    heights = [LINE_INCHES * (text.count("\n") + 1) + GAP_INCHES for text in texts]
    column = max(text_inches(figure, line) for text in texts for line in text.split("\n")) + LEAD_INCHES + 0.04
    engine: Any = figure.get_layout_engine()  # the constrained one, see new_figure
    engine.set(rect=(0, 0, 1 - column / width, 1))
    figure.draw_without_rendering()
    box = axes.get_position()
    low, high = box.y0 * height, box.y1 * height + LINE_INCHES / 2
    if sum(heights) > high - low:
        engine.set(rect=(0, 0, 1, 1))
        legend(figure, [(ending.handle, ending.text) for ending in endings])
        return
    figure.set_layout_engine("none")
    ends = [axes.transData.transform((ending.x, ending.y)) / DPI for ending in endings]
    wanted = [min(max(float(end[1]), low), box.y1 * height) for end in ends]
    for ending, text, end, y in zip(endings, texts, ends, spread(wanted, heights, low, high), strict=True):
        x = box.x1 * width + LEAD_INCHES
        figure.text(
            x / width, y / height, text, size=LABEL_POINTS, color=text_colour(ending.colour),
            ha="left", va="center", linespacing=1.1,
        )  # fmt: skip
        _leader(figure, (float(end[0]), min(max(float(end[1]), low), high)), (x - 0.03, y), ending.colour)


def _leader(figure: Figure, end: tuple[float, float], label: tuple[float, float], line_colour: str) -> None:
    """A hair line from a line's end to its name, where the eye would not find the way alone."""
    from matplotlib.lines import Line2D

    far = label[0] - end[0] > 0.5
    if abs(end[1] - label[1]) < 0.04 and not far:
        return
    width, height = figure.get_size_inches()
    start = end[0] + 0.035
    xs, ys = [start / width, label[0] / width], [end[1] / height, label[1] / height]
    dashes: Any = (0, (1, 2)) if far else "-"  # a long one must not be taken for data
    figure.add_artist(
        Line2D(xs, ys, color=line_colour, linewidth=0.5, alpha=0.6, linestyle=dashes, transform=figure.transFigure)
    )


# ---------------------------------------------------------------- a legend above the plot


def legend(figure: Figure, entries: Sequence[tuple[Any, str]]) -> None:
    """Above the plot, in as many columns as fit; the figure grows by its height, so the plot keeps its own."""
    width, height = figure.get_size_inches()
    wrapped = [(handle, wrap(figure, text, width - 0.5)) for handle, text in entries]
    for rows in range(1, len(entries) + 1):
        columns = math.ceil(len(entries) / rows)
        handles, texts = zip(*by_rows(wrapped, columns), strict=True)
        made = figure.legend(handles, texts, loc="outside upper left", ncols=columns)
        extent = made.get_window_extent()
        if extent.width / DPI <= width - 0.1 or columns == 1:
            break
        made.remove()
    figure.set_size_inches(width, round(height + extent.height / DPI + 0.04, 2))


def by_rows(entries: Sequence[T], columns: int) -> list[T]:
    """matplotlib fills a legend column by column, the first ones fuller; in this order it reads row by row."""
    rows = math.ceil(len(entries) / columns)
    full = len(entries) - columns * (rows - 1)  # columns that have an entry in the last row
    return [
        entries[row * columns + column]
        for column in range(columns)
        for row in range(rows if column < full else rows - 1)
    ]


def finish(figure: Figure) -> None:
    """Lay out once and keep it: PNG and SVG get the same places."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
