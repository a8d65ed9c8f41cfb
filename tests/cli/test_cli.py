"""The command line as a user meets it: help, exit codes, and errors without tracebacks."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from said import Command, command

from atoll.cli.terminal import save_text
from atoll.errors import ConfigError

COMMANDS = [
    "demo",
    "train",
    "run",
    "resume",
    "join",
    "leave",
    "export",
    "syncer",
    "status",
    "report",
    "chaos",
    "sim",
    "replay",
    "conform",
    "plan",
    "lab",
    "version",
]
DURABILITY = "--durability --durability-interval --snapshots --snapshot-every --keep --snapshot-options"
OPTIONS = (
    "--learners --steps --batch --seq --model --corpus --sync-every --fragments --overlap --quorum --grace-cap "
    "--weights --merge --outer-lr --outer-momentum --codec-up --codec-down --adopt --chaos --seed --out --json --config"
)


@pytest.fixture
def atoll(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process, which saves the start of a Python for each of many cases."""
    return command(monkeypatch=monkeypatch, capsys=capsys)


def test_help_names_every_command(atoll: Command) -> None:
    result = atoll("--help")
    assert result.code == 0
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(atoll: Command, command: str) -> None:
    result = atoll(command, "--help")
    assert result.code == 0
    assert "Usage" in result.stdout


