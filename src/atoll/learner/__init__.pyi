from .arithmetic import U8
from .arrays import LearnerArrays, PlanAdopt
from .buffers import read_buffers
from .fault_hooks import install_encode, install_falsify
from .inner_state import CHECKPOINT_EVERY_S, WARMUP_STEPS, InnerState, Stateful, folder_name
from .joining import JOIN_TIMEOUT_S
from .learner import ParametersLearner
from .leaving import EXIT_NOT_HANDED_OVER
from .load import load_model
from .merge_rule import merge_mode
from .parameters import F32, MakeValues, Parameters, Snapshot, into
from .shell import AttachedData
from .torch_learner import Learner
from .torch_parameters import TorchParameters, describe
from .vault import HeldContribution, HeldVersion, Vault

__all__ = [
    "CHECKPOINT_EVERY_S",
    "EXIT_NOT_HANDED_OVER",
    "F32",
    "JOIN_TIMEOUT_S",
    "U8",
    "WARMUP_STEPS",
    "AttachedData",
    "HeldContribution",
    "HeldVersion",
    "InnerState",
    "Learner",
    "LearnerArrays",
    "MakeValues",
    "Parameters",
    "ParametersLearner",
    "PlanAdopt",
    "Snapshot",
    "Stateful",
    "TorchParameters",
    "Vault",
    "describe",
    "folder_name",
    "install_encode",
    "install_falsify",
    "into",
    "load_model",
    "merge_mode",
    "read_buffers",
]
