"""What the supervisor is told (LaunchPlan), what it shows the run to (View), and what it gives back (Outcome)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.chaos import Fault, InjectedFault
from atoll.launch.process import Command


class View(Protocol):
    """Something that shows the run while it goes on; `refresh` is called at every tick and limits itself."""

    def start(self) -> None: ...
    def refresh(self) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead learner is started again."""

    delay_s: float = 3.0
    """Pause before the first restart; it doubles with each further one."""
    delay_s_max: float = 30.0
    restarts_max: int = 10
    """Per learner. 0: the death of one ends the run (data-parallel)."""
    early_deaths_max: int = 2
    """Deaths in a row before joining that mean the program is broken."""
    early_delay_s: float = 0.5
    """Pause after a death before joining: long enough for a hiccup, short enough to fail quickly."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The commands of a run and how it is kept going."""

    learners: Sequence[Command]
    syncer: Command | None = None
    """It writes RUN/syncer.json when it can be joined, and ends with status 0 on SIGTERM. Learners get its address as
    ATOLL_SYNCER."""
    restarts: RestartPolicy = RestartPolicy()
    faults: Sequence[Fault] = ()
    tokens_budget: int = 0
    """Tokens that make the whole run, for the moments of the faults; 0: unknown."""
    straggle_s_max: float = 0.0
    """How long the other learners may take to end after the first has finished; 0: as long as they like."""
    follow: str = ""
    """Id of the learner whose output is repeated through `say_raw`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended."""

    reason: str
    """finished, or the name of the signal that stopped it."""
    restarts: int
    given_up: tuple[str, ...]
    """Learners that died and were not started again."""
    silent: tuple[str, ...]
    """Learners that ended without ever joining."""
    faults: tuple[InjectedFault, ...]
    syncer_code: int
    """Exit status of the syncer after it was told to finish; 0 without one."""

    @property
    def interrupted(self) -> bool:
        return self.reason != "finished"
