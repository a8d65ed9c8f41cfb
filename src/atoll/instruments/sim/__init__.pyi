from .arrays import ArraySyncer, VaultLearner
from .clock import Clock
from .drawing import DRAW_VERSION, draw
from .fuzz import FAILURES_EXPLAINED, Explained, FuzzReport, explain, fuzz, run_seed
from .learner_host import LearnerHost
from .payloads import LearnerPayloads, Made, SyncerPayloads
from .ranges import real, whole
from .run import RunReport, run_scenario
from .scenario import FAULTS_MAX, SECONDS_MAX, LearnerSpec, Scenario, SimFault, load, to_json
from .shrink import shrink
from .workers import workers
from .world import World

__all__ = [
    "DRAW_VERSION",
    "FAILURES_EXPLAINED",
    "FAULTS_MAX",
    "SECONDS_MAX",
    "ArraySyncer",
    "Clock",
    "Explained",
    "FuzzReport",
    "LearnerHost",
    "LearnerPayloads",
    "LearnerSpec",
    "Made",
    "RunReport",
    "Scenario",
    "SimFault",
    "SyncerPayloads",
    "VaultLearner",
    "World",
    "draw",
    "explain",
    "fuzz",
    "load",
    "real",
    "run_scenario",
    "run_seed",
    "shrink",
    "to_json",
    "whole",
    "workers",
]
