"""Study files: what they expand to, which runs are the same run, how they are carried out and resumed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from lab_fakes import SMALL, FakeRunner, Progress, fake_result, small_study

from atoll.core.config import SyncConfig
from atoll.errors import ConfigError
from atoll.instruments.chaos import learner_names
from atoll.instruments.lab.conduct import FAILURES_IN_A_ROW_MAX, Forecast, StudyOutcome, Watcher, conduct, pending
from atoll.instruments.lab.scenario import LabScenario
from atoll.instruments.lab.spec import LabResult, LabSpec
from atoll.instruments.lab.store import CLAIMS_SUFFIX, ResultStore, RunRecord
from atoll.instruments.lab.study import Planned, load_study, make_spec

STUDIES = Path(__file__).parents[2] / "studies"
EXAMPLES = Path(__file__).parents[2] / "examples" / "lab"


# ---------------------------------------------------------------- expansion


def test_sweeps_are_all_combinations_seed_by_seed(tmp_path: Path) -> None:
    study = small_study(tmp_path)
    assert len(study.planned) == 3 * (2 + 2 * 2) and study.labels == ("dp", "decoupled")
    assert [one.spec.seed for one in study.planned] == [0] * 6 + [1] * 6 + [2] * 6
    first = [(one.label, dict(one.settings)) for one in study.planned[:6]]
    assert first == [
        ("dp", {"optimizer": "adamw"}),
        ("dp", {"optimizer": "muon"}),
        ("decoupled", {"optimizer": "adamw", "learners": 2}),
        ("decoupled", {"optimizer": "adamw", "learners": 4}),
        ("decoupled", {"optimizer": "muon", "learners": 2}),
        ("decoupled", {"optimizer": "muon", "learners": 4}),
    ]
    for one in study.planned:
        assert one.spec.optimizer == one.settings["optimizer"] and one.spec.model == "nano"
        assert one.spec.learners == one.settings.get("learners", LabSpec().learners)
        assert one.label == "dp" or one.spec.config().outer_lr == 0.5
    assert study.baselines == {"decoupled": "dp"} and study.store == tmp_path / "results.jsonl"
    assert study.planned[-1].title == "decoupled optimizer=muon learners=4"


def test_settings_of_the_synchronisation_are_swept_and_laid_over_the_base(tmp_path: Path) -> None:
    text = SMALL + '[[arm]]\nlabel = "outer"\nsync.outer_momentum = [0, 0.9]\nsync.quorum = [1, "all"]\nseeds = [7]\n'
    planned = small_study(tmp_path, text).only(["outer"])
    configs = [one.spec.config() for one in planned if one.spec.optimizer == "adamw"]
    assert [(c.outer_momentum, c.quorum) for c in configs] == [(0.0, "1"), (0.0, "all"), (0.9, "1"), (0.9, "all")]
    assert {c.outer_lr for c in configs} == {0.5} and {one.spec.seed for one in planned} == {7}
    assert planned[0].settings["sync.outer_momentum"] == 0


def test_a_base_can_come_from_another_file(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "world.toml").write_text("step_ms = 250\njitter = 0.1\n")
    (tmp_path / "base" / "common.toml").write_text(
        '[base]\nmodel = "nano"\ntokens = 4096\nworld = "world.toml"\n[base.sync]\nmerge = "mean"\nouter_lr = 0.4\n'
    )
    text = 'extends = "base/common.toml"\n[base]\ntokens = 8192\n[base.sync]\nouter_lr = 0.6\n'
    text += '[[arm]]\nlabel = "a"\n[[arm]]\nlabel = "b"\nworld = { jitter = 0 }\n'
    a, b = (one.spec for one in small_study(tmp_path, text).planned)
    assert (a.model, a.tokens, a.config().merge, a.config().outer_lr) == ("nano", 8192, "mean", 0.6)
    assert a.world == {"step_ms": 250.0, "jitter": 0.1} and b.world == {"step_ms": 250.0}


def test_worlds_can_be_swept_by_their_files(tmp_path: Path) -> None:
    (tmp_path / "fast.toml").write_text("step_ms = 100\n")
    (tmp_path / "slow.toml").write_text("step_ms = 900\n")
    planned = small_study(tmp_path, '[[arm]]\nlabel = "a"\nworld = ["fast.toml", "slow.toml"]\n').planned
    assert [(one.settings["world"], one.spec.world) for one in planned] == [
        ("fast", {"step_ms": 100.0}),
        ("slow", {"step_ms": 900.0}),
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [("partial", "full"), ("partial", "scaled"), ("merge", "rda"), ("feedback_up", False), ("momentum_restart", 3)],
)
def test_a_run_does_what_its_spec_says(name: str, value: object) -> None:
    spec = make_spec({"model": "nano", "sync": {name: value}})
    assert spec.sync[name] == value == getattr(spec.config(), name)
    assert make_spec(spec.to_dict()) == spec and LabSpec.from_dict(spec.to_dict()).config() == spec.config()


def test_equal_runs_have_equal_keys_however_they_are_written() -> None:
    plain = make_spec({"model": "nano"})
    usual = SyncConfig()
    assert make_spec({"model": "nano", "sync": {"outer_lr": usual.outer_lr, "quorum": usual.quorum}}) == plain
    assert make_spec({"model": "nano", "world": {"step_ms": 1000}, "lr": 0}).key == plain.key
    assert (
        make_spec({"model": "nano", "sync": {"outer_lr": 2}}).key
        == make_spec({"model": "nano", "sync": {"outer_lr": 2.0}}).key
    )
    assert make_spec({"model": "nano", "sync": {"outer_lr": 2}}).key != plain.key
    assert make_spec({"model": "nano", "seed": 1}).key != plain.key
    later = {"pacing": "fixed", "outer": "nesterov", "robust": "off", "sizes": "confirmed", "share_max": 1.0}
    later |= {"adaptive": "off", "period_min": 4, "period_max": 64, "codec_ladder": ""}
    # These are spelled out only where they are others.
    spelled_out = {**plain.sync, **later, "learners_expected": 4, "tokens_budget": plain.tokens}
    assert spelled_out == asdict(plain.config()), "a default that changes later must change the key"
    assert make_spec({"model": "nano", "method": "dp"}).sync == {}


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no arm"),
        ("[arm]\nlabel = 'a'", "no arm"),
        ("[[arm]]\nlearners = 2", "number 1 has no label"),
        ("[[arm]]\nlabel = ''", "label must be a text"),
        ("[[arm]]\nlabel = 'a'\n[[arm]]\nlabel = 'a'", "two arms are labelled 'a'"),
        ("colour = 1\n[[arm]]\nlabel = 'a'", "unknown key 'colour'"),
        ("base = 3\n[[arm]]\nlabel = 'a'", "table of settings"),
        ("baseline = 'dp'\n[[arm]]\nlabel = 'a'", "baseline 'dp' is no arm's label"),
        ("extends = 'none.toml'\n[[arm]]\nlabel = 'a'", "none.toml cannot be read"),
        ("seeds = []\n[[arm]]\nlabel = 'a'", "seeds must be"),
        ("seeds = [1, 1]\n[[arm]]\nlabel = 'a'", "different numbers"),
        ("seeds = ['x']\n[[arm]]\nlabel = 'a'", "arm a: seed must be"),
        ("columns = 'rho'\n[[arm]]\nlabel = 'a'", "columns must be"),
        ("[[arm]]\nlabel = 'a'\nseed = 3", "one list"),
        ("[[arm]]\nlabel = 'a'\nlearners = []", "arm a: learners: a sweep"),
        ("[[arm]]\nlabel = 'a'\nlearners = [[1]]", "arm a: learners: a sweep"),
        ("[[arm]]\nlabel = 'a'\nlr = [0.01, 0.01]", "arm a: lr: the sweep .* has a value twice"),
        ("[[arm]]\nlabel = 'a'\nlearners = 0", "arm a: learners must be"),
        ("[[arm]]\nlabel = 'a'\npublished = 'much'", "arm a: published"),
        ("[[arm]]\nlabel = 'a'\ntokens = -4", "arm a: tokens must be"),
        ("[[arm]]\nlabel = 'a'\nmodel = 'huge'", "arm a: model must be one of nano"),
        ("[[arm]]\nlabel = 'a'\nlr = nan", "arm a: lr must be"),
        ("[[arm]]\nlabel = 'a'\npace = 3", "arm a: unknown setting 'pace'"),
        ("[[arm]]\nlabel = 'a'\nsync = 3", "arm a: sync must be a table"),
        ("[[arm]]\nlabel = 'a'\nsync.quorum = 9", "arm a: quorum 9 is above the 4 learners"),
        ("[[arm]]\nlabel = 'a'\nsync.pace = 9", "arm a: unknown setting 'pace'"),
        ("[[arm]]\nlabel = 'a'\nmethod = 'dp'\nsync.quorum = 1", "arm a: nothing is synchronised"),
        ("[[arm]]\nlabel = 'a'\nworld = 'none.toml'", "arm a: the scenario .*none.toml cannot be read"),
        ("[[arm]]\nlabel = 'a'\nworld = { step_ms = 0 }", "arm a: world: "),
        ("[[arm]]\nlabel = 'a'\nworld.learner = [{ who = 4 }]", "arm a: .*learner 4, and the run has 4"),
        (
            "[[arm]]\nlabel = 'a'\nlr = "
            + str([n / 1e4 for n in range(200)])
            + "\nbatch = "
            + str([4 * n for n in range(1, 99)]),
            "more than 10000 combinations",
        ),
    ],
    ids=lambda text: str(text)[:40],
)
def test_what_cannot_be_is_refused_with_its_place(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"small.toml: .*{words}"):
        small_study(tmp_path, text)


def test_an_arm_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no arm 'x'; it has dp, decoupled"):
        small_study(tmp_path).only(["x"])


@pytest.mark.parametrize("file", sorted(STUDIES.glob("*.toml")), ids=lambda file: file.stem)
def test_the_studies_of_the_repository_can_be_read(file: Path) -> None:
    study = load_study(file)
    assert study.name == file.stem and study.description and study.planned
    assert set(study.baselines.values()) <= set(study.labels)


# ---------------------------------------------------------------- carrying out


def test_a_study_runs_everything_once_and_then_nothing(tmp_path: Path) -> None:
    study, runner = small_study(tmp_path), FakeRunner()
    store = ResultStore(study.store)
    outcome = conduct(study.planned, store, runner, study=study.name)
    assert outcome == StudyOutcome(done=18) and runner.ran == [one.spec for one in study.planned]
    records = store.records()
    assert set(records) == {one.spec.key for one in study.planned}
    assert {record.study for record in records.values()} == {"small"}
    assert conduct(study.planned, store, runner) == StudyOutcome() and len(runner.ran) == 18


def test_an_interrupted_study_keeps_what_is_finished_and_goes_on(tmp_path: Path) -> None:
    study = small_study(tmp_path)
    store, first, second = ResultStore(study.store), FakeRunner(stops_after=4), FakeRunner()
    outcome = conduct(study.planned, store, first)
    assert outcome.interrupted and (outcome.done, outcome.left) == (4, 14) and len(store.records()) == 4
    assert conduct(study.planned, store, second) == StudyOutcome(done=14)
    assert first.ran + second.ran == [one.spec for one in study.planned]


def test_two_arms_that_want_the_same_run_share_it(tmp_path: Path) -> None:
    planned = small_study(tmp_path, '[[arm]]\nlabel = "a"\n[[arm]]\nlabel = "b"\nsync.overlap = 2\n').planned
    assert len(planned) == 2 and [one.label for one in pending(planned, {})] == ["a"]


def test_a_run_that_fails_does_not_cost_the_others(tmp_path: Path) -> None:
    study = small_study(tmp_path)
    runner = FakeRunner(fails=lambda spec: spec.learners == 4 and spec.seed == 1 and spec.method == "decoupled")
    outcome = conduct(study.planned, ResultStore(study.store), runner)
    assert (outcome.done, outcome.left) == (16, 0)
    assert {(one.spec.learners, one.spec.seed, reason) for one, reason in outcome.failed} == {
        (4, 1, "RuntimeError: out of memory")
    }


def test_when_nothing_works_a_study_stops(tmp_path: Path) -> None:
    study, runner = small_study(tmp_path), FakeRunner(fails=lambda spec: True)
    outcome = conduct(study.planned, ResultStore(study.store), runner)
    assert len(outcome.failed) == len(runner.ran) == FAILURES_IN_A_ROW_MAX and outcome.left == 15


def test_several_processes_share_a_study(tmp_path: Path) -> None:
    """While one is at its first run, another one comes, does all the others, and leaves that one alone."""
    study = small_study(tmp_path)
    helper, outcomes = FakeRunner(), []

    class First(FakeRunner):
        def __call__(self, spec: LabSpec, *, progress: Progress | None = None) -> LabResult:
            if not self.ran:
                outcomes.append(conduct(study.planned, ResultStore(study.store), helper))
            return super().__call__(spec, progress=progress)

    first = First()
    outcome = conduct(study.planned, ResultStore(study.store), first)
    assert outcomes == [StudyOutcome(done=17, left=1, elsewhere=1)] and outcome == StudyOutcome(done=1, left=0)
    assert len(first.ran) == 1 and len({spec.key for spec in (*first.ran, *helper.ran)}) == 18
    assert [path.name for path in study.store.parent.iterdir() if "claims" in path.name] == []


def test_a_run_whose_process_died_is_done_by_the_next(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "results.jsonl")
    (tmp_path / "results.jsonl.claims").mkdir()
    (tmp_path / "results.jsonl.claims" / "a").write_text("")  # its lock is gone with it
    with store.claim("a") as mine:
        assert mine
        with store.claim("a") as other:
            assert not other
    assert not (tmp_path / "results.jsonl.claims").exists()


def test_an_interrupted_run_leaves_no_claim(tmp_path: Path) -> None:
    study = small_study(tmp_path)
    outcome = conduct(study.planned, ResultStore(study.store), FakeRunner(stops_after=2))
    assert outcome.interrupted and outcome.done == 2
    assert not study.store.with_name(study.store.name + CLAIMS_SUFFIX).exists()


def test_after_the_minutes_nothing_new_is_started(tmp_path: Path) -> None:
    study, runner = small_study(tmp_path), FakeRunner()
    outcome = conduct(study.planned, ResultStore(study.store), runner, minutes=1e-12)
    assert outcome == StudyOutcome(left=18) and not runner.ran
    for minutes in (-1.0, float("nan"), 1e300):
        with pytest.raises(ConfigError, match="minutes must be"):
            conduct(study.planned, ResultStore(study.store), runner, minutes=minutes)


def test_a_watcher_hears_of_everything(tmp_path: Path) -> None:
    heard: list[str] = []

    class Listener(Watcher):
        def began(self, planned: Planned) -> None:
            heard.append(f"began {planned.spec.seed}")

        def progressed(self, done: int, total: int) -> None:
            heard.append(f"{done}/{total}")

        def ended(self, planned: Planned, record: RunRecord) -> None:
            heard.append(f"ended {record.loss}")

        def failed(self, planned: Planned, reason: str) -> None:
            heard.append(f"failed {reason}")

    planned = small_study(tmp_path, '[[arm]]\nlabel = "a"\nmethod = "dp"\ntokens = 8192\nseeds = [0, 2]\n').planned
    runner = FakeRunner(fails=lambda spec: spec.seed == 2)
    conduct(planned, ResultStore(tmp_path / "store"), runner, watcher=Listener())
    assert heard == ["began 0", "4096/8192", "8192/8192", "ended 1.8", "began 2", "failed RuntimeError: out of memory"]


# ---------------------------------------------------------------- time left


def test_a_forecast_prefers_runs_that_are_alike() -> None:
    small, other = make_spec({"model": "nano", "tokens": 10_000}), make_spec({"model": "tiny", "tokens": 10_000})
    forecast = Forecast()
    assert forecast.seconds(small) is None
    forecast.learn(small, 10_000, 5.0)
    assert forecast.seconds(small) == pytest.approx(5.0) and forecast.seconds(other) == pytest.approx(5.0)
    forecast.learn(other, 10_000, 20.0)
    assert forecast.seconds(small) == pytest.approx(5.0) and forecast.seconds(other) == pytest.approx(20.0)
    base = make_spec({"model": "base", "tokens": 20_000})
    assert forecast.seconds(base) == pytest.approx(25.0), "of all, when nothing is alike"


def test_a_forecast_begins_with_what_the_store_knows_and_drops_it_for_what_is_measured() -> None:
    spec = make_spec({"model": "nano", "tokens": 10_000})
    forecast = Forecast({spec.key: RunRecord.of(fake_result(spec))})
    assert forecast.seconds(spec) == pytest.approx(10.0)
    forecast.learn(make_spec({"model": "nano", "tokens": 10_000, "seed": 1}), 10_000, 2.0)
    assert forecast.seconds(spec) == pytest.approx(2.0)


def test_the_examples_can_be_read() -> None:
    study = load_study(EXAMPLES / "study.toml")
    assert len(study.planned) == 8 and study.planned[1].settings == {"sync.quorum": "1"}
    hostile = LabScenario.load(EXAMPLES / "world.toml")
    assert {fault.kind for fault in hostile.faults(learner_names(8), 600.0, 0)} == {"partition", "kill", "join"}


STUDIES = Path(__file__).parents[2] / "studies"


@pytest.mark.parametrize("file", sorted(STUDIES.glob("*.toml")), ids=lambda file: file.stem)
def test_the_studies_of_this_project_can_be_read(file: Path) -> None:
    study = load_study(file)
    assert study.name == file.stem and study.description and study.planned


def test_what_was_measured_has_the_keys_of_its_specs() -> None:
    records = ResultStore(STUDIES / "results.jsonl").records()
    assert len(records) >= 38
    for key, record in records.items():
        spec = make_spec(record.spec)
        assert spec.key == key and spec.to_dict() == {**spec.to_dict(), **record.spec}
