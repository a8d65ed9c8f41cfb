"""What every simulated process has: it may be frozen, and it may be dead."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.instruments.sim.world import World


class Process:
    def __init__(self, world: World) -> None:
        self.world = world
        self.dead = False
        self.frozen = False
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def die(self) -> None:
        self.dead = True
        self._backlog.clear()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for action, arguments in backlog:
            self.call(action, *arguments)

    def call(self, action: Callable[..., None], *arguments: Any) -> None:
        """Something reaches this process: now, after it has thawed, or never."""
        if self.dead:
            return
        if self.frozen:
            self._backlog.append((action, arguments))
        else:
            action(*arguments)

    def later(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        clock = self.world.clock
        clock.at(clock.now_ns + delay_ns, self.call, action, *arguments)
