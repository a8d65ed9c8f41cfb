"""`atoll join` and `atoll leave` without the terminal: learners that come to a running job and go from it.

A joiner is one more process with an environment that says where the syncer is, so that any machine can bring some:

    ATOLL_SYNCER=host:port ATOLL_TOKEN_FILE=file ATOLL_LEARNER=name python train.py

`join_run` does this for a run of this machine: the same command, free ids, and a small supervisor of its own, which
restarts them and ends with the run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import AtollError, ConfigError, LaunchError
from atoll.launch.commands import learner_command, learner_id, peer_commands, worker_argv
from atoll.launch.config import LEARNERS_LOCAL_MAX, RunConfig, TrainConfig
from atoll.launch.folder import RunFolder, checked_id, is_finished, syncer_of
from atoll.launch.local import Supervisor
from atoll.launch.plan import LaunchPlan, RunOutcome
from atoll.launch.process import Command
from atoll.launch.ranks import gpu_share, island_argv
from atoll.launch.running import Listed, ask_to_leave, forget_dead, joined_processes, listed, main_processes
from atoll.launch.stored import StoredRun, read_run
from atoll.launch.train import STRAGGLE_S_MAX
from atoll.observe import EventWriter, LearnerFinished, read_events
from atoll.private import private_umask

LEAVE_WAIT_S = 30.0
"""A learner hands over what it has within 20 s, and its process needs a moment to end."""
POLL_S = 0.05
GONE = ("lost", "left")
"""States of a member whose id is free to be taken."""

Members = Callable[[str, str], Mapping[str, str]]
"""From address and token of a syncer to the state of every learner it knows."""


def members_of(address: str, token: str) -> Mapping[str, str]:
    """Ask the syncer who is in the run."""
    from atoll.wire import ClientOptions, fetch_status

    answer = asyncio.run(fetch_status(ClientOptions(address=address, token=token)))
    if answer["stopping"]:
        raise LaunchError(
            f"the run is over ({answer['stopping']}); start a new one, or resume it if it was interrupted"
        )
    return {str(member["learner"]): str(member["state"]) for member in answer["members"]}


@dataclass(frozen=True, slots=True)
class JoinSeat:
    """Who a joiner will be."""

    id: str
    rank: int
    """Its number in the data: one that nobody has, unless it takes another's place."""


@private_umask()
def join_run(
    path: Path,
    *,
    learners: int = 1,
    id: str = "",
    threads: int = 0,
    say: Callable[[str], None] = lambda text: None,
    say_raw: Callable[[bytes], None] = lambda data: None,
    members: Members = members_of,
) -> tuple[RunOutcome, list[str]]:
    """Add learners to the run in `path` and keep them going until it ends or a signal comes; they then leave in order.

    Returns how it ended and the ids that they had."""
    if not 1 <= learners <= LEARNERS_LOCAL_MAX or (id and learners != 1):
        raise ConfigError(f"learners must be from 1 to {LEARNERS_LOCAL_MAX}, and 1 with --id; not {learners}")
    stored = read_run(path)
    folder = stored.folder
    if is_finished(folder):
        raise LaunchError(
            f"the run in {folder.path} is finished (`atoll report {folder.path}`); start a new one to join"
        )
    folder.warn_of_open_token(say)
    address, token = syncer_of(folder.path)
    try:
        known = members(address, token)
    except AtollError as error:
        raise LaunchError(
            f"the syncer of the run in {folder.path} does not take learners: {error}; if the run was interrupted, "
            f"`atoll resume {folder.path}` goes on with it"
        ) from error
    with folder.hold_joining():
        forget_dead(folder)
        seats = _seats(folder, known, learners=learners, id=checked_id(id) if id else "")
        ids = [seat.id for seat in seats]
        # Until the processes are listed, this one stands for them, so that no other `atoll join` takes their ids.
        folder.write_processes([listed("seat", id, os.getpid()).entry() for id in ids], folder.joined_file)
    say(f"{', '.join(ids)} will join the run in {folder.path}; Ctrl-C makes them leave")
    environment = {"ATOLL_TOKEN": token, "ATOLL_SYNCER": f"@{folder.syncer_file}" if stored.config.standby else address}
    with stored.where_it_began(say):
        commands = [_command(stored, seat, threads=threads, environment=environment) for seat in seats]
        plan = LaunchPlan(
            commands,
            peers=peer_commands(folder, stored.config.shards, commands, token=token),
            syncer_address=address,
            straggle_s_max=STRAGGLE_S_MAX if isinstance(stored.config, TrainConfig) else 0.0,
            follow=ids[0] if stored.command else "",
            guest=True,
            over=lambda: run_is_over(folder),
        )
        with EventWriter(folder.events / f"join-{os.getpid()}.jsonl") as writer:
            return Supervisor(folder, plan, writer=writer, say=say, say_raw=say_raw).run(), ids


