"""A proxy between each learner and the syncer, so that links can be made worse; and before shards and relays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from atoll.errors import LaunchError
from atoll.instruments.chaos import ChaosProxy, Fault, Weather
from atoll.launch import Command


class ProxyLinks:
    """`chaos.Links`: a proxy in front of the syncer with a port for each learner.

    In a run with relays or a standby a learner has a list of addresses, and a port for each of them. A relay has that
    as well, upwards, and a port in front of it. A shard has one in front of it, which coordinator, relays and learners
    come through. The weather of a learner, a relay or a shard is that of all of its ports.
    """

    def __init__(self, seed: int) -> None:
        self._proxy = ChaosProxy(seed=seed)
        self._addresses: dict[str, str] = {}
        self._ports: dict[str, list[str]] = {}
        """Those of a part that has several, by its id."""
        self._behind: dict[str, str] = {}
        """What such a port leads to."""
        self._started = False

    def start(self, upstream: Callable[[], str]) -> None:
        """`upstream` gives the syncer's address, HOST:PORT, at any time: it keeps it through restarts."""
        if self._started:
            return
        self._started = True
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

    def front(self, id: str, address: str) -> str:
        """The port before a part of the run, the same through all its restarts."""
        return self._way(id, f"to {id}", address)

    def place(self, command: Command) -> Command:
        """The learner's command, so that it runs where its link is, and reaches the syncer over it."""
        places = command.environment["ATOLL_SYNCER"].split(",")
        ways = [self.address(command.id)]
        if len(places) > 1 or command.role != "learner":
            ways = [self._way(command.id, f"{command.id} {number}", one) for number, one in enumerate(places)]
        return replace(command, environment={**command.environment, "ATOLL_SYNCER": ",".join(ways)})

    def hold(self, learner: str, faults: Sequence[Fault]) -> None:
        for port in self._ports.get(learner, [learner]):
            self._proxy.set(port, Weather.of(faults))

    def cut(self, learner: str) -> None:
        for port in self._ports.get(learner, [learner]):
            self._proxy.cut(port)

    def close(self) -> None:
        self._proxy.close()

    def _way(self, owner: str, name: str, address: str) -> str:
        self._behind[name] = address
        if name not in self._ports.setdefault(owner, []):
            self._ports[owner].append(name)
        host, port = self._proxy.add(name, upstream=lambda: _split(self._behind[name]))
        return f"{host}:{port}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port or 0)
