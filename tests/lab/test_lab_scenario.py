"""Scenario files of the lab: speeds, links and faults for a run; and whatever cannot be is refused with a remedy."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from atoll.core.config import SyncConfig
from atoll.errors import ConfigError
from atoll.instruments.chaos import learner_names
from atoll.instruments.lab.scenario import LabScenario, plain_world
from atoll.instruments.sim.run import run_scenario
from atoll.instruments.sim.scenario import LearnerSpec, Scenario, SimFault

NAMES = learner_names(8)
FILE = """
step_ms = 500
jitter = 0.1
up_mbit = 100

[[learner]]
who = "4-7"
step_ms = 590

[[learner]]
who = [0, 7]
latency_ms = 80

[[fault]]
kind = "slow"
target = "learner-2"
at = "50%"
lasts = "10%"
amount = 4

[[fault]]
kind = "kill"
target = "learner-1"
at = "30s"
lasts = "60s"

[[extra]]
learners = 2
from = "25%"
until = "75%"
step_ms = 250
"""


def test_a_file_says_who_is_how_fast(tmp_path: Path) -> None:
    file = tmp_path / "world.toml"
    file.write_text(FILE)
    learners = LabScenario.load(file).learners(8, 4096)
    assert [one.step_ns for one in learners] == [500_000_000] * 4 + [590_000_000] * 4
    assert [one.latency_ns for one in learners] == [80_000_000, *[5_000_000] * 6, 80_000_000]
    assert {(one.tokens, one.jitter, one.up_bits_per_s, one.down_bits_per_s) for one in learners} == {
        (4096, 0.1, 1e8, 0.0)
    }


def test_a_learner_may_lie_all_along() -> None:
    learners = LabScenario.from_values({"learner": [{"who": 1, "lies": "flip"}]}).learners(3, 1)
    assert [one.lies for one in learners] == ["", "flip", ""]


def test_a_file_says_what_happens_when(tmp_path: Path) -> None:
    file = tmp_path / "world.toml"
    file.write_text(FILE)
    scenario = LabScenario.load(file)
    assert scenario.faults(NAMES, 400.0, 0) == (
        SimFault("kill", "learner-1", 30.0, 60.0),
        SimFault("join", "guest-0", 100.0, 200.0),
        SimFault("join", "guest-1", 100.0, 200.0),
        SimFault("slow", "learner-2", 200.0, 40.0, 4.0),
    )
    guests = scenario.guests(64)
    assert {name: (spec.step_ns, spec.tokens) for name, spec in guests.items()} == {
        "guest-0": (250_000_000, 64),
        "guest-1": (250_000_000, 64),
    }


def test_nothing_said_is_a_calm_world() -> None:
    scenario = LabScenario.from_values({})
    assert scenario.faults(NAMES, 100.0, 0) == () and scenario.guests(16) == {}
    assert len(set(scenario.learners(8, 16))) == 1
    assert scenario.seconds(8, 100) == pytest.approx(100.0)


def test_the_nominal_length_counts_what_all_do_together() -> None:
    scenario = LabScenario.from_values({"learner": [{"who": 1, "step_ms": 4000}]})
    # 2 learners and 10 steps each are 20 steps, of which 1.25 are done in a second.
    assert scenario.seconds(2, 10) == pytest.approx(16.0)


def test_guests_of_faults_and_extras_have_names_of_their_own() -> None:
    join = {"kind": "join", "target": "guest-0", "at": 1, "lasts": 5}
    scenario = LabScenario.from_values({"fault": [join], "extra": [{"learners": 2}], "step_ms": 700})
    faults = scenario.faults(NAMES, 60.0, 0)
    assert sorted(fault.target for fault in faults) == ["guest-0", "guest-1", "guest-2"] == sorted(scenario.guests(1))
    assert all(fault.kind == "join" for fault in faults)
    staying = next(fault for fault in faults if fault.target == "guest-1")
    assert staying.at_s == 0.0 and staying.lasts_s > 1e6, "without `until` they stay"


def test_the_simulator_takes_what_a_scenario_gives() -> None:
    scenario = LabScenario.from_values({"failures": {"every": "50%", "down": "5%"}, "extra": [{"from": "10%"}]})
    faults = scenario.faults(learner_names(3), 200.0, 1)
    Scenario(1, SyncConfig(fragments=2, learners_expected=3), scenario.learners(3, 16), 200.0, faults)


# ---------------------------------------------------------------- failures


def failures(every: Any, down: Any) -> LabScenario:
    return LabScenario.from_values({"failures": {"every": every, "down": down}})


def test_failures_come_as_often_and_last_as_long_as_said() -> None:
    seconds = 150_000.0
    faults = failures("10m", "60s").faults(NAMES, seconds, 3)
    within = [fault for fault in faults if fault.at_s < seconds]
    assert {(fault.kind, fault.target) for fault in faults} == {("kill", name) for name in NAMES}
    expected = 8 * seconds / 660.0
    assert len(within) == pytest.approx(expected, abs=4 * expected**0.5), "a Poisson count"
    assert fmean(fault.lasts_s for fault in within) == pytest.approx(60.0, rel=0.1)
    assert (
        faults == failures("10m", "60s").faults(NAMES, seconds, 3) != failures("10m", "60s").faults(NAMES, seconds, 4)
    )


def test_a_learner_does_not_fail_while_it_is_down() -> None:
    faults = failures(10.0, 20.0).faults(NAMES, 1000.0, 0)
    for name in NAMES:
        mine = [fault for fault in faults if fault.target == name]
        assert all(a.at_s + a.lasts_s <= b.at_s + 0.002 for a, b in pairwise(mine))


def test_another_learner_changes_nobody_elses_failures() -> None:
    few, many = (failures("5m", "30s").faults(learner_names(count), 3000.0, 0) for count in (2, 8))
    assert few == tuple(fault for fault in many if fault.target in ("learner-0", "learner-1"))


def test_failures_may_be_shares_of_the_run() -> None:
    faults = failures("400%", "5%").faults(NAMES, 1000.0, 0)
    assert 0 < len([fault for fault in faults if fault.at_s < 1000.0]) < 8


@pytest.mark.parametrize("lasts_s", [0.0, 40.0])
def test_a_killed_learner_stays_down_so_long(lasts_s: float) -> None:
    config = SyncConfig(fragments=1, learners_expected=2)
    kill = SimFault("kill", "learner-1", 20.0, lasts_s)
    report = run_scenario(Scenario(1, config, (LearnerSpec(), LearnerSpec()), 120.0, (kill,)), tracing=True)
    assert not report.violations
    after = [float(line.split()[0]) for line in report.lines if "learner-1#" in line and "Stepped" in line]
    back_s = next(moment for moment in after if moment > 20.0)
    assert 20.0 + (lasts_s or 3.0) < back_s < 20.0 + (lasts_s or 3.0) + 10.0


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"step_ms": 0}, "step_ns must be"),
        ({"step_ms": -1}, "step_ms must be a number from 0"),
        ({"step_ms": float("nan")}, "step_ms must be"),
        ({"step_ms": "fast"}, "step_ms must be"),
        ({"step_ms": 10**400}, "step_ms must be"),
        ({"jitter": 3}, "jitter must be"),
        ({"latency_ms": -5}, "latency_ms"),
        ({"up_mbit": -1}, "up_mbit"),
        ({"loss": 2}, "loss"),
        ({"learner": {"who": 1}}, r"\[\[learner\]\] in double brackets"),
        ({"learner": [{"step_ms": 3}]}, "number 1: it does not say whom"),
        ({"learner": [{"who": 1, "pace": 3}]}, "unknown key 'pace'"),
        ({"learner": [{"who": "7-4"}]}, "who must be"),
        ({"learner": [{"who": -1}]}, "who must be"),
        ({"learner": [{"who": True}]}, "who must be"),
        ({"learner": [{"who": "all"}]}, "who must be"),
        ({"learner": [{"who": 10**6}]}, "who must be"),
        ({"learner": [{"who": 1, "step_ms": 0}]}, "step_ns"),
        ({"fault": [5]}, "table of its own"),
        ({"fault": [{"kind": "flood", "target": "learner-0", "at": 1}]}, "number 1: fault must be one of"),
        ({"fault": [{"kind": "kill", "target": "learner-0"}]}, "it has no at"),
        ({"fault": [{"kind": "kill", "target": "learner-0", "at": -1}]}, "at is -1"),
        ({"fault": [{"kind": "kill", "target": "learner-0", "at": 1, "lasts": -1}]}, "lasts is -1"),
        ({"fault": [{"kind": "kill", "target": "syncer", "at": 1, "lasts": 1}]}, "leave out lasts"),
        ({"fault": [{"kind": "cut", "target": "learner-0", "at": 1, "lasts": 1}]}, "an instant"),
        ({"failures": {"every": "10m"}}, "it has no down"),
        ({"failures": {"every": 0, "down": 1}}, "above 0"),
        ({"failures": {"every": -1, "down": 1}}, "every is -1"),
        ({"failures": {"every": "often", "down": 1}}, "every must be a time"),
        ({"failures": 3}, "table of settings"),
        ({"learner": [{"who": 1, "lies": "flop"}]}, "lies must be one of .*flip.*did you mean flip"),
        ({"lies": 3}, "lies must be one of"),
        ({"extra": [{"learners": 0}]}, "learners must be"),
        ({"extra": [{"from": "soon"}]}, "must be a time"),
        ({"extra": [{"count": 3}]}, "unknown key 'count'"),
        (
            {"fault": [{"kind": "kill", "target": "learner-0", "at": -5}]},
            "at is -5; use 0 s to 366 days, or 0% to",
        ),
        ({"fault": [{"kind": "kill", "target": "learner-0", "at": "500%"}]}, "at is '500%'; use 0 s to 366 days"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LabScenario.from_values(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learner": [{"who": 4}]}, "learner 4, and the run has 4 learners"),
        ({"fault": [{"kind": "kill", "target": "learner-4", "at": 1}]}, "this run has no learner-4"),
        ({"fault": [{"kind": "kill", "target": "learner-0", "at": "1h"}]}, "outside this run"),
        (
            {"fault": [{"kind": "kill", "target": "learner-0", "at": 1, "lasts": "1h"}]},
            r"\[\[fault\]\] number 1: lasts is '1h', outside this run",
        ),
        ({"failures": {"every": 0.001, "down": 0.001}}, "less often"),
        ({"extra": [{"from": "50%", "until": "50%"}]}, "must come after"),
        ({"extra": [{"from": "1h"}]}, "would come at 3600 s, and the run has 100 s"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_run_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LabScenario.from_values(values).check(4, 100)


@pytest.mark.parametrize("count", [0, -1, 10**9])
def test_a_number_of_learners_that_is_none(count: int) -> None:
    with pytest.raises(ConfigError, match="learners must be"):
        LabScenario.from_values({}).learners(count, 1)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .*docs/LAB.md"):
        LabScenario.load(tmp_path / "none.toml")
    for number, data in enumerate((b"step_ms = ", b"\xff\xfe", b"x = 0x" + b"f" * 20000)):
        (tmp_path / f"{number}.toml").write_bytes(data)
        with pytest.raises(ConfigError, match="not valid TOML"):
            LabScenario.load(tmp_path / f"{number}.toml")
    (tmp_path / "wrong.toml").write_text("[[learner]]\nwho = 'x'")
    with pytest.raises(ConfigError, match=r"wrong.toml: \[\[learner\]\] number 1: who"):
        LabScenario.load(tmp_path / "wrong.toml")


def test_a_world_that_says_what_is_usual_is_the_usual_one() -> None:
    assert plain_world({"step_ms": 1000, "jitter": 0, "fault": []}) == {}
    assert plain_world({"step_ms": 500}) == {"step_ms": 500.0}
