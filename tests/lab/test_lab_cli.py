"""`atoll lab` as a user meets it: runs, studies that go on where they were, tables, pages, clear messages."""

from __future__ import annotations

import errno
from io import StringIO
from pathlib import Path

import pytest
from lab_fakes import SMALL, FakeRunner, records_of, small_study
from rich.console import Console
from said import Command, command

from atoll.instruments.cli import lab as lab_cli
from atoll.instruments.cli.amounts import count, duration
from atoll.instruments.cli.lab_progress import StudyProgress
from atoll.instruments.cli.lab_say import print_table
from atoll.instruments.lab.conduct import Forecast
from atoll.instruments.lab.store import ResultStore
from atoll.instruments.lab.study import Planned, Study, make_spec
from atoll.instruments.lab.tables import table_of, text_table


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return small_study(tmp_path)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command("lab", monkeypatch=monkeypatch, capsys=capsys)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    """Takes the place of the engine."""
    fake = FakeRunner()
    monkeypatch.setattr(lab_cli, "_runner", lambda device, threads, compiles: fake)
    return fake


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


# ---------------------------------------------------------------- run


def test_one_run_says_how_it_went(lab: Command, runner: FakeRunner, tmp_path: Path) -> None:
    (tmp_path / "world.toml").write_text("step_ms = 250\n[[learner]]\nwho = 1\nstep_ms = 500\n")
    said = lab(
        *(
            "run",
            "--model",
            "nano",
            "--learners",
            2,
            "--tokens",
            65536,
            "--seed",
            2,
            "--scenario",
            tmp_path / "world.toml",
        ),
        *("--set", "sync_every=8", "--set", "outer-lr=1", "--set", "quorum=2", "--set", "evals=3", "--json"),
        *("--store", tmp_path / "runs.jsonl"),
    )
    assert said.code == 0, said
    (spec,) = runner.ran
    config = spec.config()
    assert (config.sync_every, config.outer_lr, config.quorum, spec.evals) == (8, 1.0, "2", 3)
    assert (spec.learners, spec.tokens, spec.seed, spec.world["step_ms"]) == (2, 65536, 2, 250.0)
    assert said.last["loss"] == pytest.approx(1.734) and said.last["key"] == spec.key
    assert (
        "held-out loss 1.7340" in said.stderr and "1,000 tokens/s on a fake" in said.stderr and "rho 0.5" in said.stderr
    )
    assert list(ResultStore(tmp_path / "runs.jsonl").records()) == [spec.key]


def test_a_result_is_kept_where_nobody_listens(
    lab: Command, runner: FakeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*arguments: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(lab_cli.say, "print_result", closed)
    assert lab("run", "--model", "nano", "--tokens", 65536, "--store", tmp_path / "runs.jsonl").code == 1
    assert len(ResultStore(tmp_path / "runs.jsonl").records()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--learners", "0"], "learners must be"),
        (["--tokens", "-5"], "tokens must be"),
        (["--lr", "nan"], "lr must be"),
        (["--method", "magic"], "method must be one of decoupled"),
        (["--batch", "5"], "does not split among 4 learners"),
        (["--set", "quorum=9"], "quorum 9 is above"),
        (["--set", "pace=9"], "did you mean pacing? give NAME=VALUE with one of adaptive"),
        (["--set", "quorum"], "give NAME=VALUE"),
        (["--set", "outer_lr=much"], "outer_lr must be float"),
        (["--scenario", "none.toml"], "none.toml cannot be read"),
    ],
    ids=str,
)
def test_a_run_that_cannot_be(lab: Command, runner: FakeRunner, arguments: list[str], words: str) -> None:
    said = lab("run", *arguments)
    assert said.code == 2 and words in said.stderr and not runner.ran and "Traceback" not in said.stderr


# ---------------------------------------------------------------- study


