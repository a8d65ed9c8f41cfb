"""Starts the processes of a run on this machine and keeps them going: `atoll train`, `run`, `resume`, `join`, `leave`
and `export` without the terminal.

This front door imports nothing heavy: modules are loaded when their names are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.launch.config import RunConfig, TrainConfig, describe, run_config, script_config, train_config
    from atoll.launch.export import export_run
    from atoll.launch.join import join_run, leave_run, not_handed_over
    from atoll.launch.local import Supervisor
    from atoll.launch.plan import Finished, LaunchPlan, Outcome, View
    from atoll.launch.result import report_numbers
    from atoll.launch.resume import can_resume, resume_run
    from atoll.launch.run import run_command
    from atoll.launch.train import run_train

_HOME = {
    "RunConfig": "config",
    "TrainConfig": "config",
    "describe": "config",
    "run_config": "config",
    "script_config": "config",
    "train_config": "config",
    "Finished": "plan",
    "LaunchPlan": "plan",
    "Outcome": "plan",
    "Supervisor": "local",
    "View": "plan",
    "can_resume": "resume",
    "export_run": "export",
    "join_run": "join",
    "leave_run": "join",
    "not_handed_over": "join",
    "report_numbers": "result",
    "resume_run": "resume",
    "run_command": "run",
    "run_train": "train",
}

__all__ = [
    "Finished",
    "LaunchPlan",
    "Outcome",
    "RunConfig",
    "Supervisor",
    "TrainConfig",
    "View",
    "can_resume",
    "describe",
    "export_run",
    "join_run",
    "leave_run",
    "not_handed_over",
    "report_numbers",
    "resume_run",
    "run_command",
    "run_config",
    "run_train",
    "script_config",
    "train_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
