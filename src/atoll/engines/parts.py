"""The processes of a job, described once: command, environment, files, size. Every engine renders these.

Places differ (where the run folder and the keys are, how the syncer is reached): an engine says them in `Places`.
No secret is in a command or in the environment: a process is told the file that holds its token.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from atoll.engines.job import IslandSpec, LaunchJob

INDEX = "@INDEX@"
"""Stands for an island's number: engines that start many of one kind (arrays, Indexed Jobs) put their variable here."""
HEAD = "@HEAD@"
"""Stands for the first node of an island that has several."""
TLS_NAME = "syncer.atoll"
"""A name in every certificate that the launcher makes: an engine may start the syncer anywhere."""
RENDEZVOUS_PORT = 29400
"""torchrun's own default."""
EVERYBODY = "run"
"""Whose token it is that all processes of a job with relays share."""
OPERATOR = "operator"
"""Whose token `atoll status` and `atoll leave` of the person who launched it use."""
SERVER_KEYS = ("keys.json", "cert.pem", "key.pem", "ca.pem")
"""What a process needs that learners come to."""
Role = Literal["syncer", "shard", "relay", "island"]


@dataclass(frozen=True, slots=True)
class Places:
    """What a process finds where on its machine."""

    run: str
    """The run folder."""
    keys: str
    """Folder of its keys; empty: the job has none."""
    settings: str
    """The file that `atoll syncer --config` reads."""
    syncer: str
    """ATOLL_SYNCER of the learners."""
    tls_name: str = TLS_NAME
    """Empty: the syncer's certificate holds the host's real name."""
    shards: tuple[str, ...] = ()
    """Where they are reached, in their order."""
    relays: tuple[str, ...] = ()
    """In the order of their sites."""


@dataclass(frozen=True, slots=True)
class JobPart:
    """`count` processes of one kind. Texts may hold INDEX."""

    role: Role
    name: str
    count: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    keys: tuple[str, ...]
    """Files of the keys' folder that it needs."""
    gpus: int = 0
    hardware: str = ""
    cpus: int = 1
    memory_gb: float = 0.0
    nodes: int = 1
    ranks: int = 1
    spot: bool = False
    site: str = ""
    hosts: tuple[str, ...] = ()

    def named(self, index: int | str) -> str:
        """The id of one of them: the syncer is alone, as the relay of a site is; islands and shards are numbered."""
        return self.name if self.is_alone else f"{self.name}-{index}"

    @property
    def is_alone(self) -> bool:
        return self.role in ("syncer", "relay")


def filled(text: str, index: int | str) -> str:
    return text.replace(INDEX, str(index))


def parts_of(job: LaunchJob, places: Places) -> list[JobPart]:
    """Syncer first, then shards, relays, islands: the order in which they are started."""
    parts = [_syncer(job, places)]
    parts += [_shards(job, places)] if job.shards.count else []
    parts += [_relay(job, places, number) for number in range(len(job.relays.sites))]
    return [*parts, *(_island(job, island, places) for island in job.islands)]


def settings_text(job: LaunchJob) -> str:
    """The content of the syncer's settings file."""
    return json.dumps(dict(job.settings), indent=2) + "\n"


def token_file(name: str) -> str:
    """Within the keys' folder."""
    return f"tokens/{name}.token"


def _syncer(job: LaunchJob, places: Places) -> JobPart:
    argv = [job.run.python, "-m", "atoll", "syncer", "--listen", job.syncer.listen, *_identity(job, places)]
    argv += ["--run-folder", places.run, "--config", places.settings, "--end-when-finished", "--plain"]
    argv += ["--title", job.run.command]
    spec = job.syncer
    keys = _server_keys(job, places)
    environment = {**_common(job, "syncer"), **_token(job, places)}
    if job.shards.count:
        argv += ["--shards", ",".join(places.shards)]
        if places.keys:
            environment["ATOLL_TLS_CA"] = f"{places.keys}/ca.pem"
        if places.keys and not job.relays.sites:  # to its shards a coordinator is an operator
            keys = (*keys, token_file(OPERATOR))
            environment["ATOLL_TOKEN_FILE"] = f"{places.keys}/{token_file(OPERATOR)}"
    size = {"cpus": spec.cpus, "memory_gb": spec.memory_gb}
    return JobPart("syncer", "syncer", 1, tuple(argv), environment, keys, hosts=spec.hosts, **size)  # type: ignore[arg-type]


def _shards(job: LaunchJob, places: Places) -> JobPart:
    spec = job.shards
    name = f"shard-{INDEX}"
    argv = [job.run.python, "-m", "atoll", "shard", "--listen", f"0.0.0.0:{spec.port}"]
    argv += ["--run-folder", f"{places.run}/{name}", *_identity(job, places)]
    size: dict[str, Any] = {"cpus": spec.cpus, "memory_gb": spec.memory_gb, "hosts": spec.hosts}
    environment = {**_common(job, name), **_token(job, places)}
    return JobPart("shard", "shard", spec.count, tuple(argv), environment, _server_keys(job, places), **size)


