"""From a failing scenario to a small one: leave things out as long as the same invariant breaks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from atoll.core import SyncConfig, parse_quorum
from atoll.errors import ConfigError
from atoll.instruments.sim.run import RunReport, run_scenario
from atoll.instruments.sim.scenario import LearnerSpec, Scenario

ATTEMPTS_MAX = 80
"""Scenarios tried: a minute of work at most, and what is left then is small enough to read."""


def shrink(report: RunReport, attempts_max: int = ATTEMPTS_MAX) -> RunReport:
    """The smallest scenario found that breaks the invariant which `report` broke first."""
    if not report.violations:
        return report
    wanted = report.violations[0].invariant
    best, attempts = report, 0
    improved = True
    while improved:
        improved = False
        for smaller in _smaller(best.scenario):
            if attempts >= attempts_max:
                return best
            attempts += 1
            tried = run_scenario(smaller, tracing=True)
            if tried.violations and tried.violations[0].invariant == wanted:
                best, improved = tried, True
                break
    return best


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Simpler scenarios, the boldest first."""
    faults = scenario.faults
    half = len(faults) // 2
    if half:
        yield replace(scenario, faults=faults[:half])
        yield replace(scenario, faults=faults[half:])
    for index in range(len(faults)):
        yield replace(scenario, faults=(*faults[:index], *faults[index + 1 :]))
    yield from _fewer_learners(scenario)
    plain = LearnerSpec()
    for index, spec in enumerate(scenario.learners):
        calm = replace(plain, step_ns=spec.step_ns, tokens=spec.tokens)
        if spec != calm:
            yield replace(scenario, learners=(*scenario.learners[:index], calm, *scenario.learners[index + 1 :]))
    if scenario.arrays and not scenario.fabric:
        yield replace(scenario, arrays=False)
    if not scenario.inline:
        yield replace(scenario, inline=True)
    if scenario.inner:
        yield replace(scenario, inner=False)
    last_s = max((fault.at_s + (fault.lasts_s if fault.kind != "lie" else 0.0) for fault in faults), default=0.0)
    if scenario.seconds > last_s + 5.0:
        yield replace(scenario, seconds=round(last_s + 4.0, 3))


def _fewer_learners(scenario: Scenario) -> Iterator[Scenario]:
    count = len(scenario.learners) - 1
    name = f"learner-{count}"
    if count < 1 or any(fault.target == name for fault in scenario.faults):
        return
    try:
        yield replace(scenario, learners=scenario.learners[:-1], config=_for_fewer(scenario.config, count))
    except ConfigError:
        return


def _for_fewer(config: SyncConfig, learners: int) -> SyncConfig:
    expected = min(config.learners_expected, learners)
    number, _ = parse_quorum(config.quorum)
    quorum = str(min(number, expected)) if number else config.quorum
    return replace(config, learners_expected=expected, quorum=quorum)
