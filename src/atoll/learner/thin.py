"""Whether a learner's link carries what the run would need of it, by the transfers as they happen.

A period (H steps) brings one contribution of every fragment up and one update of every fragment down. A link that is
too thin for that costs nobody anything: this learner contributes at its own pace. But a person should know.
"""

from __future__ import annotations

import sys

from atoll.core import moving_average
from atoll.observe import Writer, events, thin_text

TOLD_NS_MIN = 200_000_000
"""A transfer that takes less says nothing about the link's rate: it is mostly round trips, or a busy processor."""
TRANSFERS_MIN = 3
"""So many of them, so that one that shared the link with another does not decide."""
CHANGE = 2.0
"""It is said again when the rate is so many times smaller than when it was last said."""


class LinkMeter:
    """One learner's link, both ways."""

    def __init__(self, learner: str, writer: Writer) -> None:
        self._learner = learner
        self._writer = writer
        self._rates = {"up": 0.0, "down": 0.0}
        self._counts = {"up": 0, "down": 0}
        self._told = {"up": 0.0, "down": 0.0}

    def rate(self, direction: str) -> float:
        """Bytes/s, as far as transfers took long enough to tell; else 0."""
        return self._rates[direction]

    def moved(self, direction: str, size: int, took_ns: int, needs: float) -> None:
        """A transfer of `size` bytes took so long, and the run needs that many bytes per second."""
        if took_ns < TOLD_NS_MIN or not size:
            return
        rate = self._rates[direction] = moving_average(self._rates[direction], size / (took_ns / 1e9))
        self._counts[direction] += 1
        told = self._told[direction]
        worse = not told or rate < told / CHANGE
        if rate < needs and worse and self._counts[direction] >= TRANSFERS_MIN:
            self._told[direction] = rate
            event = events.LinkThin(self._learner, direction, needs, rate)
            self._writer.emit(event)
            sys.stderr.write(
                f"atoll: learner {self._learner}: {thin_text(event)}; training goes on, and what it learns is merged "
                "at the link's own pace\n"
            )
