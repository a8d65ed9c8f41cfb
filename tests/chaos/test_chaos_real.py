"""The executor on real processes: each kind is put in and taken out, and what cannot be put in is said."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from atoll.instruments.chaos import ChaosExecutor, Fault
from atoll.instruments.chaos.injector import NO_LINKS, NO_RANK, NOT_RUNNING, _thaw_later
from atoll.instruments.chaos.real import PATIENCE_NS, describe
from atoll.observe.events import FaultEnded, FaultInjected, FaultSkipped

SECOND_NS = 1_000_000_000
WAIT_S_MAX = 20.0


class Control:
    """Real processes under the names of learners, and a record of who was asked to come and go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids: dict[str, int] = {}
        self.asked: list[str] = []
        self.ended = False

    def pid_of(self, target: str) -> int | None:
        return self.pids.get(target)

    def slow_file(self, learner: str) -> Path:
        return self.folder / f"slow-{learner}"

    def poison_file(self, learner: str) -> Path:
        return self.folder / f"poison-{learner}"

    def disk_full_file(self, target: str) -> Path:
        return self.folder / "disk-full"

    def send_away(self, learner: str) -> bool:
        self.asked.append(f"away {learner}")
        return True

    def bring_back(self, learner: str) -> bool:
        if self.ended:
            self.asked.append(f"back {learner}")
        return self.ended

    def add_guest(self, learner: str) -> str:
        self.asked.append(f"join {learner}")
        return ""

    def end_guest(self, learner: str) -> None:
        self.asked.append(f"part {learner}")


class LinksSeen:
    def __init__(self) -> None:
        self.held: dict[str, list[str]] = {}
        self.cuts: list[str] = []

    def hold(self, learner: str, faults: Sequence[Fault]) -> None:
        self.held[learner] = [fault.kind for fault in faults]

    def cut(self, learner: str) -> None:
        self.cuts.append(learner)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    program = "import time; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def control(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> Control:
    control = Control(tmp_path)
    control.pids = {"learner-0": sleeper.pid, "syncer": sleeper.pid}
    return control


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def wait_for(condition: object) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.02)


def at(second: float) -> int:
    """A moment of the run: its first step comes at second 100 of the clock."""
    return int((100 + second) * SECOND_NS)


def executor_of(control: Control, *faults: Fault, **options: object) -> tuple[ChaosExecutor, list[object]]:
    emitted: list[object] = []
    executor = ChaosExecutor(faults, control, emit=emitted.append, **options)  # type: ignore[arg-type]
    executor.tick(0.0, at(-50), begun=False)
    executor.tick(0.0, at(0), begun=True)
    return executor, emitted


def test_seconds_count_from_the_first_step(control: Control, sleeper: subprocess.Popen[bytes]) -> None:
    executor, emitted = executor_of(control, Fault("kill", "learner-0", at_s=5.0))
    executor.tick(0.0, at(4.9), begun=True)
    assert emitted == [] and sleeper.poll() is None
    executor.tick(0.0, at(5.0), begun=True)
    assert sleeper.wait() == -9
    assert emitted == [FaultInjected("kill", "learner-0")]
    assert [(one.fault, one.t_s) for one in executor.injected] == [("kill", 5.0)]


