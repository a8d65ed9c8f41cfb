"""The job file: one TOML file for every engine, as frozen dataclasses with checks.

[run]        name, command, where it runs; and any setting of the synchronisation, as `atoll run` takes them
[[islands]]  name, count, hardware, ranks, environment, spot or not, site
[syncer]     where it listens, keys, and any setting of durability (snapshots)
[shards]                              if the run has them
[slurm], [k8s], [ray], [ssh]          what only that engine knows
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from atoll.core import SyncConfig, meant
from atoll.engines.settings import K8sSettings, RaySettings, SlurmSettings, SshSettings
from atoll.errors import ConfigError
from atoll.launch import durability_config, durability_names, holds_credentials, split_values, sync_values, take_preset

JOB_BYTES_MAX = 1 << 20
"""A job file has a few kilobytes."""
ISLANDS_MAX = 10_000
RANKS_MAX = 65_536
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""What every engine takes as a name: Kubernetes is the strictest (DNS labels), and adds endings of its own."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OWN_VARIABLES = ("ATOLL_LEARNER", "ATOLL_SYNCER", "ATOLL_TOKEN", "ATOLL_TOKEN_FILE", "ATOLL_PART", "ATOLL_RUN_FOLDER")
"""What the launcher itself sets."""
Table = TypeVar("Table")


@dataclass(frozen=True, slots=True)
class RunSpec:
    """[run]: everything else in this table is a setting of the synchronisation (`sync_every = 8`)."""

    name: str
    """Small letters, digits and dashes; the engine's names begin with it."""
    command: str
    """What each island runs, as in a shell: python train.py --batch 8"""
    folder: str = ""
    """The run folder; empty: runs/NAME. On Slurm all nodes must see it. Over ssh it is in each host's home."""
    workdir: str = ""
    """Where the command runs; empty: beside the files below, or without any where `atoll launch` was typed."""
    files: tuple[str, ...] = ()
    """Files that are put side by side into the folder in which the command runs, such as the script."""
    python: str = "python"
    """The Python of the syncer and of torchrun, on the machines. python: the one that `atoll launch` runs in, where a
    machine has it under the same path, and else whatever PATH says there."""
    setup: str = ""
    """Shell lines in front of every process: module load cuda; . venv/bin/activate"""
    environment: Mapping[str, str] = field(default_factory=dict)
    tokens_budget: int = 0
    """The run is over after so many tokens; 0: when every island's script has ended."""


