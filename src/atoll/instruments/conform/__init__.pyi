from .clauses import LEARNER_CLAUSES, SYNCER_CLAUSES, Clause
from .examine_learner import LearnerExamOptions, examine_learner
from .examine_syncer import SyncerExamOptions, examine_syncer
from .report import Finding, Report, Verdict

__all__ = [
    "LEARNER_CLAUSES",
    "SYNCER_CLAUSES",
    "Clause",
    "Finding",
    "LearnerExamOptions",
    "Report",
    "SyncerExamOptions",
    "Verdict",
    "examine_learner",
    "examine_syncer",
]
