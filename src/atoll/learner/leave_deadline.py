"""How long leaving may take, and what a person is told meanwhile.

A script that leaves its loop has nobody behind it who kills: it hands over as long as something moves. A process that
got SIGTERM has. So there are two bounds. A link that is dead is noticed by its session, and a syncer that does not come
back is waited for only so long.
"""

from __future__ import annotations

import sys

from atoll.core import CLOSE_TIMEOUT_NS, LET_GO_NS

SIGTERM_S = (CLOSE_TIMEOUT_NS + LET_GO_NS) / 1e9
"""From SIGTERM, or the end of its step: what spot machines and schedulers grant is 30 s and more. ATOLL_SIGTERM_S."""
STILL_S = SIGTERM_S
"""A syncer that comes back after a kill does so within this; where nothing moves for so long there is no more hope."""
LEAVE_S_MAX = 180
"""However well it moves: the last progress of a model of 1 million parameters at 50 kbit/s. ATOLL_LEAVE_S."""
SAY_S = 10.0
"""Leaving is quick on most links; from here on a person wants to know what it waits for, and so every 10 s."""
RATE_GUESSED = 4096.0
"""Bytes/s, 32 kbit/s: before anything went out slowly enough to tell, a link may be as slow as this."""
RATE_SHARE = 3.0
"""The link may become this much slower than it was."""


class LeaveDeadline:
    def __init__(
        self, learner: str, now_s: float, *, leave_s: float = LEAVE_S_MAX, sigterm_s: float = SIGTERM_S
    ) -> None:
        self._learner = learner
        self._leave_s = leave_s
        self._sigterm_s = sigterm_s
        self._let_go_s = min(LET_GO_NS / 1e9, sigterm_s / 4)
        """Of those: for the syncer's word that all is on its disk."""
        self._began_s = self._moved_s = self._said_s = now_s
        self._told_s = 0.0
        self._moved: object = None

    def is_over(
        self, now_s: float, *, told: bool, moved: object, bytes_left: int, rate: float, left: bool = False
    ) -> bool:
        """True when waiting is no more use. `told`: SIGTERM has come. `moved` changes whenever something was answered,
        has arrived, or the link is back. `bytes_left` are on their way, or to be, at `rate` bytes/s (0: not known; none
        while there is no link). `left`: all is out, and only the syncer's word is missing."""
        if moved != self._moved:
            self._moved, self._moved_s = moved, now_s
        if told:
            self._told_s = self._told_s or now_s
            return now_s - self._told_s > self._sigterm_s - (0.0 if left else self._let_go_s)
        self._say(now_s, bytes_left, rate)
        allowed_s = STILL_S + bytes_left / (rate / RATE_SHARE or RATE_GUESSED)
        return now_s - self._moved_s > allowed_s or now_s - self._began_s > self._leave_s

    def _say(self, now_s: float, bytes_left: int, rate: float) -> None:
        if now_s - self._said_s < SAY_S:
            return
        self._said_s = now_s
        what = f"{bytes_left:,} bytes are to go out or come in" if bytes_left else "nothing moves"
        about = f", about {bytes_left / rate:,.0f} s at {8 * rate / 1e3:,.0f} kbit/s" if bytes_left and rate else ""
        until_s = self._began_s + self._leave_s - now_s
        text = f"atoll: learner {self._learner} leaves and hands over: {what}{about}; at most {until_s:.0f} s more\n"
        sys.stderr.write(text)
