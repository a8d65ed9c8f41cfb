"""Tables of a study: means and errors over seeds, comparisons with the right baseline, and what is not there yet."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from lab_fakes import SMALL, fake_result, records_of, small_study

from atoll.instruments.lab.across_worlds import worlds_table
from atoll.instruments.lab.store import RunRecord
from atoll.instruments.lab.study import Study
from atoll.instruments.lab.tables import Estimate, StudyLine, markdown, reached_s, table_of, text_table, to_dict


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return small_study(tmp_path)


def line_of(lines: list[StudyLine], label: str, **settings: object) -> StudyLine:
    (found,) = [
        line for line in lines if line.label == label and all(line.settings[name] == v for name, v in settings.items())
    ]
    return found


def test_means_and_standard_errors() -> None:
    estimate = Estimate.of([1.0, 2.0, 4.0])
    assert estimate.mean == pytest.approx(7 / 3) and estimate.error == pytest.approx(math.sqrt(7 / 3) / math.sqrt(3))
    assert math.isnan(Estimate.of([1.0]).error)


def test_losses_are_averaged_and_compared_seed_by_seed(study: Study) -> None:
    lines = table_of(study, records_of(study))
    assert [line.label for line in lines] == ["dp"] * 2 + ["decoupled"] * 4
    dp, four = line_of(lines, "dp", optimizer="adamw"), line_of(lines, "decoupled", optimizer="adamw", learners=4)
    assert dp.loss is not None and dp.loss.mean == pytest.approx(2.0)
    assert dp.loss.error == pytest.approx(0.1 / math.sqrt(3)) and dp.percent is None
    # Every seed is 4% worse than its twin: seed by seed the luck of the seeds is gone.
    assert four.percent is not None and four.percent.mean == pytest.approx(4.0) and four.paired
    assert four.percent.error == pytest.approx(0.0, abs=1e-9)
    assert four.fact("rho") == 0.5 and four.fact("none") is None


def test_the_baseline_is_the_one_with_the_same_settings(study: Study) -> None:
    lines = table_of(study, records_of(study))
    muon, adamw = (line_of(lines, "decoupled", optimizer=name, learners=2) for name in ("muon", "adamw"))
    assert muon.percent is not None and muon.percent.mean == pytest.approx(2.0)
    assert muon.percent_best is not None and muon.percent_best.mean == pytest.approx(2.0), "muon is the best baseline"
    assert adamw.percent is not None and adamw.percent.mean == pytest.approx(2.0)
    assert adamw.percent_best is not None and adamw.percent_best.mean == pytest.approx(13.3, abs=0.2)
    assert adamw.time_ratio == pytest.approx(1.0)


def test_what_cannot_be_compared_is_not(tmp_path: Path) -> None:
    study = small_study(tmp_path, SMALL + '[[arm]]\nlabel = "long"\ntokens = 25600\n')
    lines = table_of(study, records_of(study))
    assert line_of(lines, "long", optimizer="muon").percent is None


def test_runs_on_other_text_are_not_compared(study: Study) -> None:
    """The same corpus by name, read on two machines."""
    records = records_of(study)
    for key, one in records.items():
        records[key] = replace(one, facts={**one.facts, "data": "here" if one.spec["method"] == "dp" else "there"})
    lines = table_of(study, records)
    four = line_of(lines, "decoupled", optimizer="adamw", learners=4)
    assert four.percent is None and four.percent_best is None and four.other_text
    assert "other text" in markdown(study, lines)


def test_other_seeds_are_compared_by_their_means(tmp_path: Path) -> None:
    study = small_study(tmp_path, SMALL + '[[arm]]\nlabel = "late"\nlearners = 2\nseeds = [3, 4]\n')
    lines = table_of(study, records_of(study))
    late = line_of(lines, "late", optimizer="adamw")
    assert late.percent is not None and not late.paired
    assert late.percent.mean == pytest.approx(100 * (2.05 * 1.02 / 2.0 - 1)) and late.percent.error > 1.0
    assert "*" in text_table(study, lines).markdown() and "different seeds" in markdown(study, lines)


def test_what_was_not_merged_is_shown(study: Study) -> None:
    one = next(one for one in study.planned if one.label == "decoupled")
    books = {
        "tokens_merged": 0.7 * one.spec.tokens,
        "tokens_pending": 0.0,
        "tokens_quarantined": 0.25 * one.spec.tokens,
    }
    books["tokens_overwritten"] = 0.05 * one.spec.tokens
    (line, *others) = [
        line
        for line in table_of(study, {one.spec.key: RunRecord.of(fake_result(one.spec, **books))})
        if line.label == "decoupled"
    ]
    assert line.lost_share == pytest.approx(0.3) and all(other.lost_share is None for other in others)
    assert "30.0%" in text_table(study, [line]).rows[0] and "never merged" in markdown(study, [line])
    assert "lost" not in text_table(study, others).header


def test_what_is_missing_is_said(study: Study) -> None:
    records = records_of(study)
    gone = [one.spec.key for one in study.planned if one.label == "decoupled" and one.spec.seed > 0]
    lines = table_of(study, {key: record for key, record in records.items() if key not in gone})
    text = text_table(study, lines)
    row = dict(zip(text.header, text.rows[2], strict=True))
    assert row["seeds"] == "1 of 3" and row["against dp"] == "+2.00%" and "±" not in row["loss"]
    empty = text_table(study, table_of(study, {}))
    assert {row[empty.header.index("loss")] for row in empty.rows} == {"-"} and "against dp" not in empty.header


def test_a_seed_that_diverged_is_counted_and_left_out(study: Study) -> None:
    records = records_of(study)
    for one in study.planned:
        if one.label == "decoupled" and one.spec.learners == 4 and (one.spec.seed == 1 or one.spec.optimizer == "muon"):
            records[one.spec.key] = RunRecord.of(fake_result(one.spec, math.inf))
    lines = table_of(study, records)
    some, all_ = (line_of(lines, "decoupled", optimizer=name, learners=4) for name in ("adamw", "muon"))
    assert some.diverged == 1 and some.percent is not None and some.percent.count == 2
    assert all_.diverged == 3 and all_.loss is None and all_.percent is None
    column = text_table(study, lines).header.index("loss")
    cells = [row[column] for row in text_table(study, lines).rows]
    assert any("1 diverged" in cell for cell in cells) and "diverged" in cells


def test_markdown_and_json_say_the_same(study: Study) -> None:
    lines = table_of(replace(study, description="What | this is."), records_of(study))
    text = markdown(replace(study, published={"decoupled": 3.9}), lines)
    assert text.startswith("## small\n") and "a fake" in text
    assert "| decoupled | muon | 4 | 3 | 1.8720 ± 0.0600 | +4.00 ± 0.00% | +3.9% | +4.00 ± 0.00% |" in text
    values = json.loads(json.dumps(to_dict(study, lines), allow_nan=False))
    assert values["runs"] == values["finished"] == 18
    last = values["lines"][-1]
    assert last["loss"] == pytest.approx(1.872) and last["percent"] == pytest.approx(4.0)
    assert last["settings"] == {"optimizer": "muon", "learners": 4} and last["seeds"] == [0, 1, 2]
    assert last["facts"] == {"rho": 0.5} and len(last["keys"]) == 3
    assert to_dict(study, table_of(study, {}))["finished"] == 0


def test_cells_cannot_break_the_table(tmp_path: Path) -> None:
    study = small_study(tmp_path, '[[arm]]\nlabel = "a|b"\nmethod = "dp"\n')
    assert "| a\\|b |" in text_table(study, table_of(study, records_of(study))).markdown()


def test_bits_and_bytes_are_shown_where_runs_know_them(study: Study) -> None:
    sent = {"bits_up": 0.375, "bits_down": 4.125, "bytes_up": 3e6, "bytes_down": 1e6, "parameters": 1e4}
    records = {
        one.spec.key: RunRecord.of(fake_result(one.spec, **({} if one.label == "dp" else sent)))
        for one in study.planned
    }
    lines = table_of(study, records)
    text = text_table(study, lines)
    row = dict(zip(text.header, text.rows[-1], strict=True))
    assert (row["bits up"], row["bits down"]) == ("0.375", "4.12")
    assert row["B/parameter/Mtoken"] == f"{400 / (12800 / 1e6):.3g}"
    assert dict(zip(text.header, text.rows[0], strict=True))["bits up"] == ""
    assert "decisions" not in text.header and "Bits are per parameter" in markdown(study, lines)
    assert to_dict(study, lines)["lines"][-1]["bits_up"] == 0.375


def test_the_time_to_a_loss_is_that_of_every_seed_against_the_quickest_fixed_setting(tmp_path: Path) -> None:
    text = SMALL.replace("seeds = [0, 1, 2]", "seeds = [0, 1]\ntime_to = 2.5")
    text += '[[arm]]\nlabel = "follows"\nlearners = 2\nsync = { adaptive = "network" }\n'
    study = small_study(tmp_path, text)
    times = {"dp": [10.0, 40.0], "decoupled": [10.0, 20.0], "follows": [10.0, 22.0]}
    records = {
        one.spec.key: RunRecord.of(fake_result(one.spec, 2.0, times_s=times[one.label])) for one in study.planned
    }
    lines = table_of(study, records)  # curves go from 3.0 to 2.0
    dp, follows = (line_of(lines, label, optimizer="muon") for label in ("dp", "follows"))
    fixed = line_of(lines, "decoupled", optimizer="muon", learners=2)
    assert dp.reached_s is not None and dp.reached_s.mean == pytest.approx(25.0)
    assert dp.reached_ratio == pytest.approx(25 / 15) and fixed.reached_ratio == pytest.approx(1.0)
    assert follows.reached_ratio == pytest.approx(16 / 15)
    assert "16 s (1.07x)" in text_table(study, lines).markdown()
    one = next(run for run in records.values())
    assert reached_s(one, 1.0) is None and reached_s(one, 3.5) == one.facts["times_s"][0]
    records[next(p.spec.key for p in study.planned if p.label == "follows")] = RunRecord.of(
        fake_result(next(p.spec for p in study.planned if p.label == "follows"), 2.9, times_s=[10.0, 22.0])
    )
    assert "not reached" in text_table(study, table_of(study, records)).markdown()


def test_how_far_each_arm_is_behind_in_every_world_and_in_its_worst(tmp_path: Path) -> None:
    for name in ("wide", "thin"):
        (tmp_path / f"{name}.toml").write_text(f"step_ms = {1 + len(name)}\njitter = 0.{len(name)}\n")
        (tmp_path / f"{name}.toml").write_text("jitter = 0.1\n" if name == "wide" else "up_mbit = 1\n")
    text = """
        time_to = 2.5
        [base]
        learners = 2
        tokens = 20_000
        world = ["wide.toml", "thin.toml"]
        [[arm]]
        label = "eager"
        [[arm]]
        label = "lazy"
        sync = { sync_every = 24 }
        [[arm]]
        label = "follows"
        sync = { adaptive = "network" }
    """
    study = small_study(tmp_path, text)
    took = {("eager", 0): 20.0, ("eager", 1): 36.0, ("lazy", 0): 40.0, ("lazy", 1): 30.0, ("follows", 0): 21.0}
    ends = {one.spec.key: (took.get((one.label, int("up_mbit" in one.spec.world)), 31.0), 2.0) for one in study.planned}
    records = {
        one.spec.key: RunRecord.of(fake_result(one.spec, ends[one.spec.key][1], times_s=[0.0, ends[one.spec.key][0]]))
        for one in study.planned
    }
    made = worlds_table(study, table_of(study, records))
    assert made is not None and [name.rpartition("/")[2] for name in made.header[1:]] == ["wide", "thin", "worst"]
    assert {row[0]: row[1:] for row in made.rows} == {
        "eager": ("+0.0%", "+20.0%", "+20.0%"),
        "lazy": ("+100.0%", "+0.0%", "+100.0%"),
        "follows": ("+5.0%", "+3.3%", "+5.0%"),
    }
    never = next(one for one in study.planned if one.label == "follows")
    records[never.spec.key] = RunRecord.of(fake_result(never.spec, 2.9, times_s=[0.0, 20.0]))
    made = worlds_table(study, table_of(study, records))
    assert made is not None and made.rows[2][-1] == "not reached"
    assert worlds_table(small_study(tmp_path), []) is None
