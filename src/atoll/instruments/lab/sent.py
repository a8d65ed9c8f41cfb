"""What a run has sent, and what its controller has decided: the facts behind tables of loss over bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core import Adapted

U8 = NDArray[np.uint8]

DECISIONS_KEPT = 200
"""Of a run, as text: sixteen learners that change sixteen times within an hour."""


class BytesSent:
    """Counts payloads of merged contributions and of updates, and keeps decisions."""

    def __init__(self) -> None:
        self._values_up = self._bytes_up = self._contributions = 0
        self._values_down = self._bytes_down = 0
        self.steps = 0
        """Of merged contributions."""
        self.decisions = 0
        self._texts: list[str] = []
        self._last: dict[str, str] = {}

    def merged(self, values: int, payloads: Sequence[U8], update: U8 | None) -> None:
        """A fragment of so many values, padding included, was merged from these payloads into this update."""
        self._contributions += len(payloads)
        self._values_up += values * len(payloads)
        self._bytes_up += sum(int(payload.nbytes) for payload in payloads)
        if update is not None:
            self._values_down += values
            self._bytes_down += int(update.nbytes)

    def noted(self, event: object) -> None:
        if not isinstance(event, Adapted) or event.what == "nothing":
            return
        self.decisions += 1
        self._last[f"{event.subject} {event.what}"] = event.after
        if len(self._texts) < DECISIONS_KEPT:
            text = f"step {event.clock_step}: {event.subject} {event.what} {event.before} -> {event.after}: "
            self._texts.append(text + event.reason)

    def facts(self) -> dict[str, Any]:
        """Bits are per parameter, of a merged contribution and of an update; `period` is the mean of the steps that
        are in one contribution."""
        return {
            "period": self.steps / self._contributions if self._contributions else math.nan,
            "bits_up": 8.0 * self._bytes_up / self._values_up if self._values_up else math.nan,
            "bits_down": 8.0 * self._bytes_down / self._values_down if self._values_down else math.nan,
            "decisions": self.decisions,
            "decided": list(self._texts),
            "decided_last": dict(self._last),
        }
