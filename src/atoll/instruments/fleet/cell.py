"""One cell of the goodput table: a method, so many chips, so many learners."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from atoll.core import SyncConfig
from atoll.instruments.fleet.estimate import expected_goodput
from atoll.instruments.fleet.mechanics import MTBI_YEARS, YEAR_S, Mechanics, check_fleet
from atoll.instruments.fleet.memory import Memory, warm_up_s
from atoll.instruments.fleet.parts import Parts
from atoll.instruments.fleet.published import published_goodput
from atoll.instruments.fleet.runs import DataParallel, Islands, decoupled_config, synchronous_config
from atoll.instruments.fleet.windows import NORMAL_95, WINDOWS_MIN, Windows
from atoll.instruments.fleet.world import FleetWorld
from atoll.instruments.sim import real, whole

PRECISION = 0.4
"""Half of the 95% interval, in points, at which a cell is done; half a point is what the table's rounding leaves."""
WINDOW_S_MIN = 400.0
"""Longer than several stalls. Where repairs are a good part of what a failure costs, `Memory` asks for longer ones."""
WINDOW_FAILURES = 2.0
"""Failures that a window should have, where that is affordable."""
WINDOW_STEPS_MAX = 5_000
"""Learner steps of one window where failures are rare: a fraction of a second of work."""
WINDOW_STEPS_MIN = 100
"""Steps of each learner in one window."""
EVENTS_MAX = 4_000_000
"""Events of one cell: a minute or two of work. A cell that is not precise by then says so (`precise` is false, and its
interval is as wide as it is). Warm-up and windows that follow long repairs are cut to fit into it."""
EVENTS_PER_STEP = 4.0
"""Inputs of the machines per learner step, rounded up (3.2 measured with P = 4 and H = 24)."""
STALLS_PER_FAILURE = 2.0
"""One unplanned and one planned."""
BASELINE_FINER = 3.0
"""Data-parallel cells need no machines and cost next to nothing, so they are simulated to a narrower interval."""
LOOK_EVERY = 16
"""The interval is looked at each time the windows have grown by a sixteenth: often enough to stop in time, seldom
enough that looking does not find a lucky moment."""
FEW_FAILURES = 20
"""With fewer than this the windows' own spread says little, and the interval is at least a count's."""


@dataclass(frozen=True, slots=True)
class Cell:
    chips: int
    method: str
    learners: int
    goodput: float
    """Percent of allocated chip time in steps whose progress is merged or pending."""
    half_width: float
    """Half of the 95% interval of the goodput, in points."""
    uptime: float
    """Percent of time in which at least one learner steps."""
    published: float | None
    estimate: float
    """What `expected_goodput` says."""
    failures: int
    precise: bool
    """The interval is as narrow as was asked for, or so many seconds were asked for instead."""
    windows: int
    window_seconds: float
    simulated_seconds: float
    events: int
    """Inputs that the real machines handled; of a data-parallel baseline: stalls."""
    wall_seconds: float
    exchange: float = 100.0
    """Percent of time in which a learner could exchange a fragment, over all learners and fragments."""
    exchange_estimate: float = 100.0
    parts_failed: int = 0
    """Failures of the coordinator, of shards and of relays."""

    @property
    def few_failures(self) -> bool:
        """So few that the estimate on paper says more than the simulation."""
        return self.failures < FEW_FAILURES

    @property
    def difference(self) -> float | None:
        """Ours minus the published figure, in points."""
        return None if self.published is None else self.goodput - self.published

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference}


@dataclass(frozen=True, slots=True)
class Aim:
    """How long to simulate: until the interval is narrow enough, or for so many seconds."""

    precision: float = PRECISION
    """Half of the 95% interval, in points."""
    seconds: float = 0.0
    """Simulated seconds (0: until precise)."""
    seed: int = 0

    def __post_init__(self) -> None:
        real("precision", self.precision, 0.01, 50.0)
        real("seconds", self.seconds, 0.0, 1e9)
        whole("seed", self.seed, 0, 2**63)


