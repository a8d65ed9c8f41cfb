"""How long rounds take, and how long learners take to adopt what comes of them: what the run's period goes by."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from atoll.core.policy import median

ROUNDS_MIN = 3
"""Rounds after a decision before there is another one about the run."""
ROUNDS_KEPT = 3
"""Their median: one may be an exception, and more would remember links as they were long ago."""
VERSIONS_KEPT = 64
"""Of a fragment. A learner that adopts an older one was away, and says nothing about its link."""


class RoundsMeasured:
    """From a launch to its publication, of rounds that began after the last decision."""

    def __init__(self) -> None:
        self._begin_ns = 0
        self._took: deque[int] = deque(maxlen=ROUNDS_KEPT)

    def done(self, launched_ns: int, now_ns: int) -> None:
        if launched_ns >= self._begin_ns and now_ns >= launched_ns:
            self._took.append(now_ns - launched_ns)

    def begin_anew(self, now_ns: int) -> None:
        self._begin_ns = now_ns
        self._took.clear()

    def usual_ns(self) -> float | None:
        """None while there are too few."""
        return median(sorted(map(float, self._took))) if len(self._took) >= ROUNDS_MIN else None


class AdoptionTimes:
    """From a publication, or the adoption before it, to the report of a learner that it has the version: the time of
    its downlink, and up to a step."""

    def __init__(self) -> None:
        self._published: dict[int, deque[tuple[int, int]]] = {}
        self._bases: dict[str, tuple[Sequence[int], int]] = {}
        self._took: dict[str, deque[int]] = {}

    def published(self, fragment: int, version: int, now_ns: int) -> None:
        self._published.setdefault(fragment, deque(maxlen=VERSIONS_KEPT)).append((version, now_ns))

    def adopted(self, learner: str, bases: Sequence[int], now_ns: int) -> None:
        before, last_ns = self._bases.get(learner, (bases, now_ns))
        if len(before) != len(bases):
            before = bases
        known = [
            at_ns
            for fragment, (old, new) in enumerate(zip(before, bases, strict=True))
            if new > old
            for version, at_ns in self._published.get(fragment, ())
            if version == new
        ]
        newer = any(new > old for old, new in zip(before, bases, strict=True))
        self._bases[learner] = (tuple(bases), now_ns if newer else last_ns)
        if known:
            took_ns = max(0, now_ns - max(min(known), last_ns))
            self._took.setdefault(learner, deque(maxlen=ROUNDS_KEPT)).append(took_ns // len(known))

    def begin_anew(self) -> None:
        """Versions that are out say nothing about those that come."""
        self._took.clear()
        self._published.clear()

    def gone(self, learner: str) -> None:
        self._bases.pop(learner, None)
        self._took.pop(learner, None)

    def usual_ns(self) -> float:
        """Of the learner in the middle; 0 before that is known."""
        known = sorted(self.of_ns(learner) for learner in self._took)
        return median(known) if 2 * len(known) > len(self._bases) else 0.0

    def of_ns(self, learner: str) -> float:
        return median(sorted(map(float, self._took.get(learner, ()))))
