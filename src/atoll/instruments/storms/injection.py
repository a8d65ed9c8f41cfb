"""What stands behind the launcher's seam for faults (`launch.faults`): plans by name or file, carried out on real
processes, their links and the syncer's disk.

    StormFaults       reads the settings of a run and gives each launch its faults
    PlannedFaults     carries them out: the supervisor tells it the time
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from atoll.instruments.chaos import GUEST_PREFIX, ChaosExecutor, Fault
from atoll.instruments.storms.control import ChaosControl
from atoll.instruments.storms.files import FaultFiles
from atoll.instruments.storms.links import ProxyLinks
from atoll.instruments.storms.namespace_links import NamespaceLinks
from atoll.instruments.storms.plans import check_settings, plan_seconds, plan_text, planned_faults, still_to_come
from atoll.launch import (
    NONE,
    Attempt,
    Command,
    FaultInjection,
    NoFaults,
    RunConfig,
    RunFolder,
    SupervisedRun,
    TrainConfig,
    gpu_share,
    learner_command,
    write_text,
)
from atoll.observe import FaultSkipped, InjectedFault

INSIDE = "atoll.instruments.chaos.inside"
"""What every process of a storm loads first, so that faults inside it can be switched on; by name, because loading it
here would install it in the launcher."""


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """How a plan of faults is carried out."""

    proxied: bool = False
    """Each learner reaches the syncer through a port of its own of a proxy in the launcher."""
    seed: int = 0
    """Of the bits that the proxy flips."""
    namespaces: bool = False
    """Each learner has a network namespace of its own, and reaches the proxy over a link of the kernel's."""
    rate_mbit: float = 0.0
    """What such a link carries in each direction, in Mbit/s; 0: as much as it can."""
    duty_cycle: bool = False
    """The learners do not heed a slow file (a user's own script): slow ones are stopped and continued."""
    guest: Callable[[str], Command] | None = None
    """The command of a learner that joins under the given id; None: the run takes no guests."""

    def links(self) -> ProxyLinks | None:
        """The links of a run; None where learners talk to the syncer directly."""
        if not self.proxied:
            return None
        if self.namespaces:
            return NamespaceLinks(self.seed, bits_per_s=self.rate_mbit * 1e6)
        return ProxyLinks(self.seed)


class StormFaults:
    """`launch.faults.FaultPlanner`: what chaos, chaos_seed, storm_minutes, namespaces and rate_mbit mean."""

    def check(self, config: TrainConfig | RunConfig) -> None:
        check_settings(config)

    def injection(self, config: TrainConfig | RunConfig, attempt: Attempt, argv: Sequence[str]) -> FaultInjection:
        if config.chaos == NONE:
            return NoFaults()
        plan, files = planned_faults(config), FaultFiles(attempt.folder.path)
        files.clear()
        if plan:
            write_text(files.plan, plan_text(plan, seed=config.chaos_seed, seconds=plan_seconds(config)))
        guest = partial(guest_command, config, attempt, argv)
        return PlannedFaults(still_to_come(plan, attempt.faults), attempt.folder, _options(config, guest))


def _options(config: TrainConfig | RunConfig, guest: Callable[[str], Command]) -> ChaosOptions:
    if isinstance(config, RunConfig):
        return ChaosOptions(proxied=True, seed=config.chaos_seed, duty_cycle=True, guest=guest)
    if config.chaos == "demo":  # it only kills and slows
        return ChaosOptions()
    return ChaosOptions(
        proxied=True,
        seed=config.chaos_seed,
        namespaces=config.namespaces,
        rate_mbit=config.rate_mbit,
        guest=guest,
    )


def guest_command(config: TrainConfig | RunConfig, attempt: Attempt, argv: Sequence[str], id: str) -> Command:
    """A learner that a plan adds to the run under an id such as guest-3. Its rank is one that nobody has, and the world
    is large enough for it, because a script may divide its data by the world."""
    rank = config.learners + int(id.removeprefix(GUEST_PREFIX))
    gpus: Mapping[str, str] = {}
    if isinstance(config, RunConfig):
        gpus = gpu_share(rank, ranks=config.ranks, per_learner=config.gpus_per_learner)
    return learner_command(
        attempt.folder,
        argv,
        id=id,
        rank=rank,
        world=rank + 1,
        threads=config.threads_per_learner,
        more={"ATOLL_TOKEN": attempt.token, **gpus},
    )


class PlannedFaults:
    """`launch.faults.FaultInjection`: the faults of a plan, at their moments."""

    def __init__(self, faults: Sequence[Fault], folder: RunFolder, options: ChaosOptions | None = None) -> None:
        self.faults = faults
        self._files = FaultFiles(folder.path)
        self._options = options or ChaosOptions()
        self._links = self._options.links()
        self._run: SupervisedRun | None = None
        self._executor: ChaosExecutor | None = None

    @property
    def injected(self) -> Sequence[InjectedFault]:
        return self._executor.injected if self._executor is not None else ()

    @property
    def skipped(self) -> Sequence[FaultSkipped]:
        return self._executor.skipped if self._executor is not None else ()

    def attach(self, run: SupervisedRun) -> None:
        self._run = run
        self._executor = ChaosExecutor(
            self.faults,
            ChaosControl(run, self._files, guest=self._options.guest),
            emit=run.emit,
            links=self._links,
            duty_cycle=self._options.duty_cycle,
        )

    def place(self, command: Command) -> Command:
        more = {"ATOLL_PRELOAD": ",".join(filter(None, [os.environ.get("ATOLL_PRELOAD"), INSIDE]))}
        if command.role == "syncer":
            more["ATOLL_DISK_FULL_FILE"] = str(self._files.disk_full)
        elif command.role == "shard":
            more["ATOLL_DISK_FULL_FILE"] = str(self._files.disk_full_of(command.id))
        elif command.role == "learner":
            more["ATOLL_POISON_FILE"] = str(self._files.poison(command.id))
            more["ATOLL_LIE_FILE"] = str(self._files.lie(command.id))
            more["ATOLL_SLOW_FILE"] = str(self._files.slow(command.id))
        command = replace(command, environment={**command.environment, **more})
        served = command.role in ("syncer", "shard")
        return command if self._links is None or served else self._links.place(command)

    def front(self, id: str, address: str) -> str:
        if self._links is None:
            return address
        self.open()
        return self._links.front(id, address)

    def open(self) -> None:
        if self._links is not None:
            assert self._run is not None
            self._links.start(self._run.syncer_address)

    def tick(self, progress: float, now_ns: int, *, begun: bool) -> None:
        assert self._executor is not None
        self._executor.tick(progress, now_ns, begun=begun)

    def finish(self) -> None:
        if self._executor is not None:
            self._executor.finish()

    def close(self) -> None:
        if self._links is not None:
            self._links.close()
