"""Virtual time: a queue of what happens when. Two things at the same moment happen in the order they were planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

AT_ONCE_MAX = 1_000_000
"""Things that may happen at one moment: a million learners that hear the same news. More is somebody who goes round in
circles, and would do so for ever."""


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0
        self._planned: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._stopped = False

    def at(self, when_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Plan `action` for this moment, or for now if it has passed."""
        self._number += 1
        when_ns = when_ns if when_ns > self.now_ns else self.now_ns
        heapq.heappush(self._planned, (when_ns, self._number, action, arguments))

    def after(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now_ns + delay_ns, action, *arguments)

    def stop(self) -> None:
        """Nothing more happens until `run` is called again."""
        self._stopped = True

    def run(self, until_ns: int) -> bool:
        """Let things happen until this moment; False if somebody stopped it before."""
        self._stopped = False
        planned, pop = self._planned, heapq.heappop
        moment_ns, at_once = self.now_ns, 0
        while planned and planned[0][0] <= until_ns:
            self.now_ns, _, action, arguments = pop(planned)
            if self.now_ns == moment_ns:
                at_once += 1
                assert at_once <= AT_ONCE_MAX, f"the world does not come to rest at {moment_ns} ns"
            else:
                moment_ns, at_once = self.now_ns, 0
            action(*arguments)
            if self._stopped:
                return False
        self.now_ns = max(self.now_ns, until_ns)
        return True
