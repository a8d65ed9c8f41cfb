"""`atoll sim` as a user meets it: totals, traces that are the same every time, files, exit codes, clear messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from said import Command, command

from atoll.instruments.check import Bounded
from atoll.instruments.check.facts import Committed
from atoll.instruments.sim.drawing import DRAW_VERSION, draw
from atoll.instruments.sim.fuzz import run_seed
from atoll.instruments.sim.scenario import SimFault, load, to_json

QUIET_SEED, SEED = 6, 7
"""Without faults and with some; both without arrays and quick."""


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command("sim", monkeypatch=monkeypatch, capsys=capsys)


@pytest.fixture
def defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invariant that every run breaks at its second version."""

    def complain(checker: Bounded, fact: Committed) -> None:
        if fact.version == 2:
            checker.complain("a second version")

    monkeypatch.setattr(Bounded, "on_committed", complain, raising=False)


# ---------------------------------------------------------------- fuzz


def test_fuzz_adds_up_its_seeds(sim: Command) -> None:
    said = sim("fuzz", "--seeds", "3", "--first", "4", "--jobs", "1", "--json")
    assert said.code == 0, said
    assert said.stdout.count("\n") == 1, "with --json standard output is the object alone"
    total = said.last
    assert total["seeds"] == 3 and total["violations"] == 0 and total["failing_seeds"] == []
    drawn = [fault for seed in (4, 5, 6) for fault in draw(seed).faults]
    faults = [f"lie {fault.variant}" if fault.kind == "lie" else fault.kind for fault in drawn]
    assert total["faults"] == len(faults) == sum(total["fault_kinds"].values()) and set(total["fault_kinds"]) == set(
        faults
    )
    assert total["simulated_hours"] > 0 and total["events"] > 1000 and total["commits"] > 0
    events = {seed: run_seed(seed).events for seed in (4, 5, 6)}
    assert total["events_most"] == events[total["events_most_seed"]] == max(events.values())
    assert total["events_per_s"] > 0 and total["seeds_per_s"] > 0 and total["seconds"] > 0
    assert total["draw"] == DRAW_VERSION and total["first"] == 4 and total["defaults"] == 1
    lines = {line[:30].strip(): line[31:] for line in said.stderr.splitlines()}
    assert lines["seeds"] == f"3: 4 to 6 of draw {DRAW_VERSION}" and lines["with the default settings"] == "1"
    assert lines["faults"].startswith(f"{len(faults)} of ") and lines["seeds that broke an invariant"] == "0"
    assert "no invariant was broken" in said.stderr


def test_fuzz_explains_a_failure_and_exits_with_1(sim: Command, defect: None) -> None:
    said = sim("fuzz", "--seeds", "1", "--first", str(SEED), "--jobs", "1", "--json")
    assert said.code == 1
    assert said.last["violations"] == 1 and said.last["failing_seeds"] == [SEED]
    told = said.stderr
    assert f"seed {SEED} of draw {DRAW_VERSION} broke I10: a second version" in told and "its last events:" in told
    assert told.index(f"seed {SEED} broke I10: a second version") < told.index("its last events:"), "said at once"
    assert "smaller, with 1 learners and 0 faults: I10: a second version" in told
    assert f"atoll sim run --seed {SEED} --draw {DRAW_VERSION} --trace" in told
    assert "1 seeds broke an invariant: 7" in told and "Traceback" not in told


def test_fuzz_on_two_processes_comes_to_the_same(sim: Command) -> None:
    one = sim("fuzz", "--seeds", "2", "--first", "6", "--jobs", "1", "--json").last
    two = sim("fuzz", "--seeds", "2", "--first", "6", "--jobs", "2", "--json").last
    for name in ("seeds", "violations", "simulated_hours", "faults", "fault_kinds", "events", "commits"):
        assert one[name] == two[name], name


