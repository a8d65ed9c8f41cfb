"""The curves of a run for an experiment tracker: one reader of its events, and one small hook for each tracker.

A hook has `scalars` and `close`. The step of everything is the number of tokens that the run has processed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from atoll.errors import ConfigError
from atoll.metrics.to_mlflow import MlflowWriter
from atoll.metrics.to_tensorboard import TensorBoardWriter
from atoll.metrics.to_wandb import WandbWriter
from atoll.observe import Event, LearnerEvaluated, RunState, Tail

EVERY_NS = 5_000_000_000
"""Between two points, by the events' own clock: a run of an hour has 720."""


class ScalarWriter(Protocol):
    """What a tracker must do."""

    def scalars(self, values: Mapping[str, float], *, tokens: int, time_s: float) -> None: ...
    def close(self) -> None: ...


TRACKERS: dict[str, tuple[str, Callable[[str, str, Mapping[str, Any]], ScalarWriter]]] = {
    "tensorboard": ("pip install tensorboard", TensorBoardWriter),
    "wandb": ("pip install wandb", WandbWriter),
    "mlflow": ("pip install mlflow", MlflowWriter),
}
"""By name: how to install it, and what makes its hook of (where, name of the run, its settings)."""


def make_writer(target: str, name: str, settings: Mapping[str, Any]) -> ScalarWriter:
    """`target` is KIND or KIND:WHERE: tensorboard:FOLDER, wandb:PROJECT, mlflow:EXPERIMENT."""
    kind, _, where = target.partition(":")
    if kind not in TRACKERS:
        raise ConfigError(f"there is no tracker {kind!r}; give one of {', '.join(TRACKERS)}")
    install, make = TRACKERS[kind]
    try:
        return make(where, name, settings)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{kind} is not installed ({error.name}); install it: {install}") from None


class Tracker:
    """Reads a run folder and hands its curves on. `poll` takes in what is new."""

    def __init__(self, run_folder: str | Path, writer: ScalarWriter) -> None:
        self._tail = Tail(run_folder)
        self._writer = writer
        self._state = RunState()
        self._told_ns = 0

    def poll(self) -> None:
        for t_ns, source, event in self._tail.poll():
            self._state.apply(t_ns, event, source)
            self._tell(t_ns, event)

    @property
    def over(self) -> bool:
        return self._state.finished is not None

    def close(self) -> None:
        self._tell_all(self._state.last_ns)
        self._writer.close()

    def _tell(self, t_ns: int, event: Event) -> None:
        if isinstance(event, LearnerEvaluated) and math.isfinite(event.eval_loss):
            self._write({"loss/published": event.eval_loss}, t_ns)
        if t_ns - self._told_ns >= EVERY_NS and self._state.learner_steps:
            self._tell_all(t_ns)

    def _tell_all(self, t_ns: int) -> None:
        self._told_ns, state = t_ns, self._state
        losses = [one.loss for one in state.learners.values() if math.isfinite(one.loss)]
        values = {
            "speed/tokens_per_second": sum(state.rates(t_ns).values()),
            "goodput/share": state.goodput().share,
            "rounds/commits": float(state.rounds.commits),
            "bytes/up": float(state.bytes_up),
            "bytes/down": float(state.bytes_down),
            "learners/training": float(sum(one in ("active", "slow", "aside") for one in state.states(t_ns).values())),
        }
        if losses:
            values["loss/training"] = sum(losses) / len(losses)
        if state.finished is not None and math.isfinite(state.finished.eval_loss):
            values["loss/published"] = state.finished.eval_loss
        self._write(values, t_ns)

    def _write(self, values: Mapping[str, float], t_ns: int) -> None:
        self._writer.scalars(values, tokens=self._state.tokens or self._state.ledger.processed, time_s=t_ns / 1e9)