def test_a_wrong_plan_is_one_clear_message(atoll: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = tmp_path / "storm.toml"
    for text, words in (
        ("fault = 3", "[[fault]]"),
        ("lasts = 3", "unknown key 'lasts'"),
        ('[[fault]]\nkind = "kill"\ntarget = "learner-9"\nat = 1', "learner-9"),
        ('[[fault]]\nkind = "flood"\ntarget = "syncer"\nat = 1', "flood"),
        ('[[fault]]\nkind = "kill"\ntarget = "syncer"\nat = "2h"', "outside this run"),
        ("seed = 1\nfaults = 0", "no faults"),
        ("seed = ", "not a TOML file"),
    ):
        plan.write_text(text)
        said = atoll("chaos", "storm", "--plan", str(plan))
        assert said.code == 2 and words in said.stderr and said.stderr.count("\n") == 1, said.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["storm.toml"]


def test_a_storm_explains_its_options(atoll: Command) -> None:
    text = atoll("chaos", "storm", "--help").stdout
    options = "--minutes --plan --seed --faults --learners --model --step-ms --out --twin --json"
    assert [option for option in options.split() if option not in text] == []


def test_train_has_the_promised_options(atoll: Command) -> None:
    text = atoll("train", "--help").stdout
    assert [option for option in OPTIONS.split() if option not in text] == []


@pytest.mark.parametrize("command", ["train", "run", "syncer"])
def test_whatever_has_a_syncer_has_the_durability_options(atoll: Command, command: str) -> None:
    text = atoll(command, "--help").stdout
    assert [option for option in DURABILITY.split() if option not in text] == []


@pytest.mark.parametrize("command", ["train", "run", "syncer"])
def test_whatever_has_a_syncer_has_the_options_of_the_outer_step(atoll: Command, command: str) -> None:
    text = atoll(command, "--help").stdout
    options = "--outer-lr --outer-momentum --momentum-restart --correction --no-feedback-up --no-feedback-down"
    options += " --outer-schedule --preset"
    assert [option for option in options.split() if option not in text] == []


def test_run_has_the_options_of_those_who_measure(atoll: Command) -> None:
    text = atoll("run", "--help").stdout
    assert [option for option in ("--json", "--tokens-budget", "--minutes", "--method") if option not in text] == []


def test_help_loads_nothing_heavy() -> None:
    program = "import sys; sys.argv = ['atoll', '--help']\nimport atoll.app\n"
    program += "try: atoll.app.main()\nexcept SystemExit: pass\n"
    program += "print('heavy:', [m for m in ('torch', 'grpc', 'numba', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip().endswith("heavy: []")


def test_version_is_printed(atoll: Command) -> None:
    assert atoll("version").stdout == atoll("--version").stdout != ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--method", "magic"], ["method", "decoupled", "diloco", "dp", "single"]),
        (["train", "--codec-up", "int3"], ["codec_up", "fp32", "bf16", "int8", "int4"]),
        (["train", "--learners", "2", "--quorum", "3"], ["quorum 3", "2 learners", "--quorum 2"]),
        (["train", "--chaos", "demo", "--learners", "1"], ["at least 2 learners"]),
        (["train", "--model", "gigantic"], ["model", "tiny", "small"]),
        (["train", "--config", "no-such-file.toml"], ["no-such-file.toml", "check the path"]),
        (["train", "--learners", "many"], ["--learners"]),
        (["train", "--no-such-option"], ["--no-such-option"]),
        (["demo", "--learners", "1"], ["at least 2 learners"]),
        (["run", "--learners", "2"], ["after --", "python train.py"]),
        (["run", "--learners", "2", "--quorum", "3", "--", "true"], ["quorum 3"]),
        (["syncer", "--quorum", "3"], ["quorum 3"]),
        (["syncer", "--tls-key", "key.pem"], ["--tls-certificate"]),
        (["syncer", "--durability", "commit"], ["--run-folder"]),
        (["syncer", "--snapshot-every", "soon"], ["snapshot_every", "5m"]),
        (["train", "--durability", "often"], ["durability", "commit", "interval", "none"]),
        (["run", "--keep", "0", "--", "true"], ["keep"]),
        (["resume", "no-such-folder"], ["no-such-folder", "holds no run"]),
        (["join", "no-such-folder"], ["no-such-folder", "holds no run"]),
        (["leave", "no-such-folder", "learner-0"], ["no run folder no-such-folder", "HOST:PORT"]),
        (["status", "no-such-folder"], ["no run folder no-such-folder", "HOST:PORT"]),
        (["status", "."], [". holds no run"]),
        (["export", "no-such-folder", "--to", "model.safetensors"], ["no-such-folder"]),
        (["export", ".", "--to", "model.safetensors", "--dtype", "int4"], ["dtype", "float32", "bfloat16"]),
        (["export", "."], ["--to"]),
        (["report", "no-such-folder"], ["no-such-folder"]),
        (["train", "--chaos", "hurricane"], ["chaos", "storm", ".toml"]),
        (["train", "--chaos", "no-such-plan.toml"], ["no-such-plan.toml", "cannot be read"]),
        (["train", "--chaos", "storm", "--learners", "1"], ["at least 2 learners"]),
        (["train", "--step-ms", "-1"], ["step_ms"]),
        (["run", "--chaos", "demo", "--", "true"], ["--chaos storm"]),
        (["run", "--chaos", "storm", "--storm-minutes", "0", "--", "true"], ["storm_minutes"]),
        (["chaos", "storm", "--plan", "no-such-plan.toml"], ["no-such-plan.toml", "cannot be read"]),
        (["chaos", "storm", "--minutes", "0"], ["minutes"]),
        (["chaos", "storm", "--seed", "seven"], ["--seed"]),
        (["chaos", "storm", "--learners", "1"], ["at least 2"]),
        (["chaos", "storm", "--model", "gigantic"], ["model", "tiny"]),
        (["chaos", "storm", "--twin", "no-such-folder"], ["no-such-folder", "holds no run"]),
        (["chaos", "tsunami"], ["tsunami"]),
        (["no-such-command"], ["no-such-command"]),
    ],
)
def test_bad_input_is_one_clear_message_and_status_2(
    atoll: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = atoll(*arguments)
    assert said.code == 2
    assert [word for word in words if word not in said.stderr] == []
    assert list(tmp_path.iterdir()) == []


def run_module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "atoll", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60)


