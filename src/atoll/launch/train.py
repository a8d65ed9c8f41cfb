"""`atoll train` without the terminal: one run of the reference GPT, from its config to its published model's loss."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.errors import LaunchError
from atoll.launch.commands import (
    learner_commands,
    linked,
    new_token,
    own_shards,
    peer_commands,
    relay_commands,
    syncer_command,
    worker_argv,
)
from atoll.launch.config import TrainConfig, resolved
from atoll.launch.durability import check_keepable
from atoll.launch.faults import WITHOUT_FAULTS, FaultPlanner
from atoll.launch.folder import RunFolder, create_run_folder, write_json, write_text
from atoll.launch.local import Supervisor
from atoll.launch.pair import standby_beside
from atoll.launch.plan import FAILED, FinishedRun, LaunchPlan, RestartPolicy, View
from atoll.launch.process import tail_of
from atoll.launch.result import build_result, measure
from atoll.launch.stored import Attempt, started_in
from atoll.observe import EventWriter, RunFinished, RunStarted
from atoll.private import private_umask
from atoll.zoo import RANKS_FILE, WorkerConfig, count_parameters, model_config

SAMPLE_PROMPT = "def "
SAMPLE_BYTES = 400
"""A few lines: enough to see indentation and names, or that there are none yet."""

STRAGGLE_S_MAX = 120.0
"""The budget ends the run for all learners at once; each then ends a step and hands over its last deltas."""


@private_umask()
def run_train(
    config: TrainConfig,
    *,
    view: Callable[[Path], View] | None = None,
    say: Callable[[str], None] = lambda text: None,
    faults: FaultPlanner = WITHOUT_FAULTS,
) -> FinishedRun:
    """Train, evaluate the published model, write RUN/result.json. `view` makes the live view of a run folder."""
    began_s = time.monotonic()
    faults.check(config)
    check_keepable(config.durability)
    # The corpus is read before anything is started: an empty one is an error here, not in the logs of M processes.
    corpus = _load_corpus(config)
    folder = create_run_folder(config.out, name=config.method)
    folder.write_config(config.options(), {**resolved(config), **started_in()})
    say(f"run folder: {folder.path}")
    with folder.hold():
        attempt = Attempt(folder, new_token())
        return train_attempt(config, attempt, corpus, began_s=began_s, view=view, say=say, faults=faults)


def resume_train(
    config: TrainConfig,
    attempt: Attempt,
    *,
    view: Callable[[Path], View] | None = None,
    say: Callable[[str], None] = lambda text: None,
    faults: FaultPlanner = WITHOUT_FAULTS,
) -> FinishedRun:
    """Go on with an interrupted run to the same end. The caller holds the folder."""
    began_s = time.monotonic()
    return train_attempt(config, attempt, _load_corpus(config), began_s=began_s, view=view, say=say, faults=faults)


def train_attempt(
    config: TrainConfig,
    attempt: Attempt,
    corpus: Any,
    *,
    began_s: float,
    view: Callable[[Path], View] | None,
    say: Callable[[str], None],
    faults: FaultPlanner,
) -> FinishedRun:
    """One launch of the run's processes, up to the result if nothing interrupts it."""
    folder = attempt.folder
    model_ns = _written_ns(folder.model_file)
    with EventWriter(attempt.events_file) as writer:
        writer.emit(_run_started(config))
        plan = _plan(config, attempt, faults)
        shown = view(folder.path) if view is not None else None
        supervisor = Supervisor(folder, plan, writer=writer, view=shown, say=say)
        try:
            outcome = supervisor.run()
        except LaunchError:
            writer.emit(RunFinished(FAILED, float("nan"), 0.0))
            writer.flush()
            with contextlib.suppress(LaunchError, OSError):  # why the run failed is the error to see
                measured, outcome = measure(folder.path), supervisor.outcome(FAILED)
                write_json(
                    folder.result_file,
                    build_result(
                        config,
                        attempt,
                        measured=measured,
                        outcome=outcome,
                        eval_loss=measured.eval_loss,
                        total_s=time.monotonic() - began_s,
                    ),
                )
            raise
        writer.flush()
        measured = measure(folder.path)
        eval_loss = measured.eval_loss
        if not outcome.interrupted:
            eval_loss = _evaluate(config, folder, corpus=corpus, older_ns=model_ns)
        # Of a run that was stopped this is no final word, and what learners measured is in their own events.
        final = float("nan") if outcome.interrupted else eval_loss
        writer.emit(RunFinished(outcome.reason, final, measured.wall_s))
    total_s = time.monotonic() - began_s
    result: dict[str, Any] | None
    try:
        result = build_result(config, attempt, measured=measured, outcome=outcome, eval_loss=eval_loss, total_s=total_s)
        write_json(folder.result_file, result)
    except (LaunchError, OSError):
        if not outcome.interrupted:
            raise
        result = None  # it was stopped before there was anything to add up, or by a full disk
    return FinishedRun(folder.path, outcome, result)