def test_seeds_of_an_older_draw_are_what_they_were(sim: Command, tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    said = sim("run", "--seed", "1534", "--draw", "3", "--save", str(file), "--json")
    assert said.code == 0 and said.last["draw"] == 3
    kept = Path(__file__).parents[1] / "sim" / "scenarios" / "draw-3-seed-1534.json"
    assert load(file) == load(kept)
    assert sim("fuzz", "--seeds", "1", "--first", "7", "--draw", "3", "--jobs", "1", "--json").last["draw"] == 3
    for wrong in (("run", "--seed", "1"), ("fuzz", "--seeds", "1")):
        assert sim(*wrong, "--draw", "2").code == 2 and sim(*wrong, "--draw", str(DRAW_VERSION + 1)).code == 2
    assert sim("run", "--scenario", str(kept), "--draw", "3").code == 2


# ---------------------------------------------------------------- run


def test_a_run_says_what_it_was_and_what_it_came_to(sim: Command) -> None:
    said = sim("run", "--seed", str(SEED))
    scenario = draw(SEED)
    assert said.code == 0 and said.stderr == ""
    first, second, last = said.stdout.splitlines()
    assert first.startswith(f"seed {SEED} of draw {DRAW_VERSION}: {len(scenario.learners)} learners")
    assert f"{len(scenario.learners)} learners, {scenario.config.fragments} fragments" in first
    assert "simulated seconds" in second and "machine events" in second and last == "no invariant was broken"


def test_a_trace_is_the_same_bytes_every_time(sim: Command) -> None:
    one, two = (sim("run", "--seed", str(SEED), "--trace") for _ in range(2))
    assert one.code == 0 and one == two
    lines = one.stdout.splitlines()
    assert len(lines) > 1000 and any(" fault " in line for line in lines)
    moments = [float(line.split()[0]) for line in lines[:-3]]
    assert moments == sorted(moments)
    assert sim("run", "--seed", str(QUIET_SEED), "--trace").stdout != one.stdout


def test_a_saved_scenario_is_the_same_run(sim: Command, tmp_path: Path) -> None:
    file, again = tmp_path / "seed.json", tmp_path / "again.json"
    drawn = sim("run", "--seed", str(SEED), "--save", str(file), "--json")
    read = sim("run", "--scenario", str(file), "--save", str(again), "--json")
    assert drawn.code == read.code == 0 and drawn.last == read.last
    assert file.read_bytes() == again.read_bytes() and load(file) == draw(SEED)
    assert drawn.last["violations"] == [] and drawn.last["trace"] and drawn.last["lines"] > 1000
    assert drawn.last["faults"] == len(draw(SEED).faults)


def test_a_failing_run_exits_with_1_and_may_be_saved_small(sim: Command, tmp_path: Path, defect: None) -> None:
    whole, small = tmp_path / "whole.json", tmp_path / "small.json"
    said = sim("run", "--seed", str(SEED), "--save", str(whole), "--json")
    assert said.code == 1 and said.last["violations"] == ["I10: a second version"]
    assert "I10: a second version" in said.stderr
    assert load(whole) == draw(SEED)
    said = sim("run", "--scenario", str(whole), "--shrink", "--save", str(small), "--json")
    assert said.code == 1 and said.last["violations"] == ["I10: a second version"]
    assert len(load(small).learners) == 1 and load(small).faults == ()
    assert sim("run", "--scenario", str(small)).code == 1


def test_a_plan_of_chaos_replaces_the_faults(sim: Command, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[[fault]]\nkind = "kill"\ntarget = "syncer"\nat = "50%"\n')
    file = tmp_path / "seed.json"
    said = sim("run", "--seed", str(SEED), "--plan", str(plan), "--save", str(file), "--json")
    assert said.code == 0 and said.last["faults"] == 1
    (fault,) = load(file).faults
    assert (fault.kind, fault.target, fault.at_s) == ("kill", "syncer", draw(SEED).seconds / 2)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run",), "give either --seed NUMBER or --scenario FILE"),
        (("run", "--seed", "1", "--scenario", "x.json"), "give either --seed NUMBER or --scenario FILE"),
        (("run", "--seed", "-1"), "seed must be a whole number from 0"),
        (("run", "--seed", "9" * 30), "seed must be a whole number from 0"),
        (("run", "--scenario", "missing.json"), "missing.json is not a scenario"),
        (("run", "--scenario", "."), "is not a scenario"),
        (("run", "--seed", "7", "--plan", "missing.toml"), "missing.toml"),
        (("run", "--seed", "7", "--save", "no/such/folder.json"), "--save no/such/folder.json"),
        (("fuzz", "--seeds", "0"), "--seeds must be between 1 and"),
        (("fuzz", "--seeds", "-5"), "--seeds must be between 1 and"),
        (("fuzz", "--seeds", "9" * 30), "--seeds must be between 1 and"),
        (("fuzz", "--seeds", "1", "--first", "-1"), "--first must not be negative"),
        (("fuzz", "--seeds", "1", "--first", "9" * 30, "--jobs", "1"), "seed must be a whole number from 0"),
        (("fuzz", "--seeds", "1", "--jobs", "-1"), "--jobs must be between 0"),
        (("fuzz", "--seeds", "1", "--jobs", "1", "--minutes", "nan"), "--minutes must be 0"),
        (("fuzz", "--seeds", "1", "--jobs", "1", "--minutes", "-1"), "--minutes must be 0"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_wrong_arguments_are_one_clear_message(
    sim: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = sim(*arguments)
    assert said.code == 2, said
    assert words in said.stderr and said.stderr.startswith("atoll: ") and said.stderr.count("\n") == 1, said.stderr


@pytest.mark.parametrize("arguments", [("run", "--seed", "x"), ("run", "--seed", "1.5"), ("fuzz", "--seeds", "many")])
def test_a_seed_that_is_not_a_number(sim: Command, arguments: tuple[str, ...]) -> None:
    said = sim(*arguments)
    assert said.code == 2 and arguments[1] in said.stderr and "integer" in said.stderr
    assert "Traceback" not in said.stderr and said.stdout == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-100], "is not a scenario"),
        (lambda text: text.replace('"format": 1', '"format": 9'), "format 1"),
        (lambda text: text.replace('"kind": "kill"', '"kind": "flood"'), "unknown fault 'flood'"),
        (lambda text: text.replace('"target": "syncer"', '"target": "learner-77"', 1), "learner-77"),
        (lambda text: text.replace('"seconds": ', '"seconds": -'), "seconds must be a number"),
        (lambda text: "[" * 100_000, "is not a scenario"),
    ],
    ids=["truncated", "foreign", "unknown fault", "unknown learner", "negative time", "deep"],
)
def test_a_wrong_scenario_is_one_clear_message(
    sim: Command, tmp_path: Path, change: Callable[[str], str], words: str
) -> None:
    good = to_json(replace(draw(SEED), faults=(SimFault("kill", "syncer", 3.0),)))
    file = tmp_path / "scenario.json"
    file.write_text(change(good))
    assert file.read_text() != good
    said = sim("run", "--scenario", str(file))
    assert said.code == 2 and words in said.stderr and said.stderr.count("\n") == 1, said.stderr
