"""Starts a run's processes on this machine and keeps them going: `atoll train` and `atoll run` without the terminal.

This front door imports nothing heavy: modules are loaded when their names are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.launch.config import RunConfig, TrainConfig, describe, run_config, train_config
    from atoll.launch.local import Supervisor
    from atoll.launch.plan import LaunchPlan, Outcome, View
    from atoll.launch.run import run_command
    from atoll.launch.train import run_train

_HOME = {
    "RunConfig": "config",
    "TrainConfig": "config",
    "describe": "config",
    "run_config": "config",
    "train_config": "config",
    "LaunchPlan": "plan",
    "Outcome": "plan",
    "Supervisor": "local",
    "View": "plan",
    "run_command": "run",
    "run_train": "train",
}

__all__ = [
    "LaunchPlan",
    "Outcome",
    "RunConfig",
    "Supervisor",
    "TrainConfig",
    "View",
    "describe",
    "run_command",
    "run_config",
    "run_train",
    "train_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