@pytest.fixture
def island(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[int, int]]]:
    """A process as torchrun: two ranks with sessions of their own."""
    rank = "import time; time.sleep(600)"
    program = f"""
import os, subprocess, sys, time
for rank in range(2):
    told = {{**os.environ, "RANK": str(rank)}}
    child = subprocess.Popen([sys.executable, "-c", {rank!r}], start_new_session=True, env=told)
    open({str(tmp_path)!r} + f"/rank-{{rank}}", "w").write(f"{{child.pid}} ")
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    told = [tmp_path / f"rank-{rank}" for rank in range(2)]
    wait_for(lambda: all(one.exists() and one.read_text().endswith(" ") for one in told))
    ranks = {rank: int(one.read_text()) for rank, one in enumerate(told)}
    wait_for(lambda: all(b"RANK" in Path(f"/proc/{pid}/environ").read_bytes() for pid in ranks.values()))
    yield process, ranks
    for pid in (*ranks.values(), process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def test_a_freeze_of_an_island_stops_all_of_its_ranks(
    control: Control, island: tuple[subprocess.Popen[bytes], dict[int, int]]
) -> None:
    starter, ranks = island
    control.pids["learner-1"] = starter.pid
    everybody = (starter.pid, *ranks.values())
    executor, _ = executor_of(control, Fault("freeze", "learner-1", at_s=1.0, lasts_s=3.0))
    executor.tick(0.0, at(1), begun=True)
    wait_for(lambda: all(stopped(pid) for pid in everybody))
    executor.tick(0.0, at(4), begun=True)
    wait_for(lambda: not any(stopped(pid) for pid in everybody))


def test_an_island_that_is_slow_by_signals_stands_still_with_all_of_its_ranks(
    control: Control, island: tuple[subprocess.Popen[bytes], dict[int, int]]
) -> None:
    starter, ranks = island
    control.pids["learner-1"] = starter.pid
    executor, _ = executor_of(control, Fault("slow", "learner-1", at_s=1.0, lasts_s=30.0, amount=4.0), duty_cycle=True)
    executor.tick(0.0, at(1), begun=True)
    executor.tick(0.0, at(1.1), begun=True)
    executor.tick(0.0, at(2.9), begun=True)
    wait_for(lambda: all(stopped(pid) for pid in ranks.values()))
    executor.finish()
    wait_for(lambda: not any(stopped(pid) for pid in ranks.values()))


def test_one_rank_can_be_frozen_or_killed_and_the_others_are_left_alone(
    control: Control, island: tuple[subprocess.Popen[bytes], dict[int, int]]
) -> None:
    starter, ranks = island
    control.pids["learner-1"] = starter.pid
    faults = (
        Fault("freeze", "learner-1", at_s=1.0, lasts_s=1.0, rank=0),
        Fault("kill", "learner-1", at_s=3.0, rank=1),
        Fault("kill", "learner-1", at_s=4.0, rank=5),
    )
    executor, emitted = executor_of(control, *faults)
    executor.tick(0.0, at(1), begun=True)
    wait_for(lambda: stopped(ranks[0]))
    assert not stopped(ranks[1]) and not stopped(starter.pid)
    executor.tick(0.0, at(2), begun=True)
    wait_for(lambda: not stopped(ranks[0]))
    executor.tick(0.0, at(3), begun=True)
    wait_for(lambda: "Z" in Path(f"/proc/{ranks[1]}/stat").read_text().rsplit(")", 1)[1].split()[0])
    assert starter.poll() is None
    executor.tick(0.0, at(4), begun=True)
    executor.finish()
    assert [one.target for one in executor.injected] == ["learner-1"] * 2, "a report says which learner was hit"
    assert [one.detail for one in executor.injected] == ["rank 0", "rank 1"]
    assert any(isinstance(one, FaultSkipped) and one.reason == NO_RANK for one in emitted)


def test_a_freeze_stops_the_process_until_its_end(control: Control, sleeper: subprocess.Popen[bytes]) -> None:
    executor, emitted = executor_of(control, Fault("freeze", "syncer", at_s=1.0, lasts_s=3.0))
    executor.tick(0.0, at(1), begun=True)
    wait_for(lambda: stopped(sleeper.pid))
    executor.tick(0.0, at(3.9), begun=True)
    assert stopped(sleeper.pid)
    executor.tick(0.0, at(4), begun=True)
    wait_for(lambda: not stopped(sleeper.pid))
    assert emitted == [FaultInjected("freeze", "syncer", "", at(4), lasts_s=3.0), FaultEnded("freeze", "syncer")]


def test_nobody_stays_frozen_when_the_run_ends_early(control: Control, sleeper: subprocess.Popen[bytes]) -> None:
    executor, emitted = executor_of(control, Fault("freeze", "learner-0", at_s=1.0, lasts_s=300.0))
    executor.tick(0.0, at(1), begun=True)
    wait_for(lambda: stopped(sleeper.pid))
    executor.finish()
    wait_for(lambda: not stopped(sleeper.pid))
    assert emitted[-1] == FaultEnded("freeze", "learner-0")


def test_a_frozen_process_is_thawed_even_if_the_launcher_dies(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.send_signal(19)  # SIGSTOP
    wait_for(lambda: stopped(sleeper.pid))
    helper = _thaw_later(sleeper.pid, 0.1)
    assert helper is not None
    wait_for(lambda: not stopped(sleeper.pid))
    helper.wait()


def test_a_frozen_process_may_be_killed(control: Control, sleeper: subprocess.Popen[bytes]) -> None:
    freeze = Fault("freeze", "learner-0", at_s=1.0, lasts_s=3.0)
    executor, emitted = executor_of(control, freeze, Fault("kill", "learner-0", at_s=2.0))
    executor.tick(0.0, at(1), begun=True)
    executor.tick(0.0, at(2), begun=True)
    assert sleeper.wait() == -9
    executor.tick(0.0, at(4), begun=True)
    assert emitted[-1] == FaultEnded("freeze", "learner-0")


def test_slow_is_a_file_where_the_learner_looks_at_one(control: Control) -> None:
    executor, emitted = executor_of(control, Fault("slow", "learner-0", at_s=1.0, lasts_s=4.0, amount=4.0))
    executor.tick(0.0, at(1), begun=True)
    assert json.loads(control.slow_file("learner-0").read_text()) == {"factor": 4.0}
    executor.tick(0.0, at(5), begun=True)
    assert not control.slow_file("learner-0").exists()
    assert isinstance(emitted[0], FaultInjected) and emitted[0].detail == "4 times as long"


def test_slow_stops_and_continues_a_script_of_the_users(control: Control, sleeper: subprocess.Popen[bytes]) -> None:
    slow = Fault("slow", "learner-0", at_s=1.0, lasts_s=10.0, amount=4.0)
    executor, _ = executor_of(control, slow, duty_cycle=True)
    for second, is_stopped in ((1.0, False), (1.1, False), (1.7, True), (2.9, True), (3.2, False), (3.8, True)):
        executor.tick(0.0, at(second), begun=True)
        wait_for(lambda wanted=is_stopped: stopped(sleeper.pid) == wanted)
    assert not control.slow_file("learner-0").exists()
    executor.tick(0.0, at(11), begun=True)
    wait_for(lambda: not stopped(sleeper.pid))


def test_files_exist_while_disk_full_and_poison_last(control: Control) -> None:
    faults = (
        Fault("disk_full", "syncer", at_s=1.0, lasts_s=2.0),
        Fault("poison", "learner-0", at_s=1.0, lasts_s=3.0, variant="flip"),
    )
    executor, emitted = executor_of(control, *faults)
    executor.tick(0.0, at(1), begun=True)
    assert control.disk_full_file("syncer").exists()
    assert control.poison_file("learner-0").read_text() == "flip\n"
    executor.tick(0.0, at(3), begun=True)
    assert not control.disk_full_file("syncer").exists() and control.poison_file("learner-0").exists()
    executor.finish()
    assert not control.poison_file("learner-0").exists()
    assert emitted[2:] == [FaultEnded("disk_full", "syncer"), FaultEnded("poison", "learner-0")]


def test_a_link_is_as_bad_as_all_its_faults_together(control: Control) -> None:
    links = LinksSeen()
    faults = (
        Fault("delay", "learner-0", at_s=1.0, lasts_s=5.0, amount=100.0),
        Fault("limit", "learner-0", at_s=2.0, lasts_s=2.0, amount=1000.0, direction="up"),
        Fault("cut", "learner-0", at_s=3.0),
    )
    executor, _ = executor_of(control, *faults, links=links)
    executor.tick(0.0, at(1), begun=True)
    assert links.held == {"learner-0": ["delay"]}
    executor.tick(0.0, at(3), begun=True)
    assert links.held == {"learner-0": ["delay", "limit"]} and links.cuts == ["learner-0"]
    executor.tick(0.0, at(5), begun=True)
    assert links.held == {"learner-0": ["delay"]}
    executor.tick(0.0, at(6), begun=True)
    assert links.held == {"learner-0": []}


def test_an_absence_ends_when_the_old_process_has(control: Control) -> None:
    faults = (Fault("away", "learner-0", at_s=1.0, lasts_s=2.0), Fault("join", "guest-0", at_s=1.0, lasts_s=9.0))
    executor, emitted = executor_of(control, *faults)
    executor.tick(0.0, at(1), begun=True)
    executor.tick(0.0, at(4), begun=True)
    assert control.asked == ["away learner-0", "join guest-0"]
    control.ended = True
    executor.tick(0.0, at(5), begun=True)
    executor.tick(0.0, at(10), begun=True)
    assert control.asked[2:] == ["back learner-0", "part guest-0"]
    assert emitted[2:] == [FaultEnded("away", "learner-0"), FaultEnded("join", "guest-0")]


def test_the_end_of_the_run_starts_nobody(control: Control) -> None:
    faults = (Fault("away", "learner-0", at_s=1.0, lasts_s=90.0), Fault("join", "guest-0", at_s=1.0, lasts_s=90.0))
    executor, emitted = executor_of(control, *faults)
    executor.tick(0.0, at(1), begun=True)
    control.ended = True
    executor.finish()
    assert control.asked == ["away learner-0", "join guest-0"]
    assert len(emitted) == 4


def test_what_cannot_be_put_in_is_tried_for_a_while_and_then_said(control: Control) -> None:
    del control.pids["learner-0"]
    executor, emitted = executor_of(control, Fault("kill", "learner-0", at_s=1.0))
    executor.tick(0.0, at(1), begun=True)
    executor.tick(0.0, at(1) + PATIENCE_NS, begun=True)
    assert emitted == []
    executor.tick(0.0, at(2) + PATIENCE_NS, begun=True)
    assert emitted == [FaultSkipped("kill", "learner-0", NOT_RUNNING)]
    executor.finish()
    assert len(emitted) == 1 and [one.reason for one in executor.skipped] == [NOT_RUNNING]


def test_what_was_never_due_is_said_at_the_end(control: Control) -> None:
    executor, emitted = executor_of(control, Fault("cut", "learner-0", at_s=1.0), Fault("kill", "syncer", at_s=90.0))
    executor.tick(0.0, at(2), begun=True)
    executor.finish()
    assert emitted == [
        FaultSkipped("cut", "learner-0", NO_LINKS),
        FaultSkipped("kill", "syncer", "the run ended before its moment"),
    ]


def test_a_fault_is_described_by_its_strength() -> None:
    delay = Fault("delay", "learner-0", at_s=1.0, lasts_s=5.0, amount=123.456, direction="up")
    assert describe(delay) == "123 ms one way, learner to syncer"
    assert describe(Fault("poison", "learner-0", at_s=1.0, lasts_s=5.0, variant="huge")) == "huge"
    assert describe(Fault("kill", "learner-0", at_s=1.0, detail="on purpose")) == "on purpose"
