"""What a finished run came to: its events reduced to the one object that `atoll train --json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.errors import LaunchError
from atoll.launch.config import TrainConfig
from atoll.launch.folder import RunFolder
from atoll.launch.plan import Outcome
from atoll.launch.process import tail_of
from atoll.observe import data_parallel_bytes, measure_goodput, read_events
from atoll.observe.events import LearnerSteps, SyncerStats
from atoll.zoo import count_parameters, model_config

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
    """What the syncer counted last; None for methods without one."""


def measure(run_folder: Path) -> Measured:
    """Reduce the events of a run."""
    events = list(read_events(run_folder))
    goodput = measure_goodput(events)
    steps = [event for _, _, event in events if isinstance(event, LearnerSteps)]
    stats = [event for _, _, event in events if isinstance(event, SyncerStats)]
    last = stats[-1] if stats else None
    return Measured(
        tokens=sum(event.tokens for event in steps) if last is None else last.tokens_processed,
        learner_steps=sum(event.steps for event in steps),
        goodput=goodput.share,
        wall_s=goodput.window_s,
        stats=last,
    )


def build_result(
    config: TrainConfig,
    folder: RunFolder,
    *,
    measured: Measured,
    outcome: Outcome,
    eval_loss: float,
    total_s: float,
) -> dict[str, Any]:
    """The result object. `total_s` is everything from the command to here, `wall_s` in it only the training."""
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
        "faults": [asdict(fault) for fault in outcome.faults],
        "restarts": outcome.restarts,
        "parameters": parameters,
        "run_folder": str(folder.path),
        "report": str(folder.path / "report.html"),
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
