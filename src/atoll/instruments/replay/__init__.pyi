from .history import Decision
from .replay import replay
from .report import ReplayReport
from .tape_diff import Parting, TapeDiff, diff_tapes

__all__ = ["Decision", "Parting", "ReplayReport", "TapeDiff", "diff_tapes", "replay"]
