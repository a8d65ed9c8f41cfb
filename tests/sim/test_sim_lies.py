"""A learner that lies: every lie is drawn, changes what goes out, and costs the others next to nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from atoll.core import Hello, InlinePush, Leave, Nothing, Progress, PushHeader, PushKind, Ready, SyncConfig
from atoll.errors import ConfigError
from atoll.instruments.chaos.lies import LIES, VALUES, falsified
from atoll.instruments.sim.drawing import AMOUNTS_DRAWN, draw
from atoll.instruments.sim.run import run_scenario
from atoll.instruments.sim.scenario import LearnerSpec, Scenario, SimFault

SEEDS = 1000
BOLD = AMOUNTS_DRAWN["lie"][-1]
LASTS_S = 1e6


@pytest.fixture(scope="module")
def scenarios() -> list[Scenario]:
    return [draw(seed) for seed in range(SEEDS)]


def lies_of(scenario: Scenario) -> list[SimFault]:
    return [fault for fault in scenario.faults if fault.kind == "lie"]


# ---------------------------------------------------------------- drawing


def test_a_third_of_the_seeds_has_one_liar_among_honest_learners(scenarios: list[Scenario]) -> None:
    lying = [scenario for scenario in scenarios if scenario.liar]
    assert 0.3 <= len(lying) / SEEDS <= 0.4
    for scenario in lying:
        assert len({fault.target for fault in lies_of(scenario)}) == 1
        assert len(scenario.learners) >= 3
    calm = [scenario for scenario in lying if all(f.kind == "lie" or f.target == "syncer" for f in scenario.faults)]
    assert len(calm) >= 0.4 * len(lying), "in half of them whatever the others lose they lose by the lies"


def test_every_lie_is_told_at_once_and_late_for_a_while_and_to_the_end(scenarios: list[Scenario]) -> None:
    for name in LIES:
        told = [fault for scenario in scenarios for fault in lies_of(scenario) if fault.variant == name]
        assert {fault.amount for fault in told} == set(AMOUNTS_DRAWN["lie"]), name
        assert {fault.at_s == 0.0 for fault in told} == {True, False}, name
        assert {fault.lasts_s > 1000.0 for fault in told} == {True, False}, name


def test_a_lie_about_versions_comes_with_a_syncer_that_asks(scenarios: list[Scenario]) -> None:
    for scenario in scenarios:
        if any(LIES[fault.variant].restarts for fault in lies_of(scenario)):
            assert any(fault.target == "syncer" for fault in scenario.faults)


def test_who_takes_another_id_does_so_where_there_are_keys(scenarios: list[Scenario]) -> None:
    for scenario in scenarios:
        assert scenario.keys or not any(LIES[fault.variant].steals for fault in lies_of(scenario))
    assert {scenario.keys for scenario in scenarios} == {True, False}


# ---------------------------------------------------------------- scenarios

SMALL = Scenario(
    5,
    SyncConfig(fragments=2, learners_expected=4),
    tuple(LearnerSpec(step_ns=step_ns) for step_ns in (100_000_000, 110_000_000, 130_000_000, 120_000_000)),
    seconds=30.0,
    keys=True,
)


def with_lies(*names: str, amount: float = BOLD, **fields: Any) -> Scenario:
    lies = [SimFault("lie", "learner-2", 2.0, LASTS_S, amount, variant=name) for name in names]
    restarts = any(LIES[name].restarts for name in names)
    faults = (*lies, SimFault("kill", "syncer", 10.0)) if restarts else tuple(lies)
    return replace(SMALL, faults=faults, **fields)


def test_honest_learners_are_a_majority() -> None:
    other = SimFault("lie", "learner-0", 2.0, 5.0, BOLD, variant="epoch")
    with pytest.raises(ConfigError, match="1 of 2 learners lie"):
        replace(SMALL, learners=SMALL.learners[:2], config=SyncConfig(fragments=2), faults=(other,))
    with pytest.raises(ConfigError, match="2 of 4 learners lie"):
        replace(SMALL, faults=(*with_lies("epoch").faults, other))


def test_a_lie_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="variant must be one of epoch, "):
        SimFault("lie", "learner-0", 2.0, 5.0, BOLD, variant="weather")


def test_without_keys_anybody_may_be_anybody() -> None:
    with pytest.raises(ConfigError, match="let the scenario have keys"):
        with_lies("ids", keys=False)


# ---------------------------------------------------------------- what goes out

HEADER = PushHeader(PushKind.CONTRIBUTION, "a", 1, 0, 3, 0, 7, 5, 8, 128, "int4", 100, 1)
MESSAGES: Mapping[str, Any] = {
    "epoch": Hello("a", "a#1", 3, (), 1, "run", (3, 4), (), 2, (7, 8)),
    "generation": Hello("a", "a#1", 3, (), 1, "run", (3, 4), (), 2, (7, 8)),
    "versions": Hello("a", "a#1", 3, (), 1, "run", (3, 4), (), 2, (7, 8)),
    "ready": Ready(10, (3, 4)),
    "step": Progress(10, 10, 160, 1, 1.0, (3, 4)),
    "counters": Progress(10, 10, 160, 1, 1.0, (3, 4)),
    "pace": Progress(10, 10, 160, 100, 1.0, (3, 4)),
    "stall": Progress(10, 10, 160, 100, 1.0, (3, 4)),
    "tokens": HEADER,
    "steps": HEADER,
    "base": HEADER,
    "silent": Nothing(3, 0),
    "words": Leave("done"),
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("amount", AMOUNTS_DRAWN["lie"])
def test_a_lie_changes_its_own_message_and_no_other(name: str, amount: float) -> None:
    message = MESSAGES[name]
    assert falsified(message, {name: amount}) != message
    for other in LIES:
        if (other, type(message)) not in {(lie, type(told)) for lie, told in MESSAGES.items()} and other != "silent":
            assert falsified(message, {other: amount}) == message


def test_a_small_contribution_is_falsified_as_a_large_one_is() -> None:
    small = InlinePush(HEADER, b"")
    assert falsified(small, {"tokens": 3.0}).header == falsified(HEADER, {"tokens": 3.0})
    assert falsified(small, {"silent": 3.0}) is None


def test_only_contributions_are_falsified() -> None:
    seed = replace(HEADER, kind=PushKind.SEED)
    assert falsified(seed, dict.fromkeys(LIES, BOLD)) == seed


def test_several_lies_are_told_at_once() -> None:
    told = falsified(HEADER, {"tokens": 3.0, "steps": 1000.0})
    assert (told.tokens, told.steps) == (3 * HEADER.tokens, 1000 * HEADER.steps)


# ---------------------------------------------------------------- what it costs the others


@pytest.mark.parametrize("amount", AMOUNTS_DRAWN["lie"])
@pytest.mark.parametrize("name", LIES)
def test_one_lie_told_to_the_end_breaks_nothing(name: str, amount: float) -> None:
    report = run_scenario(with_lies(name, amount=amount, arrays=name in VALUES, keys=LIES[name].steals))
    assert not report.violations, f"{LIES[name].doc}: {report.violations[0]}"
    assert report.commits >= 20


def test_all_lies_at_once_break_nothing() -> None:
    report = run_scenario(with_lies(*LIES, arrays=False))
    assert not report.violations, report.violations[0]
    assert report.commits >= 20


def test_a_liars_run_is_the_same_every_time() -> None:
    scenario = with_lies("crowd", "numbers", "chunks", "names", arrays=False)
    one, two = run_scenario(scenario, tracing=True), run_scenario(scenario, tracing=True)
    assert one.digest == two.digest and one.lines
