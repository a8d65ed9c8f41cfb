"""What lies between learners fails, too: the coordinator's host, those of shards and of relays.

Nobody's chips stand still for it in a decoupled run: learners train on, and what they have to say waits. So besides
goodput there is `exchange`: of all learners and fragments, the share of time in which this learner can exchange this
fragment. A synchronous run waits at its next boundary for whatever is away.

    coordinator   nobody exchanges anything, until it is started again or (standby) another has taken over
    shard         its own fragments wait for it
    relay         its learners wait until they have found their way past it
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from atoll.core import SECOND_NS as NS
from atoll.core import checksum_of
from atoll.core import effects as fx
from atoll.errors import ConfigError
from atoll.instruments.fleet.mechanics import SECONDS_MAX
from atoll.instruments.sim import real, whole

if TYPE_CHECKING:
    from atoll.instruments.fleet.host import Host
    from atoll.instruments.fleet.world import FleetWorld

DAY_S = 86400.0
SHARDS_MAX, RELAYS_MAX = 64, 4096
WAIT_FOR_RUN_S = 1.0
"""A part that should fail before the run has begun does so later."""


@dataclass(frozen=True, slots=True)
class Parts:
    """How many there are, how often the host of one fails, and how long that lasts."""

    shards: int = 0
    relays: int = 0
    standby: bool = False
    mtbf_s: float = 30.0 * DAY_S
    """Mean time between failures of the host of one part, exponential: ten or so a year, as servers with what runs on
    them have."""
    restart_s: float = 60.0
    """Until a part is back after its failure, on that host or another one."""
    takeover_s: float = 20.0
    """With a standby: from the coordinator's death to the next commit."""
    reroute_s: float = 5.0
    """Until learners of a dead relay have found the syncer by themselves."""

    def __post_init__(self) -> None:
        whole("shards", self.shards, 0, SHARDS_MAX)
        whole("relays", self.relays, 0, RELAYS_MAX)
        real("mean time between failures of a part", self.mtbf_s, 1.0, 1e15)
        for name in ("restart_s", "takeover_s", "reroute_s"):
            real(name, getattr(self, name), 0.0, SECONDS_MAX)

    def check(self, learners: int) -> None:
        if self.relays > learners:
            raise ConfigError(f"{self.relays} relays for {learners} learners: some would have none; give fewer relays")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def coordinator_away_s(self) -> float:
        return self.takeover_s if self.standby else self.restart_s

    @property
    def relay_away_s(self) -> float:
        return min(self.reroute_s, self.restart_s)

    def expected_exchange(self) -> float:
        """In percent: a learner and a fragment need the coordinator and, where there are any, one shard and one relay.
        Each is up for `mtbf_s` and then away, on average."""
        away_s = [self.coordinator_away_s]
        away_s += [self.restart_s] if self.shards else []
        away_s += [self.relay_away_s] if self.relays else []
        share = 1.0
        for one_s in away_s:
            share *= self.mtbf_s / (self.mtbf_s + one_s)
        return 100.0 * share

    def synchronous_share(self, period_s: float) -> float:
        """What is left of a synchronous run's time: whoever is away when everybody has come to the boundary is waited
        for. A failure at any moment of a period leaves the rest of it for the return."""
        parts = [(1, self.coordinator_away_s), (self.shards, self.restart_s), (self.relays, self.relay_away_s)]
        cost_s = sum(count * _waited_s(away_s, period_s) for count, away_s in parts)
        return self.mtbf_s / (self.mtbf_s + cost_s)


def _waited_s(away_s: float, period_s: float) -> float:
    """Mean of max(0, away - u), u uniform over the period."""
    return away_s - period_s / 2.0 if away_s >= period_s else away_s * away_s / (2.0 * period_s)


class FailingParts:
    """The parts of a simulated run: each is up for a while and away for a while, for ever."""

    def __init__(self, world: FleetWorld, parts: Parts, seed: str) -> None:
        self._world, self._parts = world, parts
        self.failures = 0
        self._coordinator_up = True
        self._shards_away: set[int] = set()
        self._relays_away: set[int] = set()
        self._able_s = 0.0
        """Seconds so far, of a learner that could exchange all of its fragments."""
        self._since_ns = world.clock.now_ns
        self._plan("coordinator", 0, Random(f"{seed}/coordinator"), parts.coordinator_away_s)
        for kind, count, away_s in (
            ("shard", parts.shards, parts.restart_s),
            ("relay", parts.relays, parts.relay_away_s),
        ):
            for index in range(count):
                self._plan(kind, index, Random(f"{seed}/{kind}-{index}"), away_s)

    # ------------------------------------------------------------ who can reach what

    def reaches(self, learner: int) -> bool:
        """Whether this learner can have a session."""
        relay = learner % self._parts.relays if self._parts.relays else -1
        return self._coordinator_up and relay not in self._relays_away

    def serves(self, fragment: int) -> bool:
        return not self._parts.shards or fragment % self._parts.shards not in self._shards_away

    @property
    def able_s(self) -> float:
        self._count()
        return self._able_s

    def _count(self) -> None:
        now_ns, fragments = self._world.clock.now_ns, self._world.config.fragments
        learners = len(self._world.hosts)
        reach = sum(map(self.reaches, range(learners))) / max(1, learners)
        served = sum(map(self.serves, range(fragments))) / fragments
        self._able_s += (now_ns - self._since_ns) / NS * reach * served
        self._since_ns = now_ns

    # ------------------------------------------------------------ failures

    def _plan(self, kind: str, index: int, rng: Random, away_s: float) -> None:
        up_ns = int(rng.expovariate(1.0 / self._parts.mtbf_s) * NS)
        self._world.clock.after(up_ns, self._fails, kind, index, rng, away_s)

    def _fails(self, kind: str, index: int, rng: Random, away_s: float) -> None:
        if not self._world.syncer.committed:
            self._world.clock.after(int(WAIT_FOR_RUN_S * NS), self._fails, kind, index, rng, away_s)
            return
        self._count()
        self.failures += 1
        self._set(kind, index, up=False)
        self._world.clock.after(int(away_s * NS), self._is_back, kind, index, rng, away_s)

    def _is_back(self, kind: str, index: int, rng: Random, away_s: float) -> None:
        self._count()
        self._set(kind, index, up=True)
        self._plan(kind, index, rng, away_s)

    def _set(self, kind: str, index: int, *, up: bool) -> None:
        match kind:
            case "shard":
                self._set_shard(index, up=up)
            case "relay":
                (self._relays_away.discard if up else self._relays_away.add)(index)
            case _:
                self._coordinator_up = up
        for number, host in enumerate(self._world.hosts) if kind != "shard" else ():
            self._link(host, up=self.reaches(number))

    @staticmethod
    def _link(host: Host, *, up: bool) -> None:
        if up:
            host.link_up()
        else:
            host.link_down()

    def _set_shard(self, index: int, *, up: bool) -> None:
        world, shards = self._world, self._parts.shards
        (self._shards_away.discard if up else self._shards_away.add)(index)
        away = frozenset(f for f in range(world.config.fragments) if not self.serves(f))
        if not up:
            world.tell_syncer(fx.FragmentsDown(away, frozenset()))
            return
        own = range(index, world.config.fragments, shards)
        on_disk = {f: (world.version(f), checksum_of(world.version(f))) for f in own}
        world.shard_back(fx.FragmentsBack(on_disk))
