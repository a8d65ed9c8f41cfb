from .clauses import LEARNER_CLAUSES, SYNCER_CLAUSES, Clause
from .examine_learner import LearnerExamOptions, examine_learner
from .examine_syncer import SyncerExamOptions, examine_syncer
from .report import ClauseFinding, Keeping, Report

__all__ = [
    "LEARNER_CLAUSES",
    "SYNCER_CLAUSES",
    "Clause",
    "ClauseFinding",
    "Keeping",
    "LearnerExamOptions",
    "Report",
    "SyncerExamOptions",
    "examine_learner",
    "examine_syncer",
]
