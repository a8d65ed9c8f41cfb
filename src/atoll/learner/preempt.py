"""SIGTERM, as a spot machine sends it: finish the step, hand everything over, leave."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Preemption:
    """Hears SIGTERM, where nobody else does: only on the main thread, and only if the signal has its default effect."""

    def __init__(self) -> None:
        self.requested = False
        self._armed = False

    def arm(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._hear)
            self._armed = True

    def disarm(self) -> None:
        if self._armed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._armed = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
