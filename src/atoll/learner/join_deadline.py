"""How long joining may take, and what a person is told meanwhile.

A deadline in seconds alone would end a learner whose link is thin but works. So time counts only from the last fragment
that came, and leaves room for the next one at a third of the rate that was seen. A link that is dead is noticed by its
session, not here.
"""

from __future__ import annotations

import sys

from atoll.core import Arrival

SAY_S = 10.0
"""Joining is quick on most links; from here on a person wants to know what it waits for, and so every 10 s."""
RATE_GUESSED = 4096.0
"""Bytes/s, 32 kbit/s: before anything has come, a link may be as slow as this."""
RATE_SHARE = 3.0
"""The link may become this much slower than it was."""
SEED_TIMES = 5.0
"""Whoever gives the run its first parameters may have a thin link, too: the others wait so many times longer."""


class JoinDeadline:
    def __init__(self, timeout_s: float, learner: str, arriving: Arrival, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._learner = learner
        self._arriving = arriving
        self._count = arriving.count
        self._since_s = now_s
        self._said_s = now_s
        self.waited_for = ""
        """What joining waits for, in words."""

    def is_over(self, now_s: float, *, linked: bool, started: bool, fragments: list[int]) -> bool:
        """True when there is no more hope. `fragments` are the bytes of those that are still to come."""
        if self._arriving.count != self._count:
            self._count, self._since_s = self._arriving.count, now_s
        rate = self._arriving.rate / RATE_SHARE or RATE_GUESSED
        allowed_s = self._timeout_s
        if linked and not started:
            allowed_s, self.waited_for = SEED_TIMES * self._timeout_s, "the run's first parameters"
        elif linked and fragments:
            allowed_s += max(fragments) / rate
            self.waited_for = f"{len(fragments)} fragments of the model ({_size(sum(fragments))})"
        self._say(now_s, fragments)
        return now_s - self._since_s > allowed_s

    def _say(self, now_s: float, fragments: list[int]) -> None:
        if not self.waited_for or now_s - self._said_s < SAY_S:
            return
        self._said_s = now_s
        left, rate = "", self._arriving.rate
        if rate and fragments:
            left = f"; {_size(self._arriving.bytes)} came, at {8 * rate / 1e3:,.0f} kbit/s about "
            left += f"{sum(fragments) / rate:,.0f} s are left"
        sys.stderr.write(f"atoll: learner {self._learner} joins and waits for {self.waited_for}{left}\n")


def _size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.0f} kB"
