"""What happened in a run: typed events written as JSONL, read back, and reduced to goodput and a summary.

EventWriter, NullWriter    one per process; `emit` never blocks and never raises
read_events, Tail          every event of a run folder in time order; the newly appended ones
measure_goodput, RunState  pure reducers over that stream
data_parallel_bytes        what a data-parallel run would have sent
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.observe.goodput import Goodput, measure_goodput
    from atoll.observe.reader import Tail, read_events
    from atoll.observe.summary import RunState, summarize
    from atoll.observe.traffic import data_parallel_bytes
    from atoll.observe.writer import EventWriter, NullWriter, Writer

_HOME = {
    "EventWriter": "writer",
    "NullWriter": "writer",
    "Writer": "writer",
    "Tail": "reader",
    "read_events": "reader",
    "Goodput": "goodput",
    "measure_goodput": "goodput",
    "RunState": "summary",
    "summarize": "summary",
    "data_parallel_bytes": "traffic",
}

__all__ = [
    "EventWriter",
    "Goodput",
    "NullWriter",
    "RunState",
    "Tail",
    "Writer",
    "data_parallel_bytes",
    "measure_goodput",
    "read_events",
    "summarize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
