"""The whole story with real syncers and learners: kill, leave, join, export with nothing alive, resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_fakes import alive
from safetensors.torch import load_file

WAIT_S_MAX = 120.0
"""Starting torch in several processes on a busy machine takes most of it; nothing is asserted about time."""

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import atoll

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with atoll.Learner(model, optimizer) as learner:
    print("joined", flush=True)
    while not learner.done and not (Path(os.environ["ATOLL_RUN_FOLDER"]) / "end").exists():
        x = torch.randn(8, 16)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(tokens=8, loss=loss)
        time.sleep(0.02)
"""


def atoll(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "atoll", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **options
    )


def said(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=WAIT_S_MAX)
    return output


def run(*arguments: str) -> str:
    process = atoll(*arguments)
    output = said(process)
    assert process.returncode == 0, output
    return output


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.1)
    return value


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [line for path in folder.glob("events/*.jsonl") for line in path.read_text().splitlines()]
    found = [json.loads(line) for line in lines if f'"{kind}"' in line and line.endswith("}")]
    return sorted((event for event in found if event["kind"] == kind), key=lambda event: event["t_ns"])


def commits_since(folder: Path, t_ns: int) -> bool:
    return any(event["t_ns"] > t_ns for event in events(folder, "committed"))


def versions_of(folder: Path) -> dict[int, list[int]]:
    """By fragment, the committed versions in order of time. The last before a kill may have had no time to be told."""
    versions: dict[int, list[int]] = {}
    for event in events(folder, "committed"):
        versions.setdefault(event["fragment"], []).append(event["version"])
    return versions


def processes(folder: Path) -> dict[str, int]:
    return {entry["id"]: entry["pid"] for entry in json.loads((folder / "processes.json").read_text())}


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[str]]]:
    """Launchers that a failing test leaves behind; their processes die with them."""
    launchers: list[subprocess.Popen[str]] = []
    yield launchers
    for launcher in launchers:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()


def test_kill_leave_join_crash_export_and_resume_of_a_script(
    tmp_path: Path, ended: list[subprocess.Popen[str]]
) -> None:
    folder = tmp_path / "run"
    (tmp_path / "train.py").write_text(SCRIPT)
    start = ("run", "--learners", "2", "--sync-every", "4", "--fragments", "2", "--out", str(folder))
    launcher = atoll(*start, "--", "python", "train.py", cwd=tmp_path)
    ended.append(launcher)
    wait_for(lambda: len(events(folder, "learner_joined")) == 2, "both learners join")
    wait_for(lambda: commits_since(folder, 0), "a first commit")

    # The syncer is killed. The same learners find the next one, which goes on where the first was.
    before = processes(folder)
    killed_ns = time.time_ns()
    os.kill(before["syncer"], signal.SIGKILL)
    wait_for(lambda: commits_since(folder, killed_ns), "commits go on")
    after = processes(folder)
    assert after["syncer"] != before["syncer"]
    assert (after["learner-0"], after["learner-1"]) == (before["learner-0"], before["learner-1"])
    for versions in versions_of(folder).values():
        assert versions == sorted(set(versions))  # no version twice, and none goes back

    # One learner leaves, and a process of a newer build takes its place under the same name.
    assert "has left" in run("leave", str(folder), "learner-1")
    assert events(folder, "learner_finished")[-1]["reason"] == "SIGTERM"
    (tmp_path / "train.py").write_text(SCRIPT.replace('"joined"', '"joined, newer"'))
    joiner = atoll("join", str(folder), "--id", "learner-1")
    ended.append(joiner)
    log = folder / "logs" / "learner-learner-1.log"
    wait_for(lambda: "newer" in log.read_text(), "the newer build joins")
    status = json.loads(run("status", str(folder), "--json"))
    states = {member["learner"]: (member["generation"], member["state"]) for member in status["members"]}
    assert states == {"learner-0": (1, "active"), "learner-1": (2, "active")}
    assert launcher.poll() is None

    # Everything dies at once, and the model is in the state all the same.
    joined_ns = time.time_ns()
    wait_for(lambda: commits_since(folder, joined_ns), "one more commit")
    pids = processes(folder)
    for pid in (launcher.pid, pids["syncer"], pids["learner-0"]):
        os.kill(pid, signal.SIGKILL)
    joiner.terminate()
    said(joiner)
    said(launcher)
    wait_for(lambda: not any(alive(pid) for pid in pids.values()), "everything is dead")
    committed = [max(versions) for _, versions in sorted(versions_of(folder).items())]
    exported = json.loads(
        run("export", str(folder), "--to", str(tmp_path / "m.safetensors"), "--json").splitlines()[-1]
    )
    assert exported["versions"] >= committed  # a commit is on disk before it is an event
    plain = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
    plain.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert exported["parameters"] == sum(parameter.numel() for parameter in plain.parameters())

    # It is resumed from another folder, with the same names, and goes on from those versions to its end.
    resumed_ns = time.time_ns()
    resumed = atoll("resume", str(folder))
    ended.append(resumed)
    wait_for(lambda: commits_since(folder, resumed_ns), "commits go on after the resume")
    [first, *_] = [event for event in events(folder, "committed") if event["t_ns"] > resumed_ns]
    assert first["version"] == exported["versions"][first["fragment"]] + 1
    (folder / "end").touch()
    output = said(resumed)
    assert resumed.returncode == 0, output
    result = json.loads((folder / "result.json").read_text())
    assert (result["resumed"], result["syncer_restarts"]) == (1, 1)
    assert sorted(processes(folder)) == ["launcher", "learner-0", "learner-1", "syncer"]


