from .arrays import LearnerArrays, PlanAdopt
from .buffers import read_buffers
from .encode_hook import install_encode
from .island import RankCoordinator
from .learner import ParametersLearner
from .leaving import EXIT_NOT_HANDED_OVER
from .load import load_model
from .parameters import F32, MakeValues, Parameters, Snapshot, into
from .torch_learner import Learner
from .torch_parameters import TorchParameters, describe
from .vault import U8, HeldContribution, HeldVersion, Vault

__all__ = [
    "EXIT_NOT_HANDED_OVER",
    "F32",
    "U8",
    "HeldContribution",
    "HeldVersion",
    "Learner",
    "LearnerArrays",
    "MakeValues",
    "Parameters",
    "ParametersLearner",
    "PlanAdopt",
    "RankCoordinator",
    "Snapshot",
    "TorchParameters",
    "Vault",
    "describe",
    "install_encode",
    "into",
    "load_model",
    "read_buffers",
]
