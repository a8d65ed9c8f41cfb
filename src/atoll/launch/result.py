"""What a run came to, also one that was stopped: its events reduced to the one object of RUN/result.json, which
`atoll train`, `run` and `report` print with --json."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from atoll.core import SYNCER_STOPPED
from atoll.errors import LaunchError
from atoll.launch.config import RunConfig, TrainConfig
from atoll.launch.folder import RunFolder, write_json
from atoll.launch.plan import FINISHED, TIME_UP, RunOutcome
from atoll.launch.process import tail_of
from atoll.launch.stored import Attempt
from atoll.observe import (
    Event,
    LayoutFixed,
    LearnerEvaluated,
    LearnerSteps,
    ProcessStarted,
    RunFinished,
    RunStarted,
    SyncerStarted,
    SyncerStats,
    SyncerStopped,
    data_parallel_bytes,
    measure_goodput,
    natural_key,
    read_events,
)
from atoll.zoo import count_parameters, model_config

COUNTED_BY_PROCESS = ("bytes_up", "bytes_down", "contributions_late")
"""What a syncer counts from its own start. Everything else in its statistics comes back with its state."""
FP32_OVER_BF16 = 2
"""Our data-parallel baseline all-reduces fp32 gradients; `data_parallel_bytes` counts bf16 ones."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything about a run that its events say."""

    tokens: int
    steps: Mapping[str, int]
    """Of each learner, over all of its processes."""
    eval_loss: float
    """What the published model's loss was when it was last measured; NaN: nobody measured it."""
    goodput: float
    goodput_seconds: Mapping[str, float]
    """Where the learners' time went, summed over them."""
    wall_s: float
    """The training window: from the beginning of the first step of any learner to the end of the last one. Starting
    processes before it and evaluating after it are not training."""
    stats: SyncerStats | None
    """What the syncer counted last, and its predecessors with it; None for methods without one."""
    restarts: int
    """Of learners, over all attempts."""
    syncer_restarts: int

    @property
    def learner_steps(self) -> int:
        """Steps of all learners together."""
        return sum(self.steps.values())

    def ledger(self) -> dict[str, Any]:
        """The fate of every token: processed = merged + pending + the sum of discarded. Without a syncer every token is
        merged at once."""
        stats = self.stats
        if stats is None:
            return {"processed": self.tokens, "merged": self.tokens, "pending": 0, "discarded": {}}
        return {
            "processed": stats.tokens_processed,
            "merged": stats.tokens_merged,
            "pending": stats.tokens_pending,
            "discarded": dict(stats.tokens_discarded),
        }

    def numbers(self) -> dict[str, Any]:
        """What every result holds."""
        return {
            "tokens": self.tokens,
            "ledger": self.ledger(),
            "steps_total": self.learner_steps,
            "steps_by_learner": dict(self.steps),
            "goodput": self.goodput,
            "goodput_seconds": dict(self.goodput_seconds),
            "wall_s": self.wall_s,
            "restarts": self.restarts,
            "syncer_restarts": self.syncer_restarts,
        }


def measure(run_folder: Path) -> Measured:
    """Reduce the events of a run."""
    events = list(read_events(run_folder))
    goodput = measure_goodput(events)
    told = [event for _, _, event in events if isinstance(event, LearnerSteps)]
    steps: Counter[str] = Counter()
    for event in told:
        steps[event.learner] += event.steps
    if not told:  # a syncer by hand: its learners are elsewhere
        for last_words in [event for _, _, event in events if isinstance(event, SyncerStopped)]:
            steps.update(last_words.steps)
    last = last_word(events)
    return Measured(
        tokens=sum(event.tokens for event in told) if last is None else last.tokens_processed,
        steps=dict(sorted(steps.items(), key=lambda item: natural_key(item[0]))),
        eval_loss=_eval_loss(events),
        goodput=goodput.share,
        goodput_seconds=goodput.seconds,
        wall_s=goodput.window_s,
        stats=last,
        restarts=_restarts(events, "learner"),
        syncer_restarts=_restarts(events, "syncer"),
    )


def _eval_loss(events: Iterable[tuple[int, str, Event]]) -> float:
    kinds = (LearnerEvaluated, RunFinished)
    losses = [event.eval_loss for _, _, event in events if isinstance(event, kinds) and math.isfinite(event.eval_loss)]
    return losses[-1] if losses else math.nan


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
    outcome: RunOutcome,
    eval_loss: float,
    total_s: float,
) -> dict[str, Any]:
    """The result object. `total_s` is everything from the (last) command to here, `wall_s` the training of all attempts
    together. Raises LaunchError where the syncer left no sums."""
    folder = attempt.folder
    parameters = count_parameters(model_config(config.model))
    equivalent = data_parallel_bytes(parameters, measured.learner_steps, config.processes)
    return {
        "method": config.method,
        "learners": config.processes,
        "steps": config.steps_per_process,
        **measured.numbers(),
        "eval_loss": eval_loss,
        "total_s": total_s,
        "dp_bytes_equivalent": equivalent,
        **_synchronisation(config, measured, equivalent=equivalent, folder=folder),
        **_ending(attempt, outcome),
        "parameters": parameters,
        "report": str(folder.path / "report.html"),
    }


