from .clauses import LEARNER_CLAUSES, SYNCER_CLAUSES, Clause
from .examine_learner import LearnerExamOptions, examine_learner
from .examine_syncer import SyncerExamOptions, examine_syncer
from .report import Finding, Keeping, Report

__all__ = [
    "LEARNER_CLAUSES",
    "SYNCER_CLAUSES",
    "Clause",
    "Finding",
    "Keeping",
    "LearnerExamOptions",
    "Report",
    "SyncerExamOptions",
    "examine_learner",
    "examine_syncer",
]
