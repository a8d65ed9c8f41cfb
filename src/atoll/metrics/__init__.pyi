from .endpoint import metered
from .tracker import TRACKERS, Tracker, make_writer

__all__ = ["TRACKERS", "Tracker", "make_writer", "metered"]