def script_result(
    config: RunConfig, command: Sequence[str], attempt: Attempt, *, measured: Measured, outcome: RunOutcome
) -> dict[str, Any]:
    """The same for `atoll run`, as far as the launcher of a user's own script can know it."""
    return {
        "method": config.method,
        "command": list(command),
        "learners": config.learners,
        "tokens_budget": config.tokens_budget,
        "minutes": config.minutes,
        **measured.numbers(),
        "eval_loss": measured.eval_loss,
        **_counts(measured.stats),
        **_ending(attempt, outcome),
    }


def report_numbers(run_folder: Path) -> dict[str, Any]:
    """What `atoll report --json` prints: everything that the events of a run say, and its RUN/result.json over it,
    whoever has started it."""
    events = [event for _, _, event in read_events(run_folder)]
    measured = measure(run_folder)
    started = [event for event in events if isinstance(event, RunStarted)]
    layouts = [event.parameters for event in events if isinstance(event, LayoutFixed)]
    ended = [event.reason for event in events if isinstance(event, RunFinished)] or _by_hand(events)
    learners = started[-1].learners if started else len(measured.steps)
    parameters = layouts[-1] if layouts else started[-1].parameters if started else 0
    numbers = {
        "method": started[-1].method if started else "decoupled",
        "learners": learners,
        "parameters": parameters,
        **measured.numbers(),
        "eval_loss": measured.eval_loss,
        "dp_bytes_equivalent": data_parallel_bytes(parameters, measured.learner_steps, learners),
        **_counts(measured.stats),
        "finished": bool(ended) and (ended[-1] in (FINISHED, TIME_UP) or _ended_by_itself(events)),
        "reason": ended[-1] if ended else "",
    }
    try:
        stored = json.loads((run_folder / "result.json").read_text())
    except (OSError, ValueError, RecursionError):
        stored = {}
    return {**numbers, **stored} if isinstance(stored, dict) else numbers


def write_result_by_hand(run_folder: Path) -> None:
    """RUN/result.json of a run whose syncer was started by hand and has ended. Where a launcher is at work, the result
    is the launcher's to write."""
    folder = RunFolder(run_folder)
    if folder.processes_file.exists():
        return
    try:
        write_json(folder.result_file, {**report_numbers(run_folder), "run_folder": str(run_folder)})
    except OSError as error:
        raise LaunchError(
            f"{folder.result_file} cannot be written ({error.strerror}); `atoll report --json {run_folder}` says it"
        ) from error


def _by_hand(events: Sequence[Event]) -> list[str]:
    """Without a launcher the syncer has the last word."""
    last = [event for event in events if isinstance(event, SyncerStarted | SyncerStopped)][-1:]
    return [event.reason for event in last if isinstance(event, SyncerStopped)]


def _ended_by_itself(events: Sequence[Event]) -> bool:
    """Whether nobody had to stop the syncer: its budget was spent, or everybody had left. A launcher starts its syncer,
    and says itself how the run ended."""
    launched = any(isinstance(event, ProcessStarted) and event.role == "syncer" for event in events)
    return not launched and any(reason and reason != SYNCER_STOPPED for reason in _by_hand(events))


def _ending(attempt: Attempt, outcome: RunOutcome) -> dict[str, Any]:
    """How the run ended, and who did not come to the end with it."""
    return {
        "finished": not outcome.interrupted,
        "reason": outcome.reason,
        "given_up": list(outcome.given_up),
        "left": list(outcome.left),
        "tokens_not_handed_over": dict(outcome.unhanded),
        "faults": [asdict(fault) for fault in (*attempt.faults, *outcome.faults)],
        "faults_skipped": [asdict(fault) for fault in outcome.skipped],
        "resumed": attempt.number,
        "run_folder": str(attempt.folder.path),
    }


def _counts(stats: SyncerStats | None) -> dict[str, int]:
    """What the syncer counted."""
    names = ("commits", "contributions_merged", "contributions_late", "bytes_up", "bytes_down")
    return {name: getattr(stats, name) if stats is not None else 0 for name in names}


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
            **_counts(None),
            "bytes_up": sent,
            "bytes_down": sent,
            "tokens_merged": measured.tokens,
            "tokens_pending": 0,
            "tokens_discarded": {},
        }
    return {
        **_counts(stats),
        "tokens_merged": stats.tokens_merged,
        "tokens_pending": stats.tokens_pending,
        "tokens_discarded": dict(stats.tokens_discarded),
    }
