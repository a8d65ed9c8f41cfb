"""Faults as data, and their execution on a real process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.instruments.chaos import ChaosExecutor, Fault, chaos_plan
from atoll.observe.events import FaultEnded, FaultInjected

SECOND_NS = 1_000_000_000


class Processes:
    """One real process under the name of a learner, or none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids: dict[str, int] = {}

    def pid_of(self, learner: str) -> int | None:
        return self.pids.get(learner)

    def slow_file(self, learner: str) -> Path:
        return self.folder / f"slow-{learner}"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("learners", range(2, 9))
def test_the_demo_kills_one_learner_and_slows_another(learners: int) -> None:
    kill, slow, *_ = chaos_plan("demo", learners)
    names = {f"learner-{index}" for index in range(learners)}
    assert (kill.kind, slow.kind, slow.amount) == ("kill", "slow", 4.0)
    assert kill.target != slow.target
    assert {kill.target, slow.target} <= names
    assert kill.at_progress < slow.at_progress < slow.until_progress < 1.0


def test_four_learners_get_the_documented_faults() -> None:
    kill, slow, *_ = chaos_plan("demo", 4)
    assert (kill.target, kill.at_progress) == ("learner-2", 0.30)
    assert (slow.target, slow.at_progress, slow.until_progress) == ("learner-1", 0.45, 0.75)


def test_the_demo_kills_the_syncer_after_the_other_faults_began() -> None:
    kill, slow, last = chaos_plan("demo", 4)
    assert (kill.target, slow.target) == ("learner-2", "learner-1")
    assert (last.kind, last.target, last.until_progress) == ("kill", "syncer", 0.0)
    assert slow.at_progress < last.at_progress < slow.until_progress
    assert 0.6 <= last.at_progress <= 0.7


def test_plans_that_cannot_work_are_refused() -> None:
    assert chaos_plan("none", 1) == ()
    with pytest.raises(ConfigError, match="at least 2 learners"):
        chaos_plan("demo", 1)
    with pytest.raises(ConfigError, match="chaos must be one of none, demo"):
        chaos_plan("total", 4)
    with pytest.raises(ConfigError, match="fault must be one of"):
        Fault("flood", "learner-0", at_progress=0.5)
    with pytest.raises(ConfigError, match="the syncer takes no steps"):
        Fault("slow", "syncer", at_progress=0.5, until_progress=0.7, amount=4.0)
    with pytest.raises(ConfigError, match="until_progress must be above"):
        Fault("slow", "learner-0", at_progress=0.5, until_progress=0.4, amount=4.0)


def test_a_kill_happens_once_at_its_moment(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    processes, emitted = Processes(tmp_path), list[object]()
    processes.pids["learner-1"] = sleeper.pid
    executor = ChaosExecutor([Fault("kill", "learner-1", at_progress=0.3)], processes, emit=emitted.append)
    executor.tick(0.0, 5 * SECOND_NS)
    executor.tick(0.01, 10 * SECOND_NS)
    executor.tick(0.29, 12 * SECOND_NS)
    assert emitted == [] and sleeper.poll() is None
    executor.tick(0.31, 14 * SECOND_NS)
    assert sleeper.wait() == -9
    executor.tick(0.5, 16 * SECOND_NS)
    assert emitted == [FaultInjected("kill", "learner-1", "", 0)]
    [fault] = executor.injected
    assert (fault.fault, fault.target, fault.t_s) == ("kill", "learner-1", 4.0)


def test_a_learner_that_is_down_is_hit_when_it_is_back(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    processes = Processes(tmp_path)
    executor = ChaosExecutor([Fault("kill", "learner-1", at_progress=0.3)], processes, emit=lambda event: None)
    executor.tick(0.4, SECOND_NS)
    assert executor.injected == []
    processes.pids["learner-1"] = sleeper.pid
    executor.tick(0.5, 2 * SECOND_NS)
    assert sleeper.wait() == -9
    assert len(executor.injected) == 1


def test_a_slow_file_exists_while_the_fault_lasts(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    processes, emitted = Processes(tmp_path), list[object]()
    processes.pids["learner-0"] = sleeper.pid
    slow = Fault("slow", "learner-0", at_progress=0.4, until_progress=0.8, amount=4.0, detail="4x")
    executor = ChaosExecutor([slow], processes, emit=emitted.append)
    executor.tick(0.001, 10 * SECOND_NS)
    executor.tick(0.4, 14 * SECOND_NS)
    assert json.loads(processes.slow_file("learner-0").read_text()) == {"factor": 4.0}
    # Four seconds for the first 40% mean that the next 40% will take four more.
    assert emitted == [FaultInjected("slow", "learner-0", "4x", 18 * SECOND_NS, amount=4.0)]
    executor.tick(0.8, 18 * SECOND_NS)
    assert not processes.slow_file("learner-0").exists()
    assert emitted[1:] == [FaultEnded("slow", "learner-0")]
    executor.finish()
    assert len(emitted) == 2


def test_finish_ends_what_lasts(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    processes, emitted = Processes(tmp_path), list[object]()
    processes.pids["learner-0"] = sleeper.pid
    slow = Fault("slow", "learner-0", at_progress=0.4, until_progress=0.8, amount=4.0)
    executor = ChaosExecutor([slow, Fault("kill", "learner-0", at_progress=0.9)], processes, emit=emitted.append)
    executor.tick(0.5, SECOND_NS)
    executor.finish()
    assert not processes.slow_file("learner-0").exists()
    assert emitted[-1] == FaultEnded("slow", "learner-0")
    executor.tick(1.0, 2 * SECOND_NS)
    assert sleeper.poll() is None