@dataclass(frozen=True, slots=True)
class IslandSpec:
    """One of [[islands]]: `count` islands of one kind."""

    name: str
    count: int = 1
    """Islands NAME-0, NAME-1 ... Each is one learner."""
    gpus: int = 0
    """On each of its nodes."""
    hardware: str = ""
    """Which GPU, in the engine's own word: a Slurm gres type, a Kubernetes node label, a Ray accelerator type."""
    cpus: int = 1
    memory_gb: float = 0.0
    """On each node; 0: whatever the engine gives."""
    nodes: int = 1
    """Machines of one island (Slurm, Kubernetes)."""
    ranks: int = 1
    """Processes of one island. More than one are started by torchrun, spread evenly over its nodes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    spot: bool = False
    """It may be taken away at any time: tolerations on Kubernetes, `spot_partition` on Slurm."""
    site: str = ""
    """Where it is: a Slurm constraint, a zone of Kubernetes. Learners are told it as ATOLL_SITE."""
    hosts: tuple[str, ...] = ()
    """Only on these: ssh hosts in turn, or Slurm nodes."""

    def __post_init__(self) -> None:
        _whole(f"islands {self.name}: count", self.count, 0, ISLANDS_MAX)
        for name, low, high in (("gpus", 0, 1024), ("cpus", 1, 4096), ("nodes", 1, 4096), ("ranks", 1, RANKS_MAX)):
            _whole(f"islands {self.name}: {name}", getattr(self, name), low, high)
        if self.ranks % self.nodes:
            raise ConfigError(
                f"island {self.name} has {self.ranks} ranks on {self.nodes} nodes; make ranks a multiple of nodes"
            )


@dataclass(frozen=True, slots=True)
class SyncerSpec:
    """[syncer]: everything else in this table is a setting of durability (`snapshots = "s3://bucket/run"`)."""

    listen: str = "0.0.0.0:7077"
    address: str = ""
    """Where learners reach it, if the engine cannot tell: host:port, several with commas between."""
    hosts: tuple[str, ...] = ()
    """Where it runs: an ssh host, or Slurm nodes."""
    keys: str = "keys"
    """Folder of `atoll keys`; what is missing in it is made when the job is submitted. none: no keys and no TLS, which
    a syncer allows on loopback alone."""
    cpus: int = 2
    memory_gb: float = 0.0
    disk_gb: int = 20
    """Kubernetes: the size of its volume."""

    def __post_init__(self) -> None:
        _whole("syncer: cpus", self.cpus, 1, 4096)
        _whole("syncer: disk_gb", self.disk_gb, 1, 1 << 20)
        if not self.has_keys and not self.listen.startswith(("127.", "localhost:", "[::1]:")):
            raise ConfigError(
                f"[syncer] listens on {self.listen}, beyond this machine, and keys are none; leave keys away, and they "
                "are made"
            )

    @property
    def has_keys(self) -> bool:
        return self.keys != "none"

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])


@dataclass(frozen=True, slots=True)
class ShardsSpec:
    """[shards]: processes that hold fragments beside the syncer; none without the table."""

    count: int = 0
    cpus: int = 2
    memory_gb: float = 0.0
    port: int = 7177
    hosts: tuple[str, ...] = ()
    """ssh and Slurm: a host or node for each, under a name that all others reach."""

    def __post_init__(self) -> None:
        _whole("shards: count", self.count, 0, 1024)
        _whole("shards: port", self.port, 1, 65535)

    def addresses(self) -> tuple[str, ...]:
        """By their hosts."""
        if self.count > len(set(self.hosts)):
            raise ConfigError(f"{self.count} [shards] need as many hosts on this engine; name them in hosts")
        return tuple(f"{host}:{self.port}" for host in self.hosts[: self.count])


@dataclass(frozen=True, slots=True)
class RelaysSpec:
    """[relays]: one for each of these sites. Islands of the site reach the syncer through it, or directly when it is
    gone. All processes of such a job share one token, because a relay shows the syncer its own."""

    sites: tuple[str, ...] = ()
    """As islands name theirs."""
    hosts: tuple[str, ...] = ()
    """ssh and Slurm: a host or node for each, in the same order, under a name that its islands reach."""
    addresses: tuple[str, ...] = ()
    """host:port by which islands reach each, where that is not its host and `port`."""
    port: int = 7079
    cpus: int = 1
    memory_gb: float = 0.0

    def __post_init__(self) -> None:
        _whole("relays: cpus", self.cpus, 1, 4096)
        _whole("relays: port", self.port, 1, 65535)
        if len(set(self.sites)) < len(self.sites):
            raise ConfigError("[relays] names a site twice; give each site one relay")
        if len(self.addresses) not in (0, len(self.sites)):
            raise ConfigError(f"[relays] has {len(self.sites)} sites and {len(self.addresses)} addresses; give as many")

    def reached(self) -> tuple[str, ...]:
        """By their hosts, if nothing else is said."""
        if len(self.sites) > len(set(self.hosts)):
            raise ConfigError(f"{len(self.sites)} [relays] need as many hosts on this engine; name them in hosts")
        return self.addresses or tuple(f"{host}:{self.port}" for host in self.hosts[: len(self.sites)])


@dataclass(frozen=True, slots=True)
class LaunchJob:
    run: RunSpec
    islands: tuple[IslandSpec, ...]
    syncer: SyncerSpec = field(default_factory=SyncerSpec)
    shards: ShardsSpec = field(default_factory=ShardsSpec)
    relays: RelaysSpec = field(default_factory=RelaysSpec)
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    k8s: K8sSettings = field(default_factory=K8sSettings)
    ray: RaySettings = field(default_factory=RaySettings)
    ssh: SshSettings = field(default_factory=SshSettings)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What `atoll syncer --config` gets: synchronisation and durability."""

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def learners(self) -> int:
        return sum(island.count for island in self.islands)

    def island(self, name: str) -> IslandSpec:
        for island in self.islands:
            if island.name == name:
                return island
        known = [island.name for island in self.islands]
        raise ConfigError(f"job {self.name} has no island {name!r}; {meant(name, known)}it has {', '.join(known)}")

    def scaled(self, counts: Mapping[str, int]) -> LaunchJob:
        """The same job with other numbers of islands."""
        for name in counts:
            self.island(name)
        return replace(self, islands=tuple(replace(i, count=counts.get(i.name, i.count)) for i in self.islands))


def read_job(path: Path) -> LaunchJob:
    """Raises ConfigError for a file that cannot be read or means no job."""
    try:
        if path.stat().st_size > JOB_BYTES_MAX:
            raise ConfigError(f"{path} is too large for a job file; give a TOML file such as examples/jobs/")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the job file {path} ({error.strerror}); check the path") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}; mend it") from error
    return job_from(values, where=str(path))


