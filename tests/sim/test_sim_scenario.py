"""Scenarios: written down and read again, refused when they make no sense, and made smaller."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.core import INNER_LINGER_NS, SECOND_NS
from atoll.core.config import SyncConfig
from atoll.errors import ConfigError
from atoll.instruments.chaos import Fault
from atoll.instruments.check import Bounded
from atoll.instruments.check.facts import Restored
from atoll.instruments.sim.drawing import draw
from atoll.instruments.sim.fuzz import fuzz
from atoll.instruments.sim.run import run_scenario
from atoll.instruments.sim.scenario import (
    FAULTS_MAX,
    SCENARIO_BYTES_MAX,
    LearnerSpec,
    Scenario,
    SimFault,
    load,
    to_json,
)
from atoll.instruments.sim.shrink import shrink


@pytest.mark.parametrize(("seeds", "first", "jobs"), [(0, 0, 1), (10**9, 0, 1), (1, -1, 1), (1, 0, -1), (1, 0, 10**6)])
def test_a_range_of_seeds_that_is_none(seeds: int, first: int, jobs: int) -> None:
    with pytest.raises(ConfigError, match="--"):
        fuzz(seeds, first=first, jobs=jobs)


# ---------------------------------------------------------------- writing and reading


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "scenario.json"
    for seed in range(50):
        file.write_text(to_json(draw(seed)))
        assert load(file) == draw(seed)


def test_a_scenario_that_was_read_runs_as_the_drawn_one(tmp_path: Path) -> None:
    file = tmp_path / "scenario.json"
    file.write_text(to_json(draw(7)))
    drawn, read = run_scenario(draw(7), tracing=True), run_scenario(load(file), tracing=True)
    assert drawn.digest == read.digest and drawn.final == read.final and drawn.lines


def values_of(scenario: Scenario) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(to_json(scenario))
    return values


SMALL = Scenario(
    1,
    SyncConfig(fragments=2, learners_expected=2),
    (LearnerSpec(), LearnerSpec()),
    faults=(SimFault("kill", "learner-0", 3.0), SimFault("delay", "learner-1", 3.0, 5.0, 20.0)),
)
HUGE = 10**400


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("format",), 2, "format 1"),
        (("format",), None, "format 1"),
        (("colour",), "red", "unknown entry 'colour'"),
        (("fault",), [], "unknown entry 'fault'; did you mean faults?"),
        (("config",), None, "compare it"),
        (("config", "colour"), "red", "unknown setting 'colour'"),
        (("config", "sync_every"), HUGE, "sync_every"),
        (("config", "outer_lr"), HUGE, "300 digits"),
        (("config", "fragments"), 0, "fragments"),
        (("config", "quorum"), "9", "quorum 9"),
        (("learners",), [], "1 to 1000000 learners"),
        (("learners",), 3, "compare it"),
        (("learners", 0), {"pace": 1}, "pace"),
        (("learners", 0), "fast", "compare it"),
        (("learners", 0, "step_ns"), 0, "step_ns"),
        (("learners", 0, "step_ns"), -1, "step_ns"),
        (("learners", 0, "step_ns"), 0.5, "step_ns"),
        (("learners", 0, "step_ns"), HUGE, "more than 256 bits"),
        (("learners", 0, "tokens"), 0, "tokens"),
        (("learners", 0, "tokens"), "many", "tokens"),
        (("learners", 0, "latency_ns"), -1, "latency_ns"),
        (("learners", 0, "up_bits_per_s"), 1e-300, "up_bits_per_s"),
        (("learners", 0, "up_bits_per_s"), -5.0, "up_bits_per_s"),
        (("learners", 0, "loss"), 1.5, "loss"),
        (("learners", 0, "loss"), float("nan"), "loss"),
        (("seed",), "x", "seed"),
        (("seed",), -4, "seed"),
        (("seconds",), float("inf"), "seconds"),
        (("seconds",), 1e300, "seconds"),
        (("seconds",), -1, "seconds"),
        (("seconds",), HUGE, "seconds"),
        (("arrays",), 1, "arrays must be true or false"),
        (("durability",), "perhaps", "durability must be one of"),
        (("commit_ns",), -1, "commit_ns"),
        (("faults",), None, "compare it"),
        (("faults",), 5, "compare it"),
        (("faults", 0), 5, "compare it"),
        (("faults", 0, "kind"), "flood", "unknown fault 'flood'"),
        (("faults", 0, "kind"), [], "compare it"),
        (("faults", 0, "target"), "learner-2", "learner-0 to learner-1"),
        (("faults", 0, "target"), 5, "target"),
        (("faults", 0, "target"), "", "target"),
        (("faults", 0, "at_s"), -0.5, "at_s"),
        (("faults", 0, "at_s"), "soon", "at_s"),
        (("faults", 0, "at_s"), float("nan"), "at_s"),
        (("faults", 0, "at_s"), HUGE, "at_s"),
        (("faults", 0), {"kind": "cut", "target": "learner-0", "at_s": 1, "lasts_s": 1}, "is an instant"),
        (("faults", 0), {"kind": "kill", "target": "syncer", "at_s": 1, "lasts_s": 1}, "is an instant"),
        (("faults", 1, "lasts_s"), 0.0, "give lasts_s"),
        (("faults", 1, "lasts_s"), -1.0, "lasts_s"),
        (("faults", 1, "lasts_s"), 1e300, "lasts_s"),
        (("faults", 1, "amount"), 0.0, "amount"),
        (("faults", 1, "amount"), HUGE, "amount"),
        (("faults", 1, "direction"), "sideways", "direction must be one of both, up, down"),
        (("faults", 1, "target"), "syncer", "cannot hit the syncer"),
        (("faults", 1), {"kind": "disk_full", "target": "learner-0", "at_s": 1, "lasts_s": 1}, "hits the syncer"),
        (("faults", 1), {"kind": "join", "target": "learner-0", "at_s": 1, "lasts_s": 1}, "takes part already"),
        (("faults", 1), {"kind": "poison", "target": "learner-0", "at_s": 1, "lasts_s": 1}, "variant must be one of"),
        (("faults", 1), {"kind": "slow", "target": "learner-0", "at_s": 1, "lasts_s": 1, "amount": 0}, "amount"),
        (("faults", 1), {"kind": "kill"}, "target"),
    ],
    ids=str,
)
def test_a_scenario_that_makes_no_sense(tmp_path: Path, place: tuple[Any, ...], value: Any, words: str) -> None:
    values = values_of(SMALL)
    inside: Any = values
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    file = tmp_path / "scenario.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as raised:
        load(file)
    text = str(raised.value)
    assert words in text and str(file) in text and len(text) < 1000, text


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b"\xff\xfe\x00",
        b"\x00" * 100,
        b"[" * 100_000,
        b'{"format": ' * 100_000,
        b'{"format": 1' + b"0" * 5000 + b"}",
        to_json(SMALL).encode()[:-40],
    ],
    ids=["empty", "open", "list", "number", "null", "not text", "zeros", "deep", "deep objects", "digits", "truncated"],
)
def test_a_file_that_is_no_scenario(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "scenario.json"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match="is not a scenario") as raised:
        load(file)
    assert str(file) in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_is_missing_a_folder_or_endless(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(SCENARIO_BYTES_MAX + 1)
    for path in (tmp_path / "nothing.json", tmp_path, large):
        with pytest.raises(ConfigError, match="is not a scenario"):
            load(path)


def test_deep_values_inside_a_scenario(tmp_path: Path) -> None:
    file = tmp_path / "scenario.json"
    file.write_text(to_json(SMALL).replace('"target": "learner-0"', '"target": ' + "[" * 900 + "]" * 900))
    with pytest.raises(ConfigError):
        load(file)


def test_more_faults_than_anybody_needs() -> None:
    with pytest.raises(ConfigError, match="at most 10000 faults"):
        replace(SMALL, faults=SMALL.faults[:1] * (FAULTS_MAX + 1))


# ---------------------------------------------------------------- faults of a plan


def test_a_fault_of_a_plan_is_one_of_the_simulators() -> None:
    timed = SimFault.of_plan(Fault(kind="slow", target="learner-1", at_s=3.0, lasts_s=20.0, amount=4.0), 60.0)
    assert timed == SimFault("slow", "learner-1", 3.0, 20.0, 4.0)
    shared = Fault(kind="slow", target="learner-1", at_progress=0.25, until_progress=0.75, amount=4.0)
    assert SimFault.of_plan(shared, 60.0) == SimFault("slow", "learner-1", 15.0, 30.0, 4.0)
    poison = Fault(kind="poison", target="learner-1", at_s=3.0, lasts_s=20.0, variant="flip")
    assert SimFault.of_plan(poison, 60.0) == SimFault("poison", "learner-1", 3.0, 20.0, variant="flip")


# ---------------------------------------------------------------- smaller ones


def come_back(checker: Bounded, fact: Restored) -> None:
    checker.complain("a syncer has come back")


def test_a_failing_scenario_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """If coming back were forbidden, one kill of the syncer with one plain learner would show it."""
    monkeypatch.setattr(Bounded, "on_restored", come_back, raising=False)
    far = LearnerSpec(latency_ns=150_000_000, link_jitter_ns=50_000_000, jitter=0.5, loss=0.05)
    faults = (
        SimFault("cut", "learner-0", 5.0),
        SimFault("delay", "learner-1", 6.0, 3.0, 300.0),
        SimFault("kill", "learner-1", 7.0),
        SimFault("slow", "learner-0", 8.0, 5.0, 4.0),
        SimFault("join", "guest-0", 9.0, 5.0),
        SimFault("kill", "syncer", 12.0),
        SimFault("cut", "learner-0", 13.0),
    )
    config = SyncConfig(sync_every=8, fragments=2, quorum="2", learners_expected=3)
    scenario = Scenario(3, config, (far, far, far), seconds=60.0, faults=faults, inline=False, inner=True)
    report = run_scenario(scenario, tracing=True)
    assert [violation.text for violation in report.violations] == ["a syncer has come back"]
    small = shrink(report)
    assert small.violations == report.violations
    assert small.scenario.faults == (SimFault("kill", "syncer", 12.0),)
    assert small.scenario.learners == (LearnerSpec(),)
    assert small.scenario.config == replace(config, quorum="1", learners_expected=1)
    assert small.scenario.inline and not small.scenario.inner and not small.scenario.arrays
    assert small.scenario.seconds < scenario.seconds and small.events < report.events


def test_inner_state_of_a_peer_comes_over_the_link_and_through_the_syncer() -> None:
    """As in production: asked for piece by piece, and given back when the joiner has had time to ask again."""
    config = SyncConfig(sync_every=8, fragments=2, learners_expected=3)
    specs = (LearnerSpec(latency_ns=100_000_000),) * 3
    faults = (SimFault("kill", "learner-1", 20.0),)
    report = run_scenario(Scenario(1, config, specs, seconds=60.0, faults=faults, inner=True), tracing=True)
    assert not report.violations
    taken = [line.split() for line in report.lines if " InnerTaken " in line]
    asked, ended = ([float(words[0]) for words in taken if f"done={done}" in words] for done in (False, True))
    assert len(asked) == 1 and len(ended) == 1
    assert ended[0] - asked[0] == pytest.approx(INNER_LINGER_NS / SECOND_NS)


def test_making_smaller_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bounded, "on_restored", come_back, raising=False)
    scenario = replace(SMALL, faults=(*SMALL.faults, SimFault("kill", "syncer", 8.0)))
    report = run_scenario(scenario)
    assert report.violations and shrink(report, attempts_max=0) is report


def test_a_scenario_that_holds_is_left_alone() -> None:
    report = run_scenario(replace(SMALL, faults=(), seconds=5.0))
    assert not report.violations and shrink(report) is report
