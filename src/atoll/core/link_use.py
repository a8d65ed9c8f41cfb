"""How busy each learner's link is with what it was asked for: the measurement behind `adaptive`.

A link is in use while a request to its learner is unanswered. The share of the time for which that is so says how much
room there is, whatever makes it busy (bytes, delay, packets that are lost) and whatever carries the bytes. A learner
that computes slowly answers at once, with what it has or with nothing; so a slow machine is not mistaken for a thin
link. Only the syncer's clock is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """One learner's link since it was last looked at."""

    window_ns: int
    busy_ns: int
    answers: int
    size: int
    """Bytes of those answers."""

    @property
    def share(self) -> float:
        return self.busy_ns / self.window_ns if self.window_ns > 0 else 0.0

    @property
    def per_second(self) -> float:
        """Answers."""
        return self.answers / (self.window_ns / 1e9) if self.window_ns > 0 else 0.0

    def plus(self, other: LinkMeasured) -> LinkMeasured:
        window_ns, busy_ns = self.window_ns + other.window_ns, self.busy_ns + other.busy_ns
        return LinkMeasured(window_ns, busy_ns, self.answers + other.answers, self.size + other.size)


@dataclass(slots=True)
class _Use:
    start_ns: int
    since_ns: int
    asked: dict[int, int] = field(default_factory=dict)
    """By fragment: the newest round that wants it and has no answer, which stands for the older ones."""
    busy_ns: int = 0
    answers: int = 0
    size: int = 0


class LinkWatch:
    """Told of every request and answer. Time that runs backwards counts as none."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def asked(self, learner: str, fragment: int, round_number: int, now_ns: int) -> None:
        use = self._uses.get(learner)
        if use is None:
            use = self._uses[learner] = _Use(now_ns, now_ns)
        self._count(use, now_ns)
        use.asked[fragment] = round_number

    def answered(self, learner: str, fragment: int, round_number: int, size: int, now_ns: int) -> None:
        """An answer to this round, or to an older one than the newest: then that is still to come."""
        use = self._uses.get(learner)
        if use is not None:
            self._count(use, now_ns)
            if round_number >= use.asked.get(fragment, 0):
                use.asked.pop(fragment, None)
            use.answers += 1
            use.size += size

    def gone(self, learner: str) -> None:
        self._uses.pop(learner, None)

    def take(self, learner: str, now_ns: int) -> LinkMeasured | None:
        """What was measured since the last time; None of a learner that was asked for nothing yet."""
        use = self._uses.get(learner)
        if use is None:
            return None
        self._count(use, now_ns)
        measured = LinkMeasured(now_ns - use.start_ns, use.busy_ns, use.answers, use.size)
        use.start_ns, use.busy_ns, use.answers, use.size = now_ns, 0, 0, 0
        return measured

    def _count(self, use: _Use, now_ns: int) -> None:
        if use.asked:
            use.busy_ns += max(0, now_ns - use.since_ns)
        use.since_ns = now_ns
