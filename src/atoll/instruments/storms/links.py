"""A proxy between each learner and the syncer, so that links can be made worse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from atoll.errors import LaunchError
from atoll.instruments.chaos import ChaosProxy, Fault, Weather
from atoll.launch import Command


class ProxyLinks:
    """`chaos.Links`: a proxy in front of the syncer with a port for each learner."""

    def __init__(self, seed: int) -> None:
        self._proxy = ChaosProxy(seed=seed)
        self._addresses: dict[str, str] = {}

    def start(self, upstream: Callable[[], str]) -> None:
        """`upstream` gives the syncer's address, HOST:PORT, at any time: it keeps it through restarts."""
        try:
            self._proxy.start(lambda: _split(upstream()))
        except OSError as error:
            raise LaunchError(
                f"the chaos proxy cannot listen ({error}); free some ports, or use --chaos none"
            ) from error

    def address(self, learner: str) -> str:
        """Where a learner finds the syncer: a port of its own, the same through all its restarts."""
        if learner not in self._addresses:
            host, port = self._proxy.add(learner)
            self._addresses[learner] = f"{host}:{port}"
        return self._addresses[learner]

    def place(self, command: Command) -> Command:
        """The learner's command, so that it runs where its link is, and reaches the syncer over it."""
        return replace(command, environment={**command.environment, "ATOLL_SYNCER": self.address(command.id)})

    def hold(self, learner: str, faults: Sequence[Fault]) -> None:
        self._proxy.set(learner, Weather.of(faults))

    def cut(self, learner: str) -> None:
        self._proxy.cut(learner)

    def close(self) -> None:
        self._proxy.close()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port or 0)