def test_a_store_that_cannot_be_is_refused_before_anything_runs(
    lab: Command, runner: FakeRunner, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("a line")
    for store, words in ((tmp_path / "notes", "not a store of results"), (tmp_path, "cannot be written")):
        said = lab("run", "--model", "nano", "--store", store)
        assert said.code == 2 and words in said.stderr and runner.ran == []
    said = lab("report", tmp_path / "x.toml", "--store", tmp_path / "nowhere")
    assert said.code == 2 and "there is no such file" in said.stderr


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("--set sync_evry=8", "sync_every"), ("--set learnres=2", "learners"), ("--method decopled", "decoupled")],
)
def test_a_misspelt_word_is_answered_with_the_one_that_was_meant(
    lab: Command, runner: FakeRunner, wrong: str, right: str
) -> None:
    said = lab("run", *wrong.split())
    assert said.code == 2 and f"did you mean {right}?" in said.stderr


def test_a_study_is_run_once(lab: Command, runner: FakeRunner, file: Path) -> None:
    said = lab("study", file, "--json")
    assert said.code == 0, said
    assert said.last == {
        "studies": [{"study": "small", "done": 18, "failed": [], "left": 0, "elsewhere": 0, "interrupted": False}]
    }
    assert "18 runs of 2 arms, 230k tokens; 0 are done, 18 to go" in said.stderr
    assert "18 of 18  decoupled optimizer=muon learners=4, seed 2: loss 1.7680" in said.stderr
    assert "small: all runs are done" in said.stderr
    again = lab("study", file)
    assert again.code == 0 and "18 are done, 0 to go" in again.stdout and len(runner.ran) == 18


