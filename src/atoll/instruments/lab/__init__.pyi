from . import tables
from .across_worlds import worlds_table
from .conduct import Forecast, Runner, StudyOutcome, Watcher, check_minutes, conduct, pending
from .replica import Replica
from .run import BACKGROUND_THREADS, Workshop, run
from .scenario import LabScenario
from .spec import LabResult, LabSpec
from .store import ResultStore, RunRecord
from .study import Planned, Study, load_study, make_spec, short
from .tables import COMMON, StudyLine, TextTable, text_table
from .task import Batch, Model
from .toml import read_toml

__all__ = [
    "BACKGROUND_THREADS",
    "COMMON",
    "Batch",
    "Forecast",
    "LabResult",
    "LabScenario",
    "LabSpec",
    "Model",
    "Planned",
    "Replica",
    "ResultStore",
    "RunRecord",
    "Runner",
    "Study",
    "StudyLine",
    "StudyOutcome",
    "TextTable",
    "Watcher",
    "Workshop",
    "check_minutes",
    "conduct",
    "load_study",
    "make_spec",
    "pending",
    "read_toml",
    "run",
    "short",
    "tables",
    "text_table",
    "worlds_table",
]
