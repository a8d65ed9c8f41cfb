"""One change of a fragment's arrays at a time, in the order in which it was asked for; the fragments go on beside each
other. Whoever has the turn of a fragment may change or read its arrays, and gives it back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class FragmentTurns:
    """A merge, a heal and a joiner's copy of one fragment would each read what the other half wrote."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Callable[[], None]]] = {}
        """By fragment whose turn is taken: who comes next."""

    def taken(self, fragment: int) -> bool:
        return fragment in self._waiting

    def take(self, fragment: int, action: Callable[[], None]) -> None:
        """Do it now, or when those who asked before have given the turn back."""
        if fragment in self._waiting:
            self._waiting[fragment].append(action)
        else:
            self._waiting[fragment] = deque()
            action()

    def give_back(self, fragment: int) -> None:
        waiting = self._waiting[fragment]
        if waiting:
            waiting.popleft()()
        else:
            del self._waiting[fragment]
