"""What a rank that does not speak knows of its learner: what the speaker told it at the last boundary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from atoll.core import SyncConfig


class HeardWord(Protocol):
    step: int
    rank: int
    generation: int


@dataclass
class RunView:
    """The attributes of a LearnerMachine that a loop may ask for."""

    learner: str
    config: SyncConfig = field(default_factory=SyncConfig)
    generation: int = 0
    rank: int = -1
    step: int = 0
    steps: int = 0
    tokens: int = 0
    step_ns: int = 0
    joined: bool = False
    stopped: str = ""
    run: str = ""
    versions_behind: int = 0
    bases: tuple[int, ...] = ()

    def stepped(self, tokens: int, step_ns: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.step_ns = step_ns

    def hear(self, word: HeardWord) -> None:
        self.step, self.rank, self.generation = word.step, word.rank, word.generation
