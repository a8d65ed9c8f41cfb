"""Scalars for Weights & Biases, by its public functions: init, define_metric, log, finish."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class WandbWriter:
    """One W&B run for one run of ours; `where` is the project. WANDB_* in the environment says the rest."""

    def __init__(self, where: str, name: str, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(project=where or "atoll", name=name, id=name, resume="allow", config=dict(settings))
        self._run.define_metric("tokens")
        self._run.define_metric("*", step_metric="tokens")

    def scalars(self, values: Mapping[str, float], *, tokens: int, time_s: float) -> None:
        self._run.log({**values, "tokens": tokens})

    def close(self) -> None:
        self._run.finish()
