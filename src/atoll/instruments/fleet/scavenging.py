"""Extra learners for part of a run: how much sooner it is done.

Four learners train a budget of tokens. At a quarter of the tokens the extra ones join, at three quarters they leave:
that is the half of the run for which the published times (0.90, 0.83, 0.75, 0.62) are exactly those of perfect use,
(1 - f) + f / (1 + x) with f = 1/2. Here they join and leave through the real machines.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from atoll.instruments.fleet.host import STEP_TOKENS, Host
from atoll.instruments.fleet.island import Island
from atoll.instruments.fleet.mechanics import Mechanics
from atoll.instruments.fleet.published import SCAVENGING
from atoll.instruments.fleet.runs import decoupled_config
from atoll.instruments.fleet.unequal import NEVER_S
from atoll.instruments.fleet.world import FleetWorld
from atoll.instruments.sim import whole

BASE = 4
STEPS = 24_000
"""Steps of the whole run, all learners together; with two-second steps and four learners, 3.3 hours."""
JOIN_AT = 0.25
LEAVE_AT = 0.75


@dataclass(frozen=True, slots=True)
class Scavenged:
    """One row: extra learners in percent of the base, and times relative to none."""

    extra_percent: int
    learners_most: int
    decoupled: float
    decoupled_published: float
    perfect: float
    data_parallel: float
    """One elastic data-parallel job with this package's times: it stands still for two planned resizes."""
    data_parallel_published: float | None
    """Much worse than that: what made it so is not published where we could read it."""
    discarded_percent: float
    """Of the processed tokens, how many were not merged at the end."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def simulate_scavenging(*, mechanics: Mechanics | None = None, steps: int = STEPS, seed: int = 0) -> list[Scavenged]:
    whole("steps", steps, 1000, 10_000_000)
    whole("seed", seed, 0, 2**63)
    mechanics = mechanics or Mechanics()
    plain_s, _ = _decoupled(0, mechanics, steps=steps, seed=seed)
    rows = []
    for percent, (dp_published, published) in SCAVENGING.items():
        extra = BASE * percent // 100
        took_s, discarded = _decoupled(extra, mechanics, steps=steps, seed=seed)
        rows.append(
            Scavenged(
                extra_percent=percent,
                learners_most=BASE + extra,
                decoupled=took_s / plain_s,
                decoupled_published=published,
                perfect=_perfect(extra),
                data_parallel=_data_parallel(extra, steps, mechanics),
                data_parallel_published=dp_published,
                discarded_percent=discarded,
            )
        )
    return rows


def _perfect(extra: int) -> float:
    share = LEAVE_AT - JOIN_AT
    return 1.0 - share + share * BASE / (BASE + extra)


def _decoupled(extra: int, mechanics: Mechanics, *, steps: int, seed: int) -> tuple[float, float]:
    """Seconds until the budget is processed, and the percentage of it that did not end up merged."""
    config = replace(decoupled_config(BASE), tokens_budget=steps * STEP_TOKENS)
    world = FleetWorld(config, mechanics)
    for number in range(BASE):
        _add(world, mechanics, f"{seed}/{number}")
    _run_until(world, JOIN_AT)
    guests = [_add(world, mechanics, f"{seed}/guest/{number}") for number in range(extra)]
    _run_until(world, LEAVE_AT)
    for guest in guests:
        guest.leave()
    _run_until(world, 1.0)
    took_s = world.clock.now_ns / 1e9
    for host in world.hosts:
        if not host.gone:
            host.leave()
    while not world.finished:
        world.run(mechanics.step_s)
    totals = world.syncer.ledger.totals()
    return took_s, 100.0 * (totals.processed - totals.merged) / totals.processed


def _add(world: FleetWorld, mechanics: Mechanics, seed: str) -> Host:
    return world.add(Island(1.0, 1, mechanics, mtbi_s=NEVER_S, rng=Random(seed)), step_s=mechanics.step_s)


def _run_until(world: FleetWorld, share: float) -> None:
    """Until this share of the budget is processed, as the syncer knows it."""
    while not world.syncer.committed or world.syncer.ledger.processed < share * world.config.tokens_budget:
        world.run(world.mechanics.step_s)


def _data_parallel(extra: int, steps: int, mechanics: Mechanics) -> float:
    """Time relative to none for one data-parallel job: the extra capacity is as useful, but the whole job stands still
    for a planned resize when it comes and when it goes, in a run as long as ours."""
    base_s = steps / BASE * mechanics.step_s
    stalls_s = 2 * mechanics.grow_s if extra else 0.0
    return _perfect(extra) + stalls_s / base_s
