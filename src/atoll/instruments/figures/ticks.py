"""Numbers as text, and where the ticks of an axis go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VALUE_TICKS_MAX = 12
"""Up to so many different values on an axis, the ticks stand at the values themselves."""

TICK_CHAR_INCHES = 0.058
"""Width of one digit of a tick label (6.5 pt DejaVu Sans: 0.64 em)."""


def short(value: float) -> str:
    """150000 -> 150k, 2400000 -> 2.4M; small numbers as they are."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            digits = ".0f" if abs(value) >= 999.5 * size else ".3g"
            return f"{value / size:{digits}}{letter}".replace("-", "\u2212")
    return f"{value:.3g}".replace("-", "\u2212") if value else "0"


def signed(value: float, digits: int = 1) -> str:
    """+1.2, −0.3, 0.0: with a real minus, and no sign on what rounds to zero."""
    text = f"{value:+.{digits}f}"
    if float(text) == 0:
        return text[1:]
    return text.replace("-", "\u2212")


def log_axis(axes: Axes, values: Iterable[float], width_inches: float, *, at_values: bool = True) -> None:
    """A logarithmic x axis: ticks at the values if they are few, else at 1, 2, 5 or 1, 3 or powers of ten."""
    distinct = sorted(set(values))
    low, high = distinct[0], distinct[-1]
    pad = 0.05 * math.log10(high / low) if high > low else 0.3
    axes.set_xscale("log")
    axes.set_xlim(low / 10**pad, high * 10**pad)
    few = at_values and len(distinct) <= VALUE_TICKS_MAX
    chosen = distinct if few or low == high else _round_values(low, high)
    _set(axes, room_for([math.log10(v) for v in chosen], chosen, width_inches))


def linear_axis(axes: Axes, values: Iterable[float], width_inches: float) -> None:
    """Ticks at the values if they are few, and room at both ends."""
    distinct = sorted(set(values))
    low, high = distinct[0], distinct[-1]
    pad = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
    if len(distinct) <= VALUE_TICKS_MAX:
        axes.set_xlim(low - pad, high + pad)
        _set(axes, room_for(distinct, distinct, width_inches))
    else:
        count_axis(axes, low, high, width_inches)
        axes.set_xlim(low - pad, high + pad)


def count_axis(
    axes: Axes, low: float, high: float, width_inches: float, steps: Sequence[float] = (1, 2, 2.5, 5, 10)
) -> None:
    """From low to high exactly, as for tokens and time."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if low == high:
        linear_axis(axes, [low], width_inches)
        return
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=max(3, int(width_inches / 0.42)), steps=list(steps)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def log_y_axis(axes: Axes, values: Iterable[float], height_inches: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    distinct = sorted(set(values))
    low, high = distinct[0], distinct[-1]
    pad = max(0.08 * math.log10(high / low), 0.15)
    axes.set_yscale("log")
    axes.set_ylim(low / 10**pad, high * 10**pad)
    chosen = _round_values(low / 10**pad, high * 10**pad, int(height_inches / 0.25)) if high > low else [low]
    axes.yaxis.set_major_locator(FixedLocator(chosen))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def plain_y_axis(axes: Axes, values: Iterable[float]) -> None:
    """Large numbers as 40M at each tick, not as 4 with a small 1e7 above the axis."""
    from matplotlib.ticker import FuncFormatter

    if max(abs(value) for value in values) >= 10_000:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def percent_y_axis(axes: Axes) -> None:
    axes.set_ylim(0, 102)
    axes.set_yticks(range(0, 101, 20))


def room_for(at: Sequence[float], values: Sequence[float], width_inches: float) -> list[float]:
    """Those values whose labels fit next to each other, the outer two always. `at`: their places on the axis."""
    if len(values) < 3:
        return list(values)
    span = (at[-1] - at[0]) * 1.1
    inches = [width_inches * (place - at[0]) / span for place in at]
    half = [TICK_CHAR_INCHES * (len(short(value)) + 1.2) / 2 for value in values]
    kept = [0]
    last = len(values) - 1
    for i in range(1, last):
        after_left = inches[i] - half[i] >= inches[kept[-1]] + half[kept[-1]]
        before_right = inches[i] + half[i] <= inches[last] - half[last]
        if after_left and before_right:
            kept.append(i)
    return [values[i] for i in (*kept, last)]


def _set(axes: Axes, values: Sequence[float]) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axes.xaxis.set_major_locator(FixedLocator(list(values)))
    axes.xaxis.set_major_formatter(FixedFormatter([short(value) for value in values]))
    axes.xaxis.set_minor_locator(NullLocator())


def _round_values(low: float, high: float, count_max: int = 8) -> list[float]:
    """The finest of the usual steps that gives at most so many ticks, inside low..high."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [s * 10.0**e for e in range(first, last + 1) for s in steps if low <= s * 10.0**e <= high]
        if 2 <= len(found) <= count_max:
            return found
    decades = [10.0**e for e in range(first, last + 1) if low <= 10.0**e <= high]
    if len(decades) > count_max:
        return decades[:: math.ceil(len(decades) / count_max)]
    return [low, high] if high > low * 1.5 else [low]
