"""Learners of different speed: what a quorum of all costs, and what a smaller one saves.

Eight learners, four of them slower by 18%, and every learner's speed varies by 10%. Goodput is the share of learner
time in compute; the rest is waiting for others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from atoll.core import SyncConfig
from atoll.instruments.fleet.estimate import SYNC_EVERY
from atoll.instruments.fleet.island import Island
from atoll.instruments.fleet.mechanics import PACE_MIN, Mechanics
from atoll.instruments.fleet.published import HETEROGENEOUS
from atoll.instruments.fleet.runs import decoupled_config, synchronous_config
from atoll.instruments.fleet.world import FleetWorld
from atoll.instruments.sim import real, whole

LEARNERS = 8
SLOWER = 0.18
"""v5p learners against v6e: each of their steps takes 1.18 times as long."""
VARIANCE = 0.10
"""Injected: the standard deviation of a learner's step time."""
PERIODS = 400
"""Periods of H steps that are simulated: the mean waiting time is then right to about 0.3 points."""
NEVER_S = 1e15
"""Mean time between interruptions here: speeds are studied without failures."""


@dataclass(frozen=True, slots=True)
class Unequal:
    """One row: a setting, and what it came to."""

    setting: str
    variance: str
    goodput: float
    published: float | None
    commits: int
    contributors: float
    """Contributions per commit, on average."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def simulate_unequal(
    *,
    mechanics: Mechanics | None = None,
    slower: float = SLOWER,
    variance: float = VARIANCE,
    periods: int = PERIODS,
    seed: int = 0,
) -> list[Unequal]:
    """The published settings with the variance per period; and K=8 with it per step and without any, to compare."""
    real("slower", slower, 0.0, 10.0)
    real("variance", variance, 0.0, 1.0)
    whole("periods", periods, 1, 1_000_000)
    whole("seed", seed, 0, 2**63)
    mechanics = mechanics or Mechanics()
    everybody = synchronous_config(LEARNERS)
    first = replace(decoupled_config(LEARNERS), grace_cap_steps=0.0)
    rows = (
        ("K=8", "per period", everybody, variance, SYNC_EVERY),
        ("K=1", "per period", first, variance, SYNC_EVERY),
        ("K=1 + grace", "per period", decoupled_config(LEARNERS), variance, SYNC_EVERY),
        ("K=8", "per step", everybody, variance, 1),
        ("K=8", "none", everybody, 0.0, 1),
    )
    return [
        _row(name, how, config, mechanics=mechanics, slower=slower, pace=(spread, every), periods=periods, seed=seed)
        for name, how, config, spread, every in rows
    ]


def paces(rng: Random, spread: float, every: int) -> Callable[[], float]:
    """How long a step takes relative to the learner's own mean: drawn anew every so many steps."""
    state = [0, 1.0]

    def pace() -> float:
        if state[0] % every == 0:
            state[1] = max(PACE_MIN, rng.gauss(1.0, spread))
        state[0] += 1
        return state[1]

    return pace


def _row(
    name: str,
    how: str,
    config: SyncConfig,
    *,
    mechanics: Mechanics,
    slower: float,
    pace: tuple[float, int],
    periods: int,
    seed: int,
) -> Unequal:
    world = FleetWorld(config, mechanics)
    for number in range(LEARNERS):
        step_s = mechanics.step_s * (1.0 + slower if number >= LEARNERS // 2 else 1.0)
        island = Island(1.0, 1, mechanics, mtbi_s=NEVER_S, rng=Random(f"{seed}/chips/{number}"))
        world.add(island, step_s=step_s, pace=paces(Random(f"{seed}/pace/{number}"), *pace))
    world.run(10.0 * SYNC_EVERY * mechanics.step_s)
    before_s, began_ns = sum(host.useful_s for host in world.hosts), world.clock.now_ns
    world.run(periods * SYNC_EVERY * mechanics.step_s)
    took_s = (world.clock.now_ns - began_ns) / 1e9
    useful_s = sum(host.useful_s for host in world.hosts) - before_s
    book = world.syncer.book
    return Unequal(
        setting=name,
        variance=how,
        goodput=min(100.0, 100.0 * useful_s / took_s / LEARNERS),
        published=HETEROGENEOUS[name] if how == "per period" else None,
        commits=book.commits,
        contributors=book.contributions_merged / max(1, book.commits),
    )
