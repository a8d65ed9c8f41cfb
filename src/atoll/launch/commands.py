"""The commands and environments of a run's processes: how the syncer and the learners are told who they are."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from atoll.core import SyncConfig
from atoll.launch.durability import DurabilityConfig
from atoll.launch.folder import RunFolder, write_json
from atoll.launch.near import cpus_near
from atoll.launch.options import sync_options
from atoll.launch.process import Command
from atoll.launch.ranks import VISIBLE
from atoll.private import make_private_folder

HOST = "127.0.0.1"
LISTEN = f"{HOST}:0"
"""Everything is on this machine, and the kernel picks a port that is free. In a run folder that had a syncer before,
the new one tries the old port first, so that learners who wait for it find it."""
TOKEN_BYTES = 16
FIRST_START = "--first-start"
"""Later ones must ask around: learners may hold what the syncer has lost."""


def new_token() -> str:
    """A secret that keeps other runs on this machine out of this one. It travels by environment, never by argv."""
    return secrets.token_hex(TOKEN_BYTES)


def syncer_command(
    folder: RunFolder, sync: SyncConfig, durability: DurabilityConfig, *, token: str, first_start: bool
) -> Command:
    """`atoll syncer` of this very Python, with its settings in RUN/sync.json. In a folder that was made a moment ago
    nobody can hold a run (`first_start`): it begins without asking around."""
    settings = folder.path / "sync.json"
    folder.write_token(token)
    values = {**sync_options(sync), "learners": sync.learners_expected, "tokens_budget": sync.tokens_budget}
    write_json(settings, {**values, **durability.options()})
    argv = [sys.executable, "-m", "atoll", "syncer", "--listen", LISTEN]
    argv += ["--run-folder", str(folder.path), "--config", str(settings), "--stay", "--plain"]
    argv += [FIRST_START] if first_start else []
    return Command(
        role="syncer",
        id="syncer",
        argv=argv,
        environment={"ATOLL_TOKEN": token, "PYTHONUNBUFFERED": "1", **metrics_place(0)},
        orphan_signal=signal.SIGTERM,  # Even without its launcher it shall write the model.
    )


def shard_commands(folder: RunFolder, count: int, *, token: str) -> list[Command]:
    """`atoll shard`, so many times, each with a folder of its own in RUN/shards."""
    return [shard_command(folder, number, token=token) for number in range(count)]


def shard_command(folder: RunFolder, number: int, *, token: str) -> Command:
    own = folder.shard_folder(number)
    make_private_folder(own)
    argv = [sys.executable, "-m", "atoll", "shard", "--listen", LISTEN, "--run-folder", str(own)]
    argv += ["--metrics-folder", str(folder.path / "metrics")]
    environment = {"ATOLL_TOKEN": token, "PYTHONUNBUFFERED": "1", **_any_metrics_place()}
    # Without its launcher it must outlive the syncer, which fetches the model from it: SIGHUP says so.
    return Command("shard", f"shard-{number}", argv, environment, orphan_signal=signal.SIGHUP)


def relay_commands(folder: RunFolder, count: int, *, token: str) -> list[Command]:
    """`atoll relay`, so many times. Where the syncer is it is told when there is one (`--upstream`)."""
    commands = []
    for number in range(count):
        argv = [sys.executable, "-m", "atoll", "relay", "--listen", LISTEN]
        argv += ["--run-folder", str(folder.relay_folder(number)), "--metrics-folder", str(folder.path / "metrics")]
        environment = {"ATOLL_TOKEN": token, "PYTHONUNBUFFERED": "1", **_any_metrics_place()}
        commands.append(Command("relay", f"relay-{number}", argv, environment, orphan_signal=signal.SIGTERM))
    return commands


def site_of(learner: int, *, learners: int, sites: int) -> int:
    """Which site a learner belongs to, by its number: neighbours are together. One that came later (a guest) goes on
    counting from the first."""
    return learner % learners * sites // learners


def own_shards(folder: RunFolder, shards: int | str, *, token: str) -> list[Command]:
    """Those that belong to the run as a whole."""
    return shard_commands(folder, shards, token=token) if isinstance(shards, int) else []


def peer_commands(
    folder: RunFolder, shards: int | str, learners: Sequence[Command], *, token: str
) -> dict[str, Command]:
    """One beside each learner, by its rank, where the run is so."""
    if isinstance(shards, int):
        return {}
    return {one.id: shard_command(folder, int(one.environment["ATOLL_RANK"]), token=token) for one in learners}


def linked(syncer: Command, shards: Sequence[Command]) -> tuple[Command, list[Command]]:
    """The same with a token between them that learners do not have: who has it leads the shards. Shards beside learners
    have none: they come from machines that have the run's token alone."""
    more = {"ATOLL_LINK_TOKEN": new_token()} if shards else {}
    both = [replace(one, environment={**one.environment, **more}) for one in (syncer, *shards)]
    return both[0], both[1:]


def learner_commands(
    folder: RunFolder,
    argv: Sequence[str],
    *,
    count: int,
    threads: int,
    environment: Mapping[str, str],
    gpus: Sequence[Mapping[str, str]] = (),
) -> list[Command]:
    """`count` times the same command, each with its own identity and (where `gpus` says which) its own GPUs."""
    own = [{**environment, **share} for share in gpus] or [dict(environment)] * count
    return [
        learner_command(folder, argv, id=learner_id(rank), rank=rank, world=count, threads=threads, more=own[rank])
        for rank in range(count)
    ]


def learner_command(
    folder: RunFolder,
    argv: Sequence[str],
    *,
    id: str,
    rank: int,
    world: int,
    threads: int,
    more: Mapping[str, str],
) -> Command:
    """One learner: `argv` with an environment that says who it is, and `more` of it."""
    own = {
        "ATOLL_LEARNER": id,
        "ATOLL_RANK": str(rank),
        "ATOLL_WORLD": str(world),
        "ATOLL_RUN_FOLDER": str(folder.path),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "PATH": path_with_this_python(),
        **metrics_place(rank + 1),
    }
    gpus = [name for name in more.get(VISIBLE, "").split(",") if name]
    cpus = cpus_near(gpus) if world > 1 else frozenset()  # who is alone on the machine may use all of it
    return Command(role="learner", id=id, argv=argv, environment={**own, **more}, cpus=cpus)


def learner_id(number: int) -> str:
    """The id of a learner that was given no name."""
    return f"learner-{number}"


def metrics_place(number: int) -> dict[str, str]:
    """ATOLL_METRICS of a process, from that of the launcher: its port for the syncer, the next ones for learners by
    rank. Port 0 is any for all; RUN/metrics says which."""
    host, _, port = os.environ.get("ATOLL_METRICS", "").rpartition(":")
    if not port.isdigit():
        return {}
    return {"ATOLL_METRICS": f"{host}:{int(port) + number if int(port) else 0}"}


def _any_metrics_place() -> dict[str, str]:
    """For a process that has no number among syncer and learners: any free port, where the launcher was given one."""
    host, _, port = os.environ.get("ATOLL_METRICS", "").rpartition(":")
    return {"ATOLL_METRICS": f"{host}:0"} if port else {}


def worker_argv(folder: RunFolder) -> list[str]:
    """The training process of `atoll train`, of this very Python, as RUN/worker.json tells it."""
    return [sys.executable, "-m", "atoll.zoo.worker", str(folder.path / "worker.json")]


def path_with_this_python() -> str:
    """PATH with the folder of this Python first, so that `python` in a user's command is the one that has Atoll."""
    here = str(Path(sys.executable).parent)
    return os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
