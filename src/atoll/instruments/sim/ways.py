"""The links of a fabric: one between any two parties that talk, each with its own weather."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from atoll.instruments.sim.link import LinkWeather, VirtualLink, combined
from atoll.instruments.sim.scenario import SimFault
from atoll.instruments.sim.world import KEEPALIVE_NS, World

if TYPE_CHECKING:
    from atoll.instruments.sim.learner_host import LearnerHost
    from atoll.instruments.sim.relay_process import RelayProcess
    from atoll.instruments.sim.service import ServiceProcess

FAIR = LinkWeather(latency_ns=(1_000_000, 1_000_000), jitter_ns=500_000)
"""Between two places of the fabric."""


class Ways(World):
    """A world with a link between any two parties."""

    _ways: dict[tuple[str, str], VirtualLink]
    _faults: list[SimFault]
    """Weather that lasts at the moment."""

    def _servers(self) -> list[ServiceProcess]:
        raise NotImplementedError

    def _relays(self) -> list[RelayProcess]:
        raise NotImplementedError

    def way(self, client: str, server: str) -> VirtualLink:
        """The link from one place (or learner) to another."""
        key = (client, server)
        if key not in self._ways:
            seed = f"link/{self.scenario.seed}/{client}~{server}"
            self._ways[key] = VirtualLink(self.clock, Random(seed), FAIR)
            self._set_way(key)
        return self._ways[key]

    def _set_way(self, key: tuple[str, str]) -> None:
        link = self._ways[key]
        blocked = link.weather.blocked
        found = [(f.kind, f.direction, f.amount) for f in self._faults if f.target in targets_of(key)]
        link.set(combined(self._fair.get(key[0], FAIR), found))
        for direction in (0, 1):
            if link.weather.blocked[direction] and not blocked[direction]:
                self.clock.after(KEEPALIVE_NS, self._give_up_way, key, link.blocked_since[direction])

    def _set_weather(self, name: str) -> None:
        """Learners' links are ways like all others here."""
        for key in self._ways:
            self._set_way(key)

    def _give_up_way(self, key: tuple[str, str], since_ns: int) -> None:
        """Nothing has come through for so long that both sides give up what goes over this link, each by itself."""
        link = self._ways[key]
        if since_ns not in link.blocked_since:
            return
        self._break_way(link, lambda: int(self.dice.uniform(0, 5e9)))
        self.clock.after(KEEPALIVE_NS, self._give_up_way, key, since_ns)

    def _break_way(self, link: VirtualLink, wait_ns: Callable[[], int]) -> None:
        for server in self._servers():
            for connection in [*server.connections.values(), *server.accepted.values()]:
                if connection.link is link:
                    connection.reset = True
                    self.clock.after(wait_ns(), connection.learner_side_down, "no answer to pings")
                    self.clock.after(wait_ns(), connection.syncer_side_down, "no answer to pings")
            for end in [end for end in server.pipes if end.link is link]:
                self.clock.after(wait_ns(), end.cut, "no answer to pings")
        callers: list[LearnerHost | RelayProcess] = [*self.learners.values(), *self._relays()]
        for caller in callers:
            for call in [call for call in caller.calls if call.goes_over(link)]:
                call.give_up(reset=self.dice.random() < 0.5)


def targets_of(key: tuple[str, str]) -> set[str]:
    """What a fault may be aimed at to hit this link: either end of it, or both."""
    return {*key, "~".join(key), "~".join(reversed(key))}