def _relay(job: LaunchJob, places: Places, number: int) -> JobPart:
    """It shows the syncer the run's token, and the syncer's certificate to its islands."""
    spec, name = job.relays, f"relay-{number}"
    argv = [job.run.python, "-m", "atoll", "relay", "--upstream", places.syncer, "--listen", f"0.0.0.0:{spec.port}"]
    argv += _identity(job, places)
    if places.keys:
        argv += ["--tls-ca", f"{places.keys}/ca.pem", *(["--tls-name", places.tls_name] if places.tls_name else [])]
    size: dict[str, Any] = {"cpus": spec.cpus, "memory_gb": spec.memory_gb, "hosts": spec.hosts[number : number + 1]}
    environment = {**_common(job, name), **_token(job, places)}
    site = spec.sites[number]
    return JobPart("relay", name, 1, tuple(argv), environment, _server_keys(job, places), site=site, **size)


def _identity(job: LaunchJob, places: Places) -> list[str]:
    """By what a process that others come to knows them: keys of their own, or one token for all and a certificate."""
    if not places.keys:
        return []
    if not job.relays.sites:
        return ["--keys", f"{places.keys}/keys.json"]
    return ["--tls-certificate", f"{places.keys}/cert.pem", "--tls-key", f"{places.keys}/key.pem"]


def _token(job: LaunchJob, places: Places) -> dict[str, str]:
    one = places.keys and job.relays.sites
    return {"ATOLL_TOKEN_FILE": f"{places.keys}/{token_file(EVERYBODY)}"} if one else {}


def _server_keys(job: LaunchJob, places: Places) -> tuple[str, ...]:
    if not places.keys:
        return ()
    return (*SERVER_KEYS[1:], token_file(EVERYBODY)) if job.relays.sites else SERVER_KEYS


def token_of(job: LaunchJob, learner: str) -> str:
    """The file in the keys' folder that this learner shows."""
    return token_file(EVERYBODY if job.relays.sites else learner)


def _island(job: LaunchJob, island: IslandSpec, places: Places) -> JobPart:
    name = f"{island.name}-{INDEX}"
    environment = {
        **_common(job, name),
        **_reach(job, island, places),
        "ATOLL_LEARNER": name,
        "ATOLL_RUN_FOLDER": places.run,
        "OMP_NUM_THREADS": str(max(1, island.cpus * island.nodes // island.ranks)),
        **({"ATOLL_SITE": island.site} if island.site else {}),
        **island.environment,
    }
    return JobPart(
        role="island",
        name=island.name,
        count=island.count,
        argv=tuple(island_argv(job, island)),
        environment=environment,
        keys=("ca.pem", token_of(job, name)) if places.keys else (),
        gpus=island.gpus,
        hardware=island.hardware,
        cpus=island.cpus,
        memory_gb=island.memory_gb,
        nodes=island.nodes,
        ranks=island.ranks,
        spot=island.spot,
        site=island.site,
        hosts=island.hosts,
    )


def island_argv(job: LaunchJob, island: IslandSpec) -> list[str]:
    """The job's command; under torchrun if the island has several ranks."""
    command = shlex.split(job.run.command)
    if island.ranks == 1:
        return command
    torchrun = [job.run.python, "-m", "torch.distributed.run", f"--nproc-per-node={island.ranks // island.nodes}"]
    if island.nodes == 1:
        torchrun.append("--standalone")
    else:
        torchrun += [f"--nnodes={island.nodes}", "--rdzv-backend=c10d", f"--rdzv-id={job.name}-{island.name}-{INDEX}"]
        torchrun.append(f"--rdzv-endpoint={HEAD}:{RENDEZVOUS_PORT}")
    if not PurePosixPath(command[0]).name.startswith("python"):
        return [*torchrun, "--no-python", *command]
    return [*torchrun, *(command[2:] if command[1:2] == ["-u"] else command[1:])]


def _common(job: LaunchJob, name: str) -> dict[str, str]:
    """ATOLL_PART marks every process of a job on its machine, so that `stop` finds what must not stay."""
    return {"ATOLL_PART": f"{job.name}/{name}", "PYTHONUNBUFFERED": "1", **job.run.environment}


def _reach(job: LaunchJob, island: IslandSpec, places: Places) -> dict[str, str]:
    """Through the relay of its site, where there is one, and directly when that is gone."""
    relays = dict(zip(job.relays.sites, places.relays, strict=True))
    near = [relays[island.site]] if island.site in relays else []
    own = {"ATOLL_SYNCER": ",".join([*near, places.syncer])}
    if not places.keys:
        return own
    own["ATOLL_TLS_CA"] = f"{places.keys}/ca.pem"
    own["ATOLL_TOKEN_FILE"] = f"{places.keys}/{token_of(job, f'{island.name}-{INDEX}')}"
    return {**own, **({"ATOLL_TLS_NAME": places.tls_name} if places.tls_name else {})}
