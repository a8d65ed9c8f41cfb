"""Just enough SVG: scales with round ticks, axes, lines, bands and labels. Colours come from the page's style sheet by
class, so that the same picture follows the light and the dark scheme."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

CHAR_PX = 6.1
"""Mean width of a character at the 11 px of labels; only used to keep labels apart."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps a domain to pixels."""

    low: float
    high: float
    start_px: float
    end_px: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return self.start_px + share * (self.end_px - self.start_px)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten) inside a range, about `count` of them."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    raw = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def clock_ticks(high_s: float, count: int) -> list[float]:
    """Round moments: seconds, minutes or hours."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    step = next((s for s in steps if high_s / s <= count), 86400 * max(1, math.ceil(high_s / 86400 / count)))
    return [float(i * step) for i in range(int(high_s // step) + 1)]


def thin(points: Points, count_max: int) -> list[tuple[float, float]]:
    """At most `count_max` points, each the mean of its neighbours."""
    size = max(1, math.ceil(len(points) / count_max))
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


class Canvas:
    """A drawing of fixed size in pixels; the page scales it down on a narrow screen."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height = width, height
        self._label = label
        self._parts: list[str] = []

    def __str__(self) -> str:
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        return f'<svg {size} role="img" aria-label="{escape(self._label)}">{"".join(self._parts)}</svg>'

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str, tip: str = "") -> None:
        shape = f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self._parts.append(_tipped(shape, "line", tip))

    def rect(self, x: float, y: float, size: tuple[float, float], css: str, tip: str = "") -> None:
        width, height = size
        if width <= 0 or height <= 0:
            return
        shape = f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(_tipped(shape, "rect", tip))

    def circle(self, x: float, y: float, r: float, css: str, tip: str = "") -> None:
        self._parts.append(_tipped(f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{r:g}"', "circle", tip))

    def path(self, points: Iterable[tuple[float, float]], css: str, tip: str = "", close: bool = False) -> None:
        steps = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if steps:
            self._parts.append(_tipped(f'<path class="{css}" d="M{steps}{"Z" if close else ""}"', "path", tip))

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}"' + (f' text-anchor="{anchor}"' if anchor != "start" else "")
        self._parts.append(f"<text {place}{f' class={chr(34)}{css}{chr(34)}' if css else ''}>{escape(text)}</text>")

    def x_axis(self, scale: Scale, y: float, marks: Sequence[tuple[float, str]], title: str) -> None:
        """Ticks with labels under `y`, and the axis title with its unit under them."""
        self.line(scale.start_px, y, scale.end_px, y, "axis")
        for value, label in marks:
            x = scale(value)
            self.line(x, y, x, y + 4, "axis")
            self.text(x, y + 16, label, "tick", "middle")
        self.text((scale.start_px + scale.end_px) / 2, y + 33, title, "title", "middle")

    def y_axis(self, scale: Scale, x: tuple[float, float], marks: Sequence[tuple[float, str]], title: str) -> None:
        """Light gridlines across `x`, labels to the left, the title above the top left corner."""
        left, right = x
        for value, label in marks:
            y = scale(value)
            self.line(left, y, right, y, "grid")
            self.text(left - 7, y + 3.7, label, "tick", "end")
        if title:
            self.text(0, min(scale.start_px, scale.end_px) - 11, title, "title")


def _tipped(shape: str, tag: str, tip: str) -> str:
    return f"{shape}><title>{escape(tip)}</title></{tag}>" if tip else f"{shape}/>"
