"""Series of bounded size for runs of any length: a reducer can hold them for a week and a picture can draw them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

CURVE_POINTS_MAX = 600
"""More points than this cannot be told apart in a picture 1000 pixels wide."""
TRACK_POINTS_MAX = 8192
"""Half an hour of reports at four a second; after that the resolution halves each time the run's length doubles."""
TRACK_PINS_MAX = 64
SAMPLE_ITEMS_MAX = 4000

Item = TypeVar("Item")


class Curve:
    """(x, y) points. When full, neighbours are averaged in pairs; from then on each point stands for twice as many."""

    def __init__(self, points_max: int = CURVE_POINTS_MAX) -> None:
        self._points: list[tuple[float, float]] = []
        self._points_max = points_max
        self._stride = 1
        self._open: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        """Add a point; one that is not finite is left out."""
        if not (math.isfinite(x) and math.isfinite(y)):
            return
        self._open.append((x, y))
        if len(self._open) < self._stride:
            return
        self._points.append(_mean(self._open))
        self._open = []
        if len(self._points) >= self._points_max:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [_mean(list(pair)) for pair in pairs]
            self._stride *= 2

    @property
    def points(self) -> list[tuple[float, float]]:
        return [*self._points, _mean(self._open)] if self._open else list(self._points)


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    count = len(points)
    return sum(x for x, _ in points) / count, sum(y for _, y in points) / count


class Track:
    """Running totals against time. Thinning drops points between others; differences of those that stay are exact."""

    def __init__(self, width: int, points_max: int = TRACK_POINTS_MAX) -> None:
        self._width = width
        self._points_max = points_max
        self._times_ns: list[int] = []
        self._totals: list[tuple[float, ...]] = []
        self._pins: list[tuple[int, int]] = []

    def pin(self, start_ns: int, end_ns: int) -> None:
        """Keep every point of a stretch when thinning: what happened around a fault must stay exact in a long run."""
        self._pins = [*self._pins[-(TRACK_PINS_MAX - 1) :], (start_ns, end_ns)]

    def add(self, t_ns: int, totals: tuple[float, ...]) -> None:
        """Totals at a time; a time that went backwards (a clock that was set) is taken as the last one."""
        if self._times_ns and t_ns <= self._times_ns[-1]:
            self._totals[-1] = totals
            return
        self._times_ns.append(t_ns)
        self._totals.append(totals)
        if len(self._times_ns) >= self._points_max:
            self._thin()

    def _thin(self) -> None:
        last = len(self._times_ns) - 1
        kept = [i for i, t_ns in enumerate(self._times_ns) if i % 2 == 0 or i == last or self._pinned(t_ns)]
        if len(kept) > 3 * self._points_max // 4:
            # So much is pinned that thinning would have to be done at every point: let the older half of the pins go.
            self._pins = self._pins[len(self._pins) // 2 + 1 :]
            kept = [*range(0, last, 2), last]
        self._times_ns = [self._times_ns[i] for i in kept]
        self._totals = [self._totals[i] for i in kept]

    def _pinned(self, t_ns: int) -> bool:
        return any(start_ns <= t_ns <= end_ns for start_ns, end_ns in self._pins)

    @property
    def start_ns(self) -> int | None:
        return self._times_ns[0] if self._times_ns else None

    @property
    def end_ns(self) -> int | None:
        return self._times_ns[-1] if self._times_ns else None

    def at(self, t_ns: float) -> tuple[float, ...]:
        """Totals at any time, linear between points and constant outside of them."""
        if not self._times_ns:
            return (0.0,) * self._width
        i = bisect_right(self._times_ns, t_ns)
        if i == 0:
            return self._totals[0]
        if i == len(self._times_ns):
            return self._totals[-1]
        left_ns, right_ns = self._times_ns[i - 1], self._times_ns[i]
        share = (t_ns - left_ns) / (right_ns - left_ns)
        return tuple(a + share * (b - a) for a, b in zip(self._totals[i - 1], self._totals[i], strict=True))

    def between(self, start_ns: float, end_ns: float) -> tuple[float, ...]:
        """What was added between two times."""
        return tuple(b - a for a, b in zip(self.at(start_ns), self.at(end_ns), strict=True))


class Sample(Generic[Item]):
    """Every k-th item, k doubling whenever the list is full. `seen` counts all."""

    def __init__(self, items_max: int = SAMPLE_ITEMS_MAX) -> None:
        self._items: list[Item] = []
        self._items_max = items_max
        self._stride = 1
        self.seen = 0

    def add(self, item: Item) -> None:
        if self.seen % self._stride == 0:
            self._items.append(item)
            if len(self._items) >= self._items_max:
                self._items = self._items[::2]
                self._stride *= 2
        self.seen += 1

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