BUDGET = 2 * 40 * 2 * 32


def tokens_of(folder: Path) -> int:
    return sum(event["tokens"] for event in events(folder, "learner_steps"))


def test_ctrl_c_and_resume_of_a_training_run(tmp_path: Path, ended: list[subprocess.Popen[str]]) -> None:
    folder = tmp_path / "run"
    settings = (
        "--model",
        "nano",
        "--learners",
        "2",
        "--steps",
        "40",
        "--batch",
        "2",
        "--seq",
        "32",
        "--sync-every",
        "4",
    )
    launcher = atoll("train", *settings, "--chaos", "calm", "--out", str(folder))
    ended.append(launcher)
    wait_for(folder.exists, "the run folder")
    for rank in range(2):  # Slow enough that it cannot end before it is interrupted; a resume takes these away.
        (folder / f"slow-learner-{rank}").write_text('{"factor": 40}')
    wait_for(lambda: len({event["learner"] for event in events(folder, "learner_steps")}) == 2, "both learners train")
    wait_for(lambda: events(folder, "committed") and tokens_of(folder) > BUDGET // 4, "a quarter of the run")
    launcher.send_signal(signal.SIGINT)
    output = said(launcher)
    assert launcher.returncode == 128 + signal.SIGINT, output
    assert output.rstrip().endswith(f"go on with it: atoll resume {folder}")
    before = events(folder, "syncer_stats")[-1]
    so_far = json.loads((folder / "result.json").read_text())
    assert (so_far["finished"], so_far["reason"]) == (False, "SIGINT")
    assert so_far["ledger"]["merged"] == so_far["ledger"]["processed"] == before["tokens_merged"]
    assert sum(so_far["steps_by_learner"].values()) * 2 * 32 == tokens_of(folder)
    assert before["tokens_merged"] == tokens_of(folder) < BUDGET  # everybody has handed everything over

    resumed_ns = time.time_ns()
    resumed = run("resume", str(folder), "--json")
    result = json.loads(resumed.splitlines()[-1])
    assert (result["resumed"], result["method"]) == (1, "decoupled")
    # The budget is that of the whole run: what was done before the interrupt counts.
    [recovered] = events(folder, "syncer_recovered")
    assert recovered["tokens_merged"] == before["tokens_merged"]
    assert result["tokens"] == tokens_of(folder) >= BUDGET
    assert result["commits"] > before["commits"]
    parts = result["tokens_merged"] + result["tokens_pending"] + sum(result["tokens_discarded"].values())
    assert result["tokens"] == parts
    assert 0.0 < result["goodput"] <= 1.0
    # Each goes on with its own optimizer state; the second may come when the first has done the rest.
    rungs = {event["rung"] for event in events(folder, "learner_recovered") if event["t_ns"] > resumed_ns}
    assert rungs == {"checkpoint"}
    refused = atoll("resume", str(folder))
    assert "is finished" in said(refused) and refused.returncode == 2
