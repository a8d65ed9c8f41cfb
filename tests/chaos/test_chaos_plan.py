"""Faults as data: what a fault may be, what is drawn, and plans in files."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.instruments.chaos import (
    KINDS,
    Fault,
    StormPlan,
    chaos_plan,
    draw_faults,
    dump_plan,
    learner_names,
    load_plan,
    storm_plan,
)

DRAWN = {name for name, kind in KINDS.items() if kind.drawn}


def down_learners(faults: tuple[Fault, ...], at_s: float) -> set[str]:
    """Learners that a plan holds down at a moment, counting only what the fault itself says."""
    kinds = ("kill", "freeze", "away", "partition")
    return {f.target for f in faults if f.kind in kinds and f.target != "syncer" and f.at_s <= at_s <= f.end_s}


def overlap(one: Fault, other: Fault) -> bool:
    return one.at_s <= other.end_s and other.at_s <= one.end_s


def test_the_table_has_exactly_the_promised_kinds() -> None:
    instants = {"kill", "cut"}
    assert set(KINDS) == instants | {
        *("freeze", "slow", "away", "join", "partition", "delay", "limit", "stall", "corrupt", "disk_full", "poison"),
        "lie",
    }
    for name, kind in KINDS.items():
        assert kind.lasting is (kind.lasts_s is not None) is (name not in instants)
        if kind.amount:
            assert kind.amount_unit
            assert kind.amount_allowed[0] <= kind.amount[0] < kind.amount[1] <= kind.amount_allowed[1]


@pytest.mark.parametrize("learners", range(2, 9))
def test_the_demo_kills_one_learner_slows_another_and_kills_the_syncer(learners: int) -> None:
    kill, slow, last = chaos_plan("demo", learners)
    assert (kill.kind, slow.kind, slow.amount) == ("kill", "slow", 4.0)
    assert kill.target != slow.target
    assert {kill.target, slow.target} <= set(learner_names(learners))
    assert kill.at_progress < slow.at_progress < last.at_progress < slow.until_progress < 1.0
    assert (last.kind, last.target) == ("kill", "syncer")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "flood"}, "fault must be one of kill, freeze"),
        ({"kind": "slow", "target": "syncer", "lasts_s": 5, "amount": 2.0}, "takes no steps"),
        ({"kind": "delay", "target": "syncer", "lasts_s": 5, "amount": 2.0}, "cannot hit the syncer; name a learner"),
        ({"kind": "disk_full", "lasts_s": 5}, "can only hit the syncer"),
        ({"kind": "join", "lasts_s": 5}, "must be called guest-N"),
        ({"target": ""}, "a target has 1 to 200 printable"),
        ({"target": "a\nb"}, "a target has 1 to 200 printable"),
        ({"at_s": -1.0}, "either in seconds"),
        ({"at_progress": 0.5}, "either in seconds"),
        ({"at_s": -2.0}, "at_s must be between 0"),
        ({"at_s": float("nan")}, "at_s must be between 0"),
        ({"at_s": -1.0, "at_progress": 1.5}, "must begin between 0 and 1 of the run"),
        ({"lasts_s": 5.0}, "it is an instant"),
        ({"kind": "freeze"}, "it lasts; give either"),
        ({"kind": "freeze", "lasts_s": -5.0}, "lasts_s must be above 0"),
        ({"kind": "freeze", "lasts_s": float("inf")}, "lasts_s must be above 0"),
        ({"kind": "freeze", "until_progress": 0.5}, "until_progress must be above at_progress"),
        ({"kind": "freeze", "at_s": -1.0, "at_progress": 0.5, "until_progress": 0.4}, "until_progress must be above"),
        ({"amount": 3.0}, "it has no amount"),
        ({"kind": "slow", "lasts_s": 5.0, "amount": 1.0}, "must be between 1.01 and 1000"),
        ({"kind": "limit", "lasts_s": 5.0, "amount": float("nan")}, "kbit/s"),
        ({"direction": "up"}, "it has no directions"),
        ({"kind": "partition", "lasts_s": 5.0, "direction": "left"}, "use both, up, down"),
        ({"variant": "nan"}, "use no variant"),
        ({"kind": "poison", "lasts_s": 5.0}, "use one of nan, huge, flip"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Fault(**({"kind": "kill", "target": "learner-0", "at_s": 3.0} | fields))  # type: ignore[arg-type]


def test_moments_may_be_mixed() -> None:
    fault = Fault("freeze", "learner-0", at_progress=0.3, lasts_s=10.0)
    assert (fault.at_s, fault.at_progress, fault.lasts_s) == (-1.0, 0.3, 10.0)
    assert Fault("limit", "a", at_s=1, lasts_s=2, amount=500, direction="up").label() == "limit a 500 kbit/s up"


def test_a_storm_has_every_kind_and_every_form() -> None:
    plan = storm_plan(seed=7, learners=4, minutes=20.0)
    counts = Counter(fault.kind for fault in plan)
    assert len(plan) == 60 and set(counts) == DRAWN and min(counts.values()) >= 3
    assert {fault.target == "syncer" for fault in plan if fault.kind == "kill"} == {True, False}
    assert {fault.target == "syncer" for fault in plan if fault.kind == "freeze"} == {True, False}
    assert {fault.variant for fault in plan if fault.kind == "poison"} == {"nan", "huge", "flip"}
    guests = [fault.target for fault in plan if fault.kind == "join"]
    assert guests == [f"guest-{number}" for number in range(len(guests))]
    assert chaos_plan("storm", 4, seed=7, minutes=20.0) == plan != storm_plan(seed=8, learners=4, minutes=20.0)


def test_lies_are_listed_and_never_drawn_and_one_learner_may_tell_several(tmp_path: Path) -> None:
    assert set(KINDS) - DRAWN == {"lie"}
    lie = "[[fault]]\nkind = 'lie'\ntarget = 'learner-1'\nat = 0\nlasts = '100%'\namount = 5\nvariant = '{}'\n"
    path = tmp_path / "plan.toml"
    path.write_text(lie.format("flipped") + lie.format("tokens"))
    plan = load_plan(path, learners=2, seconds=60.0)
    assert [(fault.kind, fault.variant) for fault in plan.faults] == [("lie", "flipped"), ("lie", "tokens")]
    path.write_text(lie.format("flipped") * 2)
    with pytest.raises(ConfigError, match="falls together"):
        load_plan(path, learners=2, seconds=60.0)
    path.write_text(lie.format("crowd"))
    with pytest.raises(ConfigError, match="variant"):
        load_plan(path, learners=2, seconds=60.0)


def test_few_faults_are_still_of_different_kinds() -> None:
    for count in range(len(DRAWN) + 1):
        drawn = draw_faults(random.Random(count), learners=["a", "b"], seconds=600, count=count, down_max=1)
        assert len({fault.kind for fault in drawn}) == len(drawn) == count


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**64),
    learners=st.integers(1, 9),
    seconds=st.floats(1.0, 20_000.0),
    count=st.integers(0, 80),
    kinds=st.lists(st.sampled_from(list(KINDS)), min_size=1, unique=True),
    down_max=st.integers(0, 5),
)
def test_drawn_faults_keep_the_rules(
    seed: int, learners: int, seconds: float, count: int, kinds: list[str], down_max: int
) -> None:
    names = learner_names(learners)

    def draw() -> tuple[Fault, ...]:
        return draw_faults(
            random.Random(seed), learners=names, seconds=seconds, count=count, kinds=kinds, down_max=down_max
        )

    faults = draw()
    assert draw() == faults
    assert len(faults) <= count and [f.at_s for f in faults] == sorted(f.at_s for f in faults)
    for fault in faults:
        kind = KINDS[fault.kind]
        assert fault.kind in kinds
        assert 0.05 * seconds <= fault.at_s <= 0.90 * seconds and fault.end_s <= 0.95 * seconds + 1e-9
        assert fault.lasts_s <= (kind.lasts_s[1] if kind.lasts_s else 0.0)
        assert fault.target in names or fault.target == "syncer" or fault.kind == "join"
        if kind.amount:
            assert kind.amount[0] <= fault.amount <= kind.amount[1]
        down = down_learners(faults, fault.at_s)
        assert len(down) <= max(0, min(down_max, learners - 1))
    for index, one in enumerate(faults):
        for other in faults[index + 1 :]:
            if not overlap(one, other):
                continue
            assert (one.kind, one.target) != (other.kind, other.target)
            if one.target == other.target:
                assert one.target != "syncer"
                assert not (KINDS[one.kind].down and KINDS[other.kind].down)
            assert not one.kind == other.kind == "poison"


def test_moments_are_spread_over_the_run() -> None:
    plan = storm_plan(seed=1, learners=4, minutes=20.0)
    quarters = Counter(int((fault.at_s / 1200.0 - 0.05) / 0.85 * 4) for fault in plan)
    assert all(quarters[quarter] >= 8 for quarter in range(4))


def test_a_crowded_run_gets_fewer_faults_instead_of_broken_rules() -> None:
    drawn = draw_faults(random.Random(1), learners=["a", "b"], seconds=60, count=500, kinds=["kill"], down_max=1)
    assert 10 < len(drawn) < 500
    alone = draw_faults(random.Random(1), learners=["a"], seconds=60, count=9, kinds=["partition"], down_max=1)
    assert alone == ()


def test_drawing_does_not_depend_on_the_hash_seed() -> None:
    script = (
        "from atoll.instruments.chaos import dump_plan, storm_plan; "
        "print(dump_plan(storm_plan(seed=3, learners=5, minutes=9)))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] and outputs[0].count("[[fault]]") == 27


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": -1}, "a plan has 0 to 10000 faults"),
        ({"count": 10**6}, "a plan has 0 to 10000 faults"),
        ({"kinds": []}, "no kinds of faults"),
        ({"kinds": ["kill", "flood"]}, "unknown kind of fault 'flood'; use some of kill"),
        ({"seconds": 0.0}, "a run of 1 to"),
        ({"seconds": float("nan")}, "a run of 1 to"),
        ({"learners": []}, "ids of the run's learners"),
        ({"learners": ["a", "a"]}, "each once"),
        ({"down_max": -1}, "down_max must be 0 or more"),
    ],
)
def test_what_cannot_be_drawn_is_refused(change: dict[str, object], message: str) -> None:
    arguments = {"learners": ["a", "b"], "seconds": 60.0, "count": 3, "down_max": 1} | change
    with pytest.raises(ConfigError, match=message):
        draw_faults(random.Random(0), **arguments)  # type: ignore[arg-type]


def test_storms_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"chaos storm kills one learner.*at least 2"):
        chaos_plan("storm", 1)
    for minutes in (0.0, -1.0, float("inf"), 1e9):
        with pytest.raises(ConfigError, match="a storm lasts more than 0"):
            storm_plan(seed=1, learners=4, minutes=minutes)


# -- plans in files


def load(tmp_path: Path, text: str, *, learners: int = 4, seconds: float = 600.0) -> StormPlan:
    path = tmp_path / "storm.toml"
    path.write_text(text)
    return load_plan(path, learners=learners, seconds=seconds)


def test_a_file_draws_and_lists(tmp_path: Path) -> None:
    plan = load(
        tmp_path,
        """
        seed = 7
        faults = 20
        kinds = ["kill", "join", "cut"]

        [[fault]]
        kind = "partition"
        target = "learner-1"
        at = "30%"
        lasts = "1.5m"
        direction = "up"

        [[fault]]
        kind = "slow"
        target = "learner-0"
        at = 90
        lasts = "500ms"
        amount = 4
        detail = "a slow moment"

        [[fault]]
        kind = "join"
        target = "guest-0"
        at = "400s"
        lasts = "10%"
        """,
    )
    assert plan.seed == 7 and len(plan.faults) == 23
    assert [fault.at_s for fault in plan.faults] == sorted(fault.at_s for fault in plan.faults)
    partition = Fault("partition", "learner-1", at_s=180.0, lasts_s=90.0, direction="up", detail=KINDS["partition"].doc)
    assert partition in plan.faults
    assert Fault("slow", "learner-0", at_s=90.0, lasts_s=0.5, amount=4.0, detail="a slow moment") in plan.faults
    assert Fault("join", "guest-0", at_s=400.0, lasts_s=60.0, detail=KINDS["join"].doc) in plan.faults
    # What is drawn keeps the rules together with what is listed.
    assert {f.kind for f in plan.faults} == {"kill", "join", "cut", "partition", "slow"}
    assert len({f.target for f in plan.faults if f.kind == "join"}) == sum(f.kind == "join" for f in plan.faults)
    assert not [f for f in plan.faults if f.kind == "kill" and f.target == "learner-1" and overlap(f, partition)]


def test_an_almost_empty_file_is_the_usual_storm(tmp_path: Path) -> None:
    assert load(tmp_path, "seed = 5").faults == storm_plan(seed=5, learners=4, minutes=10.0)
    assert load(tmp_path, "").faults == storm_plan(seed=0, learners=4, minutes=10.0)
    assert load(tmp_path, "faults = 0").faults == ()
    assert load(tmp_path, '[[fault]]\nkind = "cut"\ntarget = "learner-0"\nat = "5s"').faults == (
        Fault("cut", "learner-0", at_s=5.0, detail=KINDS["cut"].doc),
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_dumped_plan_loads_as_the_same_plan(tmp_path: Path, seed: int) -> None:
    plan = StormPlan(storm_plan(seed=seed, learners=4, minutes=10.0), seed)
    assert load(tmp_path, dump_plan(plan)) == plan
    odd = Fault("cut", 'quote " and \\ \u00e9', at_s=1 / 3, detail="tab\tand\nline \x7f \U0001f300")
    path = tmp_path / "odd.toml"
    path.write_text(dump_plan([odd]), encoding="utf-8")
    assert load_plan(path, learners=[odd.target], seconds=600).faults == (odd,)
    assert load(tmp_path, dump_plan(())).faults == ()


def test_a_plan_in_tokens_has_no_file() -> None:
    with pytest.raises(ConfigError, match="needs moments in time"):
        dump_plan(chaos_plan("demo", 4))


FAULT = '[[fault]]\nkind = "cut"\ntarget = "learner-0"\nat = "5s"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = ", "not a TOML file"),
        ("seed = 1\nspeed = 3", r"unknown key 'speed'; did you mean seed\? use seed, faults, kinds, fault"),
        ('[[fault]]\nkind = "kill"\ntargt = "syncer"', r"unknown key 'targt'; did you mean target\?"),
        ('seed = "7"', "seed must be a whole number"),
        ("seed = -1", "seed must be a whole number"),
        ("faults = 1.5", "faults must be a whole number from 0 to 10000"),
        ("faults = true", "faults must be a whole number"),
        ('kinds = "kill"', "kinds must be a list of names"),
        ('kinds = ["flood"]', "unknown kind of fault 'flood'"),
        ('[fault]\nkind = "kill"', "double brackets"),
        ("fault = [1]", "number 1: a fault is a table"),
        (FAULT + FAULT.replace("cut", "flood"), r"\[\[fault\]\] number 2: fault must be one of"),
        (FAULT.replace("learner-0", "learner-4"), "no learner-4; use one of learner-0, learner-1, .*syncer"),
        (FAULT.replace('"5s"', '"601s"'), "outside this run of 600 s"),
        (FAULT.replace('"5s"', '"101%"'), "outside this run"),
        (FAULT.replace('"5s"', "-3"), "outside this run"),
        (FAULT.replace('"5s"', "nan"), "outside this run"),
        (FAULT.replace('"5s"', '"soon"'), 'must be a time such as "90s"'),
        (FAULT.replace('"5s"', '"5"'), 'must be a time such as "90s"'),
        (FAULT.replace('"5s"', "[5]"), 'must be a time such as "90s"'),
        (FAULT.replace('"5s"', "true"), 'must be a time such as "90s"'),
        (FAULT.replace('at = "5s"', ""), 'it has no at; add a line such as at = "90s"'),
        (FAULT + 'lasts = "3s"', "it is an instant"),
        (FAULT + "amont = 3", "unknown key 'amont'"),
        (FAULT + 'amount = "3"', "amount must be a number"),
        (FAULT + "variant = 3", "variant must be text in quotes"),
        (FAULT.replace("cut", "freeze"), 'this kind lasts; add a line such as lasts = "30s"'),
        (FAULT.replace("cut", "freeze") + "lasts = -4", "outside this run"),
        (
            FAULT.replace("cut", "freeze").replace('"5s"', '"99%"') + 'lasts = "20s"',
            "ends at 614 s and the run",
        ),
        (FAULT + FAULT, "number 2: cut on learner-0 falls together with number 1"),
    ],
)
def test_a_bad_file_is_refused_and_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, text)
    assert "storm.toml" in str(caught.value)


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_plan(tmp_path / "missing.toml", learners=2, seconds=60)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_plan(tmp_path, learners=2, seconds=60)
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00" * 100)
    with pytest.raises(ConfigError, match="not a TOML file"):
        load_plan(path, learners=2, seconds=60)
    path.write_bytes(b"#" * 5_000_000)
    with pytest.raises(ConfigError, match="at most 4000000 bytes"):
        load_plan(path, learners=2, seconds=60)
    path.write_text("x = " + "[" * 100_000)
    with pytest.raises(ConfigError, match="not a TOML file"):
        load_plan(path, learners=2, seconds=60)
