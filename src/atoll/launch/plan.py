"""What the supervisor is told (LaunchPlan), what it shows the run to (View), and what it gives back (Outcome)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from atoll.launch.faults import FaultInjection, NoFaults
from atoll.launch.process import Command
from atoll.observe import FaultSkipped, InjectedFault

FINISHED = "finished"
"""The reason of a run that came to its end by itself."""
TIME_UP = "the time is up"
"""The reason of a run that was stopped in order after its minutes: that is an end like any other."""
FAILED = "failed"
"""The launcher could not keep the run going."""
LEFT = "every learner left"
"""The reason of a run whose learners were all asked to leave before it was done."""


class View(Protocol):
    """Something that shows the run while it goes on; `refresh` is called at every tick and limits itself."""

    def start(self) -> None: ...
    def refresh(self) -> None: ...
    def stop(self) -> None: ...


def pause_before(row: int, delay_s: float, delay_s_max: float) -> float:
    """How long to wait before a process is started again that was so already `row` times in a row."""
    return min(delay_s_max, delay_s * 2.0 ** min(row - 1, 30)) if row else 0.0


def said_pause(pause_s: float) -> str:
    return f"in {pause_s:g} s" if pause_s else "now"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead learner is started again."""

    delay_s: float = 0.5
    """Pause before the second restart in a row; it doubles with each further one. The first is at once: most deaths are
    single."""
    delay_s_max: float = 30.0
    restarts_max: int = 12
    """Per learner, in a row, which is three and a half minutes of trying. 0: the death of one ends the run
    (data-parallel)."""
    calm_s: float = 60.0
    """A learner that joined and lived this long was a good one: its pause and its count begin anew."""
    early_deaths_max: int = 2
    """Deaths in a row before joining that mean the program is broken."""
    fruitless_max: int = 3
    """Failures in a row of a learner that joined and got no further than before: the second may be bad luck, the third
    is its program."""
    early_delay_s: float = 0.5
    """Pause after a death before joining: long enough for a hiccup, short enough to fail quickly."""


@dataclass(frozen=True, slots=True)
class SyncerPolicy:
    """When a dead syncer is started again. It goes on from its last commit, and learners train on meanwhile."""

    delay_s: float = 0.5
    """Pause before the second restart in a row; it doubles with each further one. The first is at once."""
    delay_s_max: float = 10.0
    restarts_max: int = 20
    """In a row, which is about three minutes of trying."""
    calm_s: float = 60.0
    """A syncer that served this long was a good one: the count begins anew."""
    early_deaths_max: int = 3
    """Deaths in a row before it served that mean that it cannot start: a broken state, or a port that is taken."""
    ready_s_max: float = 300.0
    """Importing numba on a cold and busy machine takes some 10 s, reading 12 GB of state (1B parameters) a minute."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The commands of a run and how it is kept going."""

    learners: Sequence[Command]
    syncer: Command | None = None
    """It writes RUN/syncer.json when it can be joined, and ends with status 0 on SIGTERM. Learners get its address as
    ATOLL_SYNCER."""
    shards: Sequence[Command] = ()
    """Each has its folder as --run-folder, and writes shard.json there when it can be reached. They are started before
    the syncer, which gets their addresses as --shards, and end after it."""
    standby: Command | None = None
    """A second syncer with --standby in the same folder."""
    relays: Sequence[Command] = ()
    """Each has its folder as --run-folder, and writes relay.json there when it can be reached. They are started after
    the syncer, with its address as --upstream. Learners are shared out among them."""
    peers: Mapping[str, Command] = field(default_factory=dict)
    """By learner: a shard beside it, which comes to the run by itself once the syncer serves, and goes with its
    learner: it hands its fragments over first."""
    restarts: RestartPolicy = RestartPolicy()
    syncer_restarts: SyncerPolicy = SyncerPolicy()
    faults: FaultInjection = field(default_factory=NoFaults)
    """What goes wrong on purpose."""
    tokens_budget: int = 0
    """Tokens that make the whole run, for the moments of the faults; 0: unknown."""
    minutes: float = 0.0
    """The learners are told to leave this long after the first step of any; 0: the run ends by itself."""
    straggle_s_max: float = 0.0
    """How long the other learners may take to end after the first has finished; 0: as long as they like."""
    follow: str = ""
    """Id of the learner whose output is repeated through `say_raw`."""
    syncer_address: str = ""
    """Of guests: where the run is."""
    guest: bool = False
    """True for learners that join a run which another launcher keeps: they are listed in a file of their own, and their
    end is not the run's."""
    over: Callable[[], bool] = lambda: False
    """For guests: whether the run that they joined has ended, so that a dead learner is not started again."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How the run ended."""

    reason: str
    """FINISHED, TIME_UP, the name of the signal that stopped it, LEFT, or FAILED."""
    restarts: int
    given_up: tuple[str, ...]
    """Learners that died and were not started again."""
    silent: tuple[str, ...]
    """Learners that never joined."""
    faults: tuple[InjectedFault, ...]
    syncer_code: int
    """Exit status of the syncer after it was told to finish; 0 without one."""
    syncer_restarts: int = 0
    stayed_out: tuple[str, ...] = ()
    """Of those that never joined: whose script ended by itself, and well, while there was a run to join."""
    left: tuple[str, ...] = ()
    """Learners that were asked to leave, and did."""
    learners: int = 0
    """How many there were."""
    skipped: tuple[FaultSkipped, ...] = ()
    """Faults of the chaos plan that could not be put in, and why."""
    trained: bool = True
    """Whether any learner has ever called `learner.step` in this run."""
    unhanded: Mapping[str, int] = field(default_factory=dict)
    """Tokens that learners could not hand over when they left."""

    @property
    def interrupted(self) -> bool:
        return self.reason not in (FINISHED, TIME_UP)


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that has ended, perhaps before its time. `result` is None where its events do not make one."""

    folder: Path
    outcome: RunOutcome
    result: dict[str, Any] | None
