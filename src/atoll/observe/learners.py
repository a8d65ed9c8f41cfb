"""The newest that is known of each learner."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

from atoll.observe.events import LearnerSteps
from atoll.observe.launches import REPORTED
from atoll.observe.series import Curve

GENERATIONS_MAX = 10_000
"""Processes of one learner that are told apart; nobody counts further."""
MEMBER_STATES_MAX = 1000
"""Changes of one learner's state that a picture can show."""


@dataclass(slots=True)
class LearnerSeen:
    """The newest that is known of one learner, and its loss curves."""

    learner: str
    site: str = ""
    generation: int = 0
    generations: list[int] = field(default_factory=list)
    """Those of its processes, in order. A syncer that comes back leaves some numbers out."""
    step: int = 0
    restarts: int = 0
    """Processes of it that ended before they were through."""
    rung: str = ""
    """What its last process went on with; empty while it has not recovered anything."""
    loss: float = math.nan
    behind: int = 0
    member: str = ""
    link_up: bool = True
    link_loss_said: bool = False
    """The log has a line about its lost link."""
    finished: bool = False
    report_ns: int = 0
    """Duration of its last report."""
    last_ns: int = 0
    """When it last reported steps."""
    bytes_up: int = 0
    bytes_down: int = 0
    """What went over its own link, by its word; of one that writes its events elsewhere, by the syncer's."""
    members: list[tuple[int, str]] = field(default_factory=list)
    """Since when it was in which state, by the syncer's word."""
    loss_by_tokens: Curve = field(default_factory=Curve)
    loss_by_time: Curve = field(default_factory=Curve)

    def joined(self, generation: int) -> None:
        """A process of this generation is in the run."""
        place = bisect_left(self.generations, generation)
        known = place < len(self.generations) and self.generations[place] == generation
        if not known and len(self.generations) < GENERATIONS_MAX:
            self.generations.insert(place, generation)

    def nth(self, generation: int) -> int:
        """The same as people count: 1 for its first process, 2 for the next."""
        return bisect_left(self.generations, generation) + 1

    def became(self, t_ns: int, member: str) -> None:
        """The syncer says that it is in this state now."""
        self.member = member
        if (not self.members or self.members[-1][1] != member) and len(self.members) < MEMBER_STATES_MAX:
            self.members.append((t_ns, member))

    def stepped(self, t_ns: int, event: LearnerSteps, tokens_run: int) -> None:
        """Take a report; `tokens_run` is what the whole run has processed by now."""
        self.step, self.generation, self.behind = event.step, event.generation, event.fragments_behind
        self.report_ns = sum(getattr(event, f"{name}_ns") for name in REPORTED)
        self.last_ns, self.finished = t_ns, False
        if math.isfinite(event.loss):
            self.loss = event.loss
            self.loss_by_tokens.add(tokens_run, event.loss)
            self.loss_by_time.add(t_ns, event.loss)


def natural_key(text: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts "learner-10" after "learner-2"."""
    parts: list[tuple[int, int | str]] = []
    digits = ""
    for char in [*text, ""]:
        if char.isdecimal():
            digits += char
            continue
        if digits:
            parts.append((0, int(digits)))
            digits = ""
        if char:
            parts.append((1, char))
    return tuple(parts)
