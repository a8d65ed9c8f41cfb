"""`atoll plan` as a user meets it: tables, JSON, job files, saved settings that other commands take, exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from said import Command, command

from atoll.app import main
from atoll.core.config import SyncConfig
from atoll.launch import run_config, train_config
from atoll.launch.options import read_config_file

JOB = ("--parameters", "1B", "--learners", "4", "--step-s", "1", "--up-gbit", "1", "--tokens-per-step", "500k")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command("plan", monkeypatch=monkeypatch, capsys=capsys)


def test_a_plan_for_people(plan: Command) -> None:
    said = plan(*JOB, "--chips", "4k")
    assert said.code == 0
    for text in (
        "sync-every (H)",
        "uplink of each learner",
        "grace window",
        "memory",
        "synchronous DiLoCo",
        "It fits.",
    ):
        assert text in said.stdout
    assert "Failures are left out" not in said.stdout


def test_a_plan_for_programs(plan: Command) -> None:
    said = plan(*JOB, "--json")
    answer = said.last
    assert (said.code, len(said.stdout.splitlines())) == (0, 1)
    assert answer["fits"] and answer["binding"] is None
    assert answer["settings"]["sync_every"] == 8
    assert answer["gbit_s"]["syncer_in"] == pytest.approx(4 * answer["gbit_s"]["learner_up"])
    assert {method["name"] for method in answer["methods"]} >= {"data-parallel, elastic", "Atoll, this plan"}
    assert answer["round"]["slack_s"] == pytest.approx(answer["round"]["has_s"] - answer["round"]["takes_s"])


def test_what_follows_from_failures_is_null_without_chips(plan: Command) -> None:
    without, known = plan(*JOB, "--json").last, plan(*JOB, "--chips", "4k", "--json").last
    assert {method["goodput"] for method in without["methods"]} == {None}
    assert (without["quorum"]["chance"], without["quorum"]["up"], without["job"]["syncer_gbit"]) == (None, None, None)
    assert all(0.9 < method["goodput"] < 1.0 for method in known["methods"])
    assert known["quorum"]["up"] < 4.0


def test_what_is_written_at_intervals(plan: Command) -> None:
    """7B parameters, 12 bytes each: 84 GB, in half of the time of a disk of 0.4 GB/s."""
    job = ("--parameters", "7e9", "--learners", "6", "--up-gbit", "1", "--step-s", "3", "--disk-gbyte-s", "0.4")
    said = plan(*job, "--json")
    disk = said.last["syncer"]["disk_bytes"]
    assert disk["per_interval"] == pytest.approx(84e9, rel=1e-4)
    assert disk["per_s"] == pytest.approx(disk["per_interval"] / 421.0)
    assert "421 s" in said.stderr and "on average: all state, 84 GB, every 421 s" in said.stderr
    assert "per commit" not in said.stderr
    assert "The fullest part: uplink of each learner" in said.stderr
    short = plan(*job, "--durability", "interval", "--durability-interval", "36", "--disk-gbyte-s", "2", "--json")
    assert "the state that has changed, 42 GB, every 36 s" in short.stderr
    assert "The fullest part: syncer's disk" in short.stderr  # the user's own interval


def test_fragments_0_is_said_to_leave_them_open(plan: Command) -> None:
    said = plan(*JOB, "--fragments", "0")
    assert said.code == 0 and "0 was given, which leaves it open" in said.stdout
    assert "leaves it open" not in plan(*JOB).stdout


def test_learners_of_unequal_speed_are_named(plan: Command) -> None:
    said = plan(
        *JOB[:2], "--step-s", "3", "--region", "a:2:9", "--region", "b:4:9:50:9", "--sync-every", "40", "--json"
    )
    assert "3 s to 9 s per step" in said.stderr
    assert "the fastest do 120 local steps and the slowest 40" in said.stderr
    assert (said.last["round"]["steps_fastest"], said.last["round"]["steps_slowest"]) == (120.0, 40.0)
    assert "not equally fast" not in plan(*JOB).stdout


def test_a_plan_that_misses_its_own_bandwidth(plan: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    said = plan(*JOB, "--sync-every", "24", "--codec-up", "fp32", "--json", "--save", str(file))
    assert said.code == 1
    assert said.last["binding"]["name"] == "uplink of each learner"
    assert any("--codec-up int4" in text for text in said.last["binding"]["would_fit"])
    assert "The binding limit: uplink of each learner needs 1.33 Gbit/s and has 1 Gbit/s" in said.stderr
    assert not file.exists()


def test_saved_settings_are_taken_by_run_and_by_train(plan: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    said = plan(*JOB, "--disk-gbyte-s", "0.1", "--grace-cap", "0.5", "--json", "--save", str(file))
    assert said.code == 0
    values = read_config_file(file)
    sync = run_config(values).sync
    trained, notes = train_config(values)
    expected = {**said.last["settings"], "learners_expected": 4}
    durability = {name: expected.pop(name) for name in ("durability", "durability_interval")}
    expected["grace_cap_steps"] = expected.pop("grace_cap")
    assert sync == SyncConfig(**expected)
    assert trained.sync.sync_every == sync.sync_every and not notes
    assert run_config(values).durability.options().items() >= durability.items()


def test_atoll_run_reads_the_saved_file(
    plan: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real command, up to the command that is missing: it says first what the settings come to."""
    file = tmp_path / "plan.toml"
    plan(*JOB, "--save", str(file))
    monkeypatch.setattr(sys, "argv", ["atoll", "run", "--config", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert "quorum 50% = 2 of 4" in err and "8 fragments, each every 8 steps" in err
    assert "needs the learners' command" in err


def test_a_job_file_and_options_that_win(plan: Command, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        'parameters = "2B"\nstep-s = 2.0\nsync_every = 30\ngrace_cap_steps = 0.5\n'
        '[[regions]]\nname = "east"\nlearners = 2\ngbit = 4\n'
        '[[regions]]\nname = "west"\nlearners = 1\nup_gbit = 2\ndown_gbit = 8\n'
    )
    answer = plan("--job", str(file), "--json").last
    assert (answer["job"]["learners"], answer["settings"]["sync_every"], answer["settings"]["grace_cap"]) == (
        3,
        30,
        0.5,
    )
    answer = plan("--job", str(file), "--sync-every", "48", "--region", "only:5:9:10", "--json").last
    assert (answer["job"]["learners"], answer["settings"]["sync_every"]) == (5, 48)
    assert [region["name"] for region in answer["job"]["regions"]] == ["only"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--parameters, --learners, --step-s"),
        ((*JOB, "--quorum", "9"), "quorum 9 is above the 4 learners"),
        ((*JOB, "--step-s", "nan"), "step_s must be a number"),
        ((*JOB, "--step-s", "-1"), "step_s must be a number"),
        ((*JOB, "--learners", "0"), "learners must be a whole number"),
        ((*JOB, "--region", "a:1:1"), "links are given twice"),
        ((*JOB, "--durability-interval", "soon"), "durability_interval must be a time"),
        (("--job", "no-such-file.toml"), "cannot read the settings file"),
        ((*JOB, "--learners", "2000", "--save", "plan.toml"), "the plan itself is fine, but atoll run"),
        ((*JOB, "--save", "no/such/folder/plan.toml"), "give a file in a folder that exists"),
        ((*JOB, "--up-gbit", "0"), "up_gbit must be positive"),
        ((*JOB, "--down-gbit", "0"), "down_gbit must be positive"),
        ((*JOB, "--syncer-gbit", "0"), "syncer_gbit must be positive"),
        ((*JOB, "--tokens-per-step", "0"), "tokens_per_step must be positive"),
        ((*JOB[:6], "--region", "a:4:1:50:0"), "region 'a': step_s must be positive"),
        ((*JOB, "--parameters", "7e9B"), "parameters must be a number such as"),
        (("--published", "--learners", "4"), "--published is about the published tables"),
    ],
)
def test_bad_input_is_one_clear_message(
    plan: Command, arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = plan(*arguments)
    assert said.code == 2
    assert message in said.stderr.replace("\n", " ")
    assert "Traceback" not in said.stderr


def test_unknown_names_in_a_job_file(plan: Command, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("parameters = 5\nspeed = 3\n")
    said = plan("--job", str(file))
    assert said.code == 2 and "unknown setting 'speed'" in said.stderr


def test_the_published_tables(plan: Command) -> None:
    said = plan("--published", "--json")
    totals = {total["table"]: total["exact"] for total in said.last["agreement"]}
    assert said.code == 0
    assert totals["Streaming DiLoCo, Table 4"] == 71
    assert len(said.last["cells"]) == 120
    assert "471.5 | 390.7 (-1)" in said.stderr
    assert "71 of 75 cells are the same" in said.stderr


def test_the_published_tables_fit_80_columns(plan: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = plan("--published")
    assert "…" not in said.stdout
    for text in ("Data-Parallel", "+ overlap + FP4", "DeepSeek-V3 671B", "686.6 (-3)"):
        assert text in said.stdout


def test_help_names_every_panel(plan: Command) -> None:
    said = plan("--help")
    assert said.code == 0
    for text in ("The job", "Links and machines", "Synchronisation", "--region", "--published"):
        assert text in said.stdout


def test_the_job_of_an_answer_can_be_planned_again(plan: Command, tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    for arguments in (JOB, (*JOB[:2], "--step-s", "3", "--region", "a:2:9", "--region", "b:4:9:50:9")):
        answer = plan(*arguments, "--json").last
        file.write_text(json.dumps(answer["job"]))
        assert plan("--job", str(file), "--json").last == answer


@pytest.mark.parametrize("file", sorted(Path(__file__).parents[2].glob("examples/plan-*.toml")), ids=lambda f: f.name)
def test_examples_can_be_planned(plan: Command, file: Path) -> None:
    assert plan("--job", str(file)).code == 0
