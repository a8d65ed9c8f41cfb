"""What a finished run came to: its events reduced to the one object that `atoll train --json` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from atoll.errors import LaunchError
from atoll.launch.config import RunConfig, TrainConfig
from atoll.launch.folder import RunFolder
from atoll.launch.plan import Outcome
from atoll.launch.process import tail_of
from atoll.launch.stored import Attempt
from atoll.observe import data_parallel_bytes, measure_goodput, read_events
from atoll.observe.events import Event, LearnerSteps, ProcessStarted, SyncerStats
from atoll.zoo import count_parameters, model_config

COUNTED_BY_PROCESS = ("bytes_up", "bytes_down", "contributions_late")
"""What a syncer counts from its own start. Everything else in its statistics comes back with its state."""
FP32_OVER_BF16 = 2
"""Our data-parallel baseline all-reduces fp32 gradients; `data_parallel_bytes` counts bf16 ones."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything about a run that its events say."""

    tokens: int
    learner_steps: int
    """Steps of all learners together."""
    goodput: float
    wall_s: float
    """The training window: from the beginning of the first step of any learner to the end of the last one. Starting
    processes before it and evaluating after it are not training."""
    stats: SyncerStats | None
    """What the syncer counted last, and its predecessors with it; None for methods without one."""
    restarts: int
    """Of learners, over all attempts."""
    syncer_restarts: int


def measure(run_folder: Path) -> Measured:
    """Reduce the events of a run."""
    events = list(read_events(run_folder))
    goodput = measure_goodput(events)
    steps = [event for _, _, event in events if isinstance(event, LearnerSteps)]
    last = last_word(events)
    return Measured(
        tokens=sum(event.tokens for event in steps) if last is None else last.tokens_processed,
        learner_steps=sum(event.steps for event in steps),
        goodput=goodput.share,
        wall_s=goodput.window_s,
        stats=last,
        restarts=_restarts(events, "learner"),
        syncer_restarts=_restarts(events, "syncer"),
    )


def last_word(events: Iterable[tuple[int, str, Event]]) -> SyncerStats | None:
    """The statistics of the last syncer, with what each of its predecessors had counted for itself."""
    by_process = {source: event for _, source, event in events if isinstance(event, SyncerStats)}
    if not by_process:
        return None
    *_, last = by_process.values()
    sums = {name: sum(getattr(stats, name) for stats in by_process.values()) for name in COUNTED_BY_PROCESS}
    return replace(last, **sums)


def _restarts(events: Iterable[tuple[int, str, Event]], role: str) -> int:
    """Starts beyond the first of each process. Each attempt has a launcher with an event file of its own."""
    started = [
        (source, event.id) for _, source, event in events if isinstance(event, ProcessStarted) and event.role == role
    ]
    return len(started) - len(set(started))


def build_result(
    config: TrainConfig,
    attempt: Attempt,
    *,
    measured: Measured,
    outcome: Outcome,
    eval_loss: float,
    total_s: float,
) -> dict[str, Any]:
    """The result object. `total_s` is everything from the (last) command to here, `wall_s` the training of all attempts
    together."""
    folder = attempt.folder
    parameters = count_parameters(model_config(config.model))
    equivalent = data_parallel_bytes(parameters, measured.learner_steps, config.processes)
    return {
        "method": config.method,
        "learners": config.processes,
        "steps": config.steps_per_process,
        "tokens": measured.tokens,
        "eval_loss": eval_loss,
        "goodput": measured.goodput,
        "wall_s": measured.wall_s,
        "total_s": total_s,
        "dp_bytes_equivalent": equivalent,
        **_synchronisation(config, measured, equivalent=equivalent, folder=folder),
        "faults": [asdict(fault) for fault in (*attempt.faults, *outcome.faults)],
        "faults_skipped": [asdict(fault) for fault in outcome.skipped],
        "restarts": measured.restarts,
        "syncer_restarts": measured.syncer_restarts,
        "resumed": attempt.number,
        "parameters": parameters,
        "run_folder": str(folder.path),
        "report": str(folder.path / "report.html"),
    }


def script_result(
    config: RunConfig, command: Sequence[str], attempt: Attempt, *, measured: Measured, outcome: Outcome
) -> dict[str, Any]:
    """The same for `atoll run`, as far as the launcher of a user's own script can know it."""
    stats = measured.stats
    return {
        "command": list(command),
        "learners": config.learners,
        "tokens": measured.tokens,
        "goodput": measured.goodput,
        "wall_s": measured.wall_s,
        "commits": stats.commits if stats is not None else 0,
        "bytes_up": stats.bytes_up if stats is not None else 0,
        "bytes_down": stats.bytes_down if stats is not None else 0,
        "restarts": measured.restarts,
        "syncer_restarts": measured.syncer_restarts,
        "resumed": attempt.number,
        "given_up": list(outcome.given_up),
        "faults": [asdict(fault) for fault in (*attempt.faults, *outcome.faults)],
        "faults_skipped": [asdict(fault) for fault in outcome.skipped],
        "run_folder": str(attempt.folder.path),
    }


def _synchronisation(
    config: TrainConfig, measured: Measured, *, equivalent: int, folder: RunFolder
) -> Mapping[str, Any]:
    """Bytes, commits and the fate of every token: tokens = merged + pending + sum(discarded)."""
    stats = measured.stats
    if stats is None and config.synchronises:
        raise LaunchError(
            f"the syncer left no statistics in {folder.events}, so the run has no sums; the end of its log shows "
            f"why:\n{tail_of(folder.log_file('syncer', 'syncer'))}"
        )
    if stats is None:
        # Computed, not measured: torch does not say what its all-reduce sent. Every gradient is merged at once.
        sent = FP32_OVER_BF16 * equivalent if config.method == "dp" else 0
        return {
            "bytes_up": sent,
            "bytes_down": sent,
            "commits": 0,
            "contributions_merged": 0,
            "contributions_late": 0,
            "tokens_merged": measured.tokens,
            "tokens_pending": 0,
            "tokens_discarded": {},
        }
    return {
        "bytes_up": stats.bytes_up,
        "bytes_down": stats.bytes_down,
        "commits": stats.commits,
        "contributions_merged": stats.contributions_merged,
        "contributions_late": stats.contributions_late,
        "tokens_merged": stats.tokens_merged,
        "tokens_pending": stats.tokens_pending,
        "tokens_discarded": dict(stats.tokens_discarded),
    }