def test_errors_have_no_traceback_unless_one_is_debugging() -> None:
    plain = run_module("train", "--method", "magic")
    assert (plain.returncode, plain.stdout) == (2, "")
    assert plain.stderr == "atoll: method must be one of decoupled, diloco, dp, single; not 'magic'\n"
    assert "Traceback" in run_module("train", "--method", "magic", ATOLL_DEBUG="1").stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_the_room_of_the_commands_is_the_command_too() -> None:
    argv = [sys.executable, "-m", "atoll.cli", "version"]
    assert subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout == run_module("version").stdout


@pytest.mark.parametrize("words", ["train --steps 1 --out run", "demo --out run", "lab run --tokens 100000"])
def test_without_pytorch_what_trains_names_the_extra(words: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    argv = [sys.executable, "-m", "atoll", *words.split()]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 2
    assert "pip install 'atoll[torch]'" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", ["train", "run", "syncer"])
def test_a_misspelt_setting_is_answered_with_the_one_that_was_meant(atoll: Command, tmp_path: Path, words: str) -> None:
    (tmp_path / "run.toml").write_text("sync_evry = 4\n")
    said = atoll(*words.split(), "--config", tmp_path / "run.toml", *(["--", "true"] if words == "run" else []))
    assert said.code == 2 and "run.toml; did you mean sync_every?" in said.stderr


def test_output_that_has_no_room_is_one_message() -> None:
    with Path("/dev/full").open("w") as full:
        argv = [sys.executable, "-m", "atoll", "version"]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("atoll: No space left on device")


@pytest.mark.parametrize("words", ["version", "plan --published", "version >&-"])
def test_output_that_nobody_reads_is_no_accident(words: str) -> None:
    line = f"{shlex.quote(sys.executable)} -m atoll {words}" + (
        "" if ">" in words else " | true; exit ${PIPESTATUS[0]}"
    )
    done = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.stderr == "" and done.returncode in (0, 1)


def test_a_file_is_replaced_by_a_whole_one_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = tmp_path / "table.md", Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        real(path, text[:3], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    save_text("--markdown", file, "the first")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match=r"--markdown .*table\.md: No space left on device; make room"):
        save_text("--markdown", file, "the second")
    assert file.read_text() == "the first" and list(tmp_path.iterdir()) == [file]


def test_links_and_devices_are_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    save_text("--save", tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"
    save_text("--save", Path(os.devnull), "text")
    assert Path(os.devnull).is_char_device()


def test_options_win_over_the_file(atoll: Command, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('method = "magic"\nlearners = 2\nquorum = 3\n')
    assert "quorum 3 is above the 2 learners" in atoll("train", "--config", str(path), "--method", "decoupled").stderr


@pytest.mark.parametrize("words", ["", "--preset paper", "--preset paper --sync-every 5"])
def test_the_preset_reaches_a_syncer_started_by_hand(
    atoll: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    import atoll.syncer as room

    chosen: list[Any] = []
    monkeypatch.setattr(room, "run_syncer", lambda options: chosen.append(options) or 0)
    (tmp_path / "run.toml").write_text('sync_every = 7\nlearners = 3\npreset = "paper"\nmerge = "mean"\n')
    assert atoll("syncer", "--config", tmp_path / "run.toml", *words.split()).code == 0
    got = chosen[0].config
    # The file's own words win over the preset that it names; one on the command line wins over the file.
    every = {"": 7, "--preset paper": 24}.get(words, 5)
    assert (got["sync_every"], got["merge"]) == (every, "rda" if words else "mean")
    assert (got["quorum"], got["adopt"], got["learners_expected"]) == ("1", "overwrite", 3)


def test_an_unwritable_folder_is_refused(atoll: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = atoll("run", "--out", str(tmp_path / "file" / "below"), "--", "true")
    assert said.code == 2
    assert "cannot be written" in said.stderr and "--out" in said.stderr


def test_an_empty_corpus_is_refused_before_anything_is_started(atoll: Command, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    said = atoll("train", "--corpus", str(tmp_path / "empty.txt"), "--out", str(tmp_path / "run"))
    assert said.code == 2
    assert "empty.txt" in said.stderr
    assert not (tmp_path / "run").exists()