def test_a_study_can_be_interrupted_limited_and_listed(
    lab: Command, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = tmp_path / "elsewhere.jsonl"
    monkeypatch.setattr(lab_cli, "_runner", lambda device, threads, compiles: FakeRunner(stops_after=2))
    said = lab("study", file, "--store", store, "--only", "dp")
    assert said.code == 130 and "the same command goes on" in said.stdout
    listed = lab("study", file, "--store", store, "--list")
    assert listed.stdout.count("done, loss") == 2 and listed.stdout.count("about 13 s") == 16
    late = lab("study", file, "--store", store, "--minutes", 1e-12)
    assert late.code == 0 and "16 runs are left" in late.stdout
    assert not (tmp_path / "results.jsonl").exists()


def test_a_run_that_fails_is_named_at_the_end(lab: Command, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(fails=lambda spec: spec.learners == 2 and spec.seed == 0)
    monkeypatch.setattr(lab_cli, "_runner", lambda device, threads, compiles: runner)
    said = lab("study", file, "--json")
    assert said.code == 1 and said.last["studies"][0]["done"] == 16
    assert said.stderr.count("decoupled optimizer=muon learners=2, seed 0 failed: RuntimeError: out of memory") == 2


def test_bad_studies(lab: Command, runner: FakeRunner, file: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ([tmp_path / "none.toml"], "cannot be read"),
        ([file, "--only", "x"], "no arm 'x'"),
        ([file, "--minutes", "-1"], "minutes must be"),
        ([file, "--store", tmp_path], "--store"),
    ):
        said = lab("study", *arguments)
        assert said.code == 2 and words in said.stderr and "Traceback" not in said.stderr


# ---------------------------------------------------------------- report


def test_a_report_has_tables_for_everybody(lab: Command, runner: FakeRunner, file: Path, tmp_path: Path) -> None:
    lab("study", file)
    said = lab("report", file, "--markdown", tmp_path / "out.md", "--json")
    assert said.code == 0, said
    assert "+4.00 ± 0.00%" in said.stderr and "against dp" in said.stderr
    assert (tmp_path / "out.md").read_text().startswith("## small")
    (study,) = said.last["studies"]
    assert study["finished"] == 18 and study["lines"][-1]["percent"] == pytest.approx(4.0)
    assert len(runner.ran) == 18, "a report runs nothing"


@pytest.mark.parametrize("width", [72, 80, 200])
def test_a_narrow_terminal_costs_columns_and_no_digit(study: Study, width: int) -> None:
    lines = table_of(study, records_of(study))
    text = text_table(study, lines)
    out = StringIO()
    print_table(Console(file=out, width=width, force_terminal=True, color_system=None), study, text)
    shown = out.getvalue()
    for name, *cells in zip(text.header, *text.rows, strict=True):
        column = [cell for cell in cells if cell]
        assert all(cell in shown for cell in column) or name in shown.split("no room for")[1]
    assert all(len(line.rstrip()) <= width for line in shown.split("no room for")[0].splitlines())
    assert all(name in shown.split("no room for")[0] for name in ("optimizer", "learners", "loss", "against dp"))
    assert ("no room for" in shown) == (width < 100)
    plain = StringIO()
    print_table(Console(file=plain, width=20), study, text)
    assert all(cell in plain.getvalue() for row in text.rows for cell in row)


def test_labels_that_look_like_markup(lab: Command, runner: FakeRunner, tmp_path: Path) -> None:
    out = StringIO()
    spec = make_spec({"model": "nano", "tokens": 100_000})
    one = Planned("K=1 [/fast] [bold]", {}, spec)
    with StudyProgress(Console(file=out, width=120, force_terminal=True), [one], Forecast()) as progress:
        progress.began(one)
    assert "K=1 [/fast] [bold]" in out.getvalue()


def test_a_column_that_no_run_has_is_named(lab: Command, runner: FakeRunner, file: Path) -> None:
    file.write_text('columns = ["rhoo", "rho"]\n' + SMALL.replace('columns = ["rho"]\n', ""))
    assert "no run has" not in lab("report", file).stdout
    assert lab("study", file).code == 0
    said = lab("report", file)
    assert said.code == 0 and "no run has rhoo, which columns names; there are " in said.stdout


def test_a_report_draws_figures(lab: Command, runner: FakeRunner, file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert lab("report", file, "--figures", tmp_path / "figures").code == 2, "nothing is finished"
    lab("study", file)
    said = lab("report", file, "--figures", tmp_path / "figures")
    assert said.code == 0, said
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert drawn == {"index.html", "small-loss.png", "small-relative.png", "small-by-learners.png"}
    page = (tmp_path / "figures" / "index.html").read_text()
    assert page.count("<svg") == 3 and "+4.00 ± 0.00%" in page


def test_a_report_that_cannot_be_written(lab: Command, runner: FakeRunner, file: Path, tmp_path: Path) -> None:
    said = lab("report", file, "--markdown", tmp_path / "none" / "out.md")
    assert said.code == 2 and "folder that exists" in said.stderr


def test_a_damaged_store_is_named(lab: Command, runner: FakeRunner, file: Path, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("x\ny\n")
    said = lab("report", file)
    assert said.code == 2 and "results.jsonl, line 1 is damaged" in said.stderr


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.6, "9.6 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (7500, "2 h 5 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_counts() -> None:
    assert [count(value) for value in (0, 7, 12_800, 40_000_000, 1.2e9)] == ["0", "7", "12.8k", "40M", "1.2G"]


# ---------------------------------------------------------------- the real engine


def test_a_real_study_from_file_to_table(lab: Command, tmp_path: Path) -> None:
    file = tmp_path / "real.toml"
    file.write_text(
        'baseline = "dp"\n[base]\nmodel = "nano"\nlearners = 2\nbatch = 4\nseq = 32\ntokens = 2560\nevals = 2\n'
        "eval_windows = 8\n"
        '[[arm]]\nlabel = "dp"\nmethod = "dp"\n[[arm]]\nlabel = "decoupled"\nsync.sync_every = 4\n'
        "[arm.world]\njitter = 0.1\nlearner = [{ who = 1, step_ms = 1500 }]\n"
        'failures = { every = "50%", down = "10%" }\n'
    )
    said = lab("study", file, "--device", "cpu", "--threads", 1, "--json")
    assert said.code == 0 and said.last["studies"][0]["done"] == 2, said
    table = lab("report", file, "--json").last["studies"][0]
    dp, decoupled = table["lines"]
    assert 1.0 < dp["loss"] < 6.0 and 1.0 < decoupled["loss"] < 6.0 and decoupled["percent"] is not None
    assert decoupled["virtual_s"] > dp["virtual_s"] * 0.5