def job_from(values: Mapping[str, Any], *, where: str = "the job") -> LaunchJob:
    """From loose values; every name and type is checked."""
    _known(values, [f.name for f in fields(LaunchJob) if f.name != "settings"], where)
    islands = values.get("islands", [])
    if not isinstance(islands, list) or not islands:
        raise ConfigError(f"{where} has no islands; add [[islands]] with a name")
    run, sync = _run(_section(values, "run", where), f"[run] of {where}")
    syncer, kept = _syncer(_section(values, "syncer", where), f"[syncer] of {where}")
    tables: dict[str, Any] = {
        name: _table(cls, _section(values, name, where), f"[{name}] of {where}")
        for name, cls in {
            "shards": ShardsSpec,
            "relays": RelaysSpec,
            "slurm": SlurmSettings,
            "k8s": K8sSettings,
            "ray": RaySettings,
            "ssh": SshSettings,
        }.items()
    }
    specs = tuple(_table(IslandSpec, one, f"[[islands]] of {where}") for one in islands)
    job = LaunchJob(run, specs, syncer, settings={}, **tables)
    _check_names(job)
    settings = {**sync, **kept, "learners": max(1, job.learners), "tokens_budget": run.tokens_budget}
    return replace(job, settings=settings)


def _run(values: Mapping[str, Any], where: str) -> tuple[RunSpec, dict[str, Any]]:
    own, sync = split_values({n: v for n, v in values.items() if n != "preset"}, _names(RunSpec), where=where)
    preset = take_preset({"preset": values["preset"]})[1] if "preset" in values else {}
    run = _table(RunSpec, own, where)
    if not shlex.split(run.command):
        raise ConfigError(f"{where}: command is empty; say what an island runs, such as python train.py")
    # What is wrong is said here, and not by a syncer that an engine starts an hour later.
    SyncConfig.from_dict(sync_values({**preset, **sync}))
    return run, {**preset, **sync}


def _syncer(values: Mapping[str, Any], where: str) -> tuple[SyncerSpec, dict[str, Any]]:
    own = {name: value for name, value in values.items() if name not in durability_names()}
    syncer = _table(SyncerSpec, own, where, more=durability_names())
    kept = {name: value for name, value in values.items() if name in durability_names()}
    if holds_credentials(durability_config(kept).snapshot_options):
        raise ConfigError(
            f"{where}: snapshot_options may hold a credential, and a job file is no place for one; put it into the "
            "environment of the syncer (ATOLL_SNAPSHOT_OPTIONS, AWS_...)"
        )
    return syncer, kept


def is_host(text: str) -> bool:
    """A name that a command takes for a host: one with a dash in front would be an option of ssh or srun."""
    return bool(text) and text.isprintable() and not text.startswith("-") and " " not in text


def _check_names(job: LaunchJob) -> None:
    names = [job.name, *(island.name for island in job.islands)]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} cannot be a name; use up to 40 small letters, digits and dashes, such as east")
    twice = {name for name in names[1:] if names[1:].count(name) > 1}
    if twice & set(names) or {"syncer", "shard", "relay"} & set(names[1:]):
        raise ConfigError(
            f"islands need names of their own, other than syncer, shard and relay; rename {', '.join(twice) or 'it'}"
        )
    for host in (
        *job.syncer.hosts,
        *job.shards.hosts,
        *job.relays.hosts,
        *(host for island in job.islands for host in island.hosts),
    ):
        if not is_host(host):
            raise ConfigError(f"{host!r} in hosts cannot be a host; give names as `ssh NAME` takes them")
    if strange := [site for site in job.relays.sites if site not in {island.site for island in job.islands}]:
        raise ConfigError(f"[relays] names site {strange[0]!r}, which no island has; give islands there that site")
    for where in (job.run.environment, *(island.environment for island in job.islands)):
        for name in where:
            if not _VARIABLE.fullmatch(name) or name in OWN_VARIABLES:
                raise ConfigError(f"environment {name!r} is no variable that a job may set; leave it away")


def _section(values: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    section = values.get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{name} in {where} must be a table: [{name}]")
    return section


def _table(cls: type[Table], values: Any, where: str, more: tuple[str, ...] = ()) -> Table:
    """A dataclass from a table of the file, or an error that says which name or type is wrong."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be a table")
    _known(values, [*_names(cls), *more], where)
    for f in fields(cls):  # type: ignore[arg-type]
        if f.default is MISSING and f.default_factory is MISSING and f.name not in values:
            raise ConfigError(f"{where} lacks {f.name}; add it")
    types = {f.name: str(f.type) for f in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: _typed(types[name], value, f"{where}: {name}") for name, value in values.items()})


def _typed(wanted: str, value: Any, where: str) -> Any:
    if wanted == "tuple[str, ...]" and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    if wanted == "Mapping[str, str]" and isinstance(value, dict):
        return {name: _typed("str", one, f"{where}.{name}") for name, one in value.items()}
    plain: Any = {"str": str, "int": int, "float": (int, float), "bool": bool}.get(wanted)
    if plain is not None and isinstance(value, bool) == (plain is bool) and isinstance(value, plain):
        return float(value) if wanted == "float" else value
    raise ConfigError(f"{where} must be {wanted.replace('tuple[str, ...]', 'a list of texts')}, not {value!r}")


def _known(values: Mapping[str, Any], known: list[str], where: str) -> None:
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown {name!r} in {where}; {meant(name, known)}known are {', '.join(known)}")


def _names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))


def _whole(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}; not {value!r}")