def run_is_over(folder: RunFolder) -> bool:
    """It has a result, or nothing of it is alive."""
    return is_finished(folder) or not any(one.alive for one in main_processes(folder))


def _seats(folder: RunFolder, known: Mapping[str, str], *, learners: int, id: str) -> list[JoinSeat]:
    here = {one.id: one for one in _alive(folder, "learner", "seat")}
    if id and (id in here or known.get(id, "left") not in GONE):
        state = f"pid {here[id].pid}" if id in here else known[id]
        raise LaunchError(
            f"{id} is in the run already ({state}); `atoll leave {folder.path} {id}` makes room for another process "
            f"under this name, or choose another --id"
        )
    number = _number(id)
    if id and number is not None:
        return [JoinSeat(id, number)]
    taken = {number for name in (*known, *here) if (number := _number(name)) is not None}
    free = [number for number in range(len(taken) + learners) if number not in taken][:learners]
    return [JoinSeat(id or learner_id(number), number) for number in free]


def _number(id: str) -> int | None:
    """2 for learner-2: the rank that goes with a name of ours."""
    number = id.removeprefix("learner-")
    return int(number) if number.isascii() and number.isdigit() and id == learner_id(int(number)) else None


def _command(stored: StoredRun, seat: JoinSeat, *, threads: int, environment: Mapping[str, str]) -> Command:
    argv: Sequence[str] = worker_argv(stored.folder)
    if stored.command and isinstance(stored.config, RunConfig):
        config = stored.config
        argv = island_argv(stored.command, config.ranks)
        gpus = gpu_share(seat.rank, ranks=config.ranks, per_learner=config.gpus_per_learner)
        environment = {**environment, **gpus}
    return learner_command(
        stored.folder,
        argv,
        id=seat.id,
        rank=seat.rank,
        # A script may divide its data by the world, so that a rank beyond it must not exist.
        world=max(stored.config.learners, seat.rank + 1),
        threads=threads or stored.config.threads_per_learner,
        more=environment,
    )


# ---------------------------------------------------------------- leaving


def leave_run(path: Path, learner: str, *, wait_s: float = LEAVE_WAIT_S) -> Listed:
    """Ask a learner of this machine to leave, and wait until it has: it hands over its progress first.

    Its supervisor finds the request in RUN/leave-ID, so that it neither restarts the learner nor takes its end for the
    run's."""
    folder = RunFolder(path.expanduser().resolve())
    here = learners_here(folder)
    if learner not in here:
        running = f"running here: {', '.join(sorted(here))}" if here else "none is running here"
        raise LaunchError(
            f"no learner {learner!r} of the run in {path} runs on this machine ({running}); give one of those ids, or "
            f"send SIGTERM to the process where it runs"
        )
    one = here[learner]
    ask_to_leave(folder, learner, one.pid)
    deadline_s = time.monotonic() + wait_s
    while one.alive:
        if time.monotonic() > deadline_s:
            raise LaunchError(
                f"{learner} (pid {one.pid}) was asked to leave and has not ended within {wait_s:g} s; its log "
                f"{folder.log_file('learner', learner)} may say why, and `kill -9 {one.pid}` ends it"
            )
        time.sleep(POLL_S)
    return one


def learners_here(folder: RunFolder) -> dict[str, Listed]:
    """The learners of the run that a launcher of this machine has started, by id."""
    return {one.id: one for one in _alive(folder, "learner")}


def not_handed_over(path: Path, learner: str) -> int:
    """Tokens that the last process of this learner that left could not hand over."""
    ends = [event for _, _, event in read_events(path) if isinstance(event, LearnerFinished)]
    return next((end.unhanded for end in reversed(ends) if end.learner == learner), 0)


def _alive(folder: RunFolder, *roles: str) -> list[Listed]:
    """The processes of the run that are alive on this machine and have one of these roles."""
    everybody = (*main_processes(folder), *joined_processes(folder))
    return [one for one in everybody if one.role in roles and one.alive]
