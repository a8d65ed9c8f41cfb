"""What happened in a run: typed events written as JSONL, read back, and reduced to goodput and a summary.

EventWriter, NullWriter    one per process; `emit` never blocks and never raises
read_events, Tail          every event of a run folder in time order; the newly appended ones
measure_goodput, RunState  pure reducers over that stream
data_parallel_bytes        what a data-parallel run would have sent
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
