"""Many seeds, on all cores: what they came to, and the first failures in full."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat

from atoll.errors import ConfigError
from atoll.instruments.check import Violation
from atoll.instruments.sim.drawing import DRAW_OLDEST, DRAW_VERSION, draw, is_default
from atoll.instruments.sim.ranges import whole
from atoll.instruments.sim.run import RunReport, run_scenario
from atoll.instruments.sim.shrink import shrink
from atoll.instruments.sim.workers import workers

SEEDS_MAX = 10_000_000
JOBS_MAX = 1024
CHUNK = 4
"""Seeds that a worker takes at a time: a second or two of work."""
FAILURES_EXPLAINED = 3
"""Failures that are run again with a trace and shrunk; the others are listed by their seed."""


@dataclass(frozen=True, slots=True)
class SeedOutcome:
    """What one seed came to, without its trace."""

    seed: int
    violations: tuple[Violation, ...]
    events: int
    simulated_ns: int
    faults: tuple[str, ...]
    commits: int
    defaults: bool
    """Whether it ran the settings that a user gets who chooses none."""
    liar: bool
    """Whether one of its learners lies."""
    fabric: bool
    """Whether it has a standby, shards or a relay."""
    undecidable: int = 0
    """Versions that the liar made up and nobody could tell (`RunReport`)."""


@dataclass(slots=True)
class FuzzReport:
    first: int = 0
    draw: int = DRAW_VERSION
    seeds: int = 0
    defaults: int = 0
    """Seeds that ran the default settings."""
    liars: int = 0
    """Seeds in which a learner lies."""
    fabrics: int = 0
    """Seeds with a standby, shards or a relay."""
    events: int = 0
    simulated_ns: int = 0
    most: tuple[int, int] = (0, 0)
    """Events of the seed with the most of them, and the seed: what never rests shows here."""
    commits: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[SeedOutcome] = field(default_factory=list)
    undecidable: list[int] = field(default_factory=list)
    """Seeds that went on from a version that a liar had made up, since nobody could tell."""
    interrupted: bool = False
    """Ctrl-C ended it before all seeds were done."""

    def add(self, outcome: SeedOutcome) -> None:
        self.seeds += 1
        self.defaults += outcome.defaults
        self.liars += outcome.liar
        self.fabrics += outcome.fabric
        self.events += outcome.events
        self.most = max(self.most, (outcome.events, outcome.seed))
        self.simulated_ns += outcome.simulated_ns
        self.commits += outcome.commits
        self.faults.update(outcome.faults)
        if outcome.violations:
            self.failures.append(outcome)
        if outcome.undecidable:
            self.undecidable.append(outcome.seed)

    def to_dict(self) -> dict[str, object]:
        """What `--json` prints."""
        return {
            "draw": self.draw,
            "first": self.first,
            "seeds": self.seeds,
            "defaults": self.defaults,
            "liars": self.liars,
            "fabrics": self.fabrics,
            "violations": len(self.failures),
            "failing_seeds": [outcome.seed for outcome in self.failures],
            "failing": {str(outcome.seed): str(outcome.violations[0]) for outcome in self.failures},
            "undecidable": len(self.undecidable),
            "undecidable_seeds": self.undecidable,
            "simulated_hours": round(self.simulated_ns / 3.6e12, 3),
            "faults": sum(self.faults.values()),
            "fault_kinds": dict(sorted(self.faults.items())),
            "commits": self.commits,
            "events": self.events,
            "events_most": self.most[0],
            "events_most_seed": self.most[1],
            "seconds": round(self.seconds, 3),
            "seeds_per_s": round(self.seeds / self.seconds, 3) if self.seconds else 0.0,
            "events_per_s": round(self.events / self.seconds) if self.seconds else 0,
        }


@dataclass(frozen=True, slots=True)
class Explained:
    """A failure with its last events, and the smallest scenario found that still shows it."""

    whole: RunReport
    small: RunReport


def run_seed(seed: int, version: int = DRAW_VERSION) -> SeedOutcome:
    report = run_scenario(draw(seed, version))
    scenario = report.scenario
    kinds = tuple(f"lie {fault.variant}" if fault.kind == "lie" else fault.kind for fault in scenario.faults)
    made = (report.events, report.simulated_ns, kinds, report.commits)
    about = (is_default(scenario.config), bool(scenario.liar), scenario.fabric, report.undecidable)
    return SeedOutcome(seed, report.violations, *made, *about)


def fuzz(
    seeds: int,
    *,
    first: int = 0,
    jobs: int = 0,
    minutes: float = 0.0,
    version: int = DRAW_VERSION,
    progress: Callable[[FuzzReport], None] = lambda report: None,
) -> FuzzReport:
    """Run seeds first, first + 1, ... on `jobs` cores (0: all there are); `minutes` ends it earlier (0: never).
    `version` is that of drawing."""
    if not 1 <= seeds <= SEEDS_MAX:
        raise ConfigError(f"--seeds must be between 1 and {SEEDS_MAX}, not {seeds}")
    if not 0 <= jobs <= JOBS_MAX:
        raise ConfigError(f"--jobs must be between 0 (all cores) and {JOBS_MAX}, not {jobs}")
    if first < 0:
        raise ConfigError(f"--first must not be negative, not {first}")
    if not 0.0 <= minutes < math.inf:
        raise ConfigError(f"--minutes must be 0 (no limit) or more, not {minutes}")
    whole("draw", version, DRAW_OLDEST, DRAW_VERSION)
    report = FuzzReport(first, version)
    began_s = time.monotonic()
    try:
        for outcome in _outcomes(range(first, first + seeds), version, jobs or os.cpu_count() or 1):
            report.add(outcome)
            report.seconds = time.monotonic() - began_s
            progress(report)
            if minutes and report.seconds > 60 * minutes:
                break
    except KeyboardInterrupt:
        report.interrupted = True
    return report


def _outcomes(seeds: Iterable[int], version: int, jobs: int) -> Iterator[SeedOutcome]:
    if jobs == 1:
        yield from map(run_seed, seeds, repeat(version))
        return
    with workers(jobs) as pool:
        yield from pool.map(run_seed, seeds, repeat(version), chunksize=CHUNK)


def explain(seed: int, version: int = DRAW_VERSION) -> Explained:
    """Run a failing seed again with a trace, and find a smaller scenario with the same failure."""
    report = run_scenario(draw(seed, version), tracing=True)
    return Explained(report, shrink(report))
