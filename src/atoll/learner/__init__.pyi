from .arithmetic import U8
from .arrays import LearnerArrays, PlanAdopt
from .buffers import read_buffers
from .fault_hooks import install_encode, install_falsify
from .inner_state import CHECKPOINT_EVERY_S, WARMUP_STEPS, InnerState, Stateful, folder_name
from .island.link import I64, ISLAND_TIMEOUT_S, RankLink
from .island.meeting import build, meet
from .island.parameters import RankParameters
from .island.seats import SpeakerSeat
from .island.shares import Holdings, held_runs
from .island.sockets import TOLD_BYTES_MAX, SocketLink
from .island.watch import RankWatch
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
from .view import RunView

__all__ = [
    "CHECKPOINT_EVERY_S",
    "EXIT_NOT_HANDED_OVER",
    "F32",
    "I64",
    "ISLAND_TIMEOUT_S",
    "JOIN_TIMEOUT_S",
    "TOLD_BYTES_MAX",
    "U8",
    "WARMUP_STEPS",
    "AttachedData",
    "HeldContribution",
    "HeldVersion",
    "Holdings",
    "InnerState",
    "Learner",
    "LearnerArrays",
    "MakeValues",
    "Parameters",
    "ParametersLearner",
    "PlanAdopt",
    "RankLink",
    "RankParameters",
    "RankWatch",
    "RunView",
    "Snapshot",
    "SocketLink",
    "SpeakerSeat",
    "Stateful",
    "TorchParameters",
    "Vault",
    "build",
    "describe",
    "folder_name",
    "held_runs",
    "install_encode",
    "install_falsify",
    "into",
    "load_model",
    "meet",
    "merge_mode",
    "read_buffers",
]
