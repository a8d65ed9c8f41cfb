"""A polite end: SIGTERM and SIGINT let a training loop finish its step."""

from __future__ import annotations

import signal
from types import FrameType


class StopSignal:
    """Before `arm` a signal ends the process at once: there is nothing to lose yet. After it, the loop is asked to end.

    A second signal always ends the process: the loop may be waiting for somebody who is gone. Both give the shell's
    status for the signal, because 0 would tell the launcher that the run is done.
    """

    def __init__(self) -> None:
        self.name = ""
        """The signal that asked, such as SIGTERM."""
        self._requested = False
        self._armed = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def arm(self) -> None:
        """From now on the loop asks `requested` after every step."""
        self._armed = True

    def requested(self) -> bool:
        return self._requested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested or not self._armed:
            raise SystemExit(128 + number)
        self._requested = True
        self.name = signal.Signals(number).name