def simulate_cell(
    chips: int,
    learners: int = 1,
    method: str = "decoupled",
    *,
    mechanics: Mechanics | None = None,
    mtbi_s: float = MTBI_YEARS * YEAR_S,
    aim: Aim | None = None,
    config: SyncConfig | None = None,
    parts: Parts | None = None,
) -> Cell:
    """Simulate one cell. `config` replaces the synchronisation's settings, and `parts` of the fabric fail (decoupled
    and diloco only)."""
    mechanics, aim = mechanics or Mechanics(), aim or Aim()
    check_fleet(chips, learners, method, mtbi_s, mechanics)
    if parts is not None:
        parts.check(learners)
    began_s = time.perf_counter()
    run = _make(chips, learners, method, mechanics=mechanics, mtbi_s=mtbi_s, aim=aim, config=config, parts=parts)
    stepping = 0 if isinstance(run, DataParallel) else learners
    memory = Memory.of(chips, learners, method, mechanics=mechanics, mtbi_s=mtbi_s)
    affordable_s = EVENTS_MAX / _events_per_s(chips / mtbi_s, stepping, mechanics)
    window_s = _window_s(chips / mtbi_s, stepping, mechanics, aim)
    if not aim.seconds:
        window_s = max(window_s, min(memory.window_s, affordable_s / 2.0 / WINDOWS_MIN))
    run.window(warm_up_s(mechanics, affordable_s / 4.0), None)
    failures, events, warmed_s = run.failures, run.events, run.now_s
    able_s, parts_failed = run.able_s, run.parts_failed
    windows, wanted = Windows(), WINDOWS_MIN
    precision = aim.precision if stepping else aim.precision / BASELINE_FINER
    while True:
        while len(windows) < wanted and (len(windows) < WINDOWS_MIN or run.events < EVENTS_MAX):
            run.window(window_s, windows)
        simulated_s = run.now_s - warmed_s
        share, half = windows.goodput()
        seen = run.failures - failures
        if seen < FEW_FAILURES or window_s < memory.window_s:
            half = max(half, _count_half(seen, memory.cost_s / (learners * simulated_s)))
        half = min(1.0, half + memory.bias(warmed_s, mechanics))
        if aim.seconds or 100.0 * half <= precision or run.events >= EVENTS_MAX:
            break
        wanted += 1 + wanted // LOOK_EVERY
    return Cell(
        chips=chips,
        method=method,
        learners=learners,
        goodput=100.0 * share,
        half_width=100.0 * half,
        uptime=100.0 * windows.uptime(),
        published=published_goodput(chips, learners, method, mtbi_s),
        estimate=expected_goodput(chips, learners, method, mechanics, mtbi_s, parts),
        failures=seen,
        precise=100.0 * half <= precision,
        windows=len(windows),
        window_seconds=window_s,
        simulated_seconds=simulated_s,
        events=run.events - events,
        wall_seconds=time.perf_counter() - began_s,
        exchange=100.0 * (run.able_s - able_s) / simulated_s,
        exchange_estimate=parts.expected_exchange() if parts is not None and stepping else 100.0,
        parts_failed=run.parts_failed - parts_failed,
    )


def _make(
    chips: int,
    learners: int,
    method: str,
    *,
    mechanics: Mechanics,
    mtbi_s: float,
    aim: Aim,
    config: SyncConfig | None,
    parts: Parts | None,
) -> DataParallel | Islands:
    seed = f"{aim.seed}/{method}/{chips}/{learners}"
    if method in ("inelastic", "elastic"):
        return DataParallel(chips, mechanics, elastic=method == "elastic", mtbi_s=mtbi_s, seed=seed)
    synchronous = method == "diloco"
    shards = parts.shards if parts is not None else 0
    config = config or (synchronous_config(learners, max(1, shards)) if synchronous else decoupled_config(learners))
    world = FleetWorld(replace(config, fragments=max(config.fragments, shards)), mechanics, keep_links=synchronous)
    islands = Islands(chips, learners, mechanics, mtbi_s=mtbi_s, world=world)
    islands.parts = parts
    islands.populate(seed)
    return islands


def _events_per_s(rate: float, learners: int, mechanics: Mechanics) -> float:
    """Events per simulated second, rounded up: learners' steps and stalls; of a data-parallel run: stalls."""
    return learners * EVENTS_PER_STEP / mechanics.step_s + STALLS_PER_FAILURE * rate


def _window_s(rate: float, learners: int, mechanics: Mechanics, aim: Aim) -> float:
    if aim.seconds:
        return aim.seconds / WINDOWS_MIN
    window_s = max(WINDOW_S_MIN, WINDOW_FAILURES / rate)
    if not learners:
        return window_s
    affordable = max(WINDOW_STEPS_MIN, WINDOW_STEPS_MAX / learners) * mechanics.step_s
    return min(window_s, affordable)


def _count_half(failures: int, cost: float) -> float:
    """Half of an interval that follows from the number of failures alone, each of which costs this share of the
    learners' time. It matters where windows say little: hardly any has a failure, or a repair outlasts them."""
    return NORMAL_95 * math.sqrt(failures + 1.0) * cost
