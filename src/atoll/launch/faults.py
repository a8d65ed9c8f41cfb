"""The seam for faults on purpose: what a launcher asks of whoever breaks its run (`instruments.storms`).

A FaultPlanner reads the settings of a run (`chaos` and its like) and gives every launch its FaultInjection. The
supervisor asks that how to start each process, tells it the time, and knows nothing of kinds of faults.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from atoll.errors import ConfigError
from atoll.launch.process import Child, Command
from atoll.observe import Event, FaultSkipped, InjectedFault

if TYPE_CHECKING:
    from atoll.launch.config import RunConfig, TrainConfig
    from atoll.launch.folder import RunFolder
    from atoll.launch.slot import LearnerSlot
    from atoll.launch.stored import Attempt

NONE = "none"
"""The setting `chaos` of a run in which nothing is broken on purpose."""
PLAN_SUFFIX = ".toml"


@dataclass(frozen=True, slots=True)
class SupervisedRun:
    """What faults can get hold of. Everything happens on the supervisor's thread."""

    folder: RunFolder
    slots: MutableMapping[str, LearnerSlot]
    """The learners by id; one that is added here and started is a guest of the run."""
    syncer: Callable[[], Child | None]
    """The syncer's process while it serves."""
    syncer_address: Callable[[], str]
    served: Callable[[str], Child | None]
    """The process of a shard or a relay by its id, and of the syncer that stands by, while it can be reached."""
    start: Callable[[LearnerSlot], None]
    emit: Callable[[Event], None]


class FaultInjection(Protocol):
    """The faults of one launch."""

    @property
    def injected(self) -> Sequence[InjectedFault]: ...

    @property
    def skipped(self) -> Sequence[FaultSkipped]: ...

    def attach(self, run: SupervisedRun) -> None:
        """Before anything is started."""

    def place(self, command: Command) -> Command:
        """The command of a process as it shall be started, so that faults can reach it. A learner's ATOLL_SYNCER is set
        already, and may be replaced by the address of a worse way there."""

    def front(self, id: str, address: str) -> str:
        """The address by which the others reach a shard, a relay or one of two syncers, instead of its own."""

    def open(self) -> None:
        """The syncer serves; the learners are started next."""

    def tick(self, progress: float, now_ns: int, *, begun: bool) -> None:
        """Begin and end what is due. `progress` is the share of the tokens that are processed, `begun` whether any
        step was made (where there is no budget to have a share of)."""

    def finish(self) -> None:
        """End the faults that last: the processes are told to end next."""

    def close(self) -> None:
        """Every process has ended."""


class FaultPlanner(Protocol):
    """Who knows what the settings of a run mean that ask for faults."""

    def check(self, config: TrainConfig | RunConfig) -> None:
        """Raise ConfigError for settings that cannot work."""

    def injection(self, config: TrainConfig | RunConfig, attempt: Attempt, argv: Sequence[str]) -> FaultInjection:
        """The faults of this launch, less what earlier ones have seen. `argv` is what a learner runs."""


class NoFaults:
    """The injection of a run that is left alone."""

    injected: Sequence[InjectedFault] = ()
    skipped: Sequence[FaultSkipped] = ()

    def attach(self, run: SupervisedRun) -> None: ...

    def place(self, command: Command) -> Command:
        return command

    def front(self, id: str, address: str) -> str:
        return address

    def open(self) -> None: ...

    def tick(self, progress: float, now_ns: int, *, begun: bool) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class WithoutFaults:
    """The planner of a launcher that was given none."""

    def check(self, config: TrainConfig | RunConfig) -> None:
        if config.chaos != NONE:
            raise ConfigError(
                f"this launcher carries out no faults, and chaos is {config.chaos!r}; use the `atoll` command, pass "
                f"faults=atoll.instruments.storms.StormFaults(), or set chaos to {NONE}"
            )

    def injection(self, config: TrainConfig | RunConfig, attempt: Attempt, argv: Sequence[str]) -> FaultInjection:
        return NoFaults()


WITHOUT_FAULTS: FaultPlanner = WithoutFaults()


def plan_path(chaos: str) -> Path | None:
    """The file of faults that the setting names; None for a plan that has a name."""
    return Path(chaos) if chaos.endswith(PLAN_SUFFIX) else None
