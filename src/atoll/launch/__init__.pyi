from . import train
from .builds import compare_builds
from .checkup import Finding, check_machine, check_syncer
from .commands import learner_command, path_with_this_python
from .config import LEARNERS_LOCAL_MAX, RunConfig, TrainConfig, describe, run_config, script_config, train_config
from .durability import durability_config, durability_names, holds_credentials, parse_duration, parse_options
from .ended import RunEnd, how_it_ended
from .export import export_run
from .faults import NONE, PLAN_SUFFIX, WITHOUT_FAULTS, FaultInjection, FaultPlanner, NoFaults, SupervisedRun, plan_path
from .folder import RunFolder, create_parent, is_finished, without_nan, write_json, write_text
from .join import join_run, learners_here, leave_run, not_handed_over
from .leave import leave_from_afar
from .local import Supervisor
from .options import read_config_file, split_values, sync_values, take_preset, to_toml
from .plan import FinishedRun, LaunchPlan, RestartPolicy, RunOutcome, View
from .process import Command, child_environment, die_with
from .ranks import gpu_share
from .reach import reach, run_folder_of
from .result import report_numbers, write_result_by_hand
from .resume import can_resume, resume_run
from .run import run_command
from .running import ask_to_leave, launcher_pid
from .shards import change_shards_of, shards_of
from .slot import LearnerSlot
from .stored import Attempt, StoredRun, read_run
from .train import run_train

__all__ = [
    "LEARNERS_LOCAL_MAX",
    "NONE",
    "PLAN_SUFFIX",
    "WITHOUT_FAULTS",
    "Attempt",
    "Command",
    "FaultInjection",
    "FaultPlanner",
    "Finding",
    "FinishedRun",
    "LaunchPlan",
    "LearnerSlot",
    "NoFaults",
    "RestartPolicy",
    "RunConfig",
    "RunEnd",
    "RunFolder",
    "RunOutcome",
    "StoredRun",
    "SupervisedRun",
    "Supervisor",
    "TrainConfig",
    "View",
    "ask_to_leave",
    "can_resume",
    "change_shards_of",
    "check_machine",
    "check_syncer",
    "child_environment",
    "compare_builds",
    "create_parent",
    "describe",
    "die_with",
    "durability_config",
    "durability_names",
    "export_run",
    "gpu_share",
    "holds_credentials",
    "how_it_ended",
    "is_finished",
    "join_run",
    "launcher_pid",
    "learner_command",
    "learners_here",
    "leave_from_afar",
    "leave_run",
    "not_handed_over",
    "parse_duration",
    "parse_options",
    "path_with_this_python",
    "plan_path",
    "reach",
    "read_config_file",
    "read_run",
    "report_numbers",
    "resume_run",
    "run_command",
    "run_config",
    "run_folder_of",
    "run_train",
    "script_config",
    "shards_of",
    "split_values",
    "sync_values",
    "take_preset",
    "to_toml",
    "train",
    "train_config",
    "without_nan",
    "write_json",
    "write_result_by_hand",
    "write_text",
]
