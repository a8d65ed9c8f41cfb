"""What the launcher knows of its run while it goes on: read from the events, like every other view of it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from atoll.observe import LearnerFinished, LearnerJoined, LearnerSteps, SyncerStats, Tail, Warned

GONE_FOR_GOOD = {
    "SIGTERM": "left as it was asked to",
    "SIGINT": "left as it was asked to",
    "asked to leave": "left as it was asked to",
    "FencedError": "was replaced by another process of its name",
}
"""What the reason of a LearnerFinished may name, other than the end of the run: such a learner is not started again."""


WARNINGS_MAX = 20
"""Warnings that are passed on to whoever watches the terminal: what says more than that is read in the report."""


class StepsReached(NamedTuple):
    """How far one process of a learner came."""

    steps: int
    """Steps that it took itself."""
    step: int
    """Its place in the run then."""


class RunWatch:
    """Progress in tokens, when each learner was last known to be training, and who left because of a signal."""

    def __init__(self, run_folder: Path, *, tokens_budget: int) -> None:
        self._tail = Tail(run_folder)
        self._tokens_budget = tokens_budget
        self._seen_ns: dict[str, int] = {}
        self._gone: dict[str, tuple[int, str]] = {}
        self._reached: dict[str, tuple[int, str, StepsReached]] = {}
        """Of the newest process of each learner: when it was last heard, its event file, and how far it came."""
        self._tokens_counted = 0
        self._warnings_count = 0
        self.warnings: list[tuple[int, Warned]] = []
        """What processes of the run have warned of, for whoever takes it from here."""
        self.unhanded: dict[str, int] = {}
        """Tokens that each learner's newest process could not hand over when it left."""
        self.tokens = 0
        self.active = 0
        """Learners in the run wherever they are, by the syncer's last word."""

    def poll(self) -> None:
        """Take in what was written since the last call."""
        for t_ns, source, event in self._tail.poll():
            if isinstance(event, LearnerSteps):
                self.tokens += event.tokens
                _, before, reached = self._reached.get(event.learner, (0, "", StepsReached(0, 0)))
                steps = event.steps + (reached.steps if before == source else 0)
                self._reached[event.learner] = (t_ns, source, StepsReached(steps, event.step))
            if isinstance(event, LearnerSteps | LearnerJoined):
                self._seen_ns[event.learner] = max(t_ns, self._seen_ns.get(event.learner, 0))
            elif isinstance(event, LearnerFinished):
                self._gone[event.learner] = (t_ns, event.reason)
                self.unhanded[event.learner] = event.unhanded
            elif isinstance(event, Warned) and self._warnings_count < WARNINGS_MAX:
                self._warnings_count += 1
                self.warnings.append((t_ns, event))
            elif isinstance(event, SyncerStats):
                self.active = event.active
                self._tokens_counted = event.tokens_spent if event.tokens_spent >= 0 else event.tokens_processed

    @property
    def progress(self) -> float:
        """Share of the token budget that has been processed; 0 without a budget."""
        return self.tokens / self._tokens_budget if self._tokens_budget else 0.0

    def joined_since(self, learner: str, since_ns: int) -> bool:
        """Whether a process of this learner that was started at `since_ns` has joined the run."""
        return self._seen_ns.get(learner, -1) >= since_ns

    def reached_since(self, learner: str, since_ns: int) -> StepsReached:
        """How far a process of this learner that was started at `since_ns` has come."""
        t_ns, _, reached = self._reached.get(learner, (-1, "", StepsReached(0, 0)))
        return reached if t_ns >= since_ns else StepsReached(0, 0)

    def stepped_since(self, since_ns: int) -> bool:
        """Whether any learner has told of steps since then."""
        return any(t_ns >= since_ns for t_ns, _, _ in self._reached.values())

    def gone_for_good(self, learner: str, since_ns: int) -> str:
        """How a process of this learner that was started at `since_ns` left for a reason of its own; else empty."""
        t_ns, reason = self._gone.get(learner, (-1, ""))
        return next((how for name, how in GONE_FOR_GOOD.items() if name in reason and t_ns >= since_ns), "")

    def ended_badly(self, learner: str, since_ns: int) -> str:
        """How a process of this learner that was started at `since_ns` left by itself, if it could not hand over or had
        trained nothing: its exit status says so, and starting it again would not mend it."""
        t_ns, reason = self._gone.get(learner, (-1, ""))
        if t_ns < since_ns or reason != "finished":
            return ""
        if tokens := self.unhanded.get(learner, 0):
            return f"without handing over {tokens:,} tokens"
        return "" if self.reached_since(learner, since_ns).steps else "without having trained"

    @property
    def trained(self) -> bool:
        """Whether any learner has called `learner.step`, by its own word or the syncer's."""
        return self.tokens > 0 or self._tokens_counted > 0

    @property
    def budget_spent(self) -> bool:
        """Whether the syncer has counted as many tokens as the run was to process. What it has not counted, a learner
        has only claimed: that ends nobody's run."""
        return 0 < self._tokens_budget <= self._tokens_counted
