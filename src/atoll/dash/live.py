"""The live view: follows a run folder and draws it, four times a second, without a thread of its own."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from atoll.dash.frame import frame, status_line
from atoll.observe import RunState, Tail

REDRAW_S = 0.4
"""A picture costs some 15 ms of CPU: on two cores the learners would feel it if it were drawn much more often."""
STATUS_LINE_S = 5.0


class LiveView:
    """Call `refresh` often: it reads what is new and redraws at most every REDRAW_S. Where the output is no terminal, a
    plain status line every STATUS_LINE_S and the log lines take the place of the picture."""

    def __init__(self, run_folder: str | Path, *, console: Console | None = None) -> None:
        self.console = console if console is not None else Console()
        self.state = RunState()
        self._tail = Tail(run_folder)
        self._live: Live | None = None
        self._read_s = float("-inf")
        self._said_s = float("-inf")
        self._said = 0

    def start(self) -> None:
        """Begin to draw. Without it `refresh` only reads and, off a terminal, prints lines."""
        if self.console.is_terminal and self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()

    def refresh(self, *, force: bool = False) -> None:
        """Read what is new, and redraw if the last picture is old enough (or `force`)."""
        now_s = time.monotonic()
        if not force and now_s - self._read_s < REDRAW_S:
            return
        self._read_s = now_s
        for t_ns, source, event in self._tail.poll():
            self.state.apply(t_ns, event, source)
        if self._live is not None:
            self._draw(self._live)
        elif not self.console.is_terminal:
            self._print_log()
            if self.state.first_ns is not None and (force or now_s - self._said_s >= STATUS_LINE_S):
                self._said_s = now_s
                self._print(status_line(self.state, time.time_ns()))

    def stop(self) -> None:
        """Draw the last picture and leave it on the screen."""
        self.refresh(force=True)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> LiveView:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _draw(self, live: Live) -> None:
        size = self.console.size
        picture = frame(self.state, width=size.width, height=size.height, now_ns=time.time_ns())
        live.update(picture, refresh=True)

    def _print_log(self) -> None:
        new = min(self.state.log_count - self._said, len(self.state.log))
        self._said = self.state.log_count
        for line in list(self.state.log)[len(self.state.log) - new :]:
            self._print(line.text)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
