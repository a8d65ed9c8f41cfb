"""`atoll lab study --processes`: real processes share the runs of a study; nothing is run twice, everything is said."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from atoll.errors import ConfigError
from atoll.instruments.cli.lab_processes import _run, check_processes, words
from atoll.instruments.lab.store import ResultStore

STUDY = """
[base]
model = "nano"
learners = 2
batch = 4
seq = 32
evals = 1
eval_windows = 8
{more}
"""


def study(tmp_path: Path, *, tokens: int, task: str = "") -> Path:
    file = tmp_path / "together.toml"
    more = f"tokens = {tokens}\n" + (f'task = "{task}"\n' if task else "")
    arms = '[[arm]]\nlabel = "dp"\nmethod = "dp"\nseeds = [0, 1, 2]\n[[arm]]\nlabel = "decoupled"\nseeds = [0, 1, 2]\n'
    file.write_text(STUDY.format(more=more) + arms)
    return file


def command(file: Path, *more: str) -> list[str]:
    base = [sys.executable, "-m", "atoll", "lab", "study", str(file), "--processes", "2", "--device", "cpu"]
    return [*base, "--threads", "1", "--json", *more]


def test_two_processes_share_a_study(tmp_path: Path) -> None:
    file = study(tmp_path, tokens=1280)
    done = subprocess.run(command(file), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (outcome,) = json.loads(done.stdout.splitlines()[-1])["studies"]
    assert outcome == {"study": "together", "done": 6, "failed": [], "left": 0, "elsewhere": 0, "interrupted": False}
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(lines) == len(ResultStore(tmp_path / "results.jsonl").records()) == 6, "a run was done twice"
    assert "[1] " in done.stderr and "[2] " in done.stderr and "all runs are done" in done.stderr
    assert not (tmp_path / "results.jsonl.claims").exists()
    again = subprocess.run(command(file), capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and json.loads(again.stdout.splitlines()[-1])["studies"][0]["done"] == 0


def test_a_run_that_fails_is_named_once_and_the_exit_status_tells(tmp_path: Path) -> None:
    file = study(tmp_path, tokens=1280, task="no_such_module:task")
    done = subprocess.run(command(file, "--only", "dp"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    (outcome,) = json.loads(done.stdout.splitlines()[-1])["studies"]
    assert [entry["seed"] for entry in sorted(outcome["failed"], key=lambda entry: entry["seed"])] == [0, 1, 2]
    assert outcome["left"] == outcome["done"] == 0 and "no_such_module" in outcome["failed"][0]["reason"]
    attempts = [line for line in done.stderr.splitlines() if " of 3  dp, seed" in line]
    assert len(attempts) == 3, "what has failed in one process was tried in the other"


def test_what_cannot_be_is_refused_as_by_one_process(tmp_path: Path) -> None:
    file = study(tmp_path, tokens=1280)
    done = subprocess.run(command(file, "--device", "abacus"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "abacus" in done.stderr and "goes on" not in done.stderr, done.stderr


def test_an_interruption_ends_all_of_them(tmp_path: Path) -> None:
    file = study(tmp_path, tokens=400_000_000)
    parent = subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command(file)],  # as a shell starts what is put behind with &
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    claims = tmp_path / "results.jsonl.claims"
    deadline_s = time.monotonic() + 120
    while len(list(claims.glob("*"))) < 2:
        assert time.monotonic() < deadline_s and parent.poll() is None, "the processes never began"
        time.sleep(0.1)
    parent.send_signal(signal.SIGTERM)  # to it alone: it tells the others
    out, told = parent.communicate(timeout=120)
    assert parent.returncode == 130, told
    assert json.loads(out.splitlines()[-1])["studies"][0] == {
        "study": "together",
        "done": 0,
        "failed": [],
        "left": 6,
        "elsewhere": 0,
        "interrupted": True,
    }
    assert not claims.exists(), "a process is still at it"


def test_a_process_that_dies_is_told() -> None:
    console = Console(file=io.StringIO())
    dies = [sys.executable, "-c", "import os; print('half a word'); os.abort()"]
    ends = [sys.executable, "-c", "import sys; print('on the way', file=sys.stderr); print('{\"studies\": []}')"]
    told = _run([dies, ends], console)
    assert told.broken == ["process 1 ended with signal 6 before its studies were done"] and not told.interrupted
    assert "[2] on the way" in console.file.getvalue()  # type: ignore[attr-defined]


def test_output_that_breaks_does_not_stop_anybody() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    talks = [
        sys.executable,
        "-c",
        "import sys\nfor i in range(40000): print('on the way', i, file=sys.stderr)\nprint('{\"studies\": []}')",
    ]
    assert _run([talks], Console(file=Closed())).broken == []


def test_how_many_there_may_be() -> None:
    check_processes(1)
    check_processes(64)
    for wrong in (0, -1, 65):
        with pytest.raises(ConfigError, match="--processes must be from 1 to 64"):
            check_processes(wrong)


def test_arguments_become_words() -> None:
    given = {"--store": None, "--only": ["a b", "c"], "--minutes": 1.5}
    assert words([Path("-x.toml")], given) == ["--only", "a b", "--only", "c", "--minutes", "1.5", "--", "-x.toml"]
