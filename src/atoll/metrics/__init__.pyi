from .endpoint import metered, metered_as
from .of_parts import RelayMetrics, ShardMetrics
from .tracker import TRACKERS, Tracker, make_writer

__all__ = ["TRACKERS", "RelayMetrics", "ShardMetrics", "Tracker", "make_writer", "metered", "metered_as"]
