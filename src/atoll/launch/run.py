"""`atoll run` without the terminal: the user's own command, once per learner, around one syncer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from atoll.errors import ConfigError, LaunchError
from atoll.launch.commands import (
    learner_commands,
    linked,
    new_token,
    own_shards,
    peer_commands,
    relay_commands,
    syncer_command,
)
from atoll.launch.config import RunConfig, resolved
from atoll.launch.durability import check_keepable
from atoll.launch.faults import WITHOUT_FAULTS, FaultPlanner
from atoll.launch.folder import create_run_folder, write_json
from atoll.launch.local import Supervisor
from atoll.launch.pair import standby_beside
from atoll.launch.plan import FAILED, FinishedRun, LaunchPlan, View
from atoll.launch.ranks import gpu_shares, gpus_here, island_argv
from atoll.launch.result import measure, script_result
from atoll.launch.stored import Attempt, started_in
from atoll.observe import EventWriter, RunFinished, RunStarted
from atoll.private import private_umask


@private_umask()
def run_command(
    config: RunConfig,
    command: Sequence[str],
    *,
    say: Callable[[str], None] = lambda text: None,
    say_raw: Callable[[bytes], None] = lambda data: None,
    faults: FaultPlanner = WITHOUT_FAULTS,
    view: Callable[[Path], View] | None = None,
) -> FinishedRun:
    """Run `command` as every learner. `say_raw` gets learner-0's output."""
    if not command:
        raise ConfigError("atoll run needs the learners' command after --, such as: atoll run -- python train.py")
    faults.check(config)
    check_keepable(config.durability)
    _gpus(config)  # too few are said before there is a folder
    folder = create_run_folder(config.out, name="run")
    folder.write_config(config.options(), {**resolved(config), "command": list(command), **started_in()})
    say(f"run folder: {folder.path} (logs of all learners in its logs/)")
    with folder.hold():
        attempt = Attempt(folder, new_token())
        return run_attempt(config, command, attempt, say=say, say_raw=say_raw, faults=faults, view=view)


def run_attempt(
    config: RunConfig,
    command: Sequence[str],
    attempt: Attempt,
    *,
    say: Callable[[str], None],
    say_raw: Callable[[bytes], None],
    faults: FaultPlanner,
    view: Callable[[Path], View] | None = None,
) -> FinishedRun:
    """One launch of the run's processes; RUN/result.json says what it came to."""
    folder, argv = attempt.folder, island_argv(command, config.ranks)
    learners = learner_commands(
        folder,
        argv,
        count=config.learners,
        threads=config.threads_per_learner,
        environment={"ATOLL_TOKEN": attempt.token},
        gpus=_gpus(config),
    )
    learners = [one for one in learners if one.id not in attempt.taken]
    syncer, shards = linked(
        syncer_command(folder, config.sync, config.durability, token=attempt.token, first_start=not attempt.number),
        own_shards(folder, config.shards, token=attempt.token),
    )
    plan = LaunchPlan(
        learners,
        syncer=syncer,
        shards=shards,
        standby=standby_beside(syncer) if config.standby else None,
        relays=relay_commands(folder, config.relays, token=attempt.token),
        peers=peer_commands(folder, config.shards, learners, token=attempt.token),
        faults=faults.injection(config, attempt, argv),
        tokens_budget=config.tokens_budget,
        minutes=config.minutes,
        follow="learner-0",
    )
    with EventWriter(attempt.events_file) as writer:
        writer.emit(_run_started(config, command))
        shown = view(folder.path) if view is not None else None
        supervisor = Supervisor(folder, plan, writer=writer, view=shown, say=say, say_raw=say_raw)
        try:
            outcome = supervisor.run()
        except LaunchError:
            writer.emit(RunFinished(FAILED, float("nan"), 0.0))
            writer.flush()
            with contextlib.suppress(OSError):  # why the run failed is the error to see
                outcome, measured = supervisor.outcome(FAILED), measure(folder.path)
                so_far = script_result(config, command, attempt, measured=measured, outcome=outcome)
                write_json(folder.result_file, so_far)
            raise
        writer.flush()
        measured = measure(folder.path)
        writer.emit(RunFinished(outcome.reason, float("nan"), measured.wall_s))
    result = script_result(config, command, attempt, measured=measured, outcome=outcome)
    with contextlib.suppress(*((OSError,) if outcome.interrupted else ())):  # a full disk may be why it was stopped
        write_json(folder.result_file, result)
    return FinishedRun(folder.path, outcome, result)


def _gpus(config: RunConfig) -> Sequence[Mapping[str, str]]:
    given = config.gpus_per_learner
    return gpu_shares(gpus_here(), learners=config.learners, ranks=config.ranks, per_learner=given)


def _run_started(config: RunConfig, command: Sequence[str]) -> RunStarted:
    return RunStarted(
        method=config.method,
        learners=config.learners,
        parameters=0,
        sync_every=config.sync.sync_every,
        fragments=config.sync.fragments,
        codec_up=config.sync.codec_up,
        codec_down=config.sync.codec_down,
        tokens_budget=config.tokens_budget,
        title=" ".join(command),
    )
