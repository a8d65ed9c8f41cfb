from . import events
from .account import CATEGORIES, TRACKED, TimeAccount
from .comebacks import LearnerRecovery, Return
from .durability import Lapse
from .events import (
    DataLedger,
    Event,
    FaultEnded,
    FaultInjected,
    FaultSkipped,
    LayoutFixed,
    LearnerEvaluated,
    LearnerFinished,
    LearnerJoined,
    LearnerStarted,
    LearnerSteps,
    LinkThin,
    ProcessExited,
    ProcessStarted,
    RunFinished,
    RunStarted,
    SyncerStarted,
    SyncerStats,
    SyncerStopped,
    Warned,
)
from .faults import FaultCost, InjectedFault, ObservedFault, exit_text
from .goodput import Goodput, measure_goodput
from .launches import report_begin_ns
from .learners import natural_key
from .lines import decode
from .log import RUNGS, adapted_text, bits_text, rung_text, source_text, span_text, thin_text
from .process_logs import bound_logs
from .reader import Tail, read_events
from .rounds import RoundSeen
from .summary import AWAY, SLOW_SHARE, RunState, summarize
from .syncers import SyncerRestart
from .traffic import data_parallel_bytes
from .writer import EventWriter, NullWriter, Writer

__all__ = [
    "AWAY",
    "CATEGORIES",
    "RUNGS",
    "SLOW_SHARE",
    "TRACKED",
    "DataLedger",
    "Event",
    "EventWriter",
    "FaultCost",
    "FaultEnded",
    "FaultInjected",
    "FaultSkipped",
    "Goodput",
    "InjectedFault",
    "Lapse",
    "LayoutFixed",
    "LearnerEvaluated",
    "LearnerFinished",
    "LearnerJoined",
    "LearnerRecovery",
    "LearnerStarted",
    "LearnerSteps",
    "LinkThin",
    "NullWriter",
    "ObservedFault",
    "ProcessExited",
    "ProcessStarted",
    "Return",
    "RoundSeen",
    "RunFinished",
    "RunStarted",
    "RunState",
    "SyncerRestart",
    "SyncerStarted",
    "SyncerStats",
    "SyncerStopped",
    "Tail",
    "TimeAccount",
    "Warned",
    "Writer",
    "adapted_text",
    "bits_text",
    "bound_logs",
    "data_parallel_bytes",
    "decode",
    "events",
    "exit_text",
    "measure_goodput",
    "natural_key",
    "read_events",
    "report_begin_ns",
    "rung_text",
    "source_text",
    "span_text",
    "summarize",
    "thin_text",
]
