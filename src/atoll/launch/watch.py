"""What the launcher knows of its run while it goes on: read from the events, like every other view of it."""

from __future__ import annotations

from pathlib import Path

from atoll.observe import Tail
from atoll.observe.events import LearnerJoined, LearnerSteps


class RunWatch:
    """Progress in tokens, and when each learner was last known to be training."""

    def __init__(self, run_folder: Path, *, tokens_budget: int) -> None:
        self._tail = Tail(run_folder)
        self._tokens_budget = tokens_budget
        self._seen_ns: dict[str, int] = {}
        self.tokens = 0

    def poll(self) -> None:
        """Take in what was written since the last call."""
        for t_ns, _, event in self._tail.poll():
            if isinstance(event, LearnerSteps):
                self.tokens += event.tokens
            if isinstance(event, LearnerSteps | LearnerJoined):
                self._seen_ns[event.learner] = max(t_ns, self._seen_ns.get(event.learner, 0))

    @property
    def progress(self) -> float:
        """Share of the token budget that has been processed; 0 without a budget."""
        return self.tokens / self._tokens_budget if self._tokens_budget else 0.0

    def joined_since(self, learner: str, since_ns: int) -> bool:
        """Whether a process of this learner that was started at `since_ns` has joined the run."""
        return self._seen_ns.get(learner, -1) >= since_ns