def _load_corpus(config: TrainConfig) -> Any:
    from atoll.zoo import load_corpus

    corpus = load_corpus(config.corpus)
    corpus.check(config.processes, config.seq)
    return corpus


def _plan(config: TrainConfig, attempt: Attempt, faults: FaultPlanner) -> LaunchPlan:
    """The processes of the method: a syncer and learners, ranks of one world, or one process."""
    folder = attempt.folder
    write_text(folder.path / "worker.json", _worker_config(config).to_json() + "\n")
    learners = learner_commands(
        folder,
        worker_argv(folder),
        count=config.processes,
        threads=config.threads_per_learner,
        environment={"ATOLL_TOKEN": attempt.token},
    )
    if not config.synchronises:
        # Neither survives the loss of a process: there is nobody who holds its state.
        (folder.path / RANKS_FILE).unlink(missing_ok=True)  # of an attempt that was killed
        return LaunchPlan(learners, restarts=RestartPolicy(restarts_max=0))
    learners = [command for command in learners if command.id not in attempt.taken]
    syncer, shards = linked(
        syncer_command(folder, config.sync, config.durability, token=attempt.token, first_start=not attempt.number),
        own_shards(folder, config.shards, token=attempt.token),
    )
    return LaunchPlan(
        learners,
        syncer=syncer,
        shards=shards,
        standby=standby_beside(syncer) if config.standby else None,
        relays=relay_commands(folder, config.relays, token=attempt.token),
        peers=peer_commands(folder, config.shards, learners, token=attempt.token),
        faults=faults.injection(config, attempt, worker_argv(folder)),
        tokens_budget=config.tokens_budget,
        straggle_s_max=STRAGGLE_S_MAX,
    )


def _worker_config(config: TrainConfig) -> WorkerConfig:
    return WorkerConfig(
        method=config.method,
        learners=config.learners,
        steps=config.steps,
        batch=config.batch,
        seq=config.seq,
        model=config.model,
        corpus=config.corpus,
        seed=config.seed,
        lr=config.lr,
        optimizer=config.optimizer,
        eval_every=config.eval_every_steps,
        device=config.device,
        threads=config.threads_per_learner,
        step_ms=config.step_ms,
    )


def _run_started(config: TrainConfig) -> RunStarted:
    sync = config.sync if config.synchronises else None
    return RunStarted(
        method=config.method,
        learners=config.processes,
        parameters=count_parameters(model_config(config.model)),
        sync_every=sync.sync_every if sync else 0,
        fragments=sync.fragments if sync else 0,
        codec_up=sync.codec_up if sync else "",
        codec_down=sync.codec_down if sync else "",
        tokens_budget=config.tokens_budget,
        title=f"{config.model} GPT on {config.corpus}",
    )


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _evaluate(config: TrainConfig, folder: RunFolder, *, corpus: Any, older_ns: int) -> float:
    """Held-out loss and a text sample of RUN/model.safetensors: the published model, not some learner's replica.

    A model that was written at `older_ns` is that of an earlier attempt, not of this one's end."""
    import torch

    from atoll.zoo import eval_loss, load_saved, sample

    if _written_ns(folder.model_file) <= older_ns:
        writer = folder.log_file("syncer", "syncer") if config.synchronises else folder.log_file("learner", "learner-0")
        raise LaunchError(
            f"the run ended without writing {folder.model_file}; the end of the log {writer} shows why:\n"
            f"{tail_of(writer)}"
        )
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    model = load_saved(folder.model_file, config.model).to(device)
    write_text(folder.sample_file, sample(model, SAMPLE_PROMPT, SAMPLE_BYTES, seed=config.seed) + "\n")
    return float(eval_loss(model, corpus, batch=config.batch, seq=config.seq, device=device))
