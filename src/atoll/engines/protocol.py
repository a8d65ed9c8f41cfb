"""What every engine can do, in the same words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from atoll.core import one_of
from atoll.engines.job import LaunchJob
from atoll.errors import ConfigError, LaunchError

ENGINES = {"slurm": "SlurmEngine", "k8s": "KubernetesEngine", "ray": "RayEngine", "ssh": "SshEngine"}
"""The class of each, in the module of its name. A new engine is a file and a line here."""
LOG_LINES = 200
"""How much of a log is shown: some screens."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PartState:
    """One process of a job, as its engine sees it."""

    name: str
    """syncer, east-0, shard-1"""
    state: str
    """waiting, running, ended, failed, or missing: the engine knows nothing of it."""
    where: str = ""
    """A node or host."""
    detail: str = ""
    """What else the engine says, in its own words."""


class Engine(Protocol):
    def plan(self) -> str:
        """What `submit` would hand over, as text; nothing is made or started, and no secret is in it."""

    def submit(self) -> None:
        """Start everything. Raises LaunchError if the job runs already."""

    def status(self) -> list[PartState]: ...

    def scale(self, counts: Mapping[str, int]) -> None:
        """So many islands of each kind: more are started, those beyond leave in order. Others stay as they are."""

    def stop(self) -> None:
        """Islands leave in order, the syncer writes the model and ends, and nothing of the job stays."""

    def logs(self, name: str, lines: int = LOG_LINES) -> str:
        """The end of what a process printed, over all its restarts."""


def engine_of(name: str, job: LaunchJob, say: Say = lambda text: None) -> Engine:
    one_of("engine", name, tuple(ENGINES))
    found: Any = getattr(import_module(f"atoll.engines.{name}"), ENGINES[name])
    engine: Engine = found(job, say)
    return engine


IGNORED = {
    "slurm": (),
    "k8s": ("hosts",),
    "ray": ("hosts", "site", "spot"),
    "ssh": ("hardware", "memory_gb", "spot"),
}
"""What an island may ask for that an engine has no means to give. (A site is told to the learner everywhere.)"""


def ignored_by(engine: str, job: LaunchJob) -> list[str]:
    """In words, what of this job has no effect on this engine."""
    told = []
    for island in job.islands:
        names = [name for name in IGNORED[engine] if getattr(island, name)]
        if names:
            told.append(f"{engine} does not use {', '.join(names)} of islands {island.name}")
    if engine == "ray" and job.run.setup:
        told.append("ray does not use setup of [run]: processes run in the environment of Ray's own workers")
    return told


def parse_counts(job: LaunchJob, words: Sequence[str]) -> dict[str, int]:
    """ "east=3 west=0" -> {"east": 3, "west": 0}; a number alone is meant where a job has one kind of islands."""
    counts: dict[str, int] = {}
    for word in words:
        name, _, number = word.rpartition("=")
        if not name and len(job.islands) > 1:
            kinds = " ".join(f"{island.name}=N" for island in job.islands)
            raise ConfigError(f"job {job.name} has several kinds of islands; say which: scale JOB {kinds}")
        if not (number.isascii() and number.isdigit()):
            raise ConfigError(f"{word!r} is no number of islands; write it like {job.islands[0].name}=3")
        counts[job.island(name or job.islands[0].name).name] = int(number)
    if not counts:
        raise ConfigError(f"scale needs a number of islands, such as {job.islands[0].name}=3")
    job.scaled(counts)
    return counts


STOP_ORDER = ("island", "relay", "syncer", "shard")
"""Islands hand over to syncer and shards, through relays; the syncer fetches the model from its shards."""


def role_of(name: str) -> str:
    """What a process is, by its name."""
    kind = name.rpartition("-")[0] or name
    return kind if kind in ("syncer", "shard", "relay") else "island"


def names_of(job: LaunchJob) -> list[str]:
    """Every process that the job should have."""
    shards = [f"shard-{index}" for index in range(job.shards.count)]
    return ["syncer", *shards, *(f"relay-{index}" for index in range(len(job.relays.sites))), *learners_of(job)]


def learners_of(job: LaunchJob) -> list[str]:
    """Those that get a key."""
    return [f"{island.name}-{index}" for island in job.islands for index in range(island.count)]


def goes_on(folder: str) -> str:
    return f"{folder} has a run already, and this job goes on with it; another folder in [run] begins a new one"


def syncer_must_run(states: Sequence[PartState], job: LaunchJob) -> None:
    """Raises LaunchError where nobody waits for new islands: each would try for minutes, again and again."""
    syncer = next((one for one in states if one.name == "syncer"), None)
    if syncer is None or syncer.state not in ("waiting", "running"):
        word = syncer.state if syncer is not None else "missing"
        raise LaunchError(f"the syncer of job {job.name} does not run ({word}); stop the job and submit it again")


def checked_part(job: LaunchJob, name: str) -> str:
    """A process name that this job can have, also after scaling. Raises ConfigError for any other."""
    kind, _, number = name.rpartition("-")
    if name in names_of(job) or (number.isdigit() and kind in {island.name for island in job.islands}):
        return name
    raise ConfigError(f"job {job.name} has no process {name!r}; it has {', '.join(names_of(job)[:20])}")
