"""Scalars for MLflow, by its client, which has no global state: create_run, log_batch, set_terminated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARAM_CHARS_MAX = 500
"""MLflow's own bound on a parameter's text."""


class MlflowWriter:
    """One MLflow run for one run of ours; `where` is the experiment. MLFLOW_TRACKING_URI says where that is."""

    def __init__(self, where: str, name: str, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client: Any = MlflowClient()
        found = self._client.get_experiment_by_name(where or "atoll")
        experiment = found.experiment_id if found is not None else self._client.create_experiment(where or "atoll")
        self._run: str = self._client.create_run(experiment, run_name=name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, str(value)[:PARAM_CHARS_MAX])

    def scalars(self, values: Mapping[str, float], *, tokens: int, time_s: float) -> None:
        at_ms = int(time_s * 1000)
        points = [self._metric(name.replace("/", "."), value, at_ms, tokens) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=points)

    def close(self) -> None:
        self._client.set_terminated(self._run)
