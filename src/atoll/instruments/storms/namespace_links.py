"""Learners in network namespaces of their own: the proxy at the host's end of a real link, the learner at the other.

    learner-0 in its namespace --- veth pair, rates by tc --- 198.18.a.b, a port of the proxy --- the syncer on loopback

Of the faults on a link, `partition` and `limit` are the kernel's here: packets vanish, or wait their turn. The others
stay the proxy's. Needs root on Linux; `chaos.namespaces` makes the links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from atoll.errors import LaunchError
from atoll.instruments.chaos import Fault, NamespaceNet, Way, Weather, namespaces_available
from atoll.instruments.storms.links import ProxyLinks
from atoll.launch import Command

KERNEL_FAULTS = ("partition", "limit")
"""What a link of the kernel's does itself. It has no delay and flips no bits, and a stall shall lose no packet."""


def check_namespaces() -> None:
    """Raise with the reason where this machine or this user cannot have them."""
    usable, why_not = namespaces_available()
    if not usable:
        raise LaunchError(f"--namespaces cannot be used here (leave it away to use the proxy alone): {why_not}")


class NamespaceLinks(ProxyLinks):
    """The proxy's links, each over a veth pair into the learner's namespace. Close it: namespaces outlive a process."""

    def __init__(self, seed: int, *, bits_per_s: float = 0.0) -> None:
        super().__init__(seed)
        self._net = NamespaceNet()
        self._bits_per_s = bits_per_s
        self._hosts: dict[str, str] = {}

    def address(self, learner: str) -> str:
        if learner not in self._addresses:
            self._hosts[learner] = self._net.add(learner)
            host, port = self._proxy.add(learner, host=self._hosts[learner])
            self._net.set(learner, self._kernel_weather([]))
            self._addresses[learner] = f"{host}:{port}"
        return self._addresses[learner]

    def place(self, command: Command) -> Command:
        """The command inside its learner's namespace. `ip netns exec` becomes the command, so that the process id, the
        session and the signal at the launcher's death stay what they are without it."""
        command = super().place(command)
        host = self._hosts[command.id]
        # The token may cross this link in clear, and a web proxy of the user's could not be reached from inside.
        more = {"ATOLL_CLEAR_HOST": host, "no_grpc_proxy": host}
        argv = self._net.wrap(command.id, command.argv)
        return replace(command, argv=argv, environment={**command.environment, **more})

    def hold(self, learner: str, faults: Sequence[Fault]) -> None:
        self._net.set(learner, self._kernel_weather([fault for fault in faults if fault.kind in KERNEL_FAULTS]))
        super().hold(learner, [fault for fault in faults if fault.kind not in KERNEL_FAULTS])

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._net.close()

    def _kernel_weather(self, faults: Sequence[Fault]) -> Weather:
        weather = Weather.of(faults)
        return Weather(up=self._rated(weather.up), down=self._rated(weather.down))

    def _rated(self, way: Way) -> Way:
        """The link's own rate bounds that of any fault."""
        rates = [rate for rate in (way.bits_per_s, self._bits_per_s) if rate]
        return replace(way, bits_per_s=min(rates, default=0.0))
